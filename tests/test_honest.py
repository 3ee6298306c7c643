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

from machines import CHUNK, HALVES, LOG2E, MACHINES, PROFILE, Machine, Retention, assert_silent, f32, honest
from mixproof.verify.arithmetic import round_to
from mixproof.verify.declare import Declaration
from mixproof.verify.judge import judge
from mixproof.verify.subject import Subject

# --- Gaussian mixture attention --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GMA:
    """`distance`: quotient, reciprocal, root, inverse root. `logits`: plain, printed (16), base two. `read`: chunks
    (of whatever size), slots (means), prefix (states of every token). `backward`: chunks or fused (bounded)."""

    machine: Machine
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


# --- softmax attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """`form`: parallel, or online over blocks of keys, perhaps `reverse`d. `folded`: exps in base two, with log2(e) and
    scale one constant. `recompute`: the backward forms exp(S - L) from a stored L. `delta`: of dO O, or of P dP."""

    machine: Machine
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
    """One way of an operator."""
    forward, vjp = FORMS[operator]
    if operator == "gma.responsibilities":
        gradient: Callable[..., Any] = lambda c, x, mu, omega, alpha, v_min=0.0: way.gamma_vjp(  # noqa: E731
            np.asarray(c["gamma"], f32), x, mu, omega, alpha, v_min
        )
    else:
        gradient = getattr(way, vjp)
    return honest(operator, getattr(way, forward), gradient, way.chunk, dtype, **declared)


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
