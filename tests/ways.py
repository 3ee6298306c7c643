"""The family of linear attention in any float32 arithmetic: honest ways of its operators, each right in its own way.

A letter means what it does in reference/.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from machines import CHUNK, LOG2E, Machine, Retention, f32
from mixproof.verify.arithmetic import round_to


def one(a: np.ndarray) -> np.ndarray:
    """A state of one row more than none."""
    return np.asarray(a, f32)[None, :]


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, f32)


# --- decays of one head ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tala:
    """`omega`: 1 - exp(-h), or -expm1(-h). The rest is retention's, with the sign of the decay taken out of powers."""

    retention: Retention
    omega: str = "exp"
    chunk = property(lambda self: self.retention.chunk)

    def decay(self, h, G):
        m = self.retention.machine
        return (f32(1) - m.exp(-h) if self.omega == "exp" else -np.expm1(-f32(h))) * f32(G)

    def forward(self, q, k, v, h, G, scale=1.0, S0=None, chunk=None):
        return self.retention.forward(q, k, v, self.decay(h, G), scale, S0, chunk)

    def vjp(self, cotangents, q, k, v, h, G, scale=1.0, S0=None):
        grads = self.retention.vjp(cotangents, q, k, v, self.decay(h, G), scale, S0)
        da = grads.pop("gamma")
        return grads | {"h": da * G * self.retention.machine.exp(-h), "G": da * self.decay(h, f32(1))}


