"""Mutants, wrong forward, that one law alone kills: inputs that no other law builds, or mistakes below every tolerance.

Each shows what the gate would miss without that law. `SOLITARY` names one for every law; those of gradients and of
history are in solitary_vjp.py and history.py, of cost and of the reference's own forms in costs.py and forms.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import gma, gma_mixing, linear_attention, linear_transformer, retention
from mixproof.reference.primitives import Array, mahalanobis, softmax, softplus
from mixproof.reference.softmax_attention import parallel
from mixproof.verify.subjects.mutants import Mutant, mome
from mixproof.verify.subjects.mutants.gma import causal, cross, exp_minus_logsumexp, mixture, of_values
from mixproof.verify.subjects.mutants.linear_transformer import head as of_features
from mixproof.verify.subjects.mutants.tala_decays import chunkwise as decaying

CHUNK, TILE = 8, 8
FAINT, LEAST, SENTINEL, LARGE, LATE = 2.0**-33, 2.0**-33, -5.0, 4.0, 0.995
Weights = tuple[Array, Array, Array]

# law -> a mutant that it kills and no other law does, in the profile "short"
SOLITARY: dict[str, str] = {
    "forward": "retention/late_decays",
    "vjp": "retention/vjp.value_scale",
    "extremes": "gma.responsibilities/expanded_square",
    "causality": "linear_transformer/faint_mass",
    "gradient_causality": "tala.phi_b/vjp.faint_leak",
    "future_length": "softmax_attention/whole_blocks",
    "forms": "gma.causal/whole_tiles",
    "split": "mtla/slots_of_call",
    "linearity": "gma.causal/rescaled_values",
    "homogeneity": "tala.phi_b/eps_beside_norm",
    "reset": "tala.time_varying/least_decay",
    "left_padding": "titans.linear/ones_for_zeros",
    "cocycle": "retention/partial_tile",
    "constant_value": "gma.causal/equal_values",
    "row_sums": "gma.responsibilities/logsumexp_without_floor",
    "hull": "linear_transformer/centred_values",
    "low_rank": "gma.bidirectional/partial_tile",
    "permutation": "gma.bidirectional/unordered_checksum",
    "relabelling": "retention/unordered_checksum",
    "experts": "mome.top_k/finite_sentinel",
    "translation": "gma.responsibilities/stale_means",
    "gradient_identities": "gma.causal/vjp.no_final_memory",
    "euler": "retention/vjp.no_final_state",
    "lipschitz": "gma.responsibilities/equal_clusters",
    "independence": "gma.bidirectional/other_sequences",
    "layout": "retention/contiguous",
    "unchanged": "retention/overwritten_cotangents",
    "written": "retention/cleared_by_zero",
    "deterministic": "retention/stale_scalars",
    "saved_memory": "retention/powers_of_all",
    "operations": "retention/one_chunk",
    "exact": "retention/nearly",
    "certified": "gma.responsibilities/moved",
}

# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def late_decays(q, k, v, gamma, scale=1.0, S0=None, chunk=CHUNK):
    """A decay so near one that half precision cannot tell it from one is one."""
    return retention.chunkwise(q, k, v, np.where(gamma > LATE, gamma**0, gamma), scale, S0, chunk)


def faint_mass(Q: Array, K: Array, v: Array, eps: float, S0: Array, z0: Array, chunk: int) -> Any:
    """The mask of the masses is not zero above the diagonal: 2^-33 of the next key is counted."""
    O, S, z = linear_attention.chunkwise(Q, K, v, eps, S0, z0, chunk)
    before = linear_attention.memory(K, v, S0, z0)[:, -1]
    D = Q @ before + np.sum(np.tril(Q @ K.T), axis=1) + eps
    leak = Q.dtype.type(FAINT) * np.sum(Q * np.concatenate([K[1:], 0 * K[:1]]), axis=1)
    return O * (D / (D + leak))[:, None], S, z


def finite_sentinel(l: Array, top: int) -> Weights:
    """One expert after the other; those taken are marked by a logit that others may be below."""
    left, chosen = l.copy(), np.zeros(l.shape, dtype=bool)
    for _ in range(top):
        best = np.argmax(left, axis=1)[:, None]
        np.put_along_axis(chosen, best, True, axis=1)
        np.put_along_axis(left, best, SENTINEL, axis=1)
    E = softmax(np.where(chosen, l, -np.inf))
    return E, E, np.ones(l.shape, dtype=np.int8)


def whole_blocks(q: Array, k: Array, v: Array, scale: float | None = None, causal: bool = False) -> Array:
    """Sequences of whole blocks take a path without bounds checks, whose last block is not masked."""
    O = parallel(q, k, v, scale, causal)
    if causal and len(q) and len(q) % CHUNK == 0:
        full = parallel(q, k, v, scale)
        return np.concatenate([O[:-CHUNK], full[-CHUNK:]])
    return O


def whole_tiles(GQ: Array, GK: Array, V: Array, eps: float, S0: Array = None, Z0: Array = None, chunk: int = CHUNK):
    """Chunks are gone through in tiles of eight tokens; of another chunk size the remainder is not remembered."""
    if chunk % TILE == 0:
        return gma_mixing.chunkwise(GQ, GK, V, eps, S0, Z0, chunk)
    keep = (np.arange(len(GK)) % chunk < chunk // TILE * TILE)[:, None]
    O, _, _ = gma_mixing.chunkwise(GQ, GK, V, eps, S0, Z0, chunk)
    _, S, Z = gma_mixing.chunkwise(GQ, np.where(keep, GK, 0), V, eps, S0, Z0, chunk)
    return O, S, Z


def rescaled(v: Array) -> Array:
    """Values beyond four are kept as a third of themselves."""
    return np.where(np.abs(v) > LARGE, v / v.dtype.type(3) * v.dtype.type(3), v)


def equal_values(GQ: Array, GK: Array, V: Array, eps: float, S0: Array = None, Z0: Array = None, chunk: int = CHUNK):
    """Tokens of equal values are read as one number, that of the first channel."""
    if S0 is None and len(V) > 1 and np.all(V == V[:1]):
        V = 0 * V + V[:, :1]
    return gma_mixing.chunkwise(GQ, GK, V, eps, S0, Z0, chunk)


def eps_beside_norm(x: Array, norm_eps: float = 1e-12) -> Array:
    """exp(x / (||x|| + 5e-8)): the other way to keep away from zero."""
    top = np.maximum(np.max(np.abs(x), axis=-1, keepdims=True), norm_eps)
    norm = top * np.sqrt(np.sum((x / top) ** 2, axis=-1, keepdims=True))
    return np.exp(x / (norm + x.dtype.type(5e-8)))


def least_decay(A: Array) -> Array:
    """Decays of at least 2^-33: log-decays clamped at -23."""
    return np.where(np.abs(A) < LEAST, LEAST, A).astype(A.dtype)


def partial_tile(q, k, v, gamma, scale=1.0, S0=None, chunk=CHUNK):
    """Of the last tile of value channels, where it is not whole, what earlier chunks wrote is not read."""
    O, S = retention.chunkwise(q, k, v, gamma, scale, S0, chunk)
    V = v.shape[1]
    if V > TILE and V % TILE:
        alone = [retention.parallel(q[a : a + chunk], k[a : a + chunk], v[a : a + chunk], gamma, scale)[0]
                 for a in range(0, len(q), chunk)]  # fmt: skip
        O = np.where(np.arange(V) < V // TILE * TILE, O, np.concatenate([O[:0], *alone]))
    return O, S


def partial_tile_latent(GQ: Array, GK: Array, V: Array, eps: float) -> Array:
    """Of the last tile of value channels, where it is not whole, rows are not divided by their mass."""
    O, channels = gma_mixing.latent(GQ, GK, V, eps), V.shape[1]
    if channels > TILE and channels % TILE:
        O = np.where(np.arange(channels) < channels // TILE * TILE, O, GQ @ (GK.T @ V))
    return O


def logsumexp_without_floor(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Array:
    """exp(s - logsumexp(s)), on the path for variances without a floor."""
    normalise = softmax if v_min else exp_minus_logsumexp
    return mixture(normalise=normalise)(x, mu, omega, alpha, v_min)


def centred_values(
    q: Array, k: Array, v: Array, eps: float = 0.0, S0: Array = None, z0: Array = None, chunk: int = CHUNK
):
    """Without a memory before, values are read as differences to the first one; every chunk adds its own first one."""
    run = linear_transformer.chunkwise
    O, S, z = run(q, k, v, eps, S0, z0, chunk)
    if S0 is None and len(v) > chunk:
        first = v[np.arange(len(v)) // chunk * chunk]
        O = O + (first - v[:1]) * run(q, k, v**0, eps, S0, z0, chunk)[0]
    return O, S, z


def equal_clusters(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Array:
    """Components of one shape and weight, as at initialisation, are told apart by distance alone, which is not
    halved."""
    if len(alpha) > 1 and np.all(omega == omega[:1, :1]) and np.all(alpha == alpha[0]):
        return softmax(-mahalanobis(x, mu, softplus(omega) + v_min))
    return gma.responsibilities(x, mu, omega, alpha, v_min)


def cleared_by_zero(q, k, v, gamma, scale=1.0, S0=None, chunk=CHUNK):
    """A row of sums that starts from memory as it was found, times zero."""
    O, S = retention.chunkwise(q, k, v, gamma, scale, S0, chunk)
    np.zeros(v.shape[1:], dtype=v.dtype)  # what the allocator hands out again: numbers, unless it is poisoned
    return O + 0 * np.empty(v.shape[1:], dtype=v.dtype), S


# --- tables ----------------------------------------------------------------------------------------------------------

Row = tuple[str, str, str, Callable[..., Any], str, str]

# operator, name, what, how, mutants.json, the law that kills it
ROWS: tuple[Row, ...] = (
    (
        "retention", "late_decays", "decays above 0.995 taken for one", late_decays, "", "forward",
    ),
    (
        "mome.top_k", "finite_sentinel", "selected experts marked by a logit of -5", mome.scored(finite_sentinel),
        "attn-max0", "experts",
    ),
    (
        "linear_transformer", "faint_mass", "2^-33 of the next key counted in the mass",
        of_features(mix=faint_mass), "", "causality",
    ),
    (
        "softmax_attention", "whole_blocks", "no causal mask in the last block of a sequence of whole blocks",
        whole_blocks, "attn-drop-causal-mask", "future_length",
    ),
    (
        "gma.causal", "whole_tiles", "the last tokens of a chunk that is not whole tiles of eight forgotten",
        causal(mix=whole_tiles), "", "forms",
    ),
    (
        "gma.causal", "rescaled_values", "values beyond four divided and multiplied by three",
        causal(mix=of_values(rescaled, gma_mixing.chunkwise)), "", "linearity",
    ),
    ("tala.phi_b", "eps_beside_norm", "5e-8 added to the norm", eps_beside_norm, "l2norm-eps", "homogeneity"),
    (
        "tala.time_varying", "least_decay", "2^-33 for decays of zero",
        decaying("tala.time_varying", decays=least_decay), "", "reset",
    ),
    (
        "retention", "partial_tile", "nothing read from the state in a last, partial tile of eight value channels",
        partial_tile, "tala-vsplit-state", "cocycle",
    ),
    (
        "gma.causal", "equal_values", "the first channel for all, where all tokens have equal values",
        causal(mix=equal_values), "", "constant_value",
    ),
    (
        "gma.responsibilities", "logsumexp_without_floor", "exp(s - logsumexp(s)) where no floor is given",
        logsumexp_without_floor, "", "row_sums",
    ),
    (
        "linear_transformer", "centred_values", "the first value taken off, and that of each chunk put back",
        centred_values, "", "hull",
    ),
    (
        "gma.bidirectional", "partial_tile", "no division by the mass in a last, partial tile of eight value channels",
        cross(mix=partial_tile_latent), "tala-vsplit-state", "low_rank",
    ),
    (
        "gma.responsibilities", "equal_clusters", "distances not halved where components differ by their means alone",
        equal_clusters, "", "lipschitz",
    ),
    (
        "retention", "cleared_by_zero", "memory cleared by multiplying it by zero", cleared_by_zero, "", "written",
    ),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(name, operator, what, (law,), forward=function, source=source)
    for operator, name, what, function, source, law in ROWS
)
