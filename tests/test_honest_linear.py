"""The gate's silence for the family of linear attention: implementations that are right raise no alarm.

As in test_honest.py, in real float32: decays by powers, products and exponentials of sums of logarithms, summed term by
term or in a tree; states, chunks, and chunks in blocks; masses as a column, a state or a row sum; norms in one pass or
two. An alarm is a mistake in the reference, in a ball, in a law, or here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from machines import HALVES, MACHINES, Machine, Retention, assert_silent, f32, honest
from mixproof.verify.judge import Profile, judge
from mixproof.verify.subject import Subject
from ways import SHAPES, Decayed, Normalised, Norms, Tala, decayed, zeros

# --- multi-scale retention -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MultiScale:
    """`angles`: theta by pow, by exp(-l log base), or a turn that is multiplied up token by token. `gate`: of silu's
    derivative s + u s (1 - s), or with s(-u)."""

    retention: Retention
    norms: Norms
    angles: str = "pow"
    gate: str = "reflected"
    chunk = property(lambda self: self.retention.chunk)

    def turn(self, T, K, base):
        l = np.linspace(0, 1, K // 2, dtype=f32)
        theta = self.retention.machine.exp(-l * np.log(f32(base))) if self.angles == "exp" else f32(base) ** -l
        if self.angles != "steps":
            angle = np.arange(T, dtype=f32)[:, None] * theta
            return np.cos(angle), np.sin(angle)
        c, s = (np.ones((T, K // 2), f32), zeros(T, K // 2))
        x, y = np.cos(theta), np.sin(theta)
        for n in range(1, T):
            c[n], s[n] = c[n - 1] * x - s[n - 1] * y, c[n - 1] * y + s[n - 1] * x
        return c, s

    @staticmethod
    def turned(x, c, s):
        a, b = x[:, 0::2], x[:, 1::2]
        return np.stack([a * c - b * s, a * s + b * c], axis=-1).reshape(x.shape)

    def sigmoid(self, u):
        e = self.retention.machine.exp(-np.abs(u))
        return np.where(u >= 0, self.retention.machine.divide(f32(1), 1 + e), self.retention.machine.divide(e, 1 + e))

    def retained(self, q, k, v, gamma, scale, base, chunk=None):
        c, s = self.turn(len(q), q.shape[1], base)
        Q, K = self.turned(q, c, s), self.turned(k, c, s)
        return (Q, K, c, s), self.norms.stored(self.retention.forward(Q, K, v, gamma, scale, None, chunk)[0])

    def forward(self, q, k, v, u, gamma, scale=1.0, eps=1e-6, base=10000.0, chunk=None):
        _, O = self.retained(q, k, v, gamma, scale, base, chunk)
        return u * self.sigmoid(u) * self.norms.group_norm(O, eps)

    def vjp(self, cotangents, q, k, v, u, gamma, scale=1.0, eps=1e-6, base=10000.0):
        (Q, K, c, s), O = self.retained(q, k, v, gamma, scale, base)
        G, g = np.asarray(cotangents["Y"], f32), self.sigmoid(u)
        slope = g * (1 + u * (1 - g)) if self.gate == "one minus" else g + u * g * self.sigmoid(-u)
        dO = self.norms.group_norm_vjp(G * (u * g), O, eps)
        d = self.retention.vjp({"O": dO, "S": zeros(q.shape[1], v.shape[1])}, Q, K, v, gamma, scale)
        back = {"q": self.turned(d["q"], c, -s), "k": self.turned(d["k"], c, -s)}
        return back | {"v": d["v"], "u": G * self.norms.group_norm(O, eps) * slope, "gamma": d["gamma"]}


# --- memory experts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """`form`: experts as heads, one mask for all, or recurrent. `place`: weights of what is written on keys or values.
    Where experts are held, decays vary by token."""

    retention: Retention
    form: str = "heads"
    place: str = "keys"
    chunk = property(lambda self: self.retention.chunk)
    machine = property(lambda self: self.retention.machine)

    def weights(self, operator, q, k, v, router, top):
        """E, what it reads with, what it writes with, and who decays."""
        if operator == "mome":
            E = self.machine.softmax(self.machine.mm(k * v, router))
            return E, E, np.ones_like(E), np.ones_like(E)
        if operator == "mome.write_mix":
            E = self.machine.softmax(router)
            return E, np.ones_like(E), E, np.ones_like(E)
        chosen = np.zeros(router.shape, dtype=bool)
        np.put_along_axis(chosen, np.argsort(-router, axis=1, kind="stable")[:, : int(top)], True, axis=1)
        E = self.machine.softmax(np.where(chosen, router, f32(-np.inf)))
        return E, E, E, chosen.astype(f32) if operator == "mome.top_k_hold" else np.ones_like(E)

    def written(self, k, v, w):
        return (k * w, v) if self.place == "keys" else (k, v * w)

    def head(self, held, q, k, v, a, m, S0, chunk):
        if not held:
            return self.retention.forward(q, k, v, a, 1.0, S0, chunk)
        A = np.where(m > 0, f32(a), f32(1))[:, None, None]
        return Decayed(self.machine, "right", chunk=self.chunk).run(q, k, v, A, False, 1.0, S0, chunk)

    def forward(self, operator, q, k, v, router, a, top, S0, chunk):
        E, r, w, m = self.weights(operator, q, k, v, router, top)
        X, held = E.shape[1], operator == "mome.top_k_hold"
        S = zeros(X, k.shape[1], v.shape[1]) if S0 is None else S0
        if self.form == "recurrent":
            rows = [zeros(0, v.shape[1])]
            for n in range(len(q)):
                A = np.where(m[n] > 0, a, f32(1))[:, None, None]
                S = A * S + w[n][:, None, None] * (k[n][:, None] * v[n][None, :])
                rows.append(self.machine.mm(q[n : n + 1], self.machine.sum(r[n][:, None, None] * S, axis=0)))
            return np.concatenate(rows), S
        outs = [self.head(held, q, *self.written(k, v, w[:, j : j + 1]), a[j], m[:, j], S[j], chunk) for j in range(X)]
        last = np.stack([s for _, s in outs])
        Y = self.machine.sum(np.stack([r[:, j : j + 1] * o for j, (o, _) in enumerate(outs)]), axis=0)
        if self.form == "mask":
            n, c = np.arange(len(q)), np.cumsum(m, axis=0).astype(int)
            distance = np.maximum(c[:, None] - c[None], 0)
            P = np.stack([self.retention.power(a[j], distance[:, :, j]) for j in range(X)], axis=-1)
            D = np.where((n[:, None] >= n), self.machine.sum(r[:, None] * P * w[None]), f32(0))
            Y = self.machine.mm(self.machine.mm(q, k.T) * D, v)
            for j in range(X):
                Y = Y + (r[:, j] * self.retention.power(a[j], c[:, j]))[:, None] * self.machine.mm(q, S[j])
        return Y, last

    def vjp(self, operator, cotangents, q, k, v, router, a, top, S0):
        machine, G = self.machine, np.asarray(cotangents["Y"], f32)
        E, r, w, m = self.weights(operator, q, k, v, router, top)
        held, T = operator == "mome.top_k_hold", len(q)
        S = zeros(E.shape[1], k.shape[1], v.shape[1]) if S0 is None else S0
        R = np.asarray(cotangents["S"], f32)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        dr, dw, da, dS = np.zeros_like(E), np.zeros_like(E), [], []
        for j in range(E.shape[1]):
            rj, wj = r[:, j : j + 1], w[:, j : j + 1]
            kj, vj = self.written(k, v, wj)
            dr[:, j] = machine.sum(G * self.head(held, q, kj, vj, a[j], m[:, j], S[j], None)[0])
            if held:
                A = np.where(m[:, j] > 0, f32(a[j]), f32(1))[:, None, None]
                way, up = Decayed(machine, "left", chunk=self.chunk), {"O": rj * G, "S": R[j]}
                d, dA, _, _ = way.gradients(up, q, kj, vj, A, False, 1.0, S[j])
                da.append(machine.sum(way.spread(dA, (1, 2)) * m[:, j]) if T else f32(0))
            else:
                d = self.retention.vjp({"O": rj * G, "S": R[j]}, q, kj, vj, a[j], 1.0, S[j])
                da.append(d["gamma"])
            on_keys = self.place == "keys"
            dw[:, j] = machine.sum(d["k"] * k) if on_keys else machine.sum(d["v"] * v)
            dq, dk, dv = (
                dq + d["q"],
                dk + (wj * d["k"] if on_keys else d["k"]),
                dv + (d["v"] if on_keys else wj * d["v"]),
            )
            dS.append(d["S0"])
        dE = {"mome": dr, "mome.write_mix": dw}.get(operator, dr + dw)
        dl = E * (dE - machine.sum(E * dE)[:, None])
        grads = {"a": np.stack(da), "S0": np.stack(dS), "q": dq, "k": dk, "v": dv}
        if operator != "mome":
            return grads | {"l": dl}
        df = machine.mm(dl, router.T)
        return grads | {"k": dk + df * v, "v": dv + df * k, "W": machine.mm((k * v).T, dl)}


def routed(operator: str, way: Experts):
    def dense(q, k, v, W, a, S0=None, chunk=None):
        return way.forward(operator, q, k, v, W, a, 0, S0, chunk)

    def dense_vjp(cotangents, q, k, v, W, a, S0=None):
        return way.vjp(operator, cotangents, q, k, v, W, a, 0, S0)

    def write(q, k, v, l, a, S0=None, chunk=None):
        return way.forward(operator, q, k, v, l, a, 0, S0, chunk)

    def write_vjp(cotangents, q, k, v, l, a, S0=None):
        return way.vjp(operator, cotangents, q, k, v, l, a, 0, S0)

    def chosen(q, k, v, l, a, top=2, S0=None, chunk=None):
        return way.forward(operator, q, k, v, l, a, top, S0, chunk)

    def chosen_vjp(cotangents, q, k, v, l, a, top=2, S0=None):
        return way.vjp(operator, cotangents, q, k, v, l, a, top, S0)

    return {"mome": (dense, dense_vjp), "mome.write_mix": (write, write_vjp)}.get(operator, (chosen, chosen_vjp))


# --- the block -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """MixFormer's block out of the parts above."""

    tala: Tala
    norms: Norms
    chunk = property(lambda self: self.tala.chunk)

    def layers(self, X, gain1, bias1, W_Q, W_K, W_V, W_O, heads, eps, norm_eps, chunk=None):
        m, n = self.norms.machine, self.norms
        N = n.stored(n.group_norm(X, eps) * gain1 + bias1)
        Q, K, V = (n.stored(m.mm(N, W)) for W in (W_Q, W_K, W_V))
        d, O = X.shape[1] // heads, []
        for h in range(heads):
            c = slice(h * d, (h + 1) * d)
            q, k = (n.phi_b(x[:, c], norm_eps) for x in (Q, K))
            O.append(n.stored(self.tala.forward(q, k, V[:, c], f32(h + 1), f32(1), chunk=chunk)[0]))
        A = np.concatenate([n.group_norm(o, eps) for o in O], axis=1)
        return N, Q, K, V, O, A, n.stored(m.mm(A, W_O) + X)

    def forward(
        self, X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, W_2, heads=2, eps=1e-5, norm_eps=1e-12, chunk=None
    ):
        m, n = self.norms.machine, self.norms
        M = self.layers(X, gain1, bias1, W_Q, W_K, W_V, W_O, int(heads), eps, norm_eps, chunk)[-1]
        N = n.stored(n.group_norm(M, eps) * gain2 + bias2)
        return m.mm(np.maximum(m.mm(N, W_1), f32(0)), W_2) + M

    def vjp(
        self, cotangents, X, gain1, bias1, gain2, bias2, W_Q, W_K, W_V, W_O, W_1, W_2, heads=2, eps=1e-5, norm_eps=1e-12
    ):
        m, n, heads = self.norms.machine, self.norms, int(heads)
        N1, Q, K, V, O, A, M = self.layers(X, gain1, bias1, W_Q, W_K, W_V, W_O, heads, eps, norm_eps)
        raw2 = n.group_norm(M, eps)
        N2 = n.stored(raw2 * gain2 + bias2)
        H, dY = m.mm(N2, W_1), np.asarray(cotangents["Y"], f32)
        dH = np.where(H > 0, m.mm(dY, W_2.T), f32(0))
        dN = m.mm(dH, W_1.T)
        of2 = {"gain2": m.sum(dN * raw2, axis=0), "bias2": m.sum(dN, axis=0)}
        dM = n.stored(n.group_norm_vjp(dN * gain2, M, eps) + dY)
        dA, d, back = m.mm(dM, W_O.T), X.shape[1] // heads, []
        for h, o in enumerate(O):
            c = slice(h * d, (h + 1) * d)
            q, k = (n.phi_b(x[:, c], norm_eps) for x in (Q, K))
            up = {"O": n.group_norm_vjp(dA[:, c], o, eps), "S": zeros(d, d)}
            g = self.tala.vjp(up, q, k, V[:, c], f32(h + 1), f32(1))
            ofq, ofk = (n.phi_b_vjp({"Y": g[y]}, x[:, c], norm_eps)["x"] for y, x in (("q", Q), ("k", K)))
            back.append((ofq, ofk, g["v"]))
        dQ, dK, dV = (np.concatenate(x, axis=1) for x in zip(*back, strict=True))
        dN = m.mm(dQ, W_Q.T) + m.mm(dK, W_K.T) + m.mm(dV, W_V.T)
        raw1 = n.group_norm(X, eps)
        of1 = {"gain1": m.sum(dN * raw1, axis=0), "bias1": m.sum(dN, axis=0)}
        weights = {"W_Q": m.mm(N1.T, dQ), "W_K": m.mm(N1.T, dK), "W_V": m.mm(N1.T, dV), "W_O": m.mm(A.T, dM)}
        weights |= {"W_1": m.mm(N2.T, dH), "W_2": m.mm(np.maximum(H, f32(0)).T, dY)}
        return {"X": n.group_norm_vjp(dN * gain1, X, eps) + dM} | of1 | of2 | weights


