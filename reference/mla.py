"""Multi-head latent attention: keys and values of all heads come from one latent a token, the only thing cached.

Source: survey, section 8; DeepSeek-V2 2024 (9) to (18). The survey turns keys after they are decompressed, which is
`mla.decompressed`: then Uk^T R(j - i) differs from pair to pair of tokens, and no query can absorb it. Decoupled, in
`mla`, only a small key is turned, which all heads share and which is cached beside the latent. Channels (2 i, 2 i + 1)
turn together, by position times base^(-2 i / R).

    letter   paper    shape             meaning
    qc qr    q^C q^R  (T, N, K) (., R)  content of the queries of N heads, and what is turned by position, R even
    q        q        (T, N, K)         queries where all of them is turned, K even
    c kr     c k^R    (T, L) (T, R)     latents; the rotary key
    Uk Uv    W^UK ..  (N, K, L)         up-projections of each head; Uv (N, V, L)
    C0 Kr0            (P, L) (P, R)     cached latents, cached rotary keys, turned already; token t is at P + t
    O                 (T, N, V)         what the heads return, before the output projection
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import gqla
from . import latent_attention as latent
from .caches import appended
from .latent_attention import heads_first, mixed, positions, rotated, swapped, tokens_first
from .primitives import Array, softmax
from .softmax_attention import width_scale
from .spec import Form, Input, Operator, Output, check_cotangents, check_shapes

Results = tuple[Array, Array, Array]


def expanded(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """Keys Uk c and values Uv c written out for every head.  -> O, and the caches (P + T, L), (P + T, R).  (18)"""
    return _checked(gqla.grouped, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def absorbed(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """Queries Uk^T q against the latents themselves, Uv applied to their means."""
    return _checked(gqla.absorbed, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def decode(
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> Results:  # fmt: skip
    """`absorbed` token by token."""
    return _checked(gqla.absorbed_decode, qc, qr, c, kr, Uk, Uv, scale, base, C0, Kr0)


def vjp(
    cotangents: dict[str, Array],
    qc: Array, qr: Array, c: Array, kr: Array, Uk: Array, Uv: Array, scale: float | None = None,
    base: float = 10000.0, C0: Array = None, Kr0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Cc, dCc> + <Krc, dKrc>."""
    given = {"qc": qc, "qr": qr, "c": c, "kr": kr, "Uk": Uk, "Uv": Uv, "C0": C0, "Kr0": Kr0}
    check_cotangents(OPERATOR, cotangents, given)
    one = cotangents | {"O": cotangents["O"][:, :, None]}
    grads = gqla.vjp(one, qc[:, :, None], qr[:, :, None], c, kr, Uk, Uv, scale, base, C0, Kr0)
    return grads | {n: grads[n][:, :, 0] for n in ("qc", "qr")}


# --- turned after decompression --------------------------------------------------------------------------------------


def decompressed(
    q: Array, c: Array, Uk: Array, Uv: Array, scale: float | None = None, base: float = 10000.0, C0: Array = None
) -> tuple[Array, Array]:
    """A = scale R_i q_i . R_j Uk c_j: all keys are expanded and turned, cached ones too.  -> O, latents (P + T, L)"""
    check_shapes(DECOMPRESSED, {"q": q, "c": c, "Uk": Uk, "Uv": Uv, "C0": C0})
    C, n = appended(C0, c), positions(C0, len(c))
    Q, keys, values = _heads(rotated(q, n, base)), _keys(C, Uk, base), C @ swapped(Uv)
    A = mixed(Q, swapped(keys)) * width_scale(scale, q.shape[-1])
    return tokens_first(mixed(latent.weights(A), values))[:, :, 0], C


def offset(
    q: Array, c: Array, Uk: Array, Uv: Array, scale: float | None = None, base: float = 10000.0, C0: Array = None
) -> tuple[Array, Array]:
    """The same without keys: R_i q . R_j Uk c = (Uk^T R_(i-j) q) . c, one absorbed query for each pair of tokens."""
    check_shapes(DECOMPRESSED, {"q": q, "c": c, "Uk": Uk, "Uv": Uv, "C0": C0})
    C, values = appended(C0, c), appended(C0, c) @ swapped(Uv)
    P, rows = len(C) - len(c), [tokens_first(mixed(mixed(_heads(q[:0]), Uk) @ C.T, values))]
    for t in range(len(c)):
        n = P + t - np.arange(P + t + 1)
        pairs = rotated(np.concatenate([q[t : t + 1]] * len(n)), n, base)
        absorbed = mixed(_heads(pairs), Uk)  # (N, 1, S, L): the query of token t for each key that it sees
        A = np.sum(absorbed * C[: P + t + 1], axis=-1)[:, :, None] * width_scale(scale, q.shape[-1])
        rows.append(tokens_first(mixed(softmax(A), values[:, : P + t + 1])))
    return np.concatenate(rows)[:, :, 0], C


