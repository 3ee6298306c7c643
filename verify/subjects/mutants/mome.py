"""Wrong mixtures of memory experts: forward, then gradients.

The letters are those of reference/mome.py and mome_mixing.py: r and w are the weights that tokens read and write with,
m says who decays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mixproof.reference import mome as reference
from mixproof.reference import mome_mixing as mixing
from mixproof.reference.mome import Weights
from mixproof.reference.mome_routers import R3, R3_vjp, selected, softmax_vjp, top_weights
from mixproof.reference.primitives import Array, sigmoid, softmax
from mixproof.verify.subjects.mutants import Mutant, tabulated

CHUNK = 8
Mix = Callable[..., Any]  # (q, k, v, r, w, m, a, S0, chunk) -> Y, S
Choice = Callable[[Array, int], Weights]  # from logits and the number of selected experts

# --- builders --------------------------------------------------------------------------------------------------------


def routed(
    route: Callable[..., Array] = lambda q, k, v, W: softmax(R3(k, v, W)),
    weights: Callable[[Array], Weights] = reference.read_mix, mix: Mix = mixing.chunkwise,
) -> Callable[..., Any]:  # fmt: skip
    """-> Y, S of `mome`."""

    def forward(q, k, v, W, a, S0=None, chunk=CHUNK):
        return mix(q, k, v, *weights(route(q, k, v, W)), a, S0, chunk)

    return forward


def scored(choice: Choice, mix: Mix = mixing.chunkwise) -> Callable[..., Any]:
    """-> Y, S of the operators that take logits."""

    def forward(q, k, v, l, a, top=2, S0=None, chunk=CHUNK):
        return mix(q, k, v, *choice(l, top), a, S0, chunk)

    return forward


def sweep(
    carried: Callable[[Array], Array] = lambda R: R, earlier: Callable[[Array], Array] = lambda S: S,
    final: float = 1.0,
) -> Callable[..., dict[str, Array]]:  # fmt: skip
    """The gradients of `mixing`, chunk by chunk backwards; `earlier` changes the states that the decays' one sees."""

    def vjp(cotangents, q, k, v, r, w, m, a, S0, chunk):
        tokens = {"q": q, "k": k, "v": v, "r": r, "w": w, "m": m}
        S, before = S0, []
        slices = [slice(b, b + chunk) for b in range(0, len(q), chunk)]
        for c in slices:
            before.append(S)
            S = mixing.parallel(**{n: x[c] for n, x in tokens.items()}, a=a, S0=S)[1]
        R, da = final * cotangents["S"], 0 * a
        found: dict[str, list[Array]] = {n: [0 * tokens[n][:0]] for n in "qkvrw"}
        for c, S in zip(reversed(slices), reversed(before), strict=True):
            upstream, rows = {"Y": cotangents["Y"][c], "S": R}, {n: x[c] for n, x in tokens.items()}
            d = mixing.vjp(upstream, **rows, a=a, S0=S, chunk=chunk)
            da = da + mixing.vjp(upstream, **rows, a=a, S0=None if S is None else earlier(S), chunk=chunk)["a"]
            for name, parts in found.items():
                parts.append(d[name])
            R = carried(d["S0"])
        return {name: np.concatenate(parts[::-1]) for name, parts in found.items()} | {"a": da, "S0": R}

    return vjp


def routed_vjp(
    mix: Callable[..., dict[str, Array]] = mixing.vjp, centre: Callable[[Array, Array], Array] = softmax_vjp,
    back: Callable[..., tuple[Array, Array, Array]] = R3_vjp,
    change: Callable[[dict[str, Array]], dict[str, Array]] = lambda grads: grads,
) -> Callable[..., Any]:  # fmt: skip
    """The gradients of `mome`: through the mixing, the softmax, the router."""

    def gradients(cotangents, q, k, v, W, a, S0=None, chunk=CHUNK):
        E = softmax(R3(k, v, W))
        d = mix(cotangents, q, k, v, *reference.read_mix(E), a, S0, chunk)
        dk, dv, dW = back(centre(d["r"], E), k, v, W)
        return change({"q": d["q"], "k": d["k"] + dk, "v": d["v"] + dv, "W": dW, "a": d["a"], "S0": d["S0"]})

    return gradients


