"""The Mamba block in PyTorch: projections, a short causal convolution, the selective state space, and a gate.

Source: survey, Mamba; Gu and Dao 2023, section 3.4, as in the released code: B bar = delta B, and steps, B and C are
linear in what comes out of the convolution.

    letter           shape             meaning
    x Y              (B, T, E)         tokens before and after the block
    u0 u             (B, W - 1, D)     what the convolution still sees of earlier tokens
    h0 h             (B, D, N)         state of the state space
    W_in W_z         (E, D)            projections to its input and to the gate; W_out (D, E) back
    w_conv b_conv    (D, W), (D,)      taps, that of the token itself last
    W_down W_dt      (D, Q), (Q, D)    to the steps, through a rank Q, and b_dt (D,)
    W_B W_C          (D, N)            to B and C
    A_log skip       (D, N), (D,)      A = -exp(A_log); weight of the input in the output
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from mixproof.verify import implements
from mixproof.verify.subjects.torch import _arguments as arguments
from mixproof.verify.subjects.torch import mamba

_AXES = {
    "x": "BTE", "W_in": "ED", "W_z": "ED", "w_conv": "DW", "b_conv": "D", "W_down": "DQ", "W_dt": "QD", "b_dt": "D",
    "W_B": "DN", "W_C": "DN", "A_log": "DN", "skip": "D", "W_out": "DE", "u0": "BLD", "h0": "BDN",
}  # fmt: skip
_PARAMETERS = tuple(name for name in _AXES if name not in ("x", "u0", "h0"))


@implements("mamba.block", name="torch.scan", layout="B T D", dtypes=("float64", "float32"), devices=("cpu", "cuda"))
def block(
    x: Tensor,
    W_in: Tensor,
    W_z: Tensor,
    w_conv: Tensor,
    b_conv: Tensor,
    W_down: Tensor,
    W_dt: Tensor,
    b_dt: Tensor,
    W_B: Tensor,
    W_C: Tensor,
    A_log: Tensor,
    skip: Tensor,
    W_out: Tensor,
    u0: Tensor | None = None,
    h0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Y = (SSM(S) * silu(x W_z)) W_out with S = silu(conv(x W_in)), the state space by a scan. Also u and h, from which
    a later call goes on; a call with one token is a step of decoding.  -> (B, T, E), (B, W - 1, D), (B, D, N)"""
    tensors = (x, W_in, W_z, w_conv, b_conv, W_down, W_dt, b_dt, W_B, W_C, A_log, skip, W_out, u0, h0)
    n = arguments.checked(_AXES, dict(zip(_AXES, tensors, strict=True)), ("u0", "h0"), _PARAMETERS)
    if n.get("L", n["W"] - 1) != n["W"] - 1:
        raise ValueError(f"u0 has {n['L']} rows; a convolution of {n['W']} taps sees {n['W'] - 1} earlier ones")
    wide = arguments.widest(*tensors)
    with arguments.no_autocast(x):
        X, W_in, W_z, w_conv, b_conv, W_down, W_dt, b_dt, W_B, W_C, A_log, skip, W_out = (
            t.to(wide) for t in tensors[:13]
        )
        u = X.new_zeros(n["B"], n["W"] - 1, n["D"]) if u0 is None else u0.to(wide)
        h = X.new_zeros(n["B"], n["D"], n["N"]) if h0 is None else h0.to(wide)
        taps = torch.cat([u, X @ W_in], dim=1)
        S = silu(sum(w_conv[:, j] * taps[:, j : j + n["T"]] for j in range(n["W"])) + b_conv)
        delta = softplus(S @ W_down @ W_dt + b_dt, threshold=40)  # at torch's own, 20, it is off by 2e-9
        y, h = mamba.scan(S, delta, -A_log.exp(), S @ W_B, S @ W_C, skip, h, mamba.at_once)
        Y = (y * silu(X @ W_z)) @ W_out
    return Y.to(x.dtype), taps[:, n["T"] :].clone(), h


class MambaBlock(nn.Module):
    """`block` with parameters of its own, which start as those of the released code.

    d_model   E, channels of the tokens
    d_state   N, numbers that each channel remembers
    d_conv    W, taps of the convolution
    expand    D = expand d_model channels inside
    dt_rank   Q, rank of the map to the steps; d_model / 16, rounded up, if not given

    Raises ValueError for a value below one.
    """

    STEPS = (1e-3, 0.1)  # the steps of a token of zeros

    W_in: nn.Parameter
    W_z: nn.Parameter
    w_conv: nn.Parameter
    b_conv: nn.Parameter
    W_down: nn.Parameter
    W_dt: nn.Parameter
    b_dt: nn.Parameter
    W_B: nn.Parameter
    W_C: nn.Parameter
    A_log: nn.Parameter
    skip: nn.Parameter
    W_out: nn.Parameter

    def __init__(
        self, d_model: int, d_state: int = 16, d_conv: int = 4, expand: int = 2, dt_rank: int | None = None
    ) -> None:
        super().__init__()
        dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        sizes = {"d_model": d_model, "d_state": d_state, "d_conv": d_conv, "expand": expand, "dt_rank": dt_rank}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        size = {"E": d_model, "D": expand * d_model, "N": d_state, "W": d_conv, "Q": dt_rank}
        for name in _PARAMETERS:
            self.register_parameter(name, nn.Parameter(torch.empty(*(size[axis] for axis in _AXES[name]))))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start again: rates -1, -2, .. in each channel, steps spread evenly in their logarithm, random weights."""
        for W in (self.W_in, self.W_z, self.W_down, self.W_B, self.W_C, self.W_out, self.W_dt):
            nn.init.uniform_(W, -1 / math.sqrt(len(W)), 1 / math.sqrt(len(W)))
        for w in (self.w_conv, self.b_conv):
            nn.init.uniform_(w, -1 / math.sqrt(self.w_conv.shape[1]), 1 / math.sqrt(self.w_conv.shape[1]))
        least, most = self.STEPS
        steps = least * (most / least) ** torch.rand_like(self.b_dt)
        self.b_dt.copy_(steps + (-(-steps).expm1()).log())  # softplus of it is the step
        self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1).log().expand_as(self.A_log))
        nn.init.ones_(self.skip)

    def forward(self, x: Tensor, u0: Tensor | None = None, h0: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, E) -> (B, T, E), and the states to go on from."""
        return block(x, **dict(self.named_parameters()), u0=u0, h0=h0)

    def extra_repr(self) -> str:
        (E, D), (_, W), (_, N), (Q, _) = self.W_in.shape, self.w_conv.shape, self.A_log.shape, self.W_dt.shape
        return f"{E}, d_state={N}, d_conv={W}, expand={D // E}, dt_rank={Q}"
