"""What learned responsibilities look like: usage, certainty, agreement with labels.

Source: GMA paper, sections 5.4 and F. Normalised mutual information is I(Z; C) / H(C), the one reading that Table 4
allows; ties of the hard assignment go to the lowest index (not in the source). Entropies in nats, 0 log 0 = 0.

    letter   paper      shape       meaning
    gamma    gamma-bar  (T, K)      responsibilities of T tokens, averaged over heads or of one head; rows sum to 1
    p        p          (K,)        mean responsibility of each component
    z        z          (T,)        hard assignment, the component of largest responsibility
    c        c          (T,)        category of each token, whole numbers >= 0
    n        -          (Z, C)      counts of (z, c)

Averaging over heads mixes components that nothing ties together: relabelling the components inside one head leaves
the layer as it is and changes every number here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lgamma

import numpy as np

Array = np.ndarray


def head_average(gammas: Array) -> Array:
    """gamma-bar_tk = 1/H sum_h gamma_htk.  (H, T, K) -> (T, K)."""
    gammas = np.asarray(gammas)
    if gammas.ndim != 3 or not gammas.shape[0]:
        raise ValueError(f"gammas has shape {gammas.shape}; expected (heads, tokens, components)")
    return np.sum(np.stack([_rows("gammas", g) for g in gammas]), axis=0) / len(gammas)


def usage(gamma: Array) -> Array:
    """p_k = 1/T sum_t gamma_tk.  (T, K) -> (K,)."""
    gamma = _rows("gamma", gamma)
    if not len(gamma):
        raise ValueError("gamma has no tokens")
    return np.sum(gamma, axis=0) / len(gamma)


def usage_entropy(gamma: Array) -> float:
    """-sum_k p_k log p_k / log K: 1 if all components are used alike, 0 if one is."""
    p = usage(gamma)
    return float(np.sum(_surprise(p))) / _log_components(len(p))


def token_entropy(gamma: Array) -> float:
    """Mean over tokens of -sum_k gamma_tk log gamma_tk / log K. At most the usage entropy (Jensen)."""
    usage(gamma)
    gamma = np.asarray(gamma)
    return float(np.sum(_surprise(gamma)) / len(gamma)) / _log_components(gamma.shape[1])


def mean_max(gamma: Array) -> float:
    """Mean over tokens of the largest responsibility."""
    usage(gamma)
    return float(np.mean(np.max(np.asarray(gamma), axis=1)))


def assignments(gamma: Array) -> Array:
    """z_t = argmax_k gamma_tk, the lowest index of a tie.  (T, K) -> (T,)."""
    return np.argmax(_rows("gamma", gamma), axis=1)


def active_components(gamma: Array) -> int:
    """How many components are the largest of at least one token."""
    return len(np.unique(assignments(gamma)))


def contingency(z: Array, c: Array) -> Array:
    """n_kc = number of tokens with z_t = k and c_t = c."""
    z, c = _labels("z", z), _labels("c", c)
    if len(z) != len(c):
        raise ValueError(f"c has {len(c)} labels; z has {len(z)}")
    if not len(z):
        raise ValueError("z and c have no tokens")
    return _counts(z, c)


def purity(z: Array, c: Array) -> float:
    """1/T sum_k max_c n_kc: the share of tokens in the leading category of their component."""
    return _purity(contingency(z, c))


def mutual_information(z: Array, c: Array) -> float:
    """I(Z; C) = sum p(k, c) log(p(k, c) / (p(k) p(c))) in nats."""
    return _mutual_information(contingency(z, c))


def normalised_mutual_information(z: Array, c: Array) -> float:
    """I(Z; C) / H(C): the share of the categories' entropy that the components explain."""
    return _normalised(contingency(z, c))


def entropy(labels: Array) -> float:
    """-sum p log p of the frequencies of labels, in nats."""
    labels = _labels("labels", labels)
    if not len(labels):
        raise ValueError("labels is empty")
    return float(np.sum(_surprise(np.bincount(labels) / len(labels))))


@dataclass(frozen=True)
class Baseline:
    """Mean and standard deviation of a statistic over shuffled categories."""

    mean: float
    std: float


def permutation_baseline(z: Array, c: Array, rng: np.random.Generator, permutations: int = 100) -> dict[str, Baseline]:
    """Purity, mutual information and its normalised form with the categories shuffled: both margins kept, every
    association destroyed. The standard deviation is that of the sample (division by permutations - 1)."""
    contingency(z, c)
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng is {type(rng).__name__}; expected a numpy Generator, e.g. np.random.default_rng(0)")
    if permutations < 2:
        raise ValueError(f"permutations is {permutations}; a spread needs at least 2")
    z, c = np.asarray(z), np.asarray(c)
    tables = [_counts(z, rng.permutation(c)) for _ in range(permutations)]
    statistics: dict[str, Callable[[Array], float]] = {
        "purity": _purity,
        "mutual_information": _mutual_information,
        "normalised_mutual_information": _normalised,
    }
    samples = {name: [f(n) for n in tables] for name, f in statistics.items()}
    return {name: Baseline(float(np.mean(x)), float(np.std(x, ddof=1))) for name, x in samples.items()}