def scored_vjp(
    choice: Choice, of_weights: Callable[[dict[str, Array]], Array] = lambda d: d["r"] + d["w"],
    through: Callable[[Array, Array, Array], Array] = lambda dE, E, l: softmax_vjp(dE, E),
    decays: Choice | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """The gradients of the operators that take logits; `decays` chooses anew for those of the decays."""

    def gradients(cotangents, q, k, v, l, a, top=2, S0=None, chunk=CHUNK):
        r, E, m = choice(l, top)
        d = mixing.vjp(cotangents, q, k, v, r, E, m, a, S0, chunk)
        if decays is not None:
            d["a"] = mixing.vjp(cotangents, q, k, v, *decays(l, top), a, S0, chunk)["a"]
        return {name: d[name] for name in ("q", "k", "v", "a", "S0")} | {"l": through(of_weights(d), E, l)}

    return gradients


# --- what the operators choose ---------------------------------------------------------------------------------------


def written(l: Array, top: int) -> Weights:
    return reference.write_mix(softmax(l))


def decayed(l: Array, top: int) -> Weights:
    return reference.both_mix(top_weights(l, top))


def held(l: Array, top: int) -> Weights:
    return reference.both_mix_hold(top_weights(l, top), selected(l, top))


# --- pieces that are wrong by themselves -----------------------------------------------------------------------------


def after(x: Array) -> Array:
    return np.concatenate([x[1:], x[-1:]])


def before(x: Array) -> Array:
    return np.concatenate([x[:1], x[:-1]])


def decaying(change: Callable[[Array], Array]) -> Mix:
    return lambda q, k, v, r, w, m, a, S0, chunk: mixing.chunkwise(q, k, v, r, w, m, change(a), S0, chunk)


def once_a_chunk(q, k, v, r, w, m, a, S0, chunk):
    first = np.arange(len(q)) // chunk * chunk
    return mixing.chunkwise(q, k, v, r[first], w[first], m, a, S0, chunk)


def zeroed(q, k, v, r, w, m, a, S0, chunk):
    S = np.zeros((len(a), k.shape[1], v.shape[1])) if S0 is None else S0
    rows = [q[:0] @ S[0]]
    for n in range(len(q)):
        S = S * m[n][:, None, None]
        Y, S = mixing.recurrent(*(x[n : n + 1] for x in (q, k, v, r, w, m)), a=a, S0=S)
        rows.append(Y)
    return np.concatenate(rows), S


def counted_from_the_start(q, k, v, r, w, m, a, S0, chunk):
    S = np.zeros((len(a), k.shape[1], v.shape[1])) if S0 is None else S0
    rows = [q[:0] @ S[0]]
    for b in range(0, len(q), chunk):
        part = [x[b : b + chunk] for x in (q, k, v, r, w, m)]
        Y, _ = mixing.parallel(*part, a=a, S0=(a ** np.sum(m[:b], axis=0))[:, None, None] * S)
        rows.append(Y)
        S = mixing.parallel(*part, a=a, S0=S)[1]
    return np.concatenate(rows), S


def one_expert(q, k, v, r, w, m, a, S0, chunk):
    """A state for all experts, the first one's, decaying as the weights say."""
    Y, S = mixing.chunkwise(q, k, v, r, w, m, 0 * a + a[:1], S0, chunk)
    return Y, 0 * S + S[:1]


def last_of_equals(l: Array, top: int) -> Weights:
    chosen = selected(l[:, ::-1], top)[:, ::-1]
    return reference.both_mix(softmax(np.where(chosen, l, -np.inf)))


def normalised_over_all(l: Array, top: int) -> Weights:
    return reference.both_mix(softmax(l) * selected(l, top))


def masked_with_zero(l: Array, top: int) -> Weights:
    return reference.both_mix(softmax(l * selected(l, top)))


def largest_sizes(l: Array, top: int) -> Weights:
    return reference.both_mix(softmax(np.where(selected(np.abs(l), top), l, -np.inf)))


def unread(choice: Choice) -> Choice:
    """The selected experts are read with weight one."""

    def changed(l, top):
        _, w, m = choice(l, top)
        return selected(l, top).astype(int), w, m

    return changed


def unwritten(choice: Choice) -> Choice:
    """The selected experts are written to with weight one."""

    def changed(l, top):
        r, _, m = choice(l, top)
        return r, selected(l, top).astype(int), m

    return changed


def written_to_all(l: Array, top: int) -> Weights:
    r, _, m = held(l, top)
    return r, softmax(l), m


def held_by_previous(l: Array, top: int) -> Weights:
    r, w, m = held(l, top)
    return r, w, before(m)


def without(*absent: int) -> Callable[..., tuple[Array, ...]]:
    """The router's gradients of keys, values and weights, some of them zero."""
    return lambda *inputs: tuple(0 * d if i in absent else d for i, d in enumerate(R3_vjp(*inputs)))


# --- tables ----------------------------------------------------------------------------------------------------------

ROUTED = (
    ("collapse", "all experts decaying like the first", routed(mix=decaying(lambda a: 0 * a + a[:1])), "",
     ("forward",)),
    ("next_expert", "the decay of the next expert", routed(mix=decaying(lambda a: np.roll(a, 1))), "", ("forward",)),
    ("even_weights", "all experts weighed alike", routed(lambda q, k, v, W: softmax(0 * R3(k, v, W))), "",
     ("forward",)),
    ("write_weight", "the weights on what is written", routed(weights=reference.write_mix), "", ("forward",)),
    ("sum_router", "k + v in the router", routed(lambda q, k, v, W: softmax((k + v) @ W)), "", ("forward",)),
    ("query_router", "queries in the router", routed(lambda q, k, v, W: softmax(R3(q, v, W))), "",
     ("forward", "homogeneity")),
    ("sigmoid_router", "sigmoid in the place of softmax", routed(lambda q, k, v, W: sigmoid(R3(k, v, W))), "",
     ("forward", "experts")),
    ("over_tokens", "softmax over tokens", routed(lambda q, k, v, W: softmax(R3(k, v, W), axis=0)), "",
     ("forward", "causality", "future_length")),
    ("looks_ahead", "the next token's weights", routed(lambda q, k, v, W: after(softmax(R3(k, v, W)))), "",
     ("forward", "causality")),
    ("lags", "the previous token's weights", routed(lambda q, k, v, W: before(softmax(R3(k, v, W)))), "",
     ("forward", "split")),
    ("once_a_chunk", "one routing for each chunk", routed(mix=once_a_chunk), "", ("forward", "forms")),
    ("global_read", "the decays since the first token on what is read from the states",
     routed(mix=counted_from_the_start), "tala-global-cumsum", ("forward", "forms", "left_padding")),
)  # fmt: skip

ROUTED_BACKWARD = (
    ("no_router_keys", "no gradient through the router to the keys", routed_vjp(back=without(0)), "", ("vjp",)),
    ("no_router_values", "no gradient through the router to the values", routed_vjp(back=without(1)), "", ("vjp",)),
    ("uncentred", "weights that need not sum to one", routed_vjp(centre=lambda dE, E: E * dE), "", ("vjp",)),
    ("decays_without_states", "earlier chunks missing from the gradient of the decays",
     routed_vjp(sweep(earlier=lambda S: 0 * S)), "", ("vjp",)),
    ("no_state_cotangent", "the cotangent of the final states dropped", routed_vjp(sweep(final=0.0)), "tala-no-dht",
     ("vjp",)),
    ("not_carried", "the cotangent of the states dropped between chunks", routed_vjp(sweep(lambda R: 0 * R)), "",
     ("vjp",)),
    ("summed_decays", "one gradient for the decays of all experts",
     routed_vjp(change=lambda grads: grads | {"a": 0 * grads["a"] + np.sum(grads["a"])}), "", ("vjp",)),
)  # fmt: skip

WRITTEN = (
    ("read_weight", "the weights on what is read", scored(lambda l, top: reference.read_mix(softmax(l))), "",
     ("forward",)),
    ("both_weights", "weights on what is read too", scored(lambda l, top: reference.both_mix(softmax(l))), "",
     ("forward", "experts")),
    ("no_weights", "every expert written to in full",
     scored(lambda l, top: reference.write_mix(np.ones_like(l))), "", ("forward",)),
    ("one_state", "one state for all experts", scored(written, one_expert), "", ("forward", "split")),
    ("looks_ahead", "the next token's weights", scored(lambda l, top: written(after(l), top)), "",
     ("forward", "causality")),
)  # fmt: skip

WRITTEN_BACKWARD = (
    ("read_weights", "the weights' gradient taken where they would be read",
     scored_vjp(written, lambda d: d["r"]), "", ("vjp",)),
    ("uncentred", "weights that need not sum to one",
     scored_vjp(written, lambda d: d["w"], lambda dE, E, l: E * dE), "", ("vjp",)),
)  # fmt: skip

TOP_K = (
    ("normalised_over_all", "weights of all experts, of which those not selected are dropped",
     scored(normalised_over_all), "route-norm-all", ("forward",)),
    ("masked_with_zero", "logits of zero for experts that are not selected", scored(masked_with_zero), "",
     ("forward", "experts")),
    ("last_of_equals", "the last of equal logits selected", scored(last_of_equals), "", ("forward",)),
    ("largest_sizes", "the largest sizes of logits selected", scored(largest_sizes), "", ("forward", "experts")),
    ("one_more", "one expert more selected", scored(lambda l, top: decayed(l, top + 1)), "", ("forward",)),
    ("held", "experts held that are not selected", scored(held), "", ("forward",)),
    ("zeroed", "the states of experts that are not selected set to zero", scored(held, zeroed), "",
     ("forward", "split")),
    ("no_read_weight", "selected experts read in full", scored(unread(decayed)), "", ("forward",)),
    ("no_write_weight", "selected experts written to in full", scored(unwritten(decayed)), "", ("forward",)),
)  # fmt: skip

TOP_K_BACKWARD = (
    ("no_write", "no gradient through the weights of what is written", scored_vjp(decayed, lambda d: d["r"]), "",
     ("vjp",)),
    ("no_read", "no gradient through the weights of what is read", scored_vjp(decayed, lambda d: d["w"]), "",
     ("vjp",)),
    ("all_logits", "a gradient for logits of experts that are not selected",
     scored_vjp(decayed, through=lambda dE, E, l: softmax_vjp(dE, softmax(l))), "", ("vjp",)),
)  # fmt: skip

HELD = (
    ("decayed", "decaying experts that are not selected", scored(decayed), "", ("forward",)),
    ("previous", "the experts that decay chosen by the previous token", scored(held_by_previous), "",
     ("forward",)),
    ("written_to_all", "experts written to that are not selected", scored(written_to_all), "", ("forward",)),
    ("global_read", "the decays since the first token on what is read from the states",
     scored(held, counted_from_the_start), "", ("forward", "forms")),
    ("no_read_weight", "selected experts read in full", scored(unread(held)), "", ("forward",)),
)  # fmt: skip

HELD_BACKWARD = (
    ("all_decays", "the gradient of the decays counting every token", scored_vjp(held, decays=decayed), "", ("vjp",)),
    ("no_write", "no gradient through the weights of what is written", scored_vjp(held, lambda d: d["r"]), "",
     ("vjp",)),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (
    *tabulated("mome", ROUTED, ROUTED_BACKWARD),
    *tabulated("mome.write_mix", WRITTEN, WRITTEN_BACKWARD),
    *tabulated("mome.top_k", TOP_K, TOP_K_BACKWARD),
    *tabulated("mome.top_k_hold", HELD, HELD_BACKWARD),
)