# --- judging ---------------------------------------------------------------------------------------------------------

PROFILE = Profile("honest", 0, small=True)  # eight random examples raised no alarm either
M = MACHINES


def some(ways: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: ways[name] for name in names}


R = {
    "pow": Retention(M["forward"], "pow", "output", "recurrent", 4),
    "exp": Retention(M["reversed"], "exp", "scores", "chunks", 5),
    "products": Retention(M["pairwise"], "products", "queries", "parallel", 6),
    "base two": Retention(M["lanes"], "base two", "scores", "chunks", 3),
    "blocks": Retention(M["blocks"], "exp", "queries", "chunks", 4),
    "fma": Retention(M["fma"], "pow", "output", "chunks", 3),
}
D = {
    "recurrent": Decayed(M["forward"], "left", "recurrent", 4),
    "chunks": Decayed(M["reversed"], "right", "chunks", 5),
    "blocks": Decayed(M["pairwise"], "left", "blocks", 6, 2),
    "one by one": Decayed(M["blocks"], "right", "chunks", 1),
}
G = {
    "recurrent": Decayed(M["forward"], "left", "recurrent", 4, flow=True),
    "sums": Decayed(M["lanes"], "in turn", "chunks", 5, flow=True),
    "tree": Decayed(M["blocks"], "tree", "blocks", 6, 2),
    "base two": Decayed(M["fma"], "base two", "blocks", 7, 3, flow=True),
    "products": Decayed(M["reversed"], "right", "chunks", 4),
}
N = {
    "column": Normalised(R["pow"], "column"),
    "state": Normalised(R["exp"], "state"),
    "rows": Normalised(R["products"], "rows"),
    "blocks": Normalised(R["blocks"], "state"),
    "base two": Normalised(R["base two"], "rows"),
}
NORMS = {
    "quotient": Norms(M["forward"]),
    "scaled": Norms(M["pairwise"], "scaled", "softmax", "one pass", "derived"),
    "inverse root": Norms(M["blocks"], "inverse root", "inverse root", "inverse root", "multiplied out"),
    "fma": Norms(M["fma"], "quotient", "softmax", "inverse root", "derived"),
}
TALAS = {
    name: Tala(r, omega)
    for (name, r), omega in zip(R.items(), ("exp", "expm1", "expm1", "exp", "exp", "expm1"), strict=True)
}
SCALES = {
    "pow": MultiScale(R["pow"], NORMS["quotient"]),
    "exp": MultiScale(R["exp"], NORMS["scaled"], "exp", "one minus"),
    "steps": MultiScale(R["blocks"], NORMS["inverse root"], "steps"),
    "fma": MultiScale(R["fma"], NORMS["fma"], "exp"),
}
EXPERTS = {
    "recurrent": Experts(R["pow"], "recurrent"),
    "heads": Experts(R["exp"], "heads", "values"),
    "mask": Experts(R["products"], "mask", "keys"),
    "blocks": Experts(R["blocks"], "heads", "keys"),
}
BLOCKS = {
    "pow": Block(TALAS["pow"], NORMS["quotient"]),
    "exp": Block(TALAS["exp"], NORMS["scaled"]),
    "blocks": Block(TALAS["blocks"], NORMS["inverse root"]),
}
WAYS: dict[str, dict[str, Any]] = {  # what shares code shares its ways out
    "tala": some(TALAS, "pow", "exp", "products", "base two"),
    "tala.time_varying": some(D, "recurrent", "chunks"),
    "tala.key_channel": some(D, "blocks", "one by one"),
    "tala.value_channel": some(D, "chunks"),
    "tala.elementwise": some(D, "recurrent", "blocks"),
    "gated_linear_attention.simple": some(G, "sums", "base two", "products"),
    "gated_linear_attention": some(G, "recurrent", "tree", "base two"),
    "tala.n1": some(N, "column", "state"),
    "tala.n2": some(N, "rows", "state"),
    "tala.n3": some(N, "blocks"),
    "linear_attention": some(N, "column", "blocks", "rows"),
    "tala.phi_a": NORMS,
    "tala.phi_b": NORMS,
    "multi_scale_retention": SCALES,
    "mome": some(EXPERTS, "recurrent", "mask"),
    "mome.write_mix": some(EXPERTS, "heads"),
    "mome.top_k": some(EXPERTS, "recurrent"),
    "mome.top_k_hold": some(EXPERTS, "heads"),
    "mixformer": BLOCKS,
}
METHODS = {
    "tala.n1": "n1",
    "tala.n2": "n2",
    "tala.n3": "n3",
    "linear_attention": "linear",
    "tala.phi_a": "phi_a",
    "tala.phi_b": "phi_b",
}


