"""Multi-head temporal latent attention: latents of neighbouring tokens are summed into one slot of the cache.

Source: survey, MTLA; Deng and Woodland 2025, whose code sums w_i c_i without normalising, where the survey has a gated
average. A slot holds the tokens of one stride; until its last token came it is open, and its rotary key is that of its
latest token. Token t attends to the slots closed before it and to its own as far as it has come, so that training and
inference agree; a window summed before the mask would let the first token of a slot see the last.

    letter  shape         meaning
    qc qr   (T, N, K) ..  queries of each head: content, and (T, N, R) what is turned by position; R even
    c       (T, L)        latents, normalised
    w       (T,)          logits of the weights that latents enter with
    kr      (T, R)        keys to be turned, which heads share; token t of the call has position `position` + t
    Uk Uv   (N, K, L) ..  up-projections of a latent to keys and, (N, V, L), to values
    C       (T, L)        what the slot of each token holds when the token has come
    Cc Krc  (slots, ..)   cache after the call: sums, and turned keys; ceil((position + T) / stride) slots
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .cost import check_sizes
from .latent_attention import angles, rotated, swapped
from .primitives import Array, either, masked, sigmoid, softmax, stored
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Result = tuple[Array, Array, Array]


def parallel(
    qc: Array, qr: Array, c: Array, w: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, stride: int = 2, position: int = 0, C0: Array = None, Kr0: Array = None,
) -> Result:  # fmt: skip
    """O_h = softmax(scale (qc_h (C Uk_h^T)^T + qr_h Kr^T)) C Uv_h^T, row t over the slots closed before t and its own.

    (T, N, K), (T, N, R), (T, L), (T,), (T, R) -> O (T, N, V), Cc (slots, L), Krc (slots, R).  scale defaults to
    (K + R)^-1/2."""
    s = _slots(qc, qr, c, w, kr, Uk, Uv, scale, base, stride, position, C0, Kr0)
    return _tokens_first(_weights(s, Uk) @ (s.C @ swapped(Uv))), s.Cc, s.Krc


def incremental(
    qc: Array, qr: Array, c: Array, w: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, stride: int = 2, position: int = 0, C0: Array = None, Kr0: Array = None,
) -> Result:  # fmt: skip
    """Token by token: a token that opens a slot is appended to the cache, another is added to the last slot, whose
    rotary key it replaces."""
    s = _slots(qc, qr, c, w, kr, Uk, Uv, scale, base, stride, position, C0, Kr0)
    first, new = len(s.Kr) - len(c), sigmoid(w)[:, None] * c
    C, Kr = (x[:0] if x0 is None else x0 for x, x0 in ((c, C0), (kr, Kr0)))
    rows = [(s.Q @ Uk)[:, :0] @ swapped(Uv)]
    for t in range(len(c)):
        row, k = slice(t, t + 1), s.Kr[first + t : first + t + 1]
        if (position + t) % stride == 0:
            C, Kr = np.concatenate([C, new[row]]), np.concatenate([Kr, k])
        else:
            C, Kr = np.concatenate([C[:-1], C[-1:] + new[row]]), np.concatenate([Kr[:-1], k])
        S = s.Q[:, row] @ swapped(C @ swapped(Uk)) + s.Qr[:, row] @ Kr.T
        rows.append(softmax(S * s.scale) @ (C @ swapped(Uv)))
    return _tokens_first(np.concatenate(rows, axis=1)), C, Kr


def absorbed(
    qc: Array, qr: Array, c: Array, w: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, stride: int = 2, position: int = 0, C0: Array = None, Kr0: Array = None,
) -> Result:  # fmt: skip
    """`parallel` among latents, with queries qc_h Uk_h: a score for every closed slot, and one for a token's own."""
    s = _slots(qc, qr, c, w, kr, Uk, Uv, scale, base, stride, position, C0, Kr0)
    T = len(c)
    first = len(s.Kr) - T
    closed = [n for n in range(len(s.Kr)) if n < first or (position + n - first + 1) % stride == 0]
    before = np.array(closed, dtype=int) < first + np.arange(T)[:, None]
    keep = np.concatenate([before, np.ones((T, 1), dtype=bool)], axis=1)
    C, Kr = s.C[closed], s.Kr[closed]
    own, k = s.C[first:], s.Kr[first:]
    Q = s.Q @ Uk
    itself = np.sum(Q * own, axis=-1, keepdims=True) + np.sum(s.Qr * k, axis=-1, keepdims=True)
    S = np.concatenate([Q @ C.T + s.Qr @ Kr.T, itself], axis=-1) * s.scale
    A = softmax(masked(S, keep, -np.inf))
    return _tokens_first((A[:, :, :-1] @ C + A[:, :, -1:] * own) @ swapped(Uv)), s.Cc, s.Krc


