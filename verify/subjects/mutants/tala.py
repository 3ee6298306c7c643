"""Wrong TALAs: what (14) to (16) print, wrong decays of the head, and retention's mistakes at TALA's decays.

The letters are those of reference/tala.py; a is the decay omega G."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import retention, tala, tala_printed
from mixproof.reference.primitives import Array
from mixproof.verify.arithmetic import round_to
from mixproof.verify.subjects.mutants import Mutant, tabulated
from mixproof.verify.subjects.mutants.retention import CHUNK, chunkwise, decays, vjp

Decay = Callable[[Array, Array], Array]


def decaying(a: Decay, form: Callable[..., Any] = retention.chunkwise) -> Callable[..., Any]:
    """TALA with another decay, or another form of retention, at the same chunk size."""

    def forward(q, k, v, h, G, scale=1.0, S0=None, chunk=CHUNK):
        return form(q, k, v, a(h, G), scale, S0, chunk=chunk)

    return forward


def printed(form: Callable[..., Any]) -> Callable[..., Any]:
    """A chunkwise form of reference/tala_printed.py. The paper starts from S_0 = 0: what S0 adds is added rightly."""

    def forward(q, k, v, h, G, scale=1.0, S0=None, chunk=CHUNK):
        a = tala.omega(h) * G
        O, S = form(q, k, v, a, chunk)
        if S0 is None:
            return O * scale, S
        read, carried = retention.chunkwise(q, k, 0 * v, a, 1.0, S0)
        return (O + read) * scale, S + carried

    return forward


def gain_outside(q, k, v, h, G, scale=1.0, S0=None):
    """D_nm = omega^(n-m) G, the diagonal included."""
    zero = None if S0 is None else 0 * S0
    O, S = retention.chunkwise(q, k, v, tala.omega(h), scale, zero)
    read, carried = retention.chunkwise(q, k, 0 * v, tala.omega(h) * G, scale, S0)
    return G * O + read, G * S + carried


def narrow(dtype: str) -> Decay:
    """omega rounded to a narrow format: one, for late heads."""
    return lambda h, G: round_to(tala.omega(h), dtype).astype(np.asarray(h).dtype) * G


def by_logarithm(h: Array, G: Array) -> Array:
    """exp(log omega + log G): not a number for a gain that is not positive."""
    return np.exp(tala.log_omega(h) + np.log(G))


def gradients(change: Callable[..., dict[str, Array]], **mistakes: Any) -> Callable[..., Any]:
    """The gradients of retention at a = omega G, with `mistakes` of its own, and what `change` makes of da."""
    through = vjp(**mistakes)

    def backward(cotangents, q, k, v, h, G, scale=1.0, S0=None, chunk=CHUNK):
        grads = through(cotangents, q, k, v, tala.omega(h) * G, scale, S0, chunk)
        return grads | change(grads.pop("gamma"), h, G)

    return backward


def right(da: Array, h: Array, G: Array) -> dict[str, Array]:
    return {"h": da * G * np.exp(-h), "G": da * tala.omega(h)}


def ones(operator: Callable[..., Any]) -> Callable[..., Any]:
    return decaying(lambda h, G: tala.omega(h) * G, operator)


FORWARD = (
    ("printed_16", "(16) as printed: no decay inside the chunk", printed(tala_printed.eq16_printed), "",
     ("forward", "forms", "split")),
    ("only_zeta", "(16) with the state decaying inside the chunk, the reading not",
     printed(tala_printed.eq16_only_zeta), "", ("forward", "forms")),
    ("only_xi", "(16) with the reading decaying inside the chunk, the state not", printed(tala_printed.eq16_only_xi),
     "", ("forward", "forms")),
    ("whole_last_chunk", "a^B for a last chunk shorter than B", printed(tala_printed.eq16_aB_ragged),
     "tala-tail-decay", ("forward",)),
    ("gain_outside", "G beside the power and not in it", gain_outside, "", ("forward", "cocycle")),
    ("no_gain", "the gain left out", decaying(lambda h, G: tala.omega(h)), "", ("forward",)),
    ("size_of_gain", "the sign of the gain lost", decaying(lambda h, G: tala.omega(h) * np.abs(G)), "", ("forward",)),
    ("by_logarithm", "the decay as exp(log omega + log G)", decaying(by_logarithm), "", ("forward",)),
    ("head_from_zero", "heads counted from zero", decaying(lambda h, G: tala.omega(h - 1) * G), "", ("forward",)),
    ("retnet_heads", "the decays of RetNet, 1 - 2^-(4+h)", decaying(lambda h, G: (1 - 2 ** (-4 - h)) * G), "",
     ("forward",)),
    ("omega_bfloat16", "omega rounded to bfloat16", decaying(narrow("bfloat16")), "", ("forward",)),
    ("omega_float16", "omega rounded to float16", decaying(narrow("float16")), "", ("forward",)),
    ("sum_for_difference", "omega taken for e^-h", decaying(lambda h, G: np.exp(-h) * G), "", ("forward",)),
    ("exponent_one_more", "D_nm = a^(n-m+1)", ones(chunkwise(mask=lambda a, i, chunk: a * decays(a, i))), "",
     ("forward", "cocycle")),
    ("exclusive", "the state read before it has decayed", ones(chunkwise(read=lambda a, i, start: a**i)),
     "tala-inter-exclusive", ("forward", "split")),
    ("global_positions", "the state read with positions that do not start anew",
     ones(chunkwise(read=lambda a, i, start: a ** (start + i + 1))), "tala-global-cumsum", ("forward", "forms")),
    ("leak_state", "the state read at the end of the chunk", ones(chunkwise(read_after=True)), "tala-leak-state",
     ("causality",)),
    ("padded_keys", "keys that are zero counted as one", ones(chunkwise(keys=lambda k: np.where(k == 0, 1, k))), "",
     ("left_padding",)),
    ("clipped_keys", "keys clipped to [-1, 1]", ones(chunkwise(keys=lambda k: np.clip(k, -1, 1))), "",
     ("forward", "homogeneity")),
)  # fmt: skip

BACKWARD = (
    ("no_head_gradient", "no gradient of h", gradients(lambda da, h, G: right(da, h, G) | {"h": 0 * h}), "", ("vjp",)),
    ("omega_for_slope", "d omega / dh taken for omega",
     gradients(lambda da, h, G: right(da, h, G) | {"h": da * G * tala.omega(h)}), "", ("vjp",)),
    ("log_gain", "the gradient of log G in place of that of G",
     gradients(lambda da, h, G: right(da, h, G) | {"G": da * tala.omega(h) * G}), "", ("vjp",)),
    ("no_state_cotangent", "the cotangent of the final state dropped", gradients(right, state=0), "tala-no-dht",
     ("vjp",)),
    ("doubled_queries", "the gradient of the queries doubled", gradients(right, rows=lambda G: 2 * G), "",
     ("vjp", "euler")),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = tabulated("tala", FORWARD, BACKWARD)