def subject(operator: str, way: Any, dtype: str = "float32", **declared: Any) -> Subject:
    """One way of an operator."""
    if operator in SHAPES:
        forward, vjp = decayed(operator, way)
    elif operator.startswith("mome"):
        forward, vjp = routed(operator, way)
    else:
        name = METHODS.get(operator, "")
        forward, vjp = getattr(way, name or "forward"), getattr(way, f"{name}_vjp" if name else "vjp")
    return honest(operator, forward, vjp, way.chunk, dtype, **declared)


def on(way: Any, dot: str, store: str) -> Any:
    """The same way with other operands of dot products, on a tensor core, and results kept in `store`."""
    order = "pairwise" if dot == "float32" else "tensor core"
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(way):
        value = getattr(way, f.name)
        if isinstance(value, Machine):
            changes[f.name] = dataclasses.replace(value, order=order, dot=dot)
        elif dataclasses.is_dataclass(value):
            changes[f.name] = on(value, dot, store)
        elif f.name == "store":
            changes[f.name] = store
    return dataclasses.replace(way, **changes)


@pytest.mark.parametrize(("operator", "name"), [(o, n) for o, ways in WAYS.items() for n in ways])
def test_float32_raises_no_alarm(operator, name):
    assert_silent(subject(operator, WAYS[operator][name]), profile=PROFILE)