def expected_mutual_information(z: Array, c: Array) -> float:
    """The mean of I(Z; C) over all shuffles of c, exactly: n_kc is hypergeometric with the two margins."""
    n = contingency(z, c)
    T = int(np.sum(n))
    total = 0.0
    for a in np.sum(n, axis=1):
        for b in np.sum(n, axis=0):
            for m in range(max(1, int(a + b) - T), int(min(a, b)) + 1):
                log_p = _log_choose(int(b), m) + _log_choose(T - int(b), int(a) - m) - _log_choose(T, int(a))
                total += m / T * float(np.log(T * m / (float(a) * float(b))) * np.exp(log_p))
    return total


def explained_variance(gamma: Array) -> Array:
    """lambda_i / sum lambda of the centred covariance of the rows of gamma, largest first.  (T, K) -> (min(T, K),)."""
    gamma = _rows("gamma", gamma)
    if len(gamma) < 2:
        raise ValueError(f"gamma has {len(gamma)} tokens; a variance needs at least 2")
    variances = np.linalg.svd(gamma - np.mean(gamma, axis=0), compute_uv=False) ** 2
    if not np.any(variances > 0):
        raise ValueError("gamma has equal rows: there is no variance to explain")
    return variances / np.sum(variances)


def _purity(n: Array) -> float:
    return float(np.sum(np.max(n, axis=1)) / np.sum(n))


def _mutual_information(n: Array) -> float:
    T = np.sum(n)
    expected = np.outer(np.sum(n, axis=1), np.sum(n, axis=0)) / T
    seen = n > 0
    return float(np.sum(np.where(seen, n / T * np.log(np.where(seen, n, 1) / np.where(seen, expected, 1)), 0)))


def _normalised(n: Array) -> float:
    categories = np.sum(n, axis=0)
    if np.count_nonzero(categories) < 2:
        raise ValueError("c has a single category: H(C) = 0, and I / H(C) is undefined")
    return _mutual_information(n) / float(np.sum(_surprise(categories / np.sum(categories))))


def _surprise(p: Array) -> Array:
    """-p log p, zero at zero."""
    return -p * np.log(np.where(p > 0, p, 1))


def _counts(z: Array, c: Array) -> Array:
    C = int(np.max(c)) + 1
    return np.bincount(z * C + c, minlength=(int(np.max(z)) + 1) * C).reshape(-1, C)


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _log_components(K: int) -> float:
    if K < 2:
        raise ValueError("gamma has one component: an entropy in units of log K needs at least 2")
    return float(np.log(K))


def _rows(name: str, gamma: Array) -> Array:
    """gamma as an array, its rows checked to be probabilities up to the rounding of the sums that made them."""
    gamma = np.asarray(gamma)
    if gamma.ndim != 2 or not gamma.shape[1]:
        raise ValueError(f"{name} has shape {gamma.shape}; expected (tokens, components)")
    if gamma.dtype.kind != "f":
        raise TypeError(f"{name} is {gamma.dtype}; expected floating-point responsibilities")
    if not np.all(gamma >= 0):
        t, k = np.argwhere(~(gamma >= 0))[0]
        raise ValueError(f"{name}[{t}, {k}] is {gamma[t, k]}; responsibilities are at least 0")
    total = np.asarray(np.sum(gamma, axis=1, dtype=np.float64))
    # Rounding: storing a row, eps of its dtype; the K-term sum inside softmax and this one, 2 K; averaging up to 1024
    # heads, as many: those are sums in float32 at least.
    eps = float(np.finfo(gamma.dtype).eps)
    slack = eps + (2 * gamma.shape[1] + 1024) * min(eps, float(np.finfo(np.float32).eps))
    off = np.abs(total - 1) > slack
    if np.any(off):
        t = int(np.argmax(off))
        raise ValueError(f"{name}[{t}] sums to {total[t]:.8g}; rows of responsibilities sum to 1")
    return gamma


def _labels(name: str, x: Array) -> Array:
    x = np.asarray(x)
    if x.ndim != 1:
        raise ValueError(f"{name} has shape {x.shape}; expected one label per token")
    if x.dtype.kind not in "iu" and len(x):
        raise TypeError(f"{name} is {x.dtype}; labels are whole numbers")
    if len(x) and np.min(x) < 0:
        raise ValueError(f"{name} contains {np.min(x)}; labels are at least 0")
    return x.astype(np.int64)
