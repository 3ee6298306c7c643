"""The gate's silence: implementations that are right, each in its own way, raise no alarm.

They run in real float32, element by element, with sums in many orders, fused multiply-adds, emulated tensor cores, exps
in base two, reciprocals, printed constants, every chunk size, other backward formulas and half-precision storage. An
alarm is a mistake in the reference, in a ball, in a law, or here. A letter means what it does in reference/.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mixproof.reference import operator as find_operator
from mixproof.verify.arithmetic import round_to
from mixproof.verify.declare import Declaration
from mixproof.verify.judge import Profile, judge
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.reference import batched

PROFILE = Profile("honest", 8, small=True)  # more examples raised no alarm either
LAWS = ("forward", "vjp", "extremes", "split")
CHUNK = 8
LOG2E = np.float32(1 / math.log(2))
f32 = np.float32


# --- float32 arithmetics ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """One way to do float32 arithmetic. `order` is that of sums; operands of products of matrices are rounded to `dot`
    (TF32 by cutting bits off, the worst that is allowed); `exp` is exp, in base two, or off by up to two ulps;
    quotients are `divided`, or multiplied by a reciprocal; `flushes` subnormal results of products."""

    order: str = "forward"
    dot: str = "float32"
    exp_kind: str = "exp"
    reciprocal: bool = False
    flushes: bool = False

    def sum(self, x: np.ndarray, axis: int = -1) -> np.ndarray:
        return _sum(self.order, np.moveaxis(np.asarray(x, f32), axis, -1))

    def mm(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a @ b, by the products of rows of a and columns of b."""
        a, b = self.operand(a), self.operand(b)
        wide = a[:, None, :].astype(np.float64) * b.T[None, :, :].astype(np.float64)
        if self.order == "fma":  # the product is exact in float64
            total = np.zeros(wide.shape[:-1], f32)
            for j in range(wide.shape[-1]):
                total = (wide[..., j] + total).astype(f32)
            return total
        if self.order == "tensor core":
            return _tensor_core(wide)
        return self.sum(self.flushed(wide.astype(f32)))

    def operand(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, f32)
        if self.dot == "tf32":
            return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(f32)
        return round_to(x, self.dot).astype(f32)

    def exp(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, f32)
        if self.exp_kind == "base two":
            return np.exp2(x * LOG2E)
        y = np.exp(x)
        if self.exp_kind == "two ulps":
            k = (np.ascontiguousarray(x).view(np.uint32) * np.uint32(2654435761) >> np.uint32(7)) % np.uint32(5)
            shifted = y + (k.astype(f32) - 2) * np.spacing(y)
            y = np.where((x == 0) | (y < 1e-37), y, shifted)
        return y

    def divide(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(a, f32) * (f32(1) / np.asarray(b, f32)) if self.reciprocal else np.asarray(a, f32) / b

    def flushed(self, x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) < f32(2.0**-126), f32(0), x) if self.flushes else x

    def softmax(self, s: np.ndarray) -> np.ndarray:
        e = self.exp(s - np.max(s, axis=1, keepdims=True, initial=f32(-np.inf)))
        return self.divide(e, self.sum(e)[:, None])


