"""Group-query latent attention: groups of heads share up-projections, so that one set of weights has two paths.

Source: survey, section 9; Meng 2026, from its abstract; decoupled rotary part of DeepSeek-V2 2024 (14) to (18). The
identity that the survey prints, softmax(q_absorbed . c) = softmax((q W_UK) . c), has one path on both sides; meant is
q . (Uk c) = (Uk^T q) . c, and both paths cache the turned rotary keys besides: L + R numbers a token, or G (K + V) + R.

    letter   paper    shape             meaning
    qc qr    q^C q^R  (T, G, M, K or R) content of the queries of M heads a group, and what is turned by position
    c kr     c k^R    (T, L) (T, R)     latents; the rotary key that all heads share, R even
    Uk Uv    W^UK ..  (G, K, L)         up-projections of each group; Uv (G, V, L)
    C0 Kr0            (P, L) (P, R)     cached latents, cached rotary keys, turned already; token t is at P + t
    O                 (T, G, M, V)      what the heads return, before the output projection
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import latent_attention as latent
from .caches import appended
from .latent_attention import Weigh, heads_first, positions, rotated, tokens_first
from .primitives import Array
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Path = Callable[..., Array]
Results = tuple[Array, Array, Array]


def grouped(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """Grouped-query attention to keys Uk c and values Uv c.  -> O, and the caches (P + T, L), (P + T, R)."""
    return _turned(latent.expanded, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def absorbed(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """Attention of all heads to the latents themselves, as if they had one key and one value a token."""
    return _turned(latent.absorbed, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def grouped_decode(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """Token by token, with a cache of the keys and values of every group."""
    return _turned(latent.expanded_decode, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def absorbed_decode(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """Token by token, with a cache of latents."""
    return _turned(latent.absorbed_decode, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def vjp(
    cotangents: dict[str, Array],
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Cc, dCc> + <Krc, dKrc>; what is turned is turned back."""
    given = {"qc": qc, "qr": qr, "c": c, "kr": kr, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0}
    check_cotangents(OPERATOR, cotangents, given)
    latent.check_caches(C0, Kr0)
    T, n = len(c), positions(C0, len(c))
    C, Kr = appended(C0, c), appended(Kr0, rotated(kr, n, base))
    Q, Qr, dO = (heads_first(x) for x in (qc, rotated(qr, n, base), cotangents["O"]))
    dQ, dQr, dC, dKr, dUk, dUv = latent.expanded_vjp(dO, Q, Qr, C[None], Kr, Uk, Uv, latent.scaled(scale, qc, qr))
    dC, dKr = dC[0] + cotangents["Cc"], dKr + cotangents["Krc"]
    P = len(C) - T
    return {
        "qc": tokens_first(dQ),
        "qr": rotated(tokens_first(dQr), -n, base),
        "c": dC[P:],
        "kr": rotated(dKr[P:], -n, base),
        "Uk": dUk,
        "Uv": dUv,
        "C0": dC[:P],
        "Kr0": dKr[:P],
    }


# --- shared by the forms ---------------------------------------------------------------------------------------------


def _turned(
    path: Path, qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None, base: float,
    C0: Array, Kr0: Array,
) -> Results:  # fmt: skip
    given = {"qc": qc, "qr": qr, "c": c, "kr": kr, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0}
    check_shapes(OPERATOR, given)
    latent.check_caches(C0, Kr0)
    n = positions(C0, len(c))
    qr, kr = rotated(qr, n, base), rotated(kr, n, base)
    return mixing(path, qc, qr, c, kr, Uk, Uv, latent.scaled(scale, qc, qr), C0, Kr0, latent.weights)


def mixing(
    path: Path, qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: Array, C0: Array = None,
    Kr0: Array = None, weigh: Weigh = latent.quotients,
) -> Results:  # fmt: skip
    """A form on rotary parts that are turned already; with the default weights, a rational function."""
    C, Kr = appended(C0, c), appended(Kr0, kr)
    O = path(heads_first(qc), heads_first(qr), C[None], Kr, Uk, Uv, scale, weigh)
    return tokens_first(O), C, Kr


_TOKENS = (
    Input("qc", ("T", "G", "M", "K"), "token", "query"),
    Input("qr", ("T", "G", "M", "R"), "token", "query"),
    Input("c", ("T", "L"), "token", "latent"),
    Input("kr", ("T", "R"), "token", "key"),
    Input("Uk", ("G", "K", "L"), "parameter", "weight"),
    Input("Uv", ("G", "V", "L"), "parameter", "weight"),
)

OPERATOR = Operator(
    name="gqla",
    summary="o = Uv_g sum_j p_j c_j, p = softmax(scale (q . Uk_g c_j + q^R . k^R_j)) over j <= i, one g for M heads",
    source="survey, section 9; Meng 2026; DeepSeek-V2 2024 (14)-(18)",
    inputs=(
        *_TOKENS,
        Input("scale", (), "scalar", "scale", differentiable=False),
        Input("base", (), "scalar", "base", default=10000.0, differentiable=False),
        *latent.cache_inputs("L"),
    ),
    outputs=(Output("O", ("T", "G", "M", "V")), *latent.cache_outputs("L")),
    forms=(
        Form("grouped", grouped),
        Form("absorbed", absorbed),
        Form("grouped_decode", grouped_decode),
        Form("absorbed_decode", absorbed_decode),
    ),
    vjp=vjp,
    causal=True,
    laws=(),
    cost="quadratic",
    multiple_of={"R": 2},
    exact=(
        Form("grouped", partial(mixing, latent.expanded)),
        Form("absorbed", partial(mixing, latent.absorbed)),
        Form("grouped_decode", partial(mixing, latent.expanded_decode)),
        Form("absorbed_decode", partial(mixing, latent.absorbed_decode)),
    ),
    exact_inputs=(*_TOKENS, Input("scale", (), "scalar", "field"), *latent.cache_inputs("L")),
)