# operator, way, and which of the operands of dot products and input dtypes
LOW = (
    ("tala", "exp", 0),
    ("tala.time_varying", "chunks", 1),
    ("tala.key_channel", "blocks", 2),
    ("tala.value_channel", "chunks", 1),
    ("gated_linear_attention.simple", "sums", 2),
    ("gated_linear_attention", "base two", 1),
    ("linear_attention", "column", 3),
    ("tala.n2", "rows", 1),
    ("tala.n3", "blocks", 2),
    ("tala.phi_a", "scaled", 1),
    ("tala.phi_b", "inverse root", 2),
    ("multi_scale_retention", "exp", 0),
    ("mome", "mask", 2),
    ("mome.top_k_hold", "heads", 2),
    ("mixformer", "exp", 0),
)


@pytest.mark.parametrize(("operator", "name", "half"), LOW)
def test_low_precision_raises_no_alarm(operator, name, half):
    dot, dtype = HALVES[half]
    assert_silent(subject(operator, on(WAYS[operator][name], dot, dtype), dtype, dot=dot), profile=PROFILE)


@pytest.mark.parametrize("operator", ["tala", "gated_linear_attention", "tala.n2", "mome", "mixformer"])
def test_silence_is_not_deafness(operator):
    """The same code with operands cut to TF32, where float32 is declared, is heard."""
    way = on(next(iter(WAYS[operator].values())), "tf32", "float32")
    assert judge(subject(operator, way), "forward", PROFILE).status == "fail"