def _sum(order: str, x: np.ndarray) -> np.ndarray:
    n = x.shape[-1]
    if n == 0:
        return np.zeros(x.shape[:-1], f32)
    if order == "pairwise":
        return x[..., 0] if n == 1 else _sum(order, x[..., : n // 2]) + _sum(order, x[..., n // 2 :])
    if order in ("blocks", "tensor core"):
        parts = [_sum("forward", x[..., a : a + 4]) for a in range(0, n, 4)]
        return _sum("reversed", np.stack(parts, axis=-1))
    if order == "lanes":
        return _sum("pairwise", np.stack([_sum("forward", x[..., a::4]) for a in range(min(n, 4))], axis=-1))
    x = x[..., ::-1] if order == "reversed" else x
    return np.add.accumulate(x, axis=-1, dtype=f32)[..., -1]


def _tensor_core(products: np.ndarray) -> np.ndarray:
    """Groups of eight exact products and the total so far, aligned to the largest and cut off at 24 bits, with no
    extra bit; the new total is cut off as well (Fasi et al. 2021)."""
    total = np.zeros((*products.shape[:-1], 1))
    for a in range(0, products.shape[-1], 8):
        terms = np.concatenate([total, products[..., a : a + 8]], axis=-1)
        total = _cut(np.sum(_cut(terms, np.max(np.abs(terms), axis=-1, keepdims=True)), axis=-1, keepdims=True))
    return total[..., 0].astype(f32)


def _cut(x: np.ndarray, largest: np.ndarray | None = None) -> np.ndarray:
    largest = np.abs(x) if largest is None else largest
    unit = np.ldexp(1.0, np.frexp(np.where(largest == 0, 1, largest))[1] - 24)
    return np.trunc(x / unit) * unit


# --- Gaussian mixture attention --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GMA:
    """`distance`: quotient, reciprocal, root, inverse root. `logits`: plain, printed (16), base two. `read`: chunks
    (of whatever size), slots (means), prefix (states of every token). `backward`: chunks or fused (bounded)."""

    machine: Machine = Machine()
    distance: str = "quotient"
    logits: str = "plain"
    read: str = "chunks"
    backward: str = "chunks"
    chunk: int = CHUNK
    store: str = "float32"

    def mixture(self, omega, alpha, v_min):
        m = self.machine
        var = np.maximum(omega, f32(0)) + np.log1p(m.exp(-np.abs(omega))) + f32(v_min)
        if self.logits == "printed":
            top = np.max(alpha)
            alpha = alpha - (top + np.log(m.sum(m.exp(alpha - top))))
        return var, alpha

    def square(self, x, mu, var):
        E = x[:, None, :] - mu[None, :, :]
        if self.distance == "root":
            z = E / np.sqrt(var)
            return z * z
        if self.distance == "inverse root":
            z = E * (f32(1) / np.sqrt(var))
            return z * z
        return E * E * (f32(1) / var) if self.distance == "reciprocal" else E * E / var

    def gamma(self, x, mu, omega, alpha, v_min=0.0):
        m = self.machine
        var, log_pi = self.mixture(omega, alpha, v_min)
        square, logs = m.sum(self.square(x, mu, var)), m.sum(np.log(var))
        if self.logits == "printed":
            R = mu.shape[1]
            s = log_pi - f32(R / 2 * math.log(2 * math.pi)) - f32(0.5) * logs - f32(0.5) * square
        elif self.logits == "base two":
            half = f32(0.5 / math.log(2))
            s = (alpha - f32(0.5) * logs) * LOG2E - half * square
            e = np.exp2(s - np.max(s, axis=1, keepdims=True))
            return m.divide(e, m.sum(e)[:, None])
        else:
            s = (alpha - f32(0.5) * logs) - f32(0.5) * square
        return m.softmax(s)

    def gamma_vjp(self, dgamma, x, mu, omega, alpha, v_min=0.0):
        m = self.machine
        var, _ = self.mixture(omega, alpha, v_min)
        gamma = self.gamma(x, mu, omega, alpha, v_min)
        if self.logits == "printed":
            dS = gamma * dgamma - gamma * m.sum(gamma * dgamma)[:, None]
        else:
            dS = gamma * (dgamma - m.sum(gamma * dgamma)[:, None])
        return self.logits_vjp(dS, x, mu, var, omega)

    def logits_vjp(self, dS, x, mu, var, omega):
        m = self.machine
        E = x[:, None, :] - mu[None, :, :]
        e = m.exp(-np.abs(omega))
        slope = np.where(omega >= 0, m.divide(f32(1), 1 + e), m.divide(e, 1 + e))
        dalpha = m.sum(dS, axis=0)
        if self.distance in ("reciprocal", "inverse root"):
            W = dS[:, :, None] * (E * (f32(1) / var))
            moment = m.sum(W, axis=0)
            dvar = f32(0.5) * (m.sum(W * (E * (f32(1) / var)), axis=0) - dalpha[:, None] * (f32(1) / var))
        else:
            F = dS[:, :, None] * E
            W = F / var
            moment = m.sum(F, axis=0) / var
            dvar = (m.sum(F * E, axis=0) / var - dalpha[:, None]) / var / 2
        return {"x": -m.sum(W, axis=1), "mu": moment, "omega": dvar * slope, "alpha": dalpha}

    def causal(self, q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0, S0=None, Z0=None, chunk=None):
        m, C = self.machine, chunk or self.chunk
        GQ, GK = self.gamma(q, mu, omega, alpha, v_min), self.gamma(k, mu, omega, alpha, v_min)
        S, Z = self.states(GK, v, S0, Z0)
        rows = [np.zeros((0, v.shape[1]), f32)]
        for a in range(0, len(q), C):
            Q, K, W = GQ[a : a + C], GK[a : a + C], v[a : a + C].astype(f32)
            if self.read == "prefix":
                for i in range(len(Q)):
                    S, Z = S + K[i][:, None] * W[i][None, :], Z + K[i]
                    rows.append(m.divide(m.mm(Q[i : i + 1], S), m.mm(Q[i : i + 1], Z[:, None]) + f32(eps)))
                continue
            M = np.tril(m.mm(Q, K.T))
            D = m.mm(Q, Z[:, None])[:, 0] + m.sum(M) + f32(eps)
            rows.append(m.divide(m.mm(Q, S) + m.mm(M, W), D[:, None]))
            S, Z = S + m.mm(K.T, W), Z + m.sum(K, axis=0)
        return np.concatenate(rows), S, Z

    def states(self, GK, v, S0, Z0):
        K, V = GK.shape[1], v.shape[1]
        return (np.zeros((K, V), f32) if S0 is None else S0), (np.zeros(K, f32) if Z0 is None else Z0)

    def causal_vjp(self, cotangents, q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0, S0=None, Z0=None, chunk=None):
        m, C = self.machine, chunk or self.chunk
        mixture = (mu, omega, alpha, v_min)
        GQ, GK = self.gamma(q, *mixture), self.gamma(k, *mixture)
        S, Z = self.states(GK, v, S0, Z0)
        G, R, r = (np.asarray(cotangents[n], f32) for n in ("O", "S", "Z"))
        v = v.astype(f32)
        if self.backward == "fused":
            return self.fused_vjp(G, R, r, GQ, GK, q, k, v, mixture, eps, S, Z)
        starts = range(0, len(q), C)
        dGQ, dGK, dV, reads = [], [], [], []
        for a in starts:
            Q, K, W = GQ[a : a + C], GK[a : a + C], v[a : a + C]
            M = np.tril(m.mm(Q, K.T))
            D = (m.mm(Q, Z[:, None])[:, 0] + m.sum(M) + f32(eps))[:, None]
            O = self.stored(m.divide(m.mm(Q, S) + m.mm(M, W), D))
            dU = m.divide(G[a : a + C], D)
            dD = -m.sum(dU * O) if self.distance != "root" else -m.divide(m.sum(G[a : a + C] * O), D[:, 0])
            P = np.tril(m.mm(dU, W.T) + dD[:, None])
            dGQ.append(m.mm(dU, S.T) + dD[:, None] * Z[None, :] + m.mm(P, K))
            S, Z = S + m.mm(K.T, W), Z + m.sum(K, axis=0)
            reads.append((dU, dD))
        for a, (dU, dD) in zip(reversed(starts), reversed(reads), strict=True):
            Q, K, W = GQ[a : a + C], GK[a : a + C], v[a : a + C]
            P = np.tril(m.mm(dU, W.T) + dD[:, None])
            dGK.append(m.mm(W, R.T) + r[None, :] + m.mm(P.T, Q))
            dV.append(m.mm(K, R) + m.mm(np.tril(m.mm(Q, K.T)).T, dU))
            R, r = R + m.mm(Q.T, dU), r + m.mm(dD[None, :], Q)[0]
        none = np.zeros((0, GQ.shape[1]), f32)
        d = {"GQ": np.concatenate([none, *dGQ]), "GK": np.concatenate([none, *dGK[::-1]])}
        return self.shared(d, np.concatenate([v[:0], *dV[::-1]]), q, k, mixture) | {"S0": R, "Z0": r}

    def fused_vjp(self, G, R, r, GQ, GK, q, k, v, mixture, eps, S, Z):
        """Nothing is divided by D that is not smaller than it: affinities first.  Design record, GMA 1.5"""
        m = self.machine
        M = np.tril(m.mm(GQ, GK.T))
        D = (m.mm(GQ, Z[:, None])[:, 0] + m.sum(M) + f32(eps))[:, None]
        O = m.divide(m.mm(GQ, S) + m.mm(M, v), D)
        A = m.divide(M, D)
        c = m.mm(G, v.T) - m.sum(G * O)[:, None]  # <G_i, V_j - O_i>
        # the memory before the first token is K more keys, of mass Z_k and mean S_k / Z_k
        n = m.mm(G, S.T) - m.sum(G * O)[:, None] * Z[None, :]
        w = GQ[:, None, :] * GK[None, :, :] / D[:, :, None] * np.tril(np.ones(M.shape, f32))[:, :, None]
        read = m.divide(GQ, D)
        W = m.sum(A) + m.sum(read * Z[None, :])
        left = m.sum(w * c[:, :, None], axis=1) + read * n
        # sum_k of it is <G, U - O (D - eps)> / D = (1 - W) <G, O>
        dSQ = left - GQ * (m.sum(G * O) * (1 - W))[:, None]
        direct = m.mm(v, R.T) + r[None, :]
        dSK = m.sum(w * c[:, :, None], axis=0) - GK * m.sum(A * c, axis=0)[:, None]
        dSK = dSK + GK * (direct - m.sum(GK * direct)[:, None])
        mu, omega, alpha, v_min = mixture
        var, _ = self.mixture(omega, alpha, v_min)
        Q, K = self.logits_vjp(dSQ, q, mu, var, omega), self.logits_vjp(dSK, k, mu, var, omega)
        dU = m.divide(G, D)
        dD = -m.sum(dU * O)
        both = {n: Q[n] + K[n] for n in ("mu", "omega", "alpha")}
        state = {"S0": R + m.mm(GQ.T, dU), "Z0": r + m.mm(dD[None, :], GQ)[0]}
        return {"q": Q["x"], "k": K["x"], "v": m.mm(GK, R) + m.mm(A.T, G)} | both | state

    def shared(self, d, dV, q, k, mixture):
        Q, K = self.gamma_vjp(d["GQ"], q, *mixture), self.gamma_vjp(d["GK"], k, *mixture)
        return {"q": Q["x"], "k": K["x"], "v": dV} | {n: Q[n] + K[n] for n in ("mu", "omega", "alpha")}

    def bidirectional(self, q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0):
        m = self.machine
        GQ, GK = self.gamma(q, mu, omega, alpha, v_min), self.gamma(k, mu, omega, alpha, v_min)
        v = v.astype(f32)
        if self.read == "dense":
            At = m.mm(GQ, GK.T)
            return m.mm(m.divide(At, (m.sum(At) + f32(eps))[:, None]), v)
        S, Z = m.mm(GK.T, v), m.sum(GK, axis=0)
        D = m.mm(GQ, Z[:, None])[:, 0]
        if self.read != "slots":
            return m.divide(m.mm(GQ, S), (D + f32(eps))[:, None])
        # true quotients: the reciprocal of a mass that nearly underflows is infinite
        means = S / np.where(Z == 0, 1, Z).astype(f32)[:, None]
        p = GQ * Z[None, :] / np.where(D == 0, 1, D).astype(f32)[:, None]
        return m.mm(p, means) * m.divide(D, D + f32(eps))[:, None]

    def bidirectional_vjp(self, cotangents, q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0):
        m, mixture = self.machine, (mu, omega, alpha, v_min)
        GQ, GK = self.gamma(q, *mixture), self.gamma(k, *mixture)
        G, v = np.asarray(cotangents["O"], f32), v.astype(f32)
        S, Z = m.mm(GK.T, v), m.sum(GK, axis=0)
        D = (m.mm(GQ, Z[:, None])[:, 0] + f32(eps))[:, None]
        O = self.stored(m.divide(m.mm(GQ, S), D))
        dU = m.divide(G, D)
        dD = -m.sum(dU * O)
        R, r = m.mm(GQ.T, dU), m.mm(dD[None, :], GQ)[0]
        d = {"GQ": m.mm(dU, S.T) + dD[:, None] * Z[None, :], "GK": m.mm(v, R.T) + r[None, :]}
        return self.shared(d, m.mm(GK, R), q, k, mixture)

    def stored(self, x):
        return round_to(x, self.store).astype(f32)


# --- retention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retention:
    """`powers`: pow, exp (of n log gamma), base two, products. `scaled`: the output, the queries, or the scores.
    `form`: recurrent, chunks, parallel."""

    machine: Machine = Machine()
    powers: str = "pow"
    scaled: str = "output"
    form: str = "chunks"
    chunk: int = CHUNK
    store: str = "float32"

    def power(self, gamma, n):
        """gamma^n for whole numbers n >= 0, in float32."""
        n = np.asarray(n)
        if self.powers == "pow":
            return np.power(f32(gamma), n.astype(f32))
        if self.powers == "products":
            table = np.cumprod(
                np.concatenate([[f32(1)], np.full(max(int(n.max(initial=0)), 0), f32(gamma))]), dtype=f32
            )
            return table[n]
        if self.powers == "base two":
            return np.where(n == 0, f32(1), np.exp2(n.astype(f32) * np.log2(f32(gamma))))
        return np.where(n == 0, f32(1), self.machine.exp(n.astype(f32) * np.log(f32(gamma))))

    def forward(self, q, k, v, gamma, scale=1.0, S0=None, chunk=None):
        m, C = self.machine, chunk or self.chunk
        q, k, v = (x.astype(f32) for x in (q, k, v))
        S = np.zeros((k.shape[1], v.shape[1]), f32) if S0 is None else S0
        inside = f32(1) if self.scaled == "queries" else f32(scale)
        q = q * f32(scale) if self.scaled == "queries" else q
        rows = [np.zeros((0, v.shape[1]), f32)]
        C = {"recurrent": 1, "parallel": max(len(q), 1)}.get(self.form, C)
        for a in range(0, len(q), C):
            Q, K, W = q[a : a + C], k[a : a + C], v[a : a + C]
            n, i = len(Q), np.arange(len(Q))
            if self.form == "recurrent":
                S = f32(gamma) * S + K[0][:, None] * W[0][None, :]
                rows.append(m.mm(Q, S) * inside)
                continue
            D = np.where(i[:, None] >= i[None, :], self.power(gamma, np.maximum(i[:, None] - i[None, :], 0)), f32(0))
            A = m.mm(Q, K.T) * D
            if self.scaled == "scores":
                O = m.mm(A * inside, W) + m.mm(Q * self.power(gamma, i + 1)[:, None] * inside, S)
            else:
                O = (m.mm(A, W) + self.power(gamma, i + 1)[:, None] * m.mm(Q, S)) * inside
            rows.append(O)
            S = self.power(gamma, np.asarray(n)) * S + m.mm((K * self.power(gamma, n - 1 - i)[:, None]).T, W)
        return np.concatenate(rows), S

    def vjp(self, cotangents, q, k, v, gamma, scale=1.0, S0=None, chunk=None):
        """Token by token: R_n = dS_n + scale q_n^T dO_n + gamma R_{n+1}; dgamma = sum <S_{n-1}, R_n>. Or by chunks."""
        m = self.machine
        q, k, v = (x.astype(f32) for x in (q, k, v))
        G, R = np.asarray(cotangents["O"], f32), np.asarray(cotangents["S"], f32)
        S = np.zeros((k.shape[1], v.shape[1]), f32) if S0 is None else S0
        if self.form != "recurrent":
            return self.chunk_vjp(G, R, q, k, v, gamma, f32(scale), S, chunk or self.chunk)
        before = []
        for n in range(len(q)):
            before.append(S)
            S = f32(gamma) * S + k[n][:, None] * v[n][None, :]
        dq, dk, dv, dgamma = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), f32(0)
        for n in reversed(range(len(q))):
            row = slice(n, n + 1)
            now = f32(gamma) * before[n] + k[n][:, None] * v[n][None, :]
            dq[row] = m.mm(G[row], now.T) * f32(scale)
            R = R + q[n][:, None] * (G[n] * f32(scale))[None, :]
            dk[row], dv[row] = m.mm(v[row], R.T), m.mm(k[row], R)
            dgamma = dgamma + m.sum((before[n] * R).reshape(1, -1))[0]
            R = f32(gamma) * R
        return {"q": dq, "k": dk, "v": dv, "gamma": dgamma, "S0": R}

    def chunk_vjp(self, G, R, q, k, v, gamma, scale, S, C):
        m = self.machine
        starts, before = range(0, len(q), C), []
        for a in starts:
            before.append(S)
            n = len(q[a : a + C])
            u = self.power(gamma, n - 1 - np.arange(n))[:, None]
            S = self.power(gamma, np.asarray(n)) * S + m.mm((k[a : a + C] * u).T, v[a : a + C])
        dq, dk, dv, dgamma = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), f32(0)
        for a, S in zip(reversed(starts), reversed(before), strict=True):
            c = slice(a, a + C)
            Q, K, W, dO = q[c], k[c], v[c], G[c] * scale
            n, i = len(Q), np.arange(len(Q))
            distance, keep = np.maximum(i[:, None] - i[None, :], 0), i[:, None] >= i[None, :]
            D = np.where(keep, self.power(gamma, distance), f32(0))
            w, u = self.power(gamma, i + 1)[:, None], self.power(gamma, n - 1 - i)[:, None]
            A, dA = m.mm(Q, K.T), m.mm(dO, W.T)
            dq[c] = m.mm(dA * D, K) + w * m.mm(dO, S.T)
            dk[c] = m.mm((dA * D).T, Q) + u * m.mm(W, R.T)
            dv[c] = m.mm((A * D).T, dO) + m.mm(K * u, R)
            dD = distance.astype(f32) * self.power(gamma, np.maximum(distance - 1, 0))
            dw = (i + 1).astype(f32)[:, None] * self.power(gamma, i)[:, None]
            du = (n - 1 - i).astype(f32)[:, None] * self.power(gamma, np.maximum(n - 2 - i, 0))[:, None]
            parts = [
                m.sum((A * dA * dD).reshape(1, -1)),
                m.sum((dw * m.mm(Q, S) * dO).reshape(1, -1)),
                m.sum((du * m.mm(K, R) * W).reshape(1, -1)),
                f32(n) * self.power(gamma, np.asarray(n - 1)) * m.sum((S * R).reshape(1, -1)),
            ]
            dgamma = dgamma + (parts[0][0] + parts[1][0] + parts[2][0] + parts[3][0])
            R = m.mm((w * Q).T, dO) + self.power(gamma, np.asarray(n)) * R
        return {"q": dq, "k": dk, "v": dv, "gamma": dgamma, "S0": R}


