"""Multi-head low-rank attention: the latent is cut into blocks, each of which one device may hold.

Source: survey, section 10; Liu et al. 2026 and their code. The survey concatenates what the blocks give before one
softmax: `mlra.concatenated`, where each block serves heads of its own. The released code, `mlra`, gives every head a
key and a value from every block, and adds up the results of X softmaxes; its factor (E / L)^1/2 after the norm is part
of the gain. Both are multi-head latent attentions, one a block, stacked or summed, with one rotary key for all of them.

    letter   paper    shape             meaning
    qc qr             (T, N, K) (., R)  content of the queries of N heads, and what is turned by position, R even
                      (T, X, M, K) ..   concatenated: the M heads of each block
    c        c_1 ..   (T, X, L)         latents in X blocks, before the norm of each block, if there is one
    kr       k^R      (T, R)            the rotary key
    gain              (X, L)            of the norms
    Uk Uv    UK_i     (X, N, K, L)      up-projections of each block and head; Uv (X, N, V, L)
    C0 Kr0            (P, X, L) (P, R)  cached latents, normalised; cached rotary keys, turned; token t is at P + t
    O                 (T, N, V)         what the heads return, before the output projection; (T, X, M, V)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import add

import numpy as np

from . import latent_attention as latent
from .caches import appended
from .latent_attention import Weigh, heads_first, positions, rotated, tokens_first
from .primitives import Array, rms_norm, stored
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Path = Callable[..., Array]
Results = tuple[Array, Array, Array]


def expanded(
    qc: Array, qr: Array, c: Array, kr: Array, gain: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, eps: float = 1e-6, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """O = X^-1/2 sum_x softmax(scale (Q . Uk_x C_x + Qr . Kr)) Uv_x C_x, keys and values written out."""
    return _normalised(latent.expanded, _sum, qc, qr, c, kr, gain, Uk, Uv, scale, base, eps, C0, Kr0)


def absorbed(
    qc: Array, qr: Array, c: Array, kr: Array, gain: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, eps: float = 1e-6, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """The same with queries Uk_x^T q against the latents of each block."""
    return _normalised(latent.absorbed, _sum, qc, qr, c, kr, gain, Uk, Uv, scale, base, eps, C0, Kr0)


def sharded(
    qc: Array, qr: Array, c: Array, kr: Array, gain: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, eps: float = 1e-6, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """`absorbed` with one device a block: each scales what it has, then neighbours add up, two by two."""
    return _normalised(latent.absorbed, _all_reduce, qc, qr, c, kr, gain, Uk, Uv, scale, base, eps, C0, Kr0)


def decode(
    qc: Array, qr: Array, c: Array, kr: Array, gain: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, eps: float = 1e-6, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """`absorbed` token by token."""
    return _normalised(latent.absorbed_decode, _sum, qc, qr, c, kr, gain, Uk, Uv, scale, base, eps, C0, Kr0)


def vjp(
    cotangents: dict[str, Array],
    qc: Array, qr: Array, c: Array, kr: Array, gain: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, eps: float = 1e-6, C0: Array = None, Kr0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Cc, dCc> + <Krc, dKrc>: those of each block, then back through its norm."""
    given = {"qc": qc, "qr": qr, "c": c, "kr": kr, "gain": gain, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0}
    check_cotangents(OPERATOR, cotangents, given)
    latent.check_caches(C0, Kr0)
    X, N = len(Uk), rms_norm(c, eps)
    after = cotangents["Cc"], cotangents["Krc"]
    dO, qc, qr = (_every_block(x, X) for x in (cotangents["O"] * X**-0.5, qc, qr))
    grads = _gradients(dO, qc, qr, after, stored(N * gain), kr, Uk, Uv, scale, base, C0, Kr0)
    return grads | {
        **{n: np.sum(grads[n], axis=1) for n in ("qc", "qr")},
        "c": rms_norm_vjp(grads["c"] * gain, c, eps),
        "gain": np.sum(grads["c"] * N, axis=0),
    }


def rms_norm_vjp(G: Array, x: Array, eps: float) -> Array:
    """dx = (G - N mean(G N)) / sqrt(mean(x^2) + eps) with N = rms_norm(x), over the last axis."""
    N, L = rms_norm(x, eps), x.shape[-1]
    s = np.sqrt(np.sum(x * x, axis=-1, keepdims=True) / L + eps)
    return (G - N * (np.sum(G * N, axis=-1, keepdims=True) / L)) / s


# --- as the survey prints it -----------------------------------------------------------------------------------------


