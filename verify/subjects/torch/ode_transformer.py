"""The ODE Transformer's encoder block in PyTorch: Runge-Kutta steps through attention and a feed-forward network.

Source: Li et al. 2022, as in the reference. Norms are PyTorch's own; queries, keys and values of all heads come from
one product; the result is summed up while the slopes F_i come in.

    letter       shape         meaning
    X Y          (B, T, E)     tokens before and after the block; y in a step
    W_Q .. W_O   (E, E)        projections; heads are contiguous groups of channels
    W_1 W_2      (E, F), ..    feed-forward network; W_2 (F, E), with biases b_1 (F,) and b_2 (E,)
    gain, bias   (E,)          affine part of the norms before attention, 1, and before the network, 2
    gamma1, 2    ()            learned weights of the two slopes
    W_g b_g      (2E, 1), ()   gate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments

Slope = Callable[[Tensor], Tensor]

_AXES = {
    "X": "BTE", "gain1": "E", "bias1": "E", "gain2": "E", "bias2": "E", "W_Q": "EE", "W_K": "EE", "W_V": "EE",
    "W_O": "EE", "W_1": "EF", "b_1": "F", "W_2": "FE", "b_2": "E",
}  # fmt: skip
_LEARNED = {"gamma1": "", "gamma2": ""}
_GATED = {"W_g": "CO", "b_g": ""}
_DECLARED = {"name": "torch.stages", "layout": "B T D", "dtypes": ("float64", "float32"), "devices": ("cpu", "cuda")}

# rows of coefficients of the slopes so far, and weights of all
_EULER = ([[]], [1.0])
_HEUN = ([[], [1.0]], [0.5, 0.5])
_KUTTA = ([[], [0.5], [-1.0, 2.0]], [1 / 6, 2 / 3, 1 / 6])
_CLASSICAL = ([[], [0.5], [0.0, 0.5], [0.0, 0.0, 1.0]], [1 / 6, 1 / 3, 1 / 3, 1 / 6])


@implements("ode_transformer.rk1", **_DECLARED)
def rk1(
    X: Tensor, gain1: Tensor, bias1: Tensor, gain2: Tensor, bias2: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor,
    W_O: Tensor, W_1: Tensor, b_1: Tensor, W_2: Tensor, b_2: Tensor, heads: int = 2, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Y = X + F(X): Euler's method, the residual layer.  (B, T, E) -> (B, T, E)"""
    block = (X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, b_1, W_2, b_2)
    return _run(lambda F, y: _step(F, y, *_EULER), block, heads, eps)