def vjp(
    cotangents: dict[str, Array],
    qc: Array, qr: Array, c: Array, w: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, stride: int = 2, position: int = 0, C0: Array = None, Kr0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Cc, dCc> + <Krc, dKrc>: through attention to the sums; a latent then gets what its own
    and all later sums of its slot get."""
    s = _slots(qc, qr, c, w, kr, Uk, Uv, scale, base, stride, position, C0, Kr0)
    check_cotangents(
        OPERATOR, cotangents, {"qc": qc, "kr": kr, "c": c, "Uv": Uv, "stride": stride, "position": position}
    )
    dO, dCc, dKrc = (cotangents[y.name] for y in OPERATOR.outputs)
    dO = np.transpose(dO, (1, 0, 2))
    A, keys, values = _weights(s, Uk), s.C @ swapped(Uk), s.C @ swapped(Uv)
    dA, Z = dO @ swapped(values), A @ s.C
    delta = np.sum(dO * stored(Z @ swapped(Uv)), axis=-1, keepdims=True)
    dS = A * (dA - either(delta, np.sum(A * dA, axis=-1, keepdims=True))) * s.scale
    dC = np.sum(swapped(dS) @ (s.Q @ Uk) + swapped(A) @ (dO @ Uv), axis=0)
    dKr = np.sum(swapped(dS) @ s.Qr, axis=0)

    first, P = len(s.Kr) - len(c), 0 if C0 is None else len(C0)
    dx, dk, n = [c[:0]], [kr[:0]], position + np.arange(len(c))
    for j, slot in enumerate(slots(len(c), stride, position)):
        cached, last = slice(first + j, first + j + 1), first + slot.stop - 1
        d = np.concatenate([dC[first + slot.start : last], dC[last : last + 1] + dCc[cached]])
        dx.append(np.cumsum(d[::-1], axis=0)[::-1])
        dk.append(np.concatenate([dKr[first + slot.start : last], dKr[last : last + 1] + dKrc[cached]]))
    dx, dk, g = np.concatenate(dx), np.concatenate(dk), sigmoid(w)
    return {
        "qc": _tokens_first(dS @ keys),
        "qr": rotated(_tokens_first(dS @ s.Kr), -n, base),
        "c": g[:, None] * dx,
        "w": either(g * sigmoid(-w), g * (1 - g)) * np.sum(dx * c, axis=1),
        "kr": rotated(dk, -n, base),
        "Uk": swapped(s.Q) @ (dS @ s.C),
        "Uv": swapped(dO) @ Z,
        "C0": np.concatenate([dC[:first] + dCc[:first], dx[: P - first]]),
        "Kr0": np.concatenate([dKr[:first] + dKrc[:first], 0 * dk[: P - first]]),
    }


def gates(c: Array, j: np.ndarray, W_c: Array, b_c: Array, W_p: Array, b_p: Array, base: float = 10000.0) -> Array:
    """The hyper-network: w_t = (W_c PE(j_t) + b_c) . (W_p c_t + b_p) with the slot j_t of token t.

    (T, L), (T,), (D, L), (D,), (D, L), (D,) -> (T,); L even, PE(j) = (sin j theta_0, cos j theta_0, ..)"""
    angle = j[:, None] * angles(c.shape[1], base)
    PE = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(c.shape)
    return np.sum((PE @ W_c.T + b_c) * (c @ W_p.T + b_p), axis=1)


def slots(T: int, stride: int, position: int) -> list[slice]:
    """The tokens of each slot that T tokens enter; the first slot may be open from before."""
    edges = [0, *range(stride - position % stride, T, stride), T]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]


class _Slots(NamedTuple):
    """What attention needs: the closed slots of the cache, then the slot of each token as it is when the token has
    come, with what each token sees of them; queries (N, T, ..); and the cache after the call."""

    C: Array
    Kr: Array
    keep: np.ndarray
    Q: Array
    Qr: Array
    scale: float
    Cc: Array
    Krc: Array


def _slots(
    qc: Array, qr: Array, c: Array, w: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None, base: float,
    stride: int, position: int, C0: Array, Kr0: Array,
) -> _Slots:  # fmt: skip
    check_sizes(stride=stride)
    if not isinstance(position, int) or position < 0:
        raise ValueError(f"position is {position!r}; expected a whole number of tokens")
    check_shapes(OPERATOR, {"qc": qc, "qr": qr, "c": c, "w": w, "kr": kr, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0})
    P, T = 0 if C0 is None else len(C0), len(c)
    if (C0 is None) != (Kr0 is None) or P != -(-position // stride):
        raise ValueError(f"the cache has {P} slots; {position} tokens fill {-(-position // stride)} of {stride}")

    C0, Kr0 = (x[:0] if x0 is None else x0 for x, x0 in ((c, C0), (kr, Kr0)))
    n, m = position + np.arange(T), np.arange(T)
    closed = P - 1 if T and position % stride else P  # an open slot is a token's own from now on
    new, k, sums, last = sigmoid(w)[:, None] * c, rotated(kr, n, base), [C0[:closed]], []
    for slot in slots(T, stride, position):
        before = C0[closed:] if slot.start == 0 else C0[:0]
        sums.append(np.cumsum(np.concatenate([before, new[slot]]), axis=0)[len(before) :])
        last.append(closed + slot.stop - 1)
    C, Kr = np.concatenate(sums), np.concatenate([Kr0[:closed], k])
    seen = (m <= m[:, None]) & ((n + 1) % stride == 0) | (m == m[:, None])
    keep = np.concatenate([np.ones((T, closed), dtype=bool), seen], axis=1)
    kept = [*range(closed), *last]
    size = (qc.shape[2] + qr.shape[2]) ** -0.5 if scale is None else scale
    Q, Qr = (np.transpose(x, (1, 0, 2)) for x in (qc, rotated(qr, n, base)))
    return _Slots(C, Kr, keep, Q, Qr, size, C[kept], Kr[kept])


def _weights(s: _Slots, Uk: Array) -> Array:
    """softmax(scale (Q keys^T + Qr Kr^T)) over what each token sees.  -> (N, T, closed + T)"""
    S = s.Q @ swapped(s.C @ swapped(Uk)) + s.Qr @ s.Kr.T
    return softmax(masked(S * s.scale, s.keep, -np.inf))


def _tokens_first(x: Array) -> Array:
    return np.transpose(x, (1, 0, 2))


def _filled(n: Mapping[str, int], x: Mapping[str, Any]) -> int:
    return -(-(x.get("position", 0) + n["T"]) // x.get("stride", 2))


OPERATOR = Operator(
    name="mtla",
    summary="latent attention over slots C = sum of sigmoid(w) c, closed ones and the token's own as far as it came",
    source="survey, MTLA; Deng and Woodland 2025",
    inputs=(
        Input("qc", ("T", "N", "K"), "token", "query"),
        Input("qr", ("T", "N", "R"), "token", "query"),
        Input("c", ("T", "L"), "token", "latent"),
        Input("w", ("T",), "token", "gate"),
        Input("kr", ("T", "R"), "token", "key"),
        Input("Uk", ("N", "K", "L"), "parameter", "weight"),
        Input("Uv", ("N", "V", "L"), "parameter", "weight"),
        Input("scale", (), "scalar", "scale", differentiable=False),
        Input("base", (), "scalar", "base", default=10000.0, differentiable=False),
        Input("stride", (), "scalar", "stride", default=2, differentiable=False),
        Input("position", (), "scalar", "position", default=0, differentiable=False),
        Input("C0", ("P", "L"), "state", "latent", carries="Cc"),
        Input("Kr0", ("P", "R"), "state", "key", carries="Krc"),
    ),
    outputs=(
        Output("O", ("T", "N", "V")),
        Output("Cc", ("slots", "L"), "state"),
        Output("Krc", ("slots", "R"), "state"),
    ),
    forms=(Form("parallel", parallel), Form("incremental", incremental), Form("absorbed", absorbed)),
    vjp=vjp,
    causal=True,
    laws=(),
    cost="quadratic",
    multiple_of={"R": 2},
    derived={"slots": _filled},
    position="position",
)
