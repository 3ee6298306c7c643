"""Regimes of values: what the arrays of a case hold.

Each input's domain has a default; a regime is a word that changes some of them. Every regime is here because a wrong
implementation was once right on everything simpler; `why` says which kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Generator = np.random.Generator

# domain -> default values; every domain that an operator's input may name
DEFAULTS: dict[str, Callable[[Generator, tuple[int, ...]], np.ndarray]] = {
    "routing": lambda g, shape: g.normal(size=shape),
    "query": lambda g, shape: g.normal(size=shape),
    "key": lambda g, shape: g.normal(size=shape),
    "value": lambda g, shape: g.normal(size=shape),
    "mean": lambda g, shape: g.normal(size=shape),
    "log_variance": lambda g, shape: 0.7 * g.normal(size=shape),
    "logit": lambda g, shape: 0.7 * g.normal(size=shape),
    "decay": lambda g, shape: g.choice([0.5, 0.75, 0.9, 31 / 32, 0.99], size=shape),
    "state": lambda g, shape: g.normal(size=shape),
    "mass": lambda g, shape: np.abs(g.normal(size=shape)),
    "feature": lambda g, shape: g.normal(size=shape),
    "direction": lambda g, shape: g.normal(size=shape),
    "positive": lambda g, shape: np.exp(0.7 * g.normal(size=shape)),
    "head": lambda g, shape: g.choice([1.0, 2.0, 3.0, 4.0, 8.0], size=shape),
    "gain": lambda g, shape: g.choice([1.0, 1.0, 0.75, -0.5], size=shape),
    "signed_decay": lambda g, shape: g.choice([1.0, 0.99, 0.9, 0.75, 0.5, 0.25, -0.5, -0.9], size=shape),
    "log_decay": lambda g, shape: -0.3 * np.abs(g.normal(size=shape)),
    "gate": lambda g, shape: 2 * g.normal(size=shape),
    "router": lambda g, shape: g.normal(size=shape),
    "logit_token": lambda g, shape: g.normal(size=shape),
    "weight": lambda g, shape: g.normal(size=shape) / np.sqrt(shape[-2]),
    "small_weight": lambda g, shape: g.normal(size=shape) / (4 * np.sqrt(shape[-2])),
    "norm_gain": lambda g, shape: 1 + 0.2 * g.normal(size=shape),
    "norm_bias": lambda g, shape: 0.2 * g.normal(size=shape),
    "latent": lambda g, shape: g.normal(size=shape),
    "step": lambda g, shape: 0.5 * np.abs(g.normal(size=shape)) + 2.0**-6,
    "rate": lambda g, shape: -np.exp(0.7 * g.normal(size=shape)),
    "log_rate": lambda g, shape: 0.7 * g.normal(size=shape),
    "unit": lambda g, shape: _unit(g.normal(size=shape)),
    "unit_gate": lambda g, shape: g.choice([0.0, 0.1, 0.25, 0.5, 0.9, 1.0], size=shape),
    "learning_rate": lambda g, shape: g.choice([0.0, 1 / 16, 0.1, 0.25, 0.5], size=shape),
    "target": lambda g, shape: 0.25 * g.normal(size=shape),  # of a memory of two layers, which diverges from far ones
    "logit_bias": lambda g, shape: g.normal(size=shape) - 1,
}


def _unit(a: np.ndarray) -> np.ndarray:
    return a / np.sqrt(np.sum(a * a, axis=-1, keepdims=True) + 2.0**-60)


class Draw:
    """The arrays of a case while a regime changes them: `of` gives the names whose input has one of the domains."""

    def __init__(self, values: dict[str, Any], domains: dict[str, str], generator: Generator) -> None:
        self.values, self.domains, self.generator = values, domains, generator

    def of(self, *domains: str) -> list[str]:
        return [name for name, d in self.domains.items() if d in domains and name in self.values]

    def map(self, change: Callable[[np.ndarray], np.ndarray], *domains: str) -> None:
        for name in self.of(*domains):
            self.values[name] = change(self.values[name])

    def fill(self, value: float, *domains: str) -> None:
        self.map(lambda a: np.full_like(a, value), *domains)

    def scalar(self, value: float, domain: str) -> None:
        for name in self.of(domain):
            self.values[name] = value


@dataclass(frozen=True)
class Regime:
    """`needs`: at least one input must have one of these domains (empty: always applies). Extreme regimes are the
    business of the law `extremes`. `sizes` are those without which it says nothing: it applies where an operator has
    all of these axes."""

    apply: Callable[[Draw], None]
    why: str
    needs: frozenset[str] = frozenset()
    extreme: bool = False
    sizes: tuple[tuple[str, int], ...] = ()


TOKENS = ("routing", "query", "key", "feature", "positive")
DECAYS = ("decay", "signed_decay", "gain")
# domains outside which an input has no meaning, or what it is part of diverges
BOUNDED = ("step", "unit", "unit_gate", "learning_rate", "target", "weight", "small_weight")


def _by_token(a: np.ndarray, row: np.ndarray) -> np.ndarray:
    """One number a token, ready to meet (B, H, tokens, ...)."""
    return row.reshape(-1, *(1,) * (a.ndim - 3))


def _ramp(a: np.ndarray, octaves: float) -> np.ndarray:
    T = a.shape[2]
    return a * _by_token(a, 2.0 ** (octaves * np.linspace(0, 1, max(T, 1)))[:T])


def _alternate(a: np.ndarray) -> np.ndarray:
    return np.where(_by_token(a, np.arange(a.shape[2])) % 2 == 0, 2.0, 0.0) + 0 * a


def _impulse(a: np.ndarray) -> np.ndarray:
    keep = np.arange(a.shape[2]) == (2 * a.shape[2]) // 3
    return np.where(_by_token(a, keep), 1.0 + a, 0.0)


def _outliers(d: Draw) -> None:
    def change(a: np.ndarray) -> np.ndarray:
        return np.where(d.generator.random(a.shape) < 0.1, 1000 * a, a)

    d.map(change, "value")
    d.map(lambda a: np.where(d.generator.random(a.shape) < 0.1, 10 * a, a), *TOKENS)


def _far(d: Draw) -> None:
    d.map(lambda a: 30 * a, "routing")
    d.map(lambda a: 8 * a, "query")
    d.map(lambda a: 4 * a, "key", "logit_token")
    d.map(lambda a: 30 * a, "feature", "gate", "router")
    d.map(lambda a: a**8, "positive")


def _offset(d: Draw) -> None:
    d.map(lambda a: a + 512.0, "routing", "mean")


def _disjoint(d: Draw) -> None:
    """Queries sit on the first mean and keys on the last, so that the denominator is about epsilon."""
    for name in d.of("mean"):
        mu = d.values[name]
        mu[:, 0], mu[:, -1] = -2.5, 2.5 if mu.shape[1] > 1 else -2.5
        for token, side in zip(d.of("routing"), (0, -1), strict=False):
            d.values[token] = mu[None, :, side, None, :] + 0.1 * d.values[token]
    d.fill(0.5, "log_variance")


def _equal(d: Draw) -> None:
    d.map(lambda a: np.broadcast_to(a[:, :, :1], a.shape).copy(), *TOKENS)


def _integers(d: Draw) -> None:
    d.map(np.round, *(t for t in TOKENS if t != "positive"), "value", "mean", "state", "mass")
    d.map(np.ceil, "positive")
    _decays(d, 1.0)
    d.scalar(1.0, "scale")


def _decays(d: Draw, value: float) -> None:
    d.fill(value, *DECAYS)
    d.fill(np.log(value), "log_decay")


def _mixed_decay(d: Draw) -> None:
    """Zeros beside ones: by head, and by token where decays vary."""

    def mixed(zero: float, one: float, axis: int) -> Callable[[np.ndarray], np.ndarray]:
        def change(a: np.ndarray) -> np.ndarray:
            i = np.arange(a.shape[axis]).reshape([-1 if n == axis else 1 for n in range(a.ndim)])
            return np.where(i % 3 == 0, zero, one) + 0 * a

        return change

    for name in d.of(*DECAYS, "log_decay"):
        log = d.domains[name] == "log_decay"
        axis = 2 if d.values[name].ndim > 2 else 0
        d.values[name] = mixed(-200.0 if log else 0.0, 0.0 if log else 1.0, axis)(d.values[name])


def _huge(d: Draw) -> None:
    d.map(lambda a: 2.0**70 * a, "feature")


def _unequal(d: Draw) -> None:
    """Every second token has one expert far ahead of the others; all others are tied."""

    def change(a: np.ndarray) -> np.ndarray:
        ahead = (np.arange(a.shape[-1]) == 0) & (np.arange(a.shape[-2])[:, None] % 2 == 0)
        return np.where(ahead, 30.0, 0.0) + 0 * a

    d.map(change, "logit_token")


def _increasing(d: Draw) -> None:
    d.map(lambda a: np.abs(a), "query")
    d.map(lambda a: np.abs(a) + _by_token(a, np.arange(a.shape[2])), "key")


def _identical(d: Draw) -> None:
    d.map(lambda a: np.broadcast_to(a[:, :1], a.shape).copy(), "mean", "log_variance")


def _floor(d: Draw) -> None:
    d.fill(-20.0, "log_variance")
    d.scalar(2.0**-7, "floor")


VALUE = frozenset({"value"})
GMA = frozenset({"log_variance"})
DECAY = frozenset({*DECAYS, "log_decay"})
DOT = frozenset({"key"})
GATE = frozenset({"unit_gate"})

REGIMES: dict[str, Regime] = {
    "normal": Regime(lambda d: None, "standard normal values"),
    "constant": Regime(lambda d: d.fill(1.0, "value"), "equal roundings add up; weights that do not sum to one", VALUE),
    "impulse": Regime(lambda d: d.map(_impulse, "value"), "one token matters: indexing", frozenset({"value"})),
    "alternating": Regime(lambda d: d.map(_alternate, "value"), "sums that stagnate", frozenset({"value"})),
    "outliers": Regime(_outliers, "a few large entries: rescaling", extreme=True),
    "growing": Regime(
        lambda d: d.map(lambda a: _ramp(a, 20), "value"), "amplifies what leaks from later tokens", VALUE
    ),
    "fading": Regime(
        lambda d: d.map(lambda a: _ramp(a, -20), "value"), "amplifies what is left of earlier tokens", VALUE
    ),
    "large": Regime(lambda d: d.map(lambda a: 2.0**12 * a, "value"), "overflow in half precision", VALUE, extreme=True),
    "small": Regime(
        lambda d: d.map(lambda a: 2.0**-12 * a, "value"), "absolute tolerances and underflow", VALUE, extreme=True
    ),
    "equal": Regime(_equal, "all tokens alike: uniform weights", frozenset(TOKENS)),
    "integers": Regime(_integers, "exactly representable sums, decay one", frozenset({"value", "routing"})),
    "far": Regime(
        _far, "logits below the exponential's range; missing maximum subtraction", frozenset(TOKENS), extreme=True
    ),
    "offset": Regime(_offset, "expanded squares cancel", GMA, extreme=True),
    "disjoint": Regime(_disjoint, "queries and keys share no component: the denominator is epsilon", GMA, extreme=True),
    "variances": Regime(lambda d: d.map(lambda a: 4 * a, "log_variance"), "log-determinant terms", GMA),
    "priors": Regime(lambda d: d.map(lambda a: 12 * a, "logit"), "dead components, prior terms", GMA, extreme=True),
    "wide": Regime(
        lambda d: d.map(lambda a: np.where(a > 0.3, 100.0, a), "log_variance"),
        "exp(omega) overflows where softplus(omega) does not",
        GMA,
        extreme=True,
    ),
    "floor": Regime(_floor, "the variance is its floor", GMA),
    "identical": Regime(_identical, "all components alike", GMA),
    "epsilon": Regime(lambda d: d.scalar(0.25, "epsilon"), "where epsilon is added", frozenset({"epsilon"})),
    "no_decay": Regime(lambda d: _decays(d, 1.0), "decay exactly one", DECAY),
    "full_decay": Regime(_mixed_decay, "decay exactly zero beside exactly one", DECAY, extreme=True),
    "strong_decay": Regime(lambda d: _decays(d, 2.0**-8), "exponentials overflow inside a chunk", DECAY, extreme=True),
    "weak_decay": Regime(lambda d: _decays(d, 1 - 2.0**-9), "long memory, state rounding", DECAY),
    "negative_decay": Regime(
        lambda d: d.map(lambda a: -np.abs(a), "signed_decay", "gain"),
        "logarithms of decays",
        frozenset({"signed_decay", "gain"}),
    ),
    "stiff": Regime(
        lambda d: d.map(lambda a: 64 * a, "step"),
        "steps far longer than what decays",
        frozenset({"step"}),
        extreme=True,
    ),
    "brief": Regime(
        lambda d: d.map(lambda a: 2.0**-16 * a, "step"), "steps so short that exp(z) - 1 cancels", frozenset({"step"})
    ),
    "shut": Regime(lambda d: d.fill(0.0, "unit_gate"), "gates exactly zero", GATE),
    "open": Regime(lambda d: d.fill(1.0, "unit_gate"), "gates exactly one: quotients of products", GATE),
    "late_head": Regime(lambda d: d.fill(16.0, "head"), "1 - e^-h rounds to one", frozenset({"head"})),
    "huge": Regime(_huge, "squares overflow", frozenset({"feature"}), extreme=True),
    "unequal": Regime(_unequal, "ties; one expert far ahead", frozenset({"logit_token"})),
    "scaled": Regime(lambda d: d.scalar(0.375, "scale"), "a scale that is not the default", frozenset({"scale"})),
    "strided": Regime(lambda d: d.scalar(3, "stride"), "a stride that is not the default", frozenset({"stride"})),
    "single": Regime(lambda d: d.scalar(1, "count"), "one head, or one expert", frozenset({"count"})),
    "increasing": Regime(_increasing, "the running maximum moves at every key", DOT, extreme=True),
    "negative": Regime(
        lambda d: (d.map(lambda a: 20 * np.abs(a), "query"), d.map(lambda a: -8 * np.abs(a), "key"), None)[-1],
        "all logits strongly negative: sentinels that are not -inf",
        DOT,
        extreme=True,
    ),
    "late": Regime(
        lambda d: d.scalar(500000.0, "base"),  # as long contexts have it
        "positions beyond 256, where half precision skips some: an odd one after a cache of 300 tokens",
        frozenset({"base"}),
        extreme=True,
        sizes=(("P", 300), ("T", 2)),
    ),
}