# --- decays of each token --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decayed:
    """S_n = A_n * S_{n-1} + k_n^T v_n with A (T, K or 1, V or 1), from decays a or their logarithms g.

    `decays`: products from the left or from the right; of logarithms also exps of differences of sums that start with
    the chunk, in turn, in a tree, or in base two. `form`: recurrent, chunks (decays on the scores), blocks (decays on
    queries and keys, with a token between them that both are taken relative to). `flow`: dg from q dq - k dk."""

    machine: Machine
    decays: str = "left"
    form: str = "chunks"
    chunk: int = CHUNK
    block: int = 3
    flow: bool = False

    def products(self, A):
        T = len(A)
        P = np.broadcast_to(np.eye(T + 1, dtype=f32)[:, :, None, None], (T + 1, T + 1, *A.shape[1:])).copy()
        steps = range(T) if self.decays == "left" else reversed(range(T))
        for t in steps:
            if self.decays == "left":
                P[t + 1, : t + 1] = A[t] * P[t, : t + 1]
            else:
                P[t + 1 :, t] = P[t + 1 :, t + 1] * A[t]
        return P

    def segments(self, x, logs):
        """P[n, m] = A_{m+1} ... A_n."""
        if not logs or self.decays in ("left", "right"):
            return self.products(self.machine.exp(x) if logs else x)
        x = np.concatenate([zeros(1, *x.shape[1:]), x * LOG2E if self.decays == "base two" else x])
        if self.decays == "tree":
            reach = 1
            while reach < len(x):
                x = np.concatenate([x[:reach], x[reach:] + x[:-reach]])
                reach *= 2
        else:
            x = np.add.accumulate(x, axis=0, dtype=f32)
        c = x[:, None] - x[None, :]
        keep = (np.arange(len(x))[:, None] >= np.arange(len(x)))[:, :, None, None]
        c = np.where(keep, c, f32(0))
        return np.where(keep, np.exp2(c) if self.decays == "base two" else self.machine.exp(c), f32(0))

    def scores(self, q, P, k):
        """sum_i q_ni P_nm,i k_mi for m <= n.  (n, K), (n, n, 1|K), (n, K) -> (n, n)"""
        m, n = self.machine, len(q)
        keep = np.tril(np.ones((n, n), dtype=bool))
        if self.form != "blocks":
            if P.shape[2] == 1:
                return np.where(keep, m.mm(q, k.T) * P[:, :, 0], f32(0))
            return np.where(keep, m.sum(q[:, None] * P * k[None]), f32(0))
        A = zeros(n, n)
        for a in range(0, n, self.block):
            b = min(a + self.block, n)
            A[a:b, a:b] = m.sum(q[a:b, None] * P[a:b, a:b] * k[None, a:b])
            if a:  # the token before the block stands between
                A[a:b, :a] = m.mm(q[a:b] * P[a:b, a - 1], (k[:a] * P[a - 1, :a]).T)
        return np.where(keep, A, f32(0))

    def read(self, Q, K, W, P, S):
        m, D = self.machine, P[1:, 1:]
        w, u = P[1:, 0], P[-1, 1:]
        if P.shape[2] > 1 and P.shape[3] > 1:  # column by column
            columns = [self.read(Q, K, W[:, j : j + 1], P[..., j : j + 1], S[:, j : j + 1]) for j in range(P.shape[3])]
            return tuple(np.concatenate(x, axis=1) for x in zip(*columns, strict=True))
        if P.shape[3] > 1:  # value channels
            A = np.tril(m.mm(Q, K.T))
            O = m.sum(A[:, :, None] * D[:, :, 0] * W[None], axis=1)
            return O + w[:, 0] * m.mm(Q, S), P[-1, 0] * S + m.mm(K.T, u[:, 0] * W)
        old = m.mm(Q * w[:, :, 0], S)
        return m.mm(self.scores(Q, D[..., 0], K), W) + old, P[-1, 0] * S + m.mm((K * u[:, :, 0]).T, W)

    def run(self, q, k, v, x, logs, scale, S0, chunk):
        m, C = self.machine, chunk or self.chunk
        q, k, v, x = (np.asarray(y, f32) for y in (q, k, v, x))
        S = zeros(k.shape[1], v.shape[1]) if S0 is None else S0
        rows, C = [zeros(0, v.shape[1])], 1 if self.form == "recurrent" else C
        for a in range(0, len(q), C):
            c = slice(a, a + C)
            if self.form == "recurrent":
                S = (m.exp(x[a]) if logs else x[a]) * S + k[a][:, None] * v[a][None, :]
                O = m.mm(q[c], S)
            else:
                O, S = self.read(q[c], k[c], v[c], self.segments(x[c], logs), S)
            rows.append(O * f32(scale))
        return np.concatenate(rows), S

    def gradients(self, cotangents, q, k, v, x, logs, scale, S0):
        """Token by token inside the chunk; queries and keys also by products of matrices, where decays are in
        exponentials or one number."""
        m, C = self.machine, self.chunk
        q, k, v, x = (np.asarray(y, f32) for y in (q, k, v, x))
        G, R = np.asarray(cotangents["O"], f32) * f32(scale), np.asarray(cotangents["S"], f32)
        S = zeros(k.shape[1], v.shape[1]) if S0 is None else S0
        A, before = m.exp(x) if logs else x, []
        for n in range(len(q)):
            before.append(S)
            S = A[n] * S + k[n][:, None] * v[n][None, :]
        before.append(S)
        dq, dk, dv, dA = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), zeros(len(q), *S.shape)
        flow = zeros(len(q), k.shape[1])
        for a in reversed(range(0, len(q), C)):
            c = slice(a, min(a + C, len(q)))
            last = R
            for n in reversed(range(c.start, c.stop)):
                R = R + q[n][:, None] * G[n][None, :]
                dq[n], dk[n], dv[n] = (
                    m.mm(G[n : n + 1], before[n + 1].T),
                    m.mm(v[n : n + 1], R.T),
                    m.mm(k[n : n + 1], R),
                )
                dA[n] = R * before[n]
                R = A[n] * R
            if x.shape[2] == 1 and self.form != "recurrent":
                P = self.segments(x[c], logs)
                D, w, u = P[1:, 1:, :, 0], P[1:, 0, :, 0], P[-1, 1:, :, 0]
                scores = np.tril(m.mm(G[c], v[c].T))[:, :, None] * D
                if x.shape[1] == 1:
                    dq[c], dk[c] = m.mm(scores[:, :, 0], k[c]), m.mm(scores[:, :, 0].T, q[c])
                else:
                    dq[c], dk[c] = m.sum(scores * k[None, c], axis=1), m.sum(scores * q[c][:, None], axis=0)
                dq[c] += w * m.mm(G[c], before[a].T)
                dk[c] += u * m.mm(v[c], last.T)
            later = np.add.accumulate((q[c] * dq[c] - k[c] * dk[c])[::-1], axis=0, dtype=f32)[::-1]
            flow[c] = later + m.sum(before[c.stop] * last)[None, :]
        return {"q": dq, "k": dk, "v": dv, "S0": R}, dA, A, flow

    def a_vjp(self, cotangents, q, k, v, x, scale, S0, axes):
        grads, dA, _, _ = self.gradients(cotangents, q, k, v, x, False, scale, S0)
        return grads | {"a": self.spread(dA, axes)}

    def spread(self, dA, axes):
        for axis in sorted(axes, reverse=True):
            dA = self.machine.sum(dA, axis=axis)
        return dA


