"""Wrong interleaved head attention: forward, then gradients.

The letters are those of reference/iha.py; `heads` is the reference with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mixproof.reference import iha as right
from mixproof.reference.caches import appended, visible
from mixproof.reference.iha import mixed
from mixproof.reference.primitives import Array, masked, softmax
from mixproof.reference.tucker import attention
from mixproof.verify.subjects.mutants import Row, tabulated
from mixproof.verify.subjects.mutants.tucker import changed, newest_first

Mixing = Callable[[tuple[Array, Array, Array], int], tuple[Array, Array, Array]]
Mask = Callable[[int, int, int], np.ndarray]

# --- builders --------------------------------------------------------------------------------------------------------


def tokens(T: int, S: int, J: int) -> np.ndarray:
    return np.repeat(np.repeat(visible(T, S), J, axis=0), J, axis=1)


def places(T: int, S: int, J: int) -> np.ndarray:
    return visible(T * J, S * J)


def of_head(a: tuple[Array, Array, Array], h: int) -> tuple[Array, Array, Array]:
    return a[0][h], a[1][h], a[2][h]


def plain(q: Array, k: Array, v: Array, scale: float, keep: np.ndarray, J: int) -> Array:
    return attention(q, k, v, scale, keep)


def weighted(O: Array, r: Array) -> Array:
    """(T, J, V), (J,) -> (T, V)."""
    return np.sum(O * r[None, :, None], axis=1)


def heads(
    keep: Mask = tokens, mixing: Mixing = of_head, attend: Callable[..., Array] = plain,
    total: Callable[[Array, Array], Array] = weighted, joined: Callable[[Array, Array], Array] = appended,
    default: Callable[[int, int], float] = lambda K, J: K**-0.5,
) -> Callable[..., Any]:  # fmt: skip
    """-> O, Kc, Vc."""

    def forward(q, k, v, aq, ak, av, r, scale=None, K0=None, V0=None):
        Kc, Vc, J, O = joined(K0, k), joined(V0, v), r.shape[1], []
        scale, seen = default(q.shape[2], J) if scale is None else scale, keep(len(q), len(Kc), J)
        for h in range(len(r)):
            a, b, c = mixing((aq, ak, av), h)
            places = attend(mixed(a, q), mixed(b, Kc), mixed(c, Vc), scale, seen, J)
            O.append(total(places.reshape(len(q), J, v.shape[2]), r[h]))
        return np.stack(O, axis=1), Kc, Vc

    return forward


wrong = partial(changed, vjp=right.vjp)

# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def own_pseudo_head(T: int, S: int, J: int) -> np.ndarray:
    return tokens(T, S, J) & (np.arange(T * J)[:, None] % J == np.arange(S * J) % J)


def next_token_too(T: int, S: int, J: int) -> np.ndarray:
    return np.repeat(np.repeat(np.tril(np.ones((T, S), dtype=bool), S - T + 1), J, axis=0), J, axis=1)


def from_zero(T: int, S: int, J: int) -> np.ndarray:
    return np.repeat(np.repeat(np.tril(np.ones((T, S), dtype=bool)), J, axis=0), J, axis=1)


def cache_in_tokens(T: int, S: int, J: int) -> np.ndarray:
    """An offset of P places, not of P J."""
    return np.tril(np.ones((T * J, S * J), dtype=bool), S - T)


def by_pseudo_head(q: Array, k: Array, v: Array, scale: float, keep: np.ndarray, J: int) -> Array:
    """Pseudo-heads one after the other, p T + t, under a mask of places."""
    T, S = len(q) // J, len(k) // J
    rows, columns = np.arange(T * J).reshape(T, J).T.ravel(), np.arange(S * J).reshape(S, J).T.ravel()
    O = attention(q[rows], k[columns], v[columns], scale, visible(T * J, S * J))
    return O[np.argsort(rows)]


def apart(q: Array, k: Array, v: Array, scale: float, keep: np.ndarray, J: int) -> Array:
    """The weights of each pseudo-head's keys normalised by themselves."""
    O = []
    for p in range(J):
        c = np.arange(len(k)) % J == p
        O.append(softmax(masked(q @ k[c].T * scale, keep[:, c], -np.inf)) @ v[c])
    return sum(O) / J


def transposed(a: tuple[Array, Array, Array], h: int) -> tuple[Array, Array, Array]:
    return tuple(x[:, :, h].T for x in a)  # type: ignore[return-value]


