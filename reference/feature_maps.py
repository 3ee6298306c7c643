"""The feature map of TALA in its two readings, token by token, and their gradients.

Source: MixFormer paper (11), "phi(Q) = e Q / ||Q||" with its fraction lost; the norm is that of one token's row. Taken
over the columns of K, as the text says, it is a norm over all of the sequence, and token one sees the last.

    A    exp(x) / ||exp(x)||     unit rows, whatever is added to x; the kernel phi(q) . phi(k) is in (0, 1]
    B    exp(x / ||x||)          entries in [1/e, e], whatever x is multiplied with; jumps at x = 0

B is what the typography points to. A is what tells tokens apart: with 128 channels, no two values of B's kernel are in
a ratio of more than 1.45.
"""

from __future__ import annotations

import numpy as np

from .primitives import Array, either, softmax, stored, unit
from .spec import Form, Input, Operator, Output, check_cotangents


def phi_a(x: Array) -> Array:
    """exp(x) / ||exp(x)||, the maximum subtracted first; or the root of a softmax, which underflows earlier.
    (T, K) -> (T, K).  (11), reading A"""
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return either(e / np.sqrt(np.sum(e * e, axis=-1, keepdims=True)), phi_a_softmax(x))


def phi_a_softmax(x: Array) -> Array:
    """The same as sqrt(softmax(2 x)): its squares are probabilities."""
    return np.sqrt(softmax(2 * x))


def phi_a_vjp(cotangents: dict[str, Array], x: Array) -> dict[str, Array]:
    """dx = Y * G - Y * Y (Y . G). Its rows sum to zero, so what autograd sends through the maximum is only rounding."""
    check_cotangents(PHI_A, cotangents, {"x": x})
    Y, G = stored(phi_a(x)), cotangents["Y"]
    dx = Y * G - Y * Y * np.sum(Y * G, axis=-1, keepdims=True)
    through = np.where(x == np.max(x, axis=-1, keepdims=True), np.sum(dx, axis=-1, keepdims=True), 0)
    return {"x": either(dx, dx - through)}


def phi_b(x: Array, norm_eps: float = 1e-12) -> Array:
    """exp(x / max(||x||, norm_eps)): one for a row of zeros.  (T, K) -> (T, K).  (11), reading B"""
    return np.exp(unit(x, norm_eps))


def phi_b_scaled(x: Array, norm_eps: float = 1e-12) -> Array:
    """The same with the row scaled by its largest entry, and multiplied with reciprocals."""
    y, top, r = _scaled(x)
    return np.exp(y * (1 / np.maximum(r, norm_eps / np.where(top == 0, 1, top))))


def phi_b_vjp(cotangents: dict[str, Array], x: Array, norm_eps: float = 1e-12) -> dict[str, Array]:
    """With u = x / ||x|| and H = Y * G: dx = (H - u (u . H)) / ||x||, so x . dx = 0; H / norm_eps below norm_eps."""
    check_cotangents(PHI_B, cotangents, {"x": x})
    u = unit(x, norm_eps)
    H = stored(np.exp(u)) * cotangents["Y"]
    _, top, r = _scaled(x)
    radial = np.where(top * r > norm_eps, np.sum(u * H, axis=-1, keepdims=True), 0)
    return {"x": (H - u * radial) / np.maximum(top * r, norm_eps)}


def _scaled(x: Array) -> tuple[Array, Array, Array]:
    """x over its largest entry, that entry, and the norm of the quotient; a row of zeros has (0, 0, 1)."""
    top = np.max(np.abs(x), axis=-1, keepdims=True)
    y = x / np.where(top == 0, 1, top)
    r = np.sqrt(np.sum(y * y, axis=-1, keepdims=True))
    return y, top, np.where(top == 0, 1, r)


X, Y = Input("x", ("T", "K"), "token", "feature"), Output("Y", ("T", "K"))

PHI_A = Operator(
    name="tala.phi_a",
    summary="exp(x) / ||exp(x)||, row by row",
    source="MixFormer (11), reading A",
    inputs=(X,),
    outputs=(Y,),
    forms=(Form("normalised", phi_a), Form("softmax", phi_a_softmax)),
    vjp=phi_a_vjp,
    causal=True,
    laws=("relabelling",),
)

PHI_B = Operator(
    name="tala.phi_b",
    summary="exp(x / max(||x||, norm_eps)), row by row",
    source="MixFormer (11), reading B",
    inputs=(X, Input("norm_eps", (), "scalar", "norm_eps", default=1e-12, differentiable=False)),
    outputs=(Y,),
    forms=(Form("normalised", phi_b), Form("scaled", phi_b_scaled)),
    vjp=phi_b_vjp,
    causal=True,
    laws=("relabelling", "homogeneity", "euler"),
    degrees={"x": 0},
)