SHAPES = {  # how the decays lie in (T, K, V), and the axes that they do not have
    "tala.time_varying": (lambda a, T: a[:, None, None], (1, 2)),
    "tala.key_channel": (lambda a, T: a[:, :, None], (2,)),
    "tala.value_channel": (lambda a, T: a[:, None, :], (1,)),
    "tala.elementwise": (lambda a, T: np.broadcast_to(a, (T, *a.shape)), (0,)),
    "gated_linear_attention.simple": (lambda g, T: g[:, None, None], (1, 2)),
    "gated_linear_attention": (lambda g, T: g[:, :, None], (2,)),
}


def decayed(operator: str, way: Decayed):
    lay, axes = SHAPES[operator]

    def forward(q, k, v, a, scale=1.0, S0=None, chunk=None):
        return way.run(q, k, v, lay(a, len(q)), False, scale, S0, chunk)

    def vjp(cotangents, q, k, v, a, scale=1.0, S0=None):
        return way.a_vjp(cotangents, q, k, v, lay(a, len(q)), scale, S0, axes)

    def gated(q, k, v, g, scale=1.0, S0=None, chunk=None):
        return way.run(q, k, v, lay(g, len(q)), True, scale, S0, chunk)

    def gated_vjp(cotangents, q, k, v, g, scale=1.0, S0=None):
        grads, dA, A, flow = way.gradients(cotangents, q, k, v, lay(g, len(q)), True, scale, S0)
        if way.flow:
            return grads | {"g": way.machine.sum(flow) if np.ndim(g) == 1 else flow}
        return grads | {"g": way.spread(dA * A, axes)}

    return (forward, vjp) if operator.startswith("tala") else (gated, gated_vjp)