def concatenated(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """Keys Uk_x c_x and values Uv_x c_x of all blocks side by side, one softmax a head.  -> O, and the caches."""
    return _printed(partial(_by_block, latent.expanded), qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def concatenated_absorbed(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """The same with queries Uk_x^T q against the latents of each block."""
    return _printed(partial(_by_block, latent.absorbed), qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def block_sparse(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """The same as one multi-head latent attention of X M heads, with up-projections zero but in a head's own block."""
    return _printed(_as_one, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def concatenated_vjp(
    cotangents: dict[str, Array],
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Cc, dCc> + <Krc, dKrc>, block by block."""
    given = {"qc": qc, "qr": qr, "c": c, "kr": kr, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0}
    check_cotangents(CONCATENATED, cotangents, given)
    latent.check_caches(C0, Kr0)
    after = cotangents["Cc"], cotangents["Krc"]
    return _gradients(cotangents["O"], qc, qr, after, c, kr, Uk, Uv, scale, base, C0, Kr0)


# --- shared by the forms ---------------------------------------------------------------------------------------------


def _normalised(
    path: Path, combine: Callable[[Array], Array], qc: Array, qr: Array, c: Array, kr: Array, gain: Array, Uk: Array,
    Uv: Array, scale: float | None, base: float, eps: float, C0: Array, Kr0: Array,
) -> Results:  # fmt: skip
    given = {"qc": qc, "qr": qr, "c": c, "kr": kr, "gain": gain, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0}
    check_shapes(OPERATOR, given)
    latent.check_caches(C0, Kr0)
    n, X = positions(C0, len(c)), len(Uk)
    C, Kr = appended(C0, stored(rms_norm(c, eps) * gain)), appended(Kr0, rotated(kr, n, base))
    queries = _every_block(qc, X), _every_block(rotated(qr, n, base), X)
    return combine(_by_block(path, *queries, C, Kr, Uk, Uv, latent.scaled(scale, qc, qr), latent.weights)), C, Kr


def _printed(
    form: Callable[..., Array], qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None,
    base: float, C0: Array, Kr0: Array,
) -> Results:  # fmt: skip
    given = {"qc": qc, "qr": qr, "c": c, "kr": kr, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0}
    check_shapes(CONCATENATED, given)
    latent.check_caches(C0, Kr0)
    n, scale = positions(C0, len(c)), latent.scaled(scale, qc, qr)
    return mixing(form, qc, rotated(qr, n, base), c, rotated(kr, n, base), Uk, Uv, scale, C0, Kr0, latent.weights)


def mixing(
    form: Callable[..., Array], qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: Array,
    C0: Array = None, Kr0: Array = None, weigh: Weigh = latent.quotients,
) -> Results:  # fmt: skip
    """A form on rotary parts that are turned already; with the default weights, a rational function."""
    C, Kr = appended(C0, c), appended(Kr0, kr)
    return form(qc, qr, C, Kr, Uk, Uv, scale, weigh), C, Kr


def _by_block(
    path: Path, qc: Array, qr: Array, C: Array, Kr: Array, Uk: Array, Uv: Array, scale: Array, weigh: Weigh
) -> Array:
    """Each block read by heads of its own.  Queries (T, X, M, K), latents (S, X, L) -> (T, X, M, V)."""
    X, M = qc.shape[1:3]
    O = path(_heads(qc), _heads(qr), _blocks(C), Kr, _flat(Uk), _flat(Uv), scale, weigh)
    return _tokens(O, X, M)


def _as_one(qc: Array, qr: Array, C: Array, Kr: Array, Uk: Array, Uv: Array, scale: Array, weigh: Weigh) -> Array:
    """The latents of all blocks read as one."""
    S, X, L = C.shape
    latents = C.reshape(1, S, X * L)
    O = latent.expanded(_heads(qc), _heads(qr), latents, Kr, _sparse(Uk), _sparse(Uv), scale, weigh)
    return _tokens(O, X, qc.shape[2])


def _gradients(
    dO: Array, qc: Array, qr: Array, after: tuple[Array, Array], c: Array, kr: Array, Uk: Array, Uv: Array,
    scale: float | None, base: float, C0: Array, Kr0: Array,
) -> dict[str, Array]:  # fmt: skip
    """`after` are the cotangents of the caches; dO, qc and qr are those of the heads of each block."""
    n, P, scale = positions(C0, len(c)), 0 if C0 is None else len(C0), latent.scaled(scale, qc, qr)
    C, Kr = appended(C0, c), appended(Kr0, rotated(kr, n, base))
    G, Q, Qr = (_heads(x) for x in (dO, qc, rotated(qr, n, base)))
    dQ, dQr, dC, dKr, dUk, dUv = latent.expanded_vjp(G, Q, Qr, _blocks(C), Kr, _flat(Uk), _flat(Uv), scale)
    dC, dKr = np.transpose(dC, (1, 0, 2)) + after[0], dKr + after[1]
    X, M = qc.shape[1:3]
    return {
        "qc": _tokens(dQ, X, M),
        "qr": rotated(_tokens(dQr, X, M), -n, base),
        "c": dC[P:],
        "kr": rotated(dKr[P:], -n, base),
        "Uk": dUk.reshape(Uk.shape),
        "Uv": dUv.reshape(Uv.shape),
        "C0": dC[:P],
        "Kr0": dKr[:P],
    }


def _sum(O: Array) -> Array:
    return np.sum(O, axis=1) * O.shape[1] ** -0.5


def _all_reduce(O: Array) -> Array:
    parts = [O[:, x] * O.shape[1] ** -0.5 for x in range(O.shape[1])]
    while len(parts) > 1:
        parts = [reduce(add, parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


def _every_block(x: Array, X: int) -> Array:
    """The heads (T, N, K) once for each block."""
    T, N, K = x.shape
    return np.broadcast_to(x[:, None], (T, X, N, K))


def _heads(x: Array) -> Array:
    """(T, X, M, K) -> (X M, 1, T, K)."""
    T, X, M, K = x.shape
    return heads_first(x.reshape(T, X * M, 1, K))


def _tokens(O: Array, X: int, M: int) -> Array:
    """(X M, 1, T, V) -> (T, X, M, V)."""
    return tokens_first(O).reshape(O.shape[2], X, M, O.shape[3])


def _blocks(C: Array) -> Array:
    """(S, X, L) -> (X, S, L)."""
    return np.transpose(C, (1, 0, 2))


def _flat(U: Array) -> Array:
    """(X, M, K, L) -> (X M, K, L)."""
    X, M, K, L = U.shape
    return U.reshape(X * M, K, L)


def _sparse(U: Array) -> Array:
    """Up-projections from all latents, zero but in a head's own block.  (X, M, K, L) -> (X M, K, X L)."""
    X = len(U)
    return np.concatenate([np.concatenate([U[x] * (x == y) for y in range(X)], axis=-1) for x in range(X)])


_SCALARS = (
    Input("scale", (), "scalar", "scale", differentiable=False),
    Input("base", (), "scalar", "base", default=10000.0, differentiable=False),
)
_LATENTS = (Input("c", ("T", "X", "L"), "token", "latent"), Input("kr", ("T", "R"), "token", "key"))
_CACHES = latent.cache_inputs("X", "L")

OPERATOR = Operator(
    name="mlra",
    summary="o = X^-1/2 sum_x Uv_x sum_j p_xj c_xj, a softmax p_x for each block of normalised latents",
    source="survey, section 10; Liu et al. 2026, released code",
    inputs=(
        Input("qc", ("T", "N", "K"), "token", "query"),
        Input("qr", ("T", "N", "R"), "token", "query"),
        *_LATENTS,
        Input("gain", ("X", "L"), "parameter", "norm_gain"),
        Input("Uk", ("X", "N", "K", "L"), "parameter", "weight"),
        Input("Uv", ("X", "N", "V", "L"), "parameter", "weight"),
        *_SCALARS,
        Input("eps", (), "scalar", "epsilon", default=1e-6, differentiable=False),
        *_CACHES,
    ),
    outputs=(Output("O", ("T", "N", "V")), *latent.cache_outputs("X", "L")),
    forms=(
        Form("expanded", expanded), Form("absorbed", absorbed), Form("sharded", sharded), Form("decode", decode),
    ),
    vjp=vjp,
    causal=True,
    laws=(),
    cost="quadratic",
    multiple_of={"R": 2},
)  # fmt: skip

_TOKENS = (
    Input("qc", ("T", "X", "M", "K"), "token", "query"),
    Input("qr", ("T", "X", "M", "R"), "token", "query"),
    *_LATENTS,
    Input("Uk", ("X", "M", "K", "L"), "parameter", "weight"),
    Input("Uv", ("X", "M", "V", "L"), "parameter", "weight"),
)

CONCATENATED = Operator(
    name="mlra.concatenated",
    summary="multi-head latent attention, the M heads of each of X blocks of the latent reading that block alone",
    source="survey, section 10.1",
    inputs=(*_TOKENS, *_SCALARS, *_CACHES),
    outputs=(Output("O", ("T", "X", "M", "V")), *latent.cache_outputs("X", "L")),
    forms=(
        Form("expanded", concatenated),
        Form("absorbed", concatenated_absorbed),
        Form("block_sparse", block_sparse),
    ),
    vjp=concatenated_vjp,
    causal=True,
    laws=(),
    cost="quadratic",
    multiple_of={"R": 2},
    exact=(
        Form("expanded", partial(mixing, partial(_by_block, latent.expanded))),
        Form("absorbed", partial(mixing, partial(_by_block, latent.absorbed))),
        Form("block_sparse", partial(mixing, _as_one)),
    ),
    exact_inputs=(*_TOKENS, Input("scale", (), "scalar", "field"), *_CACHES),
)