# --- softmax attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """`form`: parallel, or online over blocks of keys, perhaps `reverse`d. `folded`: exps in base two, with log2(e) and
    scale one constant. `recompute`: the backward forms exp(S - L) from a stored L. `delta`: of dO O, or of P dP."""

    machine: Machine = Machine()
    form: str = "parallel"
    reverse: bool = False
    folded: bool = False
    recompute: bool = False
    delta: str = "outputs"
    chunk: int = CHUNK
    store: str = "float32"

    def scores(self, q, k, scale, causal):
        scale = q.shape[1] ** -0.5 if scale is None else scale
        factor = f32(scale / math.log(2)) if self.folded else f32(scale)
        S = self.machine.mm(q, k.T) * factor
        keep = np.tril(np.ones(S.shape, dtype=bool)) if causal else np.ones(S.shape, dtype=bool)
        return np.where(keep, S, f32(-np.inf)), f32(scale)

    def exp(self, x):
        return np.exp2(x) if self.folded else self.machine.exp(x)

    def normalised(self, q, k, v, scale, causal, chunk=None):
        """O, and L with P = exp(S - L)."""
        m, C = self.machine, chunk or self.chunk
        S, _ = self.scores(q, k, scale, causal)
        T, n = S.shape
        top, mass, U = np.full((T, 1), f32(-np.inf)), np.zeros((T, 1), f32), np.zeros((T, v.shape[1]), f32)
        C = max(n, 1) if self.form == "parallel" else C
        starts = list(range(0, n, C))
        for a in reversed(starts) if self.reverse else starts:
            s = S[:, a : a + C]
            new = np.maximum(top, np.max(s, axis=1, keepdims=True))
            shift = np.where(np.isneginf(new), f32(0), new)
            e, r = self.exp(s - shift), self.exp(top - shift)
            mass, U, top = r * mass + m.sum(e)[:, None], r * U + m.mm(e, v[a : a + C]), new
        mass = np.where(mass == 0, f32(1), mass)
        log = np.log2(mass) if self.folded else np.log(mass)
        return m.divide(U, mass), np.where(np.isneginf(top), f32(0), top) + log

    def forward(self, q, k, v, scale=None, causal=False, chunk=None):
        q, k, v = (x.astype(f32) for x in (q, k, v))
        return self.normalised(q, k, v, scale, causal, chunk)[0]

    def vjp(self, cotangents, q, k, v, scale=None, causal=False):
        m = self.machine
        q, k, v, G = (np.asarray(x, f32) for x in (q, k, v, cotangents["O"]))
        S, scale = self.scores(q, k, scale, causal)
        O, L = self.normalised(q, k, v, None if scale is None else scale, causal)
        if self.recompute:
            P = self.exp(S - L)
        else:
            e = self.exp(S - np.max(S, axis=1, keepdims=True, initial=f32(-3e38)))
            P = m.divide(e, np.maximum(m.sum(e), f32(1e-30))[:, None])
        O = round_to(O, self.store).astype(f32)
        dP = m.mm(G, v.T)
        delta = m.sum(G * O) if self.delta == "outputs" else m.sum(P * dP)
        dS = P * (dP - delta[:, None])
        return {"q": m.mm(dS, k) * scale, "k": m.mm(dS.T, q) * scale, "v": m.mm(P.T, G)}


# --- PyTorch, every intermediate result in the input dtype -----------------------------------------------------------


def eager_bidirectional(q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0):
    """(B, T, H, D) in, autograd backward."""
    import torch

    var = torch.nn.functional.softplus(omega) + v_min
    bias = alpha - var.log().sum(-1) / 2

    def gamma(x):
        E = x.transpose(1, 2)[..., None, :] - mu[:, None]
        return torch.softmax(bias[:, None] - (E * E / var[:, None]).sum(-1) / 2, dim=-1)

    GQ, GK, V = gamma(q), gamma(k), v.transpose(1, 2)
    S, Z = GK.mT @ V, GK.sum(2)
    return (GQ @ S / (GQ @ Z[..., None] + eps)).transpose(1, 2)


def eager_retention(q, k, v, gamma, scale=1.0, S0=None):
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    i = torch.arange(q.shape[2])
    g = gamma[:, None, None]
    D = torch.where(i[:, None] >= i, g ** (i[:, None] - i).clamp(min=0), 0)
    w, u = gamma[:, None] ** (i + 1), gamma[:, None] ** (len(i) - 1 - i)
    O, S = (q @ k.mT * D) @ v * scale, (k * u[..., None]).mT @ v
    if S0 is not None:
        O, S = O + w[..., None] * (q @ S0) * scale, S + gamma[:, None, None] ** len(i) * S0
    return O.transpose(1, 2), S


def eager_attention(q, k, v, scale=None, causal=False):
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    S = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        S = S.masked_fill(~torch.ones(S.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return (torch.softmax(S, dim=-1) @ v).transpose(1, 2)


# --- judging ---------------------------------------------------------------------------------------------------------

FORMS = {
    "gma.responsibilities": ("gamma", None),
    "gma.bidirectional": ("bidirectional", "bidirectional_vjp"),
    "gma.causal": ("causal", "causal_vjp"),
    "retention": ("forward", "vjp"),
    "softmax_attention": ("forward", "vjp"),
}


def subject(operator: str, way: Any, dtype: str = "float32", **declared: Any) -> Subject:
    """An implementation whose tokens come in and go out in `dtype`."""
    spec = find_operator(operator)
    forward, vjp = FORMS[operator]
    if operator == "gma.responsibilities":
        gradient: Callable[..., Any] = lambda c, x, mu, omega, alpha, v_min=0.0: way.gamma_vjp(  # noqa: E731
            np.asarray(c["gamma"], f32), x, mu, omega, alpha, v_min
        )
    else:
        gradient = getattr(way, vjp)
    function = batched(spec, getattr(way, forward), gradient, way.chunk)
    run, run_vjp = function, function.vjp
    tokens = {x.name for x in (*spec.inputs, *spec.outputs) if x.role == "token"}

    def rounded(name: str, x: np.ndarray) -> np.ndarray:
        return round_to(x, dtype).astype(f32) if name in tokens else np.asarray(x, f32)

    def in_dtype(chunk: int | None = None, **inputs: Any) -> tuple[np.ndarray, ...]:
        results = run(chunk=chunk, **{n: _wide(x) for n, x in inputs.items()})
        return tuple(rounded(y.name, x) for y, x in zip(spec.outputs, results, strict=True))

    def vjp_in_dtype(cotangents: dict[str, Any], **inputs: Any) -> dict[str, np.ndarray]:
        grads = run_vjp(cotangents, **{n: _wide(x) for n, x in inputs.items()})
        return {n: rounded(n, x) for n, x in grads.items()}

    in_dtype.__signature__ = function.__signature__
    in_dtype.vjp = vjp_in_dtype
    declaration = Declaration(
        operator,
        "honest",
        layout="B H T D",
        dtypes=(dtype,),
        chunk=way.chunk,
        framework="numpy",
        at_least={"T": 0},
        **declared,
    )
    return Subject(declaration, in_dtype)


def _wide(x: Any) -> Any:
    return np.asarray(x, f32) if isinstance(x, np.ndarray) else x


MACHINES = {
    "forward": Machine(),
    "reversed": Machine("reversed", reciprocal=True),
    "pairwise": Machine("pairwise", exp_kind="base two"),
    "blocks": Machine("blocks", exp_kind="two ulps", reciprocal=True, flushes=True),
    "lanes": Machine("lanes", exp_kind="two ulps"),
    "fma": Machine("fma", exp_kind="base two", reciprocal=True),
}
GMAS = {
    "gma-printed": GMA(MACHINES["forward"], "quotient", "printed", "slots", "chunks", 8),
    "gma-recurrent": GMA(MACHINES["reversed"], "reciprocal", "plain", "prefix", "chunks", 1),
    "gma-roots": GMA(MACHINES["pairwise"], "root", "plain", "dense", "chunks", 3),
    "gma-fused": GMA(MACHINES["blocks"], "inverse root", "base two", "slots", "fused", 5),
    "gma-base-two": GMA(MACHINES["lanes"], "root", "base two", "chunks", "chunks", 16),
    "gma-fma": GMA(MACHINES["fma"], "inverse root", "printed", "chunks", "fused", 7),
}
RETENTIONS = {
    "retention-recurrent": Retention(MACHINES["forward"], "pow", "output", "recurrent"),
    "retention-exp": Retention(MACHINES["reversed"], "exp", "scores", "chunks", 8),
    "retention-products": Retention(MACHINES["pairwise"], "products", "queries", "parallel", 16),
    "retention-base-two": Retention(MACHINES["lanes"], "base two", "scores", "chunks", 3),
    "retention-blocks": Retention(MACHINES["blocks"], "exp", "queries", "chunks", 1),
    "retention-fma": Retention(MACHINES["fma"], "exp", "output", "recurrent", 5),
}
ATTENTIONS = {
    "attention-parallel": Attention(MACHINES["forward"]),
    "attention-blocks": Attention(MACHINES["reversed"], "online", chunk=5, recompute=True),
    "attention-reversed": Attention(MACHINES["pairwise"], "online", reverse=True, recompute=True, delta="products"),
    "attention-folded": Attention(MACHINES["lanes"], "online", folded=True, recompute=True, chunk=3),
    "attention-one-by-one": Attention(MACHINES["blocks"], "online", chunk=1, recompute=True),
    "attention-fma": Attention(MACHINES["fma"], "parallel", folded=True, delta="products"),
}
WAYS = (
    *((o, n, w) for n, w in GMAS.items() for o in ("gma.causal", "gma.bidirectional", "gma.responsibilities")),
    *(("retention", n, w) for n, w in RETENTIONS.items()),
    *(("softmax_attention", n, w) for n, w in ATTENTIONS.items()),
)
# operands of dot products, input dtype; the tensor core cuts off where it accumulates
HALVES = tuple(
    (dot, dtype)
    for dot, dtype in (("tf32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"))
)


def assert_silent(honest: Subject, *, outside: tuple[str, ...] = ()) -> None:
    """No alarm, and a verdict, but for laws of which every case lies `outside` the declared arithmetic's domain."""
    for law in LAWS:
        verdict = judge(honest, law, PROFILE)
        allowed = ("undecided",) if law in outside else ("pass", "not applicable")
        assert verdict.status in allowed, f"{verdict}"