# --- normalisers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normalised:
    """`mass`: one more column of the values, a state of its own, or (n2) the sum of each row of scores."""

    retention: Retention
    mass: str = "column"
    chunk = property(lambda self: self.retention.chunk)
    machine = property(lambda self: self.retention.machine)

    def parts(self, q, k, v, a, S0, z0, chunk):
        """Numerators, masses, and the states of both."""
        r, m, (T, K) = self.retention, self.machine, k.shape
        S0 = zeros(K, v.shape[1]) if S0 is None else S0
        z0 = zeros(K) if z0 is None else z0
        ones = np.ones((T, 1), f32)
        if self.mass == "column":
            U, M = r.forward(
                q, k, np.concatenate([v, ones], axis=1), a, 1.0, np.concatenate([S0, z0[:, None]], 1), chunk
            )
            return U[:, :-1], U[:, -1:], M[:, :-1], M[:, -1]
        U, S = r.forward(q, k, v, a, 1.0, S0, chunk)
        D, z = r.forward(q, k, ones, a, 1.0, z0[:, None], chunk)
        if self.mass == "rows":
            n = np.arange(T)
            P = np.tril(m.mm(q, k.T) * r.power(a, np.maximum(n[:, None] - n, 0)))
            D = m.sum(P)[:, None] + r.power(a, n + 1)[:, None] * m.sum(q * z0[None, :])[:, None]
        return U, D, S, z[:, 0]

    def n2(self, q, k, v, a, eps=0.0, S0=None, z0=None, chunk=None):
        U, D, S, z = self.parts(q, k, v, a, S0, z0, chunk)
        return self.machine.divide(U, D + f32(eps)), S, z

    def n2_vjp(self, cotangents, q, k, v, a, eps=0.0, S0=None, z0=None):
        r, m = self.retention, self.machine
        G, dS, dz = (np.asarray(cotangents[n], f32) for n in ("O", "S", "z"))
        U, D, _, _ = self.parts(q, k, v, a, S0, z0, None)
        D = D + f32(eps)
        O = round_to(m.divide(U, D), r.store).astype(f32)
        dU = m.divide(G, D)
        dD, ones = -m.sum(dU * O)[:, None], np.ones((len(q), 1), f32)
        M0 = None if S0 is None else np.concatenate([S0, z0[:, None]], axis=1)
        if self.mass == "column":
            up = {"O": np.concatenate([dU, dD], axis=1), "S": np.concatenate([dS, dz[:, None]], axis=1)}
            d = r.vjp(up, q, k, np.concatenate([v, ones], axis=1), a, 1.0, M0)
            rest = {"v": d["v"][:, :-1], "S0": d["S0"][:, :-1], "z0": d["S0"][:, -1]}
            return {"q": d["q"], "k": d["k"], "a": d["gamma"]} | rest
        d = r.vjp({"O": dU, "S": dS}, q, k, v, a, 1.0, S0)
        e = r.vjp({"O": dD, "S": dz[:, None]}, q, k, ones, a, 1.0, None if z0 is None else z0[:, None])
        both = {name: d[name] + e[name] for name in ("q", "k")} | {"a": d["gamma"] + e["gamma"]}
        return both | {"v": d["v"], "S0": d["S0"], "z0": e["S0"][:, 0]}

    def linear(self, q, k, v, eps=0.0, S0=None, z0=None, chunk=None):
        return self.n2(q, k, v, f32(1), eps, S0, z0, chunk)

    def linear_vjp(self, cotangents, q, k, v, eps=0.0, S0=None, z0=None):
        grads = self.n2_vjp(cotangents, q, k, v, f32(1), eps, S0, z0)
        del grads["a"]
        return grads

    def sums(self, x, a, x0, chunk=None):
        """x_t = a x_{t-1} + x_t, channel by channel."""
        ones = np.ones((len(x), 1), f32)
        return self.retention.forward(ones, ones, x, a, 1.0, None if x0 is None else one(x0), chunk)

    def sums_vjp(self, dX, last, x, a, x0):
        ones = np.ones((len(x), 1), f32)
        d = self.retention.vjp({"O": dX, "S": one(last)}, ones, ones, x, a, 1.0, None if x0 is None else one(x0))
        return d["v"], d["gamma"], d["S0"][0]

    def n1(self, q, k, v, a, x0=None, z0=None, chunk=None):
        (X, x), (Z, z) = self.sums(k * v, a, x0, chunk), self.sums(k, a, z0, chunk)
        m = self.machine
        return (m.divide(q * X, Z) if self.mass == "column" else q * m.divide(X, Z)), x[0], z[0]

    def n1_vjp(self, cotangents, q, k, v, a, x0=None, z0=None):
        m, G = self.machine, np.asarray(cotangents["O"], f32)
        X, Z = self.sums(k * v, a, x0)[0], self.sums(k, a, z0)[0]
        M = m.divide(X, Z)
        dX = m.divide(G * q, Z) if self.mass == "column" else G * m.divide(q, Z)
        dkv, of_x, dx0 = self.sums_vjp(dX, cotangents["x"], k * v, a, x0)
        dk, of_z, dz0 = self.sums_vjp(-dX * M, cotangents["z"], k, a, z0)
        return {"q": G * M, "k": dkv * v + dk, "v": dkv * k, "a": of_x + of_z, "x0": dx0, "z0": dz0}

    def n3(self, q, k, v, a, S0=None, z0=None, chunk=None):
        Z, z = self.sums(k, a, z0, chunk)
        return *self.retention.forward(self.machine.divide(q, Z), k, v, a, 1.0, S0, chunk), z[0]

    def n3_vjp(self, cotangents, q, k, v, a, S0=None, z0=None):
        m, Z = self.machine, self.sums(k, a, z0)[0]
        p = m.divide(q, Z)
        d = self.retention.vjp({"O": cotangents["O"], "S": cotangents["S"]}, p, k, v, a, 1.0, S0)
        dq = m.divide(d["q"], Z)
        dk, da, dz0 = self.sums_vjp(-dq * p, cotangents["z"], k, a, z0)
        return {"q": dq, "k": d["k"] + dk, "v": d["v"], "a": d["gamma"] + da, "S0": d["S0"], "z0": dz0}


