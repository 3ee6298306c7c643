"""Wrong selective state spaces, and wrong convolutions where nothing is selected: forward, then gradients.

The letters are those of reference/mamba.py. `selective` goes token by token, in chunks at whose ends things go wrong;
`convolved` is the kernel of reference/mamba_lti.py with its steps as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import mamba, mamba_lti
from mixproof.reference.mamba import AT_ONCE, HELD
from mixproof.reference.primitives import Array, decay, phi1, segment_decays, softplus
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import Mutant, Row, tabulated

CHUNK = 8
RULES = {"mamba.zoh": HELD, "mamba.euler": AT_ONCE}
Change = Callable[[Array], Array]
Gain = Callable[[Array, Array], Array]
End = Callable[[Array, Array, Array, int], Array]  # h, the state the chunk began with, its decays, a chunk's tokens

# --- builders --------------------------------------------------------------------------------------------------------


def spread(delta: Array, A: Array) -> Array:
    """delta A as (T, D, N)."""
    return delta[:, :, None] * A


def selective(
    gain: Gain, decays: Gain = lambda delta, A: np.exp(spread(delta, A)), steps: Change = lambda delta: delta,
    rates: Change = lambda A: A, starts: Callable[[Array, int], Array] = lambda h, T: h,
    end: End = lambda h, h0, a, chunk: h, values: Change = lambda u: u,
    skipped: Callable[[Array, Array], Array] = lambda skip, u: skip * u, read: int = 1, last: int = 0,
    give: Callable[[Array, Array], Array] = lambda B, C: C,
) -> Callable[..., Any]:  # fmt: skip
    """-> y, h. Token t reads the state after token t - 1 + `read`; where `last`, that after the chunk."""

    def forward(u, delta, A, B, C, skip, h0=None, chunk=CHUNK):
        u, delta, A = values(u), steps(delta), rates(A)
        a, W = decays(delta, A), gain(delta, A) * u[:, :, None] * B[:, None, :]
        C, rows = give(B, C), [0 * u[:0]]
        h = starts(0 * A if h0 is None else h0, len(u))
        for start in range(0, len(u), chunk):
            states = [h]
            for t in range(start, min(start + chunk, len(u))):
                states.append(a[t] * states[-1] + W[t])
            c = slice(start, start + chunk)
            for i, weights in enumerate(C[c]):
                rows.append((states[-1 if last else i + read] @ weights)[None])
            h = end(states[-1], states[0], a[c], chunk)
        return np.concatenate(rows) + skipped(skip, u), h

    return forward


def selective_vjp(
    name: str, change: Callable[..., dict[str, Array]] = lambda grads, **inputs: grads, final: float = 1.0,
    slopes: Callable[[Array, Array], Any] | None = None, decayed: float = 1.0,
) -> Callable[..., Any]:  # fmt: skip
    """`final` is a factor of the cotangent of h, `decayed` 0 where decays are not multiplied back into their own
    gradient."""
    by = slopes or RULES[name].slopes

    def gradients(cotangents, u, delta, A, B, C, skip, h0=None, chunk=CHUNK):
        z = spread(delta, A)
        a, F = np.exp(z), RULES[name].gain(delta, A)
        up = cotangents | {"h": final * cotangents["h"]}
        products = lambda start, stop: segment_decays(z, start, stop)  # noqa: E731
        d = mamba.state_gradients(up, u, products, a if decayed else a**0, F, B, C, skip, h0, chunk)
        dF, dz, (by_delta, by_A) = d.pop("F"), d.pop("log a"), by(delta, A)
        d |= {"delta": np.sum(dz * A + dF * by_delta, axis=2)}
        d |= {"A": np.sum(dz * delta[:, :, None] + dF * by_A, axis=0)}
        return change(d, upstream=cotangents["y"], skip=skip)

    return gradients


def convolved(
    kernel: Callable[..., Array] = lambda powers, *rest: mamba_lti.kernel(powers[:-1], *rest),
    gain: Gain = HELD.gain, decays: Change = np.exp, left: int = 1, initial: float = 1.0, written: float = 1.0,
    place: Callable[[Array, int], Array] = lambda n, T: n, taps: int | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """-> y, h. `place` says which tap a distance has, `left` how often h0 has decayed at the first token."""

    def forward(u, delta, A, B, C, skip, h0=None):
        T = len(u)
        a, F = decays(delta[:, None] * A), gain(delta[None], A)[0]
        h0, n = 0 * a if h0 is None else h0, np.arange(T)
        powers = decay(a, np.arange(T + 1)[:, None, None])
        tap = place(n[:, None] - n, T)
        k = kernel(powers, F, B, C)
        seen = (tap >= 0) & (tap < (T if taps is None else taps))
        M = np.where(seen[:, :, None], k[np.where(seen, tap, 0)], 0)
        y = np.sum(M * u, axis=1) + initial * np.sum(powers[n + left] * h0 * C, axis=2) + skip * u
        W = F * u[:, :, None] * (B if written else B**0)
        return y, powers[T] * h0 + np.sum(powers[T - 1 - n] * W, axis=0)

    return forward


def convolved_vjp(change: Callable[..., dict[str, Array]], final: float = 1.0) -> Callable[..., Any]:
    def gradients(cotangents, u, delta, A, B, C, skip, h0=None):
        up = cotangents | {"h": final * cotangents["h"]}
        return change(mamba_lti.vjp(up, u, delta, A, B, C, skip, h0), len(u))

    return gradients


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def plain_phi1(delta: Array, A: Array) -> Array:
    """(exp(z) - 1) / z as it stands."""
    z = spread(delta, A)
    return delta[:, :, None] * ((np.exp(z) - 1) / z)


def bilinear(z: Array) -> Array:
    return (1 + z / 2) / (1 - z / 2)


def logspace(rule: Gain) -> Callable[..., Any]:
    """h_t = exp(L_t) sum_s exp(-L_s) w_s with L the sum of the logarithms of decays."""

    def forward(u, delta, A, B, C, skip, h0=None, chunk=CHUNK):
        L = np.cumsum(spread(delta, A), axis=0)
        W = np.exp(-L) * rule(delta, A) * u[:, :, None] * B[:, None, :]
        h = np.exp(L) * (np.cumsum(W, axis=0) + (0 * A if h0 is None else h0))
        y = np.sum(h * C[:, None, :], axis=2) + skip * u
        return y, h[-1] if len(u) else 0 * A if h0 is None else h0

    return forward


def undecayed(h: Array, h0: Array, a: Array, chunk: int) -> Array:
    return h + h0 - np.prod(a, axis=0) * h0


def forgotten(h: Array, h0: Array, a: Array, chunk: int) -> Array:
    return h - np.prod(a, axis=0) * h0


def padded(h: Array, h0: Array, a: Array, chunk: int) -> Array:
    """Steps that fill up a short chunk decay the state too."""
    return a[-1] ** (chunk - len(a)) * h


def rounded(h: Array, h0: Array, a: Array, chunk: int) -> Array:
    return round_to(h, "bfloat16").astype(h.dtype)


def earlier(x: Array) -> Array:
    return np.concatenate([x[:1], x[:-1]])


def later(x: Array) -> Array:
    return np.concatenate([x[1:], x[-1:]])


def decayed_by(steps: Change) -> Gain:
    return lambda delta, A: np.exp(spread(steps(delta), A))


def without_skip(grads: dict[str, Array], upstream: Array, skip: Array) -> dict[str, Array]:
    return grads | {"u": grads["u"] - skip * upstream}


def without(*names: str) -> Callable[..., dict[str, Array]]:
    return lambda grads, *_, **__: grads | {n: 0 * grads[n] for n in names}


# --- tables ----------------------------------------------------------------------------------------------------------


def forward(name: str) -> list[Row]:
    """Whatever the rule for the input is."""
    rule = RULES[name].gain
    return [
        ("linear_decay", "decays 1 + delta A", selective(rule, lambda d, A: 1 + spread(d, A)), "scan-euler-A",
         ("forward",)),
        ("bilinear_decay", "decays by the bilinear rule", selective(rule, lambda d, A: bilinear(spread(d, A))),
         "", ("forward",)),
        ("positive_rates", "rates of the other sign", selective(rule, rates=np.abs), "", ("forward",)),
        ("first_channel", "the rates of the first channel for all",
         selective(rule, rates=lambda A: np.broadcast_to(A[:1], A.shape)), "", ("forward",)),
        ("softplus_twice", "steps through softplus once more", selective(rule, steps=softplus), "", ("forward",)),
        ("earlier_step", "decays by the step of the previous token", selective(rule, decayed_by(earlier)), "",
         ("forward",)),
        ("later_step", "decays by the step of the next token", selective(rule, decayed_by(later)), "",
         ("forward", "causality")),
        ("read_before", "the state read before the token is written", selective(rule, read=0), "", ("forward",)),
        ("read_last", "the state read at the end of the chunk", selective(rule, last=1), "",
         ("forward", "causality", "forms")),
        ("read_by_input", "B for C", selective(rule, give=lambda B, C: B), "", ("forward",)),
        ("no_skip", "no skip", selective(rule, skipped=lambda skip, u: 0 * u), "", ("forward",)),
        ("undecayed_state", "the carried state not decayed", selective(rule, end=undecayed), "", ("forward", "forms")),
        ("first_chunk", "the carried state dropped after a chunk", selective(rule, end=forgotten),
         "scan-h0-first-chunk", ("forward", "split", "forms")),
        ("padded_tail", "a short last chunk filled up with steps", selective(rule, end=padded), "scan-pad-decay",
         ("forward", "split")),
        ("short_ignores_state", "the initial state ignored when a chunk is not full",
         selective(rule, starts=lambda h, T: h if T >= CHUNK else 0 * h), "", ("forward", "split")),
        ("bfloat16_state", "the state rounded to bfloat16 between chunks", selective(rule, end=rounded),
         "scan-state-bf16", ("forward", "forms")),
        ("logspace", "decays as quotients of exponentials", logspace(rule), "scan-logspace", ("extremes",)),
        ("clipped_values", "values clipped to [-2, 2]", selective(rule, values=lambda u: np.clip(u, -2, 2)), "",
         ("forward", "linearity", "homogeneity", "euler")),
    ]  # fmt: skip


def backward(name: str) -> list[Row]:
    return [
        ("no_final", "the cotangent of the final state dropped", selective_vjp(name, final=0.0), "tala-no-dht",
         ("vjp",)),
        ("no_decay", "decays missing from the gradients of what they depend on", selective_vjp(name, decayed=0.0), "",
         ("vjp",)),
        ("no_skip", "no skip in the gradient of u", selective_vjp(name, without_skip), "", ("vjp", "euler")),
        ("no_initial", "no gradient for the initial state", selective_vjp(name, without("h0")), "", ("vjp",)),
    ]  # fmt: skip


OF_ZOH: list[Row] = [
    ("at_once", "delta B for B bar", selective(AT_ONCE.gain), "", ("forward",)),
    ("plain_phi1", "(exp(z) - 1) / z for phi1(z)", selective(plain_phi1), "", ("forward",)),
    ("undivided", "exp(delta A) - 1 for B bar", selective(lambda d, A: -np.expm1(spread(d, A))), "",
     ("forward",)),
    ("bilinear_input", "the bilinear rule's B bar",
     selective(lambda d, A: d[:, :, None] / (1 - spread(d, A) / 2)), "", ("forward",)),
]  # fmt: skip
OF_EULER: list[Row] = [
    ("held", "B bar of a token that is held", selective(HELD.gain), "", ("forward",)),
    ("no_step", "B for B bar", selective(lambda d, A: d[:, :, None] ** 0 + 0 * A), "", ("forward",)),
    ("decayed_input", "an input that decays in its own step",
     selective(lambda d, A: d[:, :, None] * np.exp(spread(d, A))), "",
     ("forward",)),
]  # fmt: skip
BACK_OF_ZOH: list[Row] = [
    ("no_slope", "B bar taken to be independent of the rates",
     selective_vjp("mamba.zoh", slopes=lambda d, A: (HELD.slopes(d, A)[0], 0 * HELD.slopes(d, A)[1])), "", ("vjp",)),
    ("phi1_by_step", "phi1 taken to be independent of the step",
     selective_vjp("mamba.zoh", slopes=lambda d, A: (phi1(spread(d, A)), HELD.slopes(d, A)[1])), "", ("vjp",)),
]  # fmt: skip
BACK_OF_EULER: list[Row] = [
    ("no_slope", "B bar taken to be independent of the steps",
     selective_vjp("mamba.euler", slopes=lambda d, A: (0 * d[:, :, None], 0 * A)), "", ("vjp",)),
]  # fmt: skip
OF_LTI: list[Row] = [
    ("circular", "a convolution that wraps around", convolved(place=lambda n, T: n % max(T, 1)), "",
     ("forward", "causality")),
    ("correlation", "the kernel the wrong way round", convolved(place=lambda n, T: -n), "", ("forward", "causality")),
    ("late_kernel", "a kernel that begins with C a F B",
     convolved(lambda powers, *rest: mamba_lti.kernel(powers[1:], *rest)), "", ("forward",)),
    ("short_kernel", "a kernel of eight taps", convolved(taps=8), "", ("forward",)),
    ("at_once", "delta B for B bar", convolved(gain=AT_ONCE.gain), "", ("forward",)),
    ("bilinear_decay", "decays by the bilinear rule", convolved(decays=bilinear), "", ("forward",)),
    ("state_unweighted", "the final state without B", convolved(written=0.0), "scan-state-noB", ("forward", "split")),
    ("early_state", "the initial state not decayed at the first token", convolved(left=0), "", ("forward", "split")),
    ("no_state", "the initial state not read", convolved(initial=0.0), "", ("forward", "split")),
]  # fmt: skip
BACK_OF_LTI: list[Row] = [
    ("no_final", "the cotangent of the final state dropped", convolved_vjp(lambda d, T: d, final=0.0), "", ("vjp",)),
    ("mean_step", "the step's gradient averaged over tokens",
     convolved_vjp(lambda d, T: d | {"delta": d["delta"] / max(T, 1)}), "", ("vjp",)),
    ("no_initial", "no gradient for the initial state", convolved_vjp(without("h0")), "", ("vjp",)),
]  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (
    *tabulated("mamba.zoh", forward("mamba.zoh") + OF_ZOH, backward("mamba.zoh") + BACK_OF_ZOH),
    *tabulated("mamba.euler", forward("mamba.euler") + OF_EULER, backward("mamba.euler") + BACK_OF_EULER),
    *tabulated("mamba.lti", OF_LTI, BACK_OF_LTI),
)