def keys_not_mixed(a: tuple[Array, Array, Array], h: int) -> tuple[Array, Array, Array]:
    J, N = a[1][h].shape
    return a[0][h], (np.arange(N) == h).astype(a[1].dtype) + np.zeros((J, 1), a[1].dtype), a[2][h]


def values_as_keys(a: tuple[Array, Array, Array], h: int) -> tuple[Array, Array, Array]:
    return a[0][h], a[1][h], a[1][h]


def averaged(O: Array, r: Array) -> Array:
    return np.sum(O, axis=1) / O.shape[1]


def first_output(O: Array, r: Array) -> Array:
    return O[:, 0] * r[0]


def scrambled(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    d["ak"] = np.transpose(d["ak"], (2, 1, 0))


def constant_cache(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    d["K0"] = cotangents["Kc"][: len(d["K0"])]


def constant_average(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    d["r"] = 0 * d["r"]


def mixing_of_call(d: dict[str, Array], cotangents: dict[str, Array], I: dict[str, Any]) -> None:
    if I.get("K0") is not None:
        new = cotangents | {n: cotangents[n][len(I["K0"]) :] for n in ("Kc", "Vc")}
        inputs: dict[str, Any] = I | {"K0": None, "V0": None}
        d["av"] = right.vjp(new, **inputs)["av"]


# --- tables ----------------------------------------------------------------------------------------------------------

IHA: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("places", "a mask of places, not of tokens", heads(places), "", ("forward",)),
        ("own_pseudo_head", "pseudo-heads that see their own kind only", heads(own_pseudo_head), "", ("forward",)),
        ("leak", "a mask that shows the next token", heads(next_token_too), "", ("forward", "causality")),
        ("mask_from_zero", "a mask that forgets the cached tokens", heads(from_zero), "", ("forward", "split")),
        (
            "by_pseudo_head", "pseudo-heads one after the other under a mask of places", heads(attend=by_pseudo_head),
            "", ("forward", "causality"),
        ),
        ("apart", "a softmax for each pseudo-head of the keys", heads(attend=apart), "", ("forward",)),
        (
            "transposed", "mixing weights of heads in pseudo-heads taken the other way", heads(mixing=transposed), "",
            ("forward",),
        ),
        ("keys_not_mixed", "keys that are not mixed", heads(mixing=keys_not_mixed), "", ("forward",)),
        ("values_as_keys", "values mixed by the weights of keys", heads(mixing=values_as_keys), "", ("forward",)),
        ("averaged", "pseudo-outputs averaged", heads(total=averaged), "", ("forward",)),
        ("first_output", "the first pseudo-output alone", heads(total=first_output), "", ("forward",)),
        (
            "wide_scale", "logits scaled by the width of all pseudo-heads", heads(default=lambda K, J: (K * J) ** -0.5),
            "", ("forward",),
        ),
        ("newest_first", "a cache that is extended at its front", heads(joined=newest_first), "", ("forward", "split")),
    ),
    (
        ("scrambled", "the gradient of ak given to other heads", wrong(scrambled), "", ("vjp",)),
        ("constant_cache", "no gradient through attention for cached keys", wrong(constant_cache), "", ("vjp",)),
        ("constant_average", "weights of pseudo-outputs taken for constants", wrong(constant_average), "", ("vjp",)),
        ("mixing_of_call", "the gradient of av without the cached tokens", wrong(mixing_of_call), "", ("vjp",)),
    ),
)  # fmt: skip

INDEX_CAUSAL: tuple[tuple[Row, ...], tuple[Row, ...]] = (
    (
        ("tokens", "a mask of tokens, not of places", heads(tokens), "", ("forward",)),
        (
            "cache_in_tokens", "a cache of P places in the mask, not of P J", heads(cache_in_tokens), "",
            ("forward", "split"),
        ),
        ("own_pseudo_head", "pseudo-heads that see their own kind only", heads(own_pseudo_head), "", ("forward",)),
        (
            "by_pseudo_head", "pseudo-heads one after the other", heads(places, attend=by_pseudo_head), "",
            ("forward", "causality"),
        ),
    ),
    (("tokens", "the gradients of a mask of tokens", partial(right.vjp, index=False), "", ("vjp",)),),
)  # fmt: skip

MUTANTS = (*tabulated("iha", *IHA), *tabulated("iha.index_causal", *INDEX_CAUSAL))
