"""The second half of MixFormer's ledger, C32 to C62: every check finds its verdict, and another where it should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mixproof.reference import (
    cost_mixformer,
    mamba,
    mamba_lti,
    mixformer,
    mome_mixing,
    retention,
    tala,
    tala_masks,
    tala_normalised,
    tala_printed,
)
from mixproof.verify.claims import KINDS, Claim
from mixproof.verify.claims import mixformer_costs as costs
from mixproof.verify.claims import mixformer_counting as counting
from mixproof.verify.claims import mixformer_results as results
from mixproof.verify.claims import mixformer_rivals as rivals
from mixproof.verify.claims import mixformer_sizes as sizes
from mixproof.verify.claims import mixformer_text as text

MODULES = (rivals, costs, results, sizes, text)
CLAIMS = [c for module in MODULES for c in vars(module).values() if isinstance(c, Claim)]
ALL = {c.id.removeprefix("mixformer."): c for c in CLAIMS}
REFUTED = ("C32", "C40", "C42", "C44", "C45", "C48", "C50", "C52", "C53", "C55", "C57")
OPEN = ("C58", "C59")


def test_the_second_half_is_covered() -> None:
    assert sorted(c.id for c in CLAIMS) == [f"mixformer.C{n}" for n in range(32, 63)]


def test_errors_of_the_paper_are_refuted() -> None:
    assert {i for i, c in ALL.items() if c.verdict == "refuted"} == set(REFUTED)
    assert {i for i, c in ALL.items() if c.verdict == "not checkable"} == set(OPEN)


@pytest.mark.parametrize("id", ALL)
def test_the_verdict_is_found_again(id: str) -> None:
    found = ALL[id].check()
    assert found.verdict == ALL[id].verdict, found.numbers
    assert "\n" not in found.numbers
    assert ALL[id].evidence in KINDS


# --- checks that hear what they check --------------------------------------------------------------------------------

in_a_scan, convolution, total = mamba.in_a_scan, mamba_lti.convolution, cost_mixformer.total  # before they are broken


def _deep(u: Any, *rest: Any) -> Any:
    """As deep as the recurrence, under the name of a scan."""
    return mamba.in_steps(u, *rest)


_deep.__name__ = "in_a_scan"


def _late(*x: Any) -> Any:
    y, h = in_a_scan(*x)
    return np.concatenate([y[:1], y[:-1]]), h


_late.__name__ = "in_a_scan"


def _row(**changed: str) -> dict[str, tuple[str, str]]:
    """Table 3 with other accuracies of MixFormer."""
    table = dict(zip(results.TASKS, results.TABLE_3["MixFormer"][0].split(), strict=True)) | changed
    return results.TABLE_3 | {"MixFormer": (" ".join(table.values()), "56.72")}


SINKHORN = results.TABLE_3["Sinkhorn Trans."][0]
BROKEN = [
    ("C32", mamba, "in_a_scan", _deep, "holds"),
    ("C32", mamba, "in_a_scan", _late, "holds"),
    ("C32", tala_normalised, "n1_recurrent", lambda q, k, v, a: (q * v, None), "holds"),
    ("C33", mamba_lti, "convolution", lambda **x: (2 * convolution(**x)[0][::-1],), "refuted"),
    ("C33", rivals, "_convolved", lambda x, y: (list(np.convolve(x, y)[: len(x)]), len(x) ** 2), "refuted"),
    ("C34", tala_masks, "free_gain", lambda omega, G: tala_masks.geometric(omega, len(G)), "holds"),
    ("C34", tala_masks, "geometric", lambda a, T: np.ones((T, T), dtype=int) + np.eye(T, dtype=int), "refuted"),
    ("C35", cost_mixformer, "parallel_storage", lambda tokens, heads: heads * tokens, "holds"),
    ("C35", cost_mixformer, "chunkwise_storage", lambda tokens, heads, chunk: heads * tokens**2, "refuted"),
    ("C36", cost_mixformer, "state", lambda d_model, heads, experts: d_model**2 // heads, "holds"),
    ("C37", rivals, "_composed", lambda steps: [0.0] * (2 ** len(steps) + 1), "holds"),
    ("C37", rivals, "_composed", lambda steps: [0.0] * 2, "refuted"),
    ("C39", tala_masks, "semiseparable_rank", lambda D: 3, "holds"),
    ("C39", tala_masks, "read_mix", lambda E, a: tala_masks.geometric(a[0], len(E)), "refuted"),
    ("C40", costs, "_ffn", lambda X, W_1, W_2: np.maximum(X[:1] @ W_1, 0) @ W_2, "holds"),
    ("C41", cost_mixformer, "tala_as_printed", lambda tokens, d: 3 * tokens * d * d, "holds"),
    ("C41", retention, "recurrent", lambda q, k, v, gamma, S0: (q @ (k.T @ v), S0), "refuted"),
    ("C42", cost_mixformer, "mome_as_printed", lambda tokens, experts: 1000 * tokens * experts, "holds"),
    ("C43", retention, "parallel", retention.recurrent, "holds"),
    ("C43", retention, "chunkwise", lambda *x, chunk, S0: retention.parallel(*x, S0=S0), "refuted"),
    ("C43", cost_mixformer, "total", lambda tokens, *rest: total(1, *rest) * tokens**2, "refuted"),
    ("C44", costs, "MODELS", {"wide": {"d_ff": 4, "d_model": 2}}, "holds"),
    ("C38", results, "TABLE_3", results.TABLE_3 | {"S4": ("1 1 1 1 1", "1"), "RetNet": ("1 1 1 1 1", "1")}, "holds"),
    ("C38", results, "TABLE_3", _row(Text="50.00"), "refuted"),
    ("C45", results, "TABLE_3", results.TABLE_3 | {"Sinkhorn Trans.": (SINKHORN, "51.48")}, "holds"),
    ("C46", results, "TABLE_3", _row(ListOps="28.79"), "refuted"),
    ("C47", results, "TABLE_3", _row(ListOps="37.26"), "refuted"),
    ("C48", results, "TABLE_3", _row(Image="42.78"), "holds"),
    ("C49", results, "TABLE_3", _row(Pathfinder="77.06"), "refuted"),
    ("C51", cost_mixformer, "EXPERTS", cost_mixformer.EXPERTS | {"SwiGLU": lambda d, f: (0, d * f)}, "refuted"),
    ("C51", cost_mixformer, "EXPERTS", cost_mixformer.EXPERTS | {"memory": cost_mixformer.EXPERTS["SwiGLU"]}, "holds"),
    ("C52", cost_mixformer, "EXPERTS", cost_mixformer.EXPERTS | {"memory": cost_mixformer.EXPERTS["SwiGLU"]}, "holds"),
    ("C53", cost_mixformer, "EXPERTS", {"K V": cost_mixformer.EXPERTS["SwiGLU"]}, "holds"),
    ("C55", sizes, "TABLE", sizes.TEXT, "holds"),
    ("C56", cost_mixformer, "ADAM_BYTES", 12, "holds"),
    ("C60", tala_printed, "eq14_free_G", lambda q, k, v, omega, G: tala.recurrent(q, k, v, 1.0, 1.0)[0], "holds"),
    ("C60", tala, "recurrent", lambda q, k, v, h, G, S0=None: retention.recurrent(q, k, v, 0.5), "refuted"),
    ("C62", tala, "log_omega", lambda h: -(2.0 ** (-5 - h)), "refuted"),
    ("C61", retention, "recurrent", lambda q, k, v, gamma: (q @ k.T @ v / gamma, None), "refuted"),
]  # fmt: skip


@pytest.mark.parametrize(("id", "place", "name", "wrong", "verdict"), BROKEN, ids=[f"{b[0]}-{b[2]}" for b in BROKEN])
def test_a_check_hears_what_it_checks(
    monkeypatch: pytest.MonkeyPatch, id: str, place: Any, name: str, wrong: Any, verdict: str
) -> None:
    """With something else in place of what the paper describes, the finding is another."""
    assert verdict != ALL[id].verdict
    monkeypatch.setattr(place, name, wrong)
    assert ALL[id].check().verdict == verdict


def test_both_kinds_of_wrong_name_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "NAMES", text.NAMES[:-2])
    assert ALL["C57"].check().verdict == "refuted"
    monkeypatch.setattr(text, "REFERENCES", tuple(r for r in text.REFERENCES if r[1] == r[2]))
    assert ALL["C57"].check().verdict == "holds"


def test_other_sizes_give_other_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as wide as the equations need it for 2B, and heads of another width."""
    wide = {"layers": 12, "d_model": 6144, "heads": 48, "d_ff": 1024, "experts": 64}
    monkeypatch.setitem(sizes.MODELS, "A0.3B-2B", wide)
    assert ALL["C50"].check().verdict == "holds"
    assert ALL["C62"].check().verdict == "holds"
    monkeypatch.setitem(sizes.MODELS, "A0.3B-2B", wide | {"heads": 24})
    assert ALL["C62"].check().verdict == "refuted"