@implements("ode_transformer.rk2", **_DECLARED)
def rk2(
    X: Tensor, gain1: Tensor, bias1: Tensor, gain2: Tensor, bias2: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor,
    W_O: Tensor, W_1: Tensor, b_1: Tensor, W_2: Tensor, b_2: Tensor, heads: int = 2, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Heun's method of order 2.  (B, T, E) -> (B, T, E)"""
    block = (X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, b_1, W_2, b_2)
    return _run(lambda F, y: _step(F, y, *_HEUN), block, heads, eps)


@implements("ode_transformer.rk2_learned", **_DECLARED)
def rk2_learned(
    X: Tensor, gain1: Tensor, bias1: Tensor, gain2: Tensor, bias2: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor,
    W_O: Tensor, W_1: Tensor, b_1: Tensor, W_2: Tensor, b_2: Tensor, gamma1: Tensor, gamma2: Tensor,
    heads: int = 2, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Heun's slopes with learned weights.  (B, T, E) -> (B, T, E)"""
    block = (X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, b_1, W_2, b_2)
    return _run(_learned, block, heads, eps, _LEARNED, gamma1, gamma2)


@implements("ode_transformer.rk2_gated", **_DECLARED)
def rk2_gated(
    X: Tensor, gain1: Tensor, bias1: Tensor, gain2: Tensor, bias2: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor,
    W_O: Tensor, W_1: Tensor, b_1: Tensor, W_2: Tensor, b_2: Tensor, W_g: Tensor, b_g: Tensor,
    heads: int = 2, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Heun's slopes, between which a gate of each token chooses.  (B, T, E) -> (B, T, E)"""
    block = (X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, b_1, W_2, b_2)
    return _run(_gated, block, heads, eps, _GATED, W_g, b_g)


@implements("ode_transformer.rk3", **_DECLARED)
def rk3(
    X: Tensor, gain1: Tensor, bias1: Tensor, gain2: Tensor, bias2: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor,
    W_O: Tensor, W_1: Tensor, b_1: Tensor, W_2: Tensor, b_2: Tensor, heads: int = 2, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Kutta's method of order 3.  (B, T, E) -> (B, T, E)"""
    block = (X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, b_1, W_2, b_2)
    return _run(lambda F, y: _step(F, y, *_KUTTA), block, heads, eps)


@implements("ode_transformer.rk4", **_DECLARED)
def rk4(
    X: Tensor, gain1: Tensor, bias1: Tensor, gain2: Tensor, bias2: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor,
    W_O: Tensor, W_1: Tensor, b_1: Tensor, W_2: Tensor, b_2: Tensor, heads: int = 2, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """The classical method of order 4.  (B, T, E) -> (B, T, E)"""
    block = (X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, b_1, W_2, b_2)
    return _run(lambda F, y: _step(F, y, *_CLASSICAL), block, heads, eps)


class ODETransformerBlock(nn.Module):
    """A block with parameters of its own, which all its stages share. Norms start as the identity, weights as those of
    nn.Linear, learned coefficients at one as in the paper, a gate halfway, where it is Heun's method.

    d_model   E, channels of the tokens; a multiple of `heads`
    method    "rk1", "rk2", "rk2_learned", "rk2_gated", "rk3" or "rk4"
    hidden    F, width of the feed-forward network; 4 d_model if not given
    eps       added to variances

    Raises ValueError for a value outside these.
    """

    def __init__(
        self, d_model: int, heads: int, method: str = "rk2", hidden: int | None = None, eps: float = 1e-5
    ) -> None:
        super().__init__()
        hidden = 4 * d_model if hidden is None else hidden
        for name, value in {"d_model": d_model, "heads": heads, "hidden": hidden}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if method not in METHODS:
            raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
        arguments.not_negative(eps=eps)
        _divides(heads, d_model)
        self.heads, self.method, self.eps = heads, method, eps
        self.gain1, self.bias1, self.gain2, self.bias2 = (nn.Parameter(torch.empty(d_model)) for _ in range(4))
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Parameter(torch.empty(d_model, d_model)) for _ in range(4))
        self.W_1, self.b_1 = nn.Parameter(torch.empty(d_model, hidden)), nn.Parameter(torch.empty(hidden))
        self.W_2, self.b_2 = nn.Parameter(torch.empty(hidden, d_model)), nn.Parameter(torch.empty(d_model))
        if method == "rk2_learned":
            self.gamma1, self.gamma2 = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))
        if method == "rk2_gated":
            self.W_g, self.b_g = nn.Parameter(torch.empty(2 * d_model, 1)), nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again."""
        for name, parameter in self.named_parameters():
            if name in ("gain1", "gain2", "gamma1", "gamma2"):
                nn.init.ones_(parameter)
            elif parameter.ndim == 2 and name != "W_g":
                bound = 1 / math.sqrt(len(parameter))
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.zeros_(parameter)

    def forward(self, X: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)"""
        return METHODS[self.method](X, **dict(self.named_parameters()), heads=self.heads, eps=self.eps)

    def extra_repr(self) -> str:
        E, F = self.W_1.shape
        return f"{E}, heads={self.heads}, method={self.method!r}, hidden={F}, eps={self.eps}"


METHODS: dict[str, Callable[..., Tensor]] = {
    "rk1": rk1,
    "rk2": rk2,
    "rk2_learned": rk2_learned,
    "rk2_gated": rk2_gated,
    "rk3": rk3,
    "rk4": rk4,
}


def _run(
    method: Callable[..., Tensor],
    block: tuple[Tensor, ...],
    heads: int,
    eps: float,
    more: Mapping[str, str] = MappingProxyType({}),
    *weights: Tensor,
) -> Tensor:
    """A method with F for its slope; `more` has the axes of its own parameters."""
    axes, tensors = _AXES | dict(more), (*block, *weights)
    sizes = arguments.checked(axes, dict(zip(axes, tensors, strict=True)), parameters=list(axes)[1:])
    arguments.not_negative(eps=eps)
    _divides(heads, sizes["E"])
    if "C" in sizes and (sizes["C"], sizes["O"]) != (2 * sizes["E"], 1):
        raise ValueError(f"W_g has shape ({sizes['C']}, {sizes['O']}); expected ({2 * sizes['E']}, 1)")
    X, wide = block[0], arguments.widest(*tensors)
    with arguments.no_autocast(X):
        x, *parameters = (t.to(wide) for t in block)
        return method(_slope(parameters, heads, eps), x, *(t.to(wide) for t in weights)).to(X.dtype)


def _slope(parameters: Sequence[Tensor], heads: int, eps: float) -> Slope:
    """F(y) = SAN(LN(y)) + FFN(LN(y + SAN(LN(y))))."""
    gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, b_1, W_2, b_2 = parameters
    W, E = torch.cat([W_Q, W_K, W_V], dim=1), gain1.shape

    def F(y: Tensor) -> Tensor:
        parts = (layer_norm(y, E, gain1, bias1, eps) @ W).chunk(3, dim=-1)
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in parts)
        P = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
        S = (P @ v).transpose(1, 2).flatten(2) @ W_O
        N = layer_norm(y + S, E, gain2, bias2, eps)
        return S + ((N @ W_1 + b_1).relu() @ W_2 + b_2)

    return F


def _step(F: Slope, y: Tensor, a: Sequence[Sequence[float]], b: Sequence[float | Tensor]) -> Tensor:
    """y + sum_i b_i F_i with F_i = F(y + sum_j a_ij F_j)."""
    Y, slopes = y, []
    for row, weight in zip(a, b, strict=True):
        Z = y
        for c, earlier in zip(row, slopes, strict=True):
            Z = Z + c * earlier if c else Z
        slopes.append(F(Z))
        Y = Y + weight * slopes[-1]
    return Y


def _learned(F: Slope, y: Tensor, gamma1: Tensor, gamma2: Tensor) -> Tensor:
    return _step(F, y, _HEUN[0], [gamma1, gamma2])


def _gated(F: Slope, y: Tensor, W_g: Tensor, b_g: Tensor) -> Tensor:
    F1 = F(y)
    F2 = F(y + F1)
    first, second = W_g.chunk(2)
    g = (F1 @ first + F2 @ second + b_g).sigmoid()
    return y + F2 + g * (F1 - F2)


def _divides(heads: int, channels: int) -> None:
    if heads < 1 or channels % heads:
        raise ValueError(f"heads is {heads}; it must divide the {channels} channels")