@pytest.mark.parametrize(("operator", "name", "way"), WAYS, ids=[f"{o}-{n}" for o, n, _ in WAYS])
def test_float32_raises_no_alarm(operator, name, way):
    assert_silent(subject(operator, way))


@pytest.mark.parametrize(("dot", "dtype"), HALVES, ids=[f"{i}-{d}" for d, i in HALVES])
@pytest.mark.parametrize("operator", ["gma.causal", "gma.bidirectional", "retention", "softmax_attention"])
def test_low_precision_raises_no_alarm(operator, dot, dtype):
    family = {"gma": GMAS, "ret": RETENTIONS, "sof": ATTENTIONS}[operator[:3]]
    way = list(family.values())[1 + HALVES.index((dot, dtype))]
    order = "pairwise" if dot == "float32" else "tensor core"
    machine = dataclasses.replace(way.machine, order=order, dot=dot)
    assert_silent(subject(operator, dataclasses.replace(way, machine=machine, store=dtype), dtype, dot=dot))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("operator", "function"),
    [
        ("gma.bidirectional", eager_bidirectional),
        ("retention", eager_retention),
        ("softmax_attention", eager_attention),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_eager_pytorch_raises_no_alarm(operator, function, dtype):
    pytest.importorskip("torch")
    declaration = Declaration(
        operator, "eager", dtypes=(dtype,), chunk=CHUNK, dot="input", intermediate="input", parameters="input",
        at_least={"T": 1},
    )  # fmt: skip
    # eight bits of a denominator do not tell it from zero, so nothing is known of a gradient
    unknown = ("vjp",) if (operator, dtype) == ("gma.bidirectional", "bfloat16") else ()
    assert_silent(Subject(declaration, function), outside=unknown)


@pytest.mark.parametrize("name", ["gma.causal", "retention", "softmax_attention"])
def test_silence_is_not_deafness(name):
    """The same code with operands cut to TF32, where float32 is declared, is heard."""
    way = {"gma": GMAS, "ret": RETENTIONS, "sof": ATTENTIONS}[name[:3]]
    way = next(iter(way.values()))
    machine = dataclasses.replace(way.machine, dot="tf32")
    assert judge(subject(name, dataclasses.replace(way, machine=machine)), "forward", PROFILE).status == "fail"
