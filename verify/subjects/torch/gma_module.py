"""Gaussian mixture attention as a layer: projections, one mixture a head, heads concatenated, output projection.

Source: GMA paper (4), (11), (14), (15) and its multi-head section. The layer has 4 D^2 + H K (2 D / H + 1) parameters:
a mixture belongs to one head, as the paper's parameter tables need, and `mixture="shared"` is what its text says
instead. Not in the source, hence arguments: eps and v_min. Not in the source either: how means and variances start.
Here means are standard normal and variances one; the prior starts uniform, as the paper says.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mixproof.verify.subjects.torch import gma

IMPLEMENTATIONS = {
    "eager": (gma.cross, gma.causal),
    "chunkwise": (gma.chunkwise_cross, gma.chunkwise_causal),
    "recompute": (gma.recompute_cross, gma.recompute_causal),
}
MIXTURES = ("per_head", "shared")


class State(NamedTuple):
    """What a causal layer remembers of the tokens so far: S (B, H, K, D / H), their values, and Z (B, H, K), mass."""

    S: Tensor
    Z: Tensor


class GaussianMixtureAttention(nn.Module):
    """`heads` Gaussian mixture attentions over d_model / heads channels each, every one with `components` components.

    d_model        D, channels of the tokens; a multiple of `heads`
    causal         whether token i sees tokens j <= i only, and a state is carried
    mixture        "per_head", or "shared": all heads use one mixture
    eps, v_min     added to the normaliser; added to the variances
    chunk          tokens a chunk, for "chunkwise" and "recompute"
    implementation "chunkwise", "eager", or "recompute", whose backward stores no responsibilities

    Raises ValueError for a value outside these.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        components: int,
        causal: bool = False,
        mixture: str = "per_head",
        eps: float = 1e-6,
        v_min: float = 0.0,
        chunk: int = 64,
        implementation: str = "chunkwise",
    ) -> None:
        super().__init__()
        for name, value in {"d_model": d_model, "heads": heads, "components": components, "chunk": chunk}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name, value in {"eps": eps, "v_min": v_min}.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be finite and not negative")
        if d_model % heads:
            raise ValueError(f"d_model is {d_model}, which {heads} heads do not divide")
        if mixture not in MIXTURES:
            raise ValueError(f"mixture is {mixture!r}; it must be one of {', '.join(MIXTURES)}")
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation is {implementation!r}; it must be one of {', '.join(IMPLEMENTATIONS)}")
        self.d_model, self.heads, self.components, self.causal, self.mixture = (
            d_model,
            heads,
            components,
            causal,
            mixture,
        )
        self.eps, self.v_min, self.chunk, self.implementation = eps, v_min, chunk, implementation
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        owners = (heads,) if mixture == "per_head" else ()
        self.mu = nn.Parameter(torch.empty(*owners, components, d_model // heads))
        self.omega = nn.Parameter(torch.empty(*owners, components, d_model // heads))
        self.alpha = nn.Parameter(torch.empty(*owners, components))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: random projections and means, unit variances, uniform prior."""
        for W in (self.W_Q, self.W_K, self.W_V, self.W_O):
            W.reset_parameters()
        nn.init.normal_(self.mu)
        nn.init.constant_(self.omega, math.log(math.e - 1))  # softplus(omega) = 1
        nn.init.zeros_(self.alpha)

    def forward(
        self, x: Tensor, context: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Tokens x (B, T, D) attend to each other, or to `context` (B, S, D).  -> (B, T, D) and, if causal, the state.

        A causal layer continues from `state` if it is given. Raises ValueError where an argument does not fit."""
        self._check("x", x)
        if context is not None and self.causal:
            raise ValueError("context was given to a causal layer; only a layer with causal=False attends to another")
        if state is not None and not self.causal:
            raise ValueError("state was given to a layer with causal=False; only a causal layer carries one")
        source = x if context is None else context
        self._check("context", source, batch=x.shape[0])
        q, k, v = self._split(self.W_Q(x)), self._split(self.W_K(source)), self._split(self.W_V(source))  # (4)
        cross, causal = IMPLEMENTATIONS[self.implementation]
        options = {} if self.implementation == "eager" else {"chunk": self.chunk}
        mixture = [p if self.mixture == "per_head" else p.expand(self.heads, *p.shape) for p in self._mixture()]
        if self.causal:
            O, S, Z = causal(q, k, v, *mixture, self.eps, self.v_min, *(state or (None, None)), **options)
            state = State(S, Z)
        else:
            O = cross(q, k, v, *mixture, self.eps, self.v_min, **options)
        return self.W_O(O.flatten(2)), state

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One more token (B, D) of a causal layer: its output (B, D) and the state after it."""
        if not self.causal:
            raise ValueError("step needs a causal layer; this one has causal=False")
        if x.ndim != 2:
            raise ValueError(f"x has shape {tuple(x.shape)}; step expects (B, {self.d_model})")
        y, after = self.forward(x[:, None], state=state)
        assert after is not None
        return y[:, 0], after

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, heads={self.heads}, components={self.components}, causal={self.causal}, "
            f"mixture={self.mixture!r}, eps={self.eps}, v_min={self.v_min}, chunk={self.chunk}, "
            f"implementation={self.implementation!r}"
        )

    def _mixture(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mu, self.omega, self.alpha

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def _check(self, name: str, x: Tensor, batch: int | None = None) -> None:
        if x.ndim != 3 or x.shape[2] != self.d_model or x.shape[0] != (x.shape[0] if batch is None else batch):
            expected = f"({'B' if batch is None else batch}, tokens, {self.d_model})"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {expected}")