def decompressed_vjp(
    cotangents: dict[str, Array],
    q: Array, c: Array, Uk: Array, Uv: Array, scale: float | None = None, base: float = 10000.0, C0: Array = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of <O, dO> + <Cc, dCc>; those of queries and keys are turned back."""
    check_cotangents(DECOMPRESSED, cotangents, {"q": q, "c": c, "Uk": Uk, "Uv": Uv, "C0": C0})
    C, n, scale = appended(C0, c), positions(C0, len(c)), width_scale(scale, q.shape[-1])
    S = len(C)
    Q, keys, values, dO = _heads(rotated(q, n, base)), _keys(C, Uk, base), C @ swapped(Uv), _heads(cotangents["O"])
    P, dA = latent.weights_vjp(dO, mixed(Q, swapped(keys)) * scale, values)
    dA = dA * scale
    dkeys = np.transpose(swapped(latent.joined(dA)) @ latent.joined(Q), (1, 0, 2))
    dkeys = np.transpose(rotated(dkeys, -np.arange(S), base), (1, 0, 2))
    dvalues = swapped(latent.joined(P)) @ latent.joined(dO)
    dC = (latent.to_latents(dkeys, Uk, 1) + latent.to_latents(dvalues, Uv, 1))[0] + cotangents["Cc"]
    return {
        "q": rotated(tokens_first(mixed(dA, keys))[:, :, 0], -n, base),
        "c": dC[S - len(c) :],
        "Uk": swapped(dkeys) @ C,
        "Uv": swapped(dvalues) @ C,
        "C0": dC[: S - len(c)],
    }


# --- shared by the forms ---------------------------------------------------------------------------------------------


def _checked(form: Callable[..., Results], *given: Any) -> Results:
    check_shapes(OPERATOR, {x.name: value for x, value in zip(OPERATOR.inputs, given, strict=True)})
    return _ungrouped(form, *given)


def _ungrouped(form: Callable[..., Results], qc: Array, qr: Array, *rest: Any, **named: Any) -> Results:
    """A grouped form, each head a group of its own."""
    O, C, Kr = form(qc[:, :, None], qr[:, :, None], *rest, **named)
    return O[:, :, 0], C, Kr


def _heads(x: Array) -> Array:
    """(T, N, K) -> (N, 1, T, K)."""
    return heads_first(x[:, :, None])


def _keys(C: Array, Uk: Array, base: float) -> Array:
    """All keys, turned by their positions.  (S, L), (N, K, L) -> (N, S, K)."""
    return np.transpose(rotated(np.transpose(C @ swapped(Uk), (1, 0, 2)), np.arange(len(C)), base), (1, 0, 2))


_UP = (Input("Uk", ("N", "K", "L"), "parameter", "weight"), Input("Uv", ("N", "V", "L"), "parameter", "weight"))
_TOKENS = (
    Input("qc", ("T", "N", "K"), "token", "query"),
    Input("qr", ("T", "N", "R"), "token", "query"),
    Input("c", ("T", "L"), "token", "latent"),
    Input("kr", ("T", "R"), "token", "key"),
)
_SCALARS = (
    Input("scale", (), "scalar", "scale", differentiable=False),
    Input("base", (), "scalar", "base", default=10000.0, differentiable=False),
)
_CACHES = latent.cache_inputs("L")

OPERATOR = Operator(
    name="mla",
    summary="o = Uv sum_j p_j c_j, p = softmax(scale (q . Uk c_j + q^R . k^R_j)) over j <= i, rotary parts apart",
    source="survey, section 8; DeepSeek-V2 2024 (9)-(18)",
    inputs=(*_TOKENS, *_UP, *_SCALARS, *_CACHES),
    outputs=(Output("O", ("T", "N", "V")), *latent.cache_outputs("L")),
    forms=(Form("expanded", expanded), Form("absorbed", absorbed), Form("decode", decode)),
    vjp=vjp,
    causal=True,
    laws=(),
    cost="quadratic",
    multiple_of={"R": 2},
    exact=(
        Form("expanded", partial(_ungrouped, partial(gqla.mixing, latent.expanded))),
        Form("absorbed", partial(_ungrouped, partial(gqla.mixing, latent.absorbed))),
        Form("decode", partial(_ungrouped, partial(gqla.mixing, latent.absorbed_decode))),
    ),
    exact_inputs=(*_TOKENS, *_UP, Input("scale", (), "scalar", "field"), *_CACHES),
)

DECOMPRESSED = Operator(
    name="mla.decompressed",
    summary="o = Uv sum_j p_j c_j, p = softmax(scale R_i q . R_j Uk c_j) over j <= i, R turning whole keys",
    source="survey, section 8.1",
    inputs=(Input("q", ("T", "N", "K"), "token", "query"), _TOKENS[2], *_UP, *_SCALARS, _CACHES[0]),
    outputs=(Output("O", ("T", "N", "V")), latent.cache_outputs("L")[0]),
    forms=(Form("expanded", decompressed), Form("offset", offset)),
    vjp=decompressed_vjp,
    causal=True,
    laws=(),
    cost="quadratic",
    multiple_of={"K": 2},
)
