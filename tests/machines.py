"""Float32 arithmetics, retention in each of them, and how it is judged: what tests of the gate's silence share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mixproof.reference import operator as find_operator
from mixproof.verify.arithmetic import round_to
from mixproof.verify.declare import Declaration
from mixproof.verify.judge import Profile, judge
from mixproof.verify.numbers.lanes import tensor_core
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
            return tensor_core(wide).astype(f32)
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
            shifted = y + (k.reshape(x.shape).astype(f32) - 2) * np.spacing(y)
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


MACHINES = {
    "forward": Machine(),
    "reversed": Machine("reversed", reciprocal=True),
    "pairwise": Machine("pairwise", exp_kind="base two"),
    "blocks": Machine("blocks", exp_kind="two ulps", reciprocal=True, flushes=True),
    "lanes": Machine("lanes", exp_kind="two ulps"),
    "fma": Machine("fma", exp_kind="base two", reciprocal=True),
}


# --- retention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retention:
    """`powers`: pow, exp (of n log gamma), base two, products. `scaled`: the output, the queries, or the scores.
    `form`: recurrent, chunks, parallel."""

    machine: Machine
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
        sign, size = np.where((n % 2 == 1) & (gamma < 0), f32(-1), f32(1)), f32(np.abs(gamma))
        if self.powers == "base two":
            return np.where(n == 0, f32(1), sign * np.exp2(n.astype(f32) * np.log2(size)))
        return np.where(n == 0, f32(1), sign * self.machine.exp(n.astype(f32) * np.log(size)))

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


# --- judging ---------------------------------------------------------------------------------------------------------


def honest(
    operator: str, forward: Callable[..., Any], gradient: Any, chunk: int, dtype: str = "float32", **declared: Any
) -> Subject:
    """An implementation of one head of one sequence, whose tokens come in and go out in `dtype`."""
    spec = find_operator(operator)
    function = batched(spec, forward, gradient, chunk)
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
        chunk=chunk,
        framework="numpy",
        at_least={"T": 0},
        **declared,
    )
    return Subject(declaration, in_dtype)


def _wide(x: Any) -> Any:
    return np.asarray(x, f32) if isinstance(x, np.ndarray) else x


# operands of dot products, input dtype; the tensor core cuts off where it accumulates
HALVES = tuple(
    (dot, dtype)
    for dot, dtype in (("tf32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"))
)


def assert_silent(honest: Subject, *, outside: tuple[str, ...] = (), profile: Profile = PROFILE) -> None:
    """No alarm, and a verdict, but for laws of which every case lies `outside` the declared arithmetic's domain."""
    for law in LAWS:
        verdict = judge(honest, law, profile)
        allowed = ("undecided",) if law in outside else ("pass", "not applicable")
        assert verdict.status in allowed, f"{verdict}"
