"""Claims of MixFormer about its two models: section 5.1, Table 4."""

from __future__ import annotations

from math import prod

import numpy as np

from mixproof.reference import cost_mixformer, mixformer, tala
from mixproof.verify.claims import Finding, claim, conditional, holds
from mixproof.verify.claims.evidence import same

MODELS = {  # Table 4
    "A0.3B-2B": {"layers": 12, "d_model": 1024, "heads": 8, "d_ff": 896, "experts": 64},
    "A1B-7B": {"layers": 16, "d_model": 2048, "heads": 16, "d_ff": 1024, "experts": 64},
}
BILLION = 10**9
TOTAL = {"A0.3B-2B": 2, "A1B-7B": 7}  # in units of BILLION, as printed
ACTIVE = {"A0.3B-2B": (3, BILLION // 10), "A1B-7B": (1, BILLION)}  # a number and its unit
ROWS = ("hidden", "ffn", "heads", "layers", "experts", "learning rate", "tokens")
TEXT = {  # section 5.1
    "A0.3B-2B": ("1024", "896", "8", "12", "64", "1e-4", "15B"),
    "A1B-7B": ("2048", "1024", "16", "16", "64", "1e-5", "15B"),
}
TABLE = {  # Table 4
    "A0.3B-2B": ("1024", "896", "8", "12", "64", "1e-4", "15B"),
    "A1B-7B": ("2048", "1024", "16", "16", "64", "1e-5", "30B"),
}


def _printed(layers: int, d_model: int, heads: int, d_ff: int, experts: int) -> int:
    """Parameters of the blocks of (19), (20), with a router of 1 x k_e in every head; without embeddings."""
    sizes = {"D": d_model, "F": d_ff}
    block = sum(prod(sizes[a] for a in x.axes) for x in mixformer.OPERATOR.inputs if x.role == "parameter")
    return layers * (block + heads * experts)


def _read(reading: str, name: str, active: int | None = None) -> int:
    """Parameters without embeddings if the experts are what `reading` says."""
    sizes = {k: n for k, n in MODELS[name].items() if k != "heads"}
    return cost_mixformer.parameters(reading, **sizes, active=active)


def _is(n: int, printed: int, unit: int) -> bool:
    """Whether n, rounded to a whole number of units, is the printed one."""
    return abs(2 * n - 2 * printed * unit) < unit


def _billions(n: int) -> str:
    return f"{n / BILLION:.3f}"


@claim(
    "mixformer.C50",
    "The smaller model has 2B parameters",
    source="5.1; Table 4",
    verdict="refuted",
    evidence="recomputation",
    why="the equations with the sizes of Table 4 have 72.4M, memories being states and no parameters. Embeddings would"
    " have to be of 941 thousand words, with 50 304 it is 0.175B",
)
def small_model() -> Finding:
    name = "A0.3B-2B"
    n = _printed(**MODELS[name])
    words = (TOTAL[name] * BILLION - n) // cost_mixformer.embeddings(1, 1024)
    return holds(
        _is(n, TOTAL[name], BILLION),
        f"{_billions(n)}B, {_billions(n + cost_mixformer.embeddings(50_304, 1024))}B with input and output embeddings"
        f" of 50304 words; {words} words for 2B",
    )


@claim(
    "mixformer.C51",
    "Of the 2B parameters a token uses 0.3B",
    source="5.1",
    verdict="holds only if",
    evidence="recomputation",
    why="the 64 experts are gated feed-forward networks, W_1, W_2, W_3 of d x d' each, instead of memories, and 7 to 9"
    " of them are used, a number that is not printed. As printed a token uses every parameter",
)
def active_parameters() -> Finding:
    name = "A0.3B-2B"
    experts = [n for n in range(1, 65) if _is(_read("SwiGLU", name, n), *ACTIVE[name])]
    total, used = _read("SwiGLU", name), _read("SwiGLU", name, 8)
    memory = _read("memory", name), _read("memory", name, 8)
    return conditional(
        _is(total, TOTAL[name], BILLION) and 8 in experts,
        _is(memory[0], TOTAL[name], BILLION) and _is(memory[1], *ACTIVE[name]),
        f"gated networks: {_billions(total)}B, {_billions(used)}B with 8; 0.3B with {experts[0]} to {experts[-1]};"
        f" memories: {_billions(memory[0])}B, all used",
    )


@claim(
    "mixformer.C52",
    "The larger model has 7B parameters, of which a token uses 1B",
    source="5.1; Table 4",
    verdict="refuted",
    evidence="recomputation",
    why="the equations with the sizes of Table 4 have 336M, or 338M with a router of d x k_e, and all of them are"
    " used. 64 gated feed-forward networks, 8 of them used, would make 6.713B and 1.076B",
)
def large_model() -> Finding:
    name = "A1B-7B"
    counts = {reading: (_read(reading, name), _read(reading, name, 8)) for reading in ("memory", "SwiGLU")}
    total, used = counts["memory"]
    return holds(
        _is(total, TOTAL[name], BILLION) and _is(used, *ACTIVE[name]),
        f"{_billions(_printed(**MODELS[name]))}B; with a router of d x k_e in all and with 8 of 64 experts: "
        + ", ".join(f"{reading} {_billions(n)}B, {_billions(m)}B" for reading, (n, m) in counts.items()),
    )


WORDS = range(0, 256_001, 1000)  # of vocabularies in use


@claim(
    "mixformer.C53",
    "2B and 7B parameters come from 64 experts within the attention layer",
    source="4.4, 5.1",
    verdict="refuted",
    evidence="recomputation",
    why="keys and values for each expert: 1.66B and 8.79B; queries, keys, values and outputs: 3.24B and 17.2B; one"
    " projection: 0.88B and 4.63B. No vocabulary up to 256 thousand words mends one of them; gated feed-forward"
    " networks fit with up to 163 thousand",
)
def places_of_experts() -> Finding:
    fits = {reading: [w for w in WORDS if _fits(reading, w)] for reading in cost_mixformer.EXPERTS}
    attention = [reading for reading in fits if "FFN" not in reading and reading != "SwiGLU"]
    counts = {r: " and ".join(_billions(_read(r, name)) for name in MODELS) for r in fits}
    return holds(
        any(fits[reading] for reading in attention),
        "without embeddings: " + ", ".join(f"{r} {c}" for r, c in counts.items()) + "; both fit: "
        + ", ".join(f"{r} to {w[-1]} words" for r, w in fits.items() if w),
    )  # fmt: skip


def _fits(reading: str, words: int) -> bool:
    """Whether both counts round to the printed ones, with untied embeddings of so many words."""
    extra = {name: cost_mixformer.embeddings(words, MODELS[name]["d_model"]) if words else 0 for name in MODELS}
    return all(_is(_read(reading, name) + extra[name], TOTAL[name], BILLION) for name in MODELS)


@claim(
    "mixformer.C54",
    "The learnable T x T matrices G account for 2B and 7B parameters",
    source="4.3 (12) (14), 5.1",
    verdict="holds only if",
    evidence="recomputation",
    why="every head has one, and T is a length from 4908 to 5028, which is not printed: 4480 gives the smaller"
    " model 2.0B, 5102 the larger 7.0B. T = 4096 gives 1.7B and 4.6B, 1024 gives 0.2B and 0.6B; and no part of G is"
    " inactive",
)
def free_gains() -> Finding:
    def count(name: str, T: int) -> int:
        return _printed(**MODELS[name]) + MODELS[name]["layers"] * MODELS[name]["heads"] * T**2

    def fits(T: int) -> bool:
        return all(_is(count(name, T), TOTAL[name], BILLION) for name in MODELS)

    lengths = [T for T in range(1, 8193) if fits(T)]
    powers = [2**i for i in range(8, 14)]
    exact = [
        cost_mixformer.gain_tokens(TOTAL[name] * BILLION - _printed(**m), m["layers"], m["heads"])
        for name, m in MODELS.items()
    ]
    return conditional(
        bool(lengths),
        any(fits(T) for T in powers),
        (f"T from {lengths[0]} to {lengths[-1]}" if lengths else "no T")
        + f" gives both; {exact[0]} and {exact[1]} give 2 and 7; "
        + ", ".join(f"T = {T}: " + " and ".join(_billions(count(n, T)) for n in MODELS) for T in (1024, 4096, 8192)),
    )


@claim(
    "mixformer.C55",
    "Table 4 has the set-up that section 5.1 describes",
    source="5.1; Table 4",
    verdict="refuted",
    evidence="reading of a text",
    why="A1B-7B is trained on 15B tokens in the text, on 30B in the table",
)
def training_tokens() -> Finding:
    apart = [
        f"{name}, {row}: {text} in the text, {table} in the table"
        for name in MODELS
        for row, text, table in zip(ROWS, TEXT[name], TABLE[name], strict=True)
        if text != table
    ]
    return holds(not apart, f"{len(MODELS) * len(ROWS)} entries; " + "; ".join(apart))


@claim(
    "mixformer.C56",
    "A model of 7B parameters was trained with Adam on four RTX 4090",
    source="5.1",
    verdict="holds only if",
    evidence="recomputation",
    why="at most 14 bytes a parameter lie on the cards, activations included: without a copy of the weights in 32 bits,"
    " 12 bytes, or with states kept elsewhere. The usual 16 bytes make 112 GB, four cards have 4 x 24 GiB = 103 GB",
)
def four_cards() -> Finding:
    cards, n = 4 * 24 * 2**30, TOTAL["A1B-7B"] * BILLION
    usual, short = cost_mixformer.ADAM_BYTES, 2 + 2 + 4 + 4
    return conditional(
        short * n <= cards,
        usual * n <= cards,
        f"{cards / 1e9:.1f} GB in all, {cards // n} bytes a parameter; {usual} bytes: {usual * n / 1e9:.0f} GB,"
        f" {short}: {short * n / 1e9:.0f} GB",
    )


@claim(
    "mixformer.C62",
    "Both models have heads of 128 channels, whose decays run from 1 - e^-1 to 1 - e^-8 and 1 - e^-16",
    source="Table 4; 4.3 (13)",
    verdict="holds",
    evidence="recomputation",
)
def heads_of_128() -> Finding:
    widths = {name: m["d_model"] / m["heads"] for name, m in MODELS.items()}
    last = {name: np.float64(m["d_model"] // 128) for name, m in MODELS.items()}  # h = 1, .., d / d_head
    lags = {name: 1 / np.expm1(-tala.log_omega(h)) for name, h in last.items()}  # omega / (1 - omega)
    return holds(
        set(widths.values()) == {128.0}
        and all(last[name] == MODELS[name]["heads"] and same(lags[name], np.expm1(last[name])) for name in MODELS),
        "; ".join(
            f"{name}: {widths[name]:g} channels, slowest decay {tala.omega(last[name]):.7f}, a mean lag of e^{h:g} - 1"
            f" = {lags[name]:.3g} tokens"
            for name, h in last.items()
        ),
    )