def test_gains_of_another_number_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = sizes.MODELS.values()
    monkeypatch.setattr(sizes, "MODELS", {"A0.3B-2B": small | {"layers": 16}, "A1B-7B": large | {"layers": 25}})
    assert ALL["C54"].check().verdict == "holds"
    monkeypatch.setattr(sizes, "MODELS", {"A0.3B-2B": large, "A1B-7B": small})
    assert ALL["C54"].check().verdict == "refuted"


# --- what the checks stand on ----------------------------------------------------------------------------------------


def test_printed_parameters_are_those_of_the_arrays() -> None:
    """The block's arrays, one by one, against the cost formula, which leaves out gains and biases of norms."""
    for m in sizes.MODELS.values():
        norms = 4 * m["layers"] * m["d_model"]
        assert sizes._printed(**m) == cost_mixformer.parameters_as_printed(**m) + norms
    assert {x.name for x in mixformer.OPERATOR.inputs if x.role == "parameter"} >= {"W_Q", "W_K", "W_V", "W_O", "W_1"}


def test_rounding_to_what_is_printed() -> None:
    assert [sizes._is(n, 2, 10) for n in (14, 15, 16, 24, 25)] == [False, False, True, True, False]


def test_products_and_depth_are_counted() -> None:
    assert counting.effort(lambda A, B: A @ B, (2, 3), (3, 4)) == (24, 3)  # a product and two additions
    assert counting.effort(lambda x: x, (2,)) == (0, 0)
    assert counting.effort(lambda x, y: (x * y, 3 * x + 1), (2,), (2,)) == (2, 2)
    assert counting.products(lambda x: x**5 * x, (7,)) == 7
    chain = [counting.effort(rivals._sums(form), (16, 1), ())[1] for form in (mamba.in_a_scan, mamba.in_steps)]
    assert chain[0] < 16 < chain[1]


def test_memories_are_counted_as_they_are_run() -> None:
    """Token by token, with a router of given weights: a state decays and is weighted entry by entry."""
    d, X = 3, 4
    q = np.ones((1, d))
    ones = np.ones((1, X), np.int8)
    Y, S = mome_mixing.recurrent(q, q, q, np.full((1, X), 0.25), ones, ones, np.full(X, 0.5), np.ones((X, d, d)))
    assert np.all(Y == d * 1.5)
    assert costs._mome(1, X, d) == 2 * S.size + 2 * d * d
    for N, k, width in ((1, 1, 1), (2, 3, 2), (3, 2, 4)):
        assert costs._mome(N, k, width) == costs._memories(N, width, width, k)


@pytest.mark.parametrize("N", [1, 2, 8, 32])
def test_convolution_in_place(N: int) -> None:
    x, y = np.random.default_rng(N).integers(-9, 10, size=(2, N)).tolist()
    z, held = rivals._convolved(x, y)
    assert [round(a) for a in z] == np.convolve(x, y)[:N].tolist()
    assert held == 8 * N
