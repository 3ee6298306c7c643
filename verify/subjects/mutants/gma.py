"""Wrong Gaussian mixture attentions, forward: wrong responsibilities, then wrong mixing. Gradients are in gma_vjp.py.

The letters are those of reference/gma_mixing.py. Each builder is the reference with its steps as arguments; a mutant
changes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import gma, gma_mixing
from mixproof.reference.primitives import Array, causal_mask, mahalanobis, softmax, softplus
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import Mutant

Feature = Callable[..., Array]
Mixing = Callable[..., Any]
CHUNK, TILE = 8, 4
LEAK, OFFSET = 1e-6, 2.0**-6

# --- builders --------------------------------------------------------------------------------------------------------


def mixture(
    prior: float = 1.0, log_determinant: float = 1.0, distance: Feature = mahalanobis, variance: Feature = softplus,
    floor: float = 1.0, sharpness: float = 1.0, favour: float = 0.0, normalise: Feature = softmax,
) -> Feature:  # fmt: skip
    """gamma = softmax_k(alpha - 1/2 sum log var - 1/2 sum (x - mu)^2 / var).  (T, R), parameters -> (T, K)."""

    def gamma(x: Array, mu: Array, omega: Array, alpha: Array, v_min: float = 0.0) -> Array:
        var = variance(omega) + floor * v_min
        s = prior * alpha - log_determinant * np.sum(np.log(var), axis=1) / 2 - distance(x, mu, var) / 2
        return normalise(sharpness * s + favour * np.arange(len(alpha), dtype=s.dtype))

    return gamma


def causal(query: Feature = gma.responsibilities, key: Feature | None = None, mix: Mixing = gma_mixing.chunkwise):
    """-> O, S, Z."""
    key = key or query

    def forward(q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0, S0=None, Z0=None, chunk=CHUNK):
        mixture = (mu, omega, alpha, v_min)
        return mix(query(q, *mixture), key(k, *mixture), v, eps, S0, Z0, chunk)

    return forward


def cross(query: Feature = gma.responsibilities, key: Feature | None = None, mix: Mixing = gma_mixing.latent):
    """-> O; of one sequence with itself it is the bidirectional operator."""
    key = key or query

    def forward(q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0):
        mixture = (mu, omega, alpha, v_min)
        return mix(query(q, *mixture), key(k, *mixture), v, eps)

    return forward


def chunks(
    keep: Callable[[int], np.ndarray] = causal_mask, counted: Callable[[int], np.ndarray] | None = None,
    leak: float = 0.0, divisor: Callable[[Array, float], Array] = lambda D, eps: D + eps,
    read_after: bool = False, writes: Callable[[int, int, int], bool] = lambda a, n, chunk: True,
    kept: Callable[[Array], Array] = lambda S: S, kept_mass: Callable[[Array], Array] = lambda Z: Z,
    operand: Callable[[Array], Array] = lambda X: X,
    starts: Callable[[Array, Array, int, int], tuple[Array, Array]] = lambda S, Z, T, chunk: (S, Z),
) -> Mixing:  # fmt: skip
    """The chunkwise form; `keep` masks what the numerator reads of its own chunk, `counted` what the mass does."""

    def mix(GQ, GK, V, eps, S0=None, Z0=None, chunk=CHUNK):
        S, Z = gma_mixing.aggregate(GK[:0], V[:0], S0, Z0)
        S, Z = starts(S, Z, len(GQ), chunk)
        rows = [GQ[:0] @ S]
        for a in range(0, len(GQ), chunk):
            Q, K, W = GQ[a : a + chunk], GK[a : a + chunk], V[a : a + chunk]
            n = len(Q)
            At = operand(Q) @ operand(K).T
            M, L = np.where(keep(n), At, 0), np.where((counted or keep)(n), At, 0)
            M = M + leak * np.where(np.eye(n, k=1, dtype=bool), At, 0)
            S1, Z1 = S + operand(K).T @ operand(W), Z + np.sum(K, axis=0)
            R, r = (S1, Z1) if read_after else (S, Z)
            D = divisor(Q @ r + np.sum(L, axis=1), eps)
            rows.append((operand(Q) @ operand(R) + operand(M) @ operand(W)) / D[:, None])
            if writes(a, n, chunk):
                S, Z = kept(S1), kept_mass(Z1)
        return np.concatenate(rows), S, Z

    return mix


def everything(n: int) -> np.ndarray:
    return np.ones((n, n), dtype=bool)


def earlier(n: int) -> np.ndarray:
    return np.tril(np.ones((n, n), dtype=bool), -1)


def rounded(dtype: str) -> Callable[[Array], Array]:
    return lambda x: round_to(x, dtype).astype(x.dtype)


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def expanded(x: Array, mu: Array, var: Array) -> Array:
    P = 1 / var
    return (x * x) @ P.T - 2 * x @ (P * mu).T + np.sum(P * mu * mu, axis=1)


def uncentred(x: Array, mu: Array, var: Array) -> Array:
    return mahalanobis(x, mu * (np.arange(mu.shape[1]) > 0), var)


def exp_over_sum(s: Array) -> Array:
    e = np.exp(s)
    return e / np.sum(e, axis=1, keepdims=True)


def exp_minus_logsumexp(s: Array) -> Array:
    top = np.max(s, axis=1, keepdims=True)
    return np.exp(s - (top + np.log(np.sum(np.exp(s - top), axis=1, keepdims=True))))


def unnormalised(s: Array) -> Array:
    return np.exp(s - np.max(s, axis=1, keepdims=True))


def over_tokens(s: Array) -> Array:
    return softmax(s, axis=0)


def mass_of_sequence(GQ, GK, V, eps, S0=None, Z0=None, chunk=CHUNK):
    M = gma_mixing.affinity(GQ, GK, causal=True)
    S, Z = gma_mixing.aggregate(GK, V, S0, Z0)
    U = M @ V if S0 is None else GQ @ S0 + M @ V
    return U / (GQ @ Z + eps)[:, None], S, Z


def padded_tail(GQ, GK, V, eps, S0=None, Z0=None, chunk=CHUNK):
    """The keys of the padding are zeros; where they sit among the means does not matter, their mass is one each."""
    O, S, Z = gma_mixing.chunkwise(GQ, GK, V, eps, S0, Z0, chunk)
    return O, S, Z + (-len(GQ) % chunk) / len(Z)


def slots_by_prefix(GQ, GK, V, eps, S0=None, Z0=None, chunk=CHUNK):
    S, Z = gma_mixing.aggregate(GK[:0], V[:0], S0, Z0)
    rows = [GQ[:0] @ S]
    for i in range(len(GQ)):
        S, Z = S + GK[i][:, None] * V[i][None, :], Z + GK[i]
        rows.append((GQ[i] / (Z + eps))[None, :] @ S)
    return np.concatenate(rows), S, Z


def slots(GQ, GK, V, eps):
    S, Z = gma_mixing.aggregate(GK, V)
    return (GQ / (Z + eps)) @ S


def of_values(change: Callable[[Array], Array], mix: Mixing) -> Mixing:
    return lambda GQ, GK, V, *rest: mix(GQ, GK, change(V), *rest)


def of_eps(change: Callable[[float, int], float], mix: Mixing) -> Mixing:
    return lambda GQ, GK, V, eps, *rest: mix(GQ, GK, V, change(eps, GK.shape[1]), *rest)


def weighted_keys(GQ, GK, V, eps):
    return gma_mixing.latent(GQ, GK * (1 + np.arange(len(GK)) / 64)[:, None].astype(GK.dtype), V, eps)


def centred_affinity(GQ, GK, V, eps):
    At = GQ @ GK.T
    return (At - OFFSET) @ V / (np.sum(At, axis=1) + eps)[:, None]


def with_skip(GQ, GK, V, eps):
    """Rows of V stand in for those of the queries: only defined for as many keys as queries."""
    O = gma_mixing.latent(GQ, GK, V, eps)
    return O + OFFSET * V[: len(O)] if len(V) >= len(O) else O


def clamped(D: Array, eps: float) -> Array:
    return np.maximum(D + eps, 1e-3)


def clamped_latent(GQ, GK, V, eps):
    S, Z = gma_mixing.aggregate(GK, V)
    return GQ @ S / clamped(GQ @ Z, eps)[:, None]


def tf32_latent(GQ, GK, V, eps):
    S, Z = gma_mixing.aggregate(rounded("tf32")(GK), rounded("tf32")(V))
    return gma_mixing.broadcast(rounded("tf32")(GQ), S, Z, eps)


def by_length(GQ, GK, V, eps, S0=None, Z0=None, chunk=CHUNK):
    return gma_mixing.chunkwise(GQ, GK, V, eps * max(1, len(GQ)), S0, Z0, chunk)


# --- tables ----------------------------------------------------------------------------------------------------------

ALL = ("gma.responsibilities", "gma.bidirectional", "gma.cross", "gma.causal")
MIXERS = ALL[1:]

# name -> what, how, mutants.json, the laws that kill it for responsibilities, and those for the operators that mix
FEATURES: dict[str, tuple[str, Feature, str, tuple[str, ...], tuple[str, ...]]] = {
    "no_log_determinant": (
        "the log-determinant dropped", mixture(log_determinant=0), "gma-no-logdet", ("forward",), ("forward",)
    ),
    "flipped_log_determinant": (
        "the log-determinant's sign flipped", mixture(log_determinant=-1), "gma-no-logdet", ("forward",), ("forward",)
    ),
    "deviation_as_variance": (
        "softplus(omega) taken for sigma, not sigma^2", mixture(variance=lambda w: softplus(w) ** 2), "",
        ("forward",), ("forward",),
    ),
    "no_floor": ("the variance floor dropped", mixture(floor=0), "", (), ("forward",)),
    "prior_twice": ("the prior applied twice", mixture(prior=2), "route-w-biased", ("forward",), ("forward",)),
    "no_prior": ("the prior dropped", mixture(prior=0), "route-w-biased", ("forward",), ("forward",)),
    "sharpened": (
        "logits multiplied by two", mixture(sharpness=2), "", ("forward", "lipschitz"), ("forward",)
    ),
    "favoured_components": (
        "component k favoured by 2^-6 k", mixture(favour=2.0**-6), "", ("forward", "relabelling"),
        ("forward", "relabelling"),
    ),
    "mean_not_subtracted": (
        "the first coordinate of the means not subtracted", mixture(distance=uncentred), "",
        ("forward", "translation"), ("forward", "translation"),
    ),
    "expanded_square": (
        "x^2 - 2 x mu + mu^2 without a common shift", mixture(distance=expanded), "", ("extremes",), ("extremes",)
    ),
    "over_tokens": (
        "responsibilities normalised over tokens", mixture(normalise=over_tokens), "gma-key-over-time",
        ("forward", "row_sums"), ("forward",),
    ),
    "no_maximum": (
        "no maximum subtracted before exp", mixture(normalise=exp_over_sum), "gma-no-max", ("extremes",), ("extremes",)
    ),
    "minus_logsumexp": (
        "exp(s - logsumexp(s)) for a softmax", mixture(normalise=exp_minus_logsumexp), "", ("row_sums",), ()
    ),
    "bfloat16_responsibilities": (
        "responsibilities rounded to bfloat16", mixture(normalise=lambda s: rounded("bfloat16")(softmax(s))), "",
        ("forward", "row_sums"), ("forward",),
    ),
    "unnormalised": (
        "responsibilities not normalised", mixture(normalise=lambda s: np.exp(s)), "",
        ("forward", "row_sums", "hull"), ("forward",),
    ),
}  # fmt: skip

CAUSAL: tuple[Mutant, ...] = tuple(
    Mutant(name, "gma.causal", what, killed_by, forward=causal(mix=mix), source=source)
    for name, what, mix, source, killed_by in (
        ("exclusive_prefix", "tokens that do not read their own key", chunks(keep=earlier), "", ("forward",)),
        (
            "mass_of_chunk", "the mass of the whole chunk in the denominator", chunks(counted=everything),
            "gma-den-chunk", ("forward", "causality"),
        ),
        (
            "mass_of_sequence", "the mass of the whole sequence in the denominator", mass_of_sequence,
            "gma-den-chunk", ("forward", "causality", "future_length"),
        ),
        (
            "no_mask", "no causal mask inside chunks", chunks(keep=everything), "",
            ("forward", "causality", "forms"),
        ),
        (
            "update_before_read", "the memory updated before it is read", chunks(read_after=True),
            "tala-leak-state", ("forward", "causality"),
        ),
        (
            "update_once", "the memory not updated after the first chunk",
            chunks(writes=lambda a, n, chunk: a == 0), "", ("forward", "forms"),
        ),
        (
            "tail_not_written", "the last, short chunk missing from the memory",
            chunks(writes=lambda a, n, chunk: n == chunk), "", ("forward", "split"),
        ),
        ("leak", "the next key read with weight 1e-6", chunks(leak=LEAK), "", ("causality",)),
        (
            "eps_per_component", "epsilon added for every component",
            of_eps(lambda eps, K: eps * K, gma_mixing.chunkwise), "", ("forward",),
        ),
        ("eps_per_slot", "epsilon added in every slot", slots_by_prefix, "", ("forward",)),
        ("no_eps", "epsilon dropped", chunks(divisor=lambda D, eps: D), "", ("forward",)),
        ("eps_by_length", "epsilon multiplied by the number of tokens", by_length, "", ("forward",)),
        (
            "clamped_mass", "the denominator clamped at 1e-3", chunks(divisor=clamped), "gma-den-clamp",
            ("extremes",),
        ),
        (
            "padded_tail", "the padding of the last chunk counted in the mass", padded_tail, "gma-tail-pad",
            ("forward", "split"),
        ),
        (
            "mass_not_resumed", "the initial mass ignored", chunks(starts=lambda S, Z, T, chunk: (S, 0 * Z)),
            "gma-resume-noZ", ("forward", "split"),
        ),
        (
            "short_ignores_state", "the initial memory ignored when a chunk is not full",
            chunks(starts=lambda S, Z, T, chunk: (S, Z) if T >= chunk else (0 * S, 0 * Z)), "tala-h0-short",
            ("forward", "split"),
        ),
        (
            "empty_resets", "the final memory of an empty sequence zero",
            chunks(starts=lambda S, Z, T, chunk: (S, Z) if T else (0 * S, 0 * Z)), "tala-vl-empty",
            ("forward",),
        ),
        (
            "bfloat16_mass", "the mass rounded to bfloat16 between chunks", chunks(kept_mass=rounded("bfloat16")),
            "gma-Z-bf16", ("forward", "forms"),
        ),
        (
            "bfloat16_memory", "the memory rounded to bfloat16 between chunks", chunks(kept=rounded("bfloat16")),
            "tala-bf16-state", ("forward", "forms"),
        ),
        (
            "tf32_operands", "operands of dot products rounded to TF32", chunks(operand=rounded("tf32")), "attn-tf32",
            ("forward",),
        ),
        (
            "first_tile", "only the first four value channels written to the memory",
            chunks(kept=lambda S: S * (np.arange(S.shape[1]) < TILE)), "tala-vsplit-state", ("forward",),
        ),
        (
            "clipped_values", "values clipped to [-2, 2]",
            of_values(lambda V: np.clip(V, -2, 2), gma_mixing.chunkwise), "", ("forward", "linearity"),
        ),
        (
            "shifted_values", "2^-6 added to the values", of_values(lambda V: V + OFFSET, gma_mixing.chunkwise), "",
            ("forward", "linearity", "constant_value", "hull", "row_sums"),
        ),
    )
)  # fmt: skip

FULL: tuple[Mutant, ...] = tuple(
    Mutant(name, operator, what, killed_by, forward=cross(mix=mix), source=source)
    for name, what, mix, source, killed_by in (
        (
            "eps_per_component", "epsilon added for every component", of_eps(lambda eps, K: eps * K, gma_mixing.latent),
            "", ("forward",),
        ),
        ("eps_per_slot", "epsilon added in every slot", slots, "", ("forward",)),
        ("no_eps", "epsilon dropped", of_eps(lambda eps, K: 0 * eps, gma_mixing.latent), "", ("forward",)),
        ("clamped_mass", "the denominator clamped at 1e-3", clamped_latent, "gma-den-clamp", ("extremes",)),
        (
            "causal", "a causal mask",
            lambda GQ, GK, V, eps: gma_mixing.attention(GQ, GK, eps, causal=True) @ V, "", ("forward", "permutation"),
        ),
        ("weighted_keys", "key j weighted by 1 + j / 64", weighted_keys, "", ("forward", "permutation")),
        (
            "negative_affinity", "a constant subtracted from the affinity", centred_affinity, "",
            ("forward", "low_rank"),
        ),
        ("skip", "2^-6 v added", with_skip, "", ("forward", "low_rank")),
        ("tf32_operands", "operands of dot products rounded to TF32", tf32_latent, "attn-tf32", ("forward",)),
        (
            "clipped_values", "values clipped to [-2, 2]", of_values(lambda V: np.clip(V, -2, 2), gma_mixing.latent),
            "", ("forward", "linearity"),
        ),
        (
            "shifted_values", "2^-6 added to the values", of_values(lambda V: V + OFFSET, gma_mixing.latent), "",
            ("forward", "constant_value"),
        ),
    )
    for operator in ("gma.bidirectional", "gma.cross")
)  # fmt: skip


def _of(operator: str, gamma: Feature, key: Feature | None = None) -> Callable[..., Any]:
    if operator == "gma.responsibilities":
        return gamma
    return (causal if operator == "gma.causal" else cross)(gamma, key)


MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(
            name, operator, what, alone if operator == ALL[0] else mixed, forward=_of(operator, gamma), source=source
        )
        for name, (what, gamma, source, alone, mixed) in FEATURES.items()
        for operator in ALL
        if (alone if operator == ALL[0] else mixed)
    ),
    *(
        Mutant(
            "unnormalised_keys", operator, "responsibilities of the keys not normalised", ("forward",),
            forward=_of(operator, gma.responsibilities, mixture(normalise=unnormalised)),
        )
        for operator in MIXERS
    ),
    *CAUSAL,
    *FULL,
)  # fmt: skip