# --- feature maps and norms ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norms:
    """`unit`: a quotient by the root of the sum of squares where that is in range, the same of the row over its largest
    entry, or the product with an inverse root. `phi_a`: quotient, inverse root, or softmax. `variance`: two passes, one
    (Welford's), or an inverse root. `back`: of a group norm as it is derived, or with the norm multiplied out."""

    machine: Machine
    unit: str = "quotient"
    phi: str = "quotient"
    variance: str = "two passes"
    back: str = "derived"
    store: str = "float32"
    chunk = CHUNK

    def stored(self, x):
        return round_to(x, self.store).astype(f32)

    def phi_a(self, x):
        m, x = self.machine, np.asarray(x, f32)
        if self.phi == "softmax":
            return np.sqrt(m.softmax(x * f32(2)))
        e = m.exp(x - np.max(x, axis=-1, keepdims=True))
        r = np.sqrt(m.sum(e * e))[:, None]
        return e * (f32(1) / r) if self.phi == "inverse root" else m.divide(e, r)

    def phi_a_vjp(self, cotangents, x):
        m, G, Y = self.machine, np.asarray(cotangents["Y"], f32), self.stored(self.phi_a(x))
        if self.phi == "quotient":
            return {"x": Y * (G - Y * m.sum(Y * G)[:, None])}
        return {"x": Y * G - Y * Y * m.sum(Y * G)[:, None]}

    def norm(self, x, eps):
        """x / max(||x||, eps), the denominator, and whether it is the norm."""
        m, top = self.machine, np.max(np.abs(x), axis=-1, keepdims=True)
        top = np.where(top == 0, f32(1), top)
        small = (self.unit == "scaled") | (top > f32(2**40)) | (top < f32(2**-40))
        s = np.where(small, top, f32(1))
        y = m.divide(x, s)
        if self.unit == "inverse root":
            r = f32(1) / np.sqrt(m.sum(y * y))[:, None]
            least = np.minimum(r, m.divide(s, f32(eps)))
            return y * least, m.divide(s, least), s > r * f32(eps)
        r = np.sqrt(m.sum(y * y))[:, None]
        most = np.maximum(r, m.divide(f32(eps), s))
        return m.divide(y, most), most * s, r * s > f32(eps)

    def phi_b(self, x, norm_eps=1e-12):
        return self.machine.exp(self.norm(np.asarray(x, f32), norm_eps)[0])

    def phi_b_vjp(self, cotangents, x, norm_eps=1e-12):
        m, x, G = self.machine, np.asarray(x, f32), np.asarray(cotangents["Y"], f32)
        u, N, above = self.norm(x, norm_eps)
        H = self.stored(m.exp(u)) * G
        along = np.where(above, m.sum(u * H)[:, None], f32(0))
        if self.unit == "inverse root":
            r = f32(1) / N
            return {"x": H * r - u * (along * r)}
        return {"x": m.divide(H - u * along, N)}

    def moments(self, x, eps):
        """mean, and 1 / sqrt(var + eps) or its inverse."""
        m, n = self.machine, x.shape[1]
        if self.variance == "one pass":
            mean, square = zeros(len(x)), zeros(len(x))
            for i in range(n):
                d = x[:, i] - mean
                mean = mean + d / f32(i + 1)
                square = square + d * (x[:, i] - mean)
            var = square / f32(n)
        else:
            mean = m.sum(x) / f32(n)
            E = x - mean[:, None]
            var = m.sum(E * E) / f32(n)
        return mean[:, None], np.sqrt(var + f32(eps))[:, None]

    def group_norm(self, x, eps):
        mean, s = self.moments(x, eps)
        if self.variance == "inverse root":
            return (x - mean) * (f32(1) / s)
        return self.machine.divide(x - mean, s)

    def group_norm_vjp(self, G, x, eps):
        m, n = self.machine, f32(x.shape[1])
        mean, s = self.moments(x, eps)
        r = f32(1) / s
        if self.back == "multiplied out":  # as PyTorch
            ds, db = m.sum(G * x)[:, None], m.sum(G)[:, None]
            b = (db * mean - ds) * r * r * r / n
            return r * G + b * x + (-b * mean - db * r / n)
        N = self.group_norm(x, eps)
        return m.divide(G - m.sum(G)[:, None] / n - N * (m.sum(G * N)[:, None] / n), s)
