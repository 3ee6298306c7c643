"""GMA backward: against PyTorch's autograd, differences in 60 digits, enclosures; conservation laws; multi-head.

Tolerances: `majorant` evaluates the gradients with every subtraction turned into a sum. Each step of the backward
pass rounds on that scale, n terms by n U, and a responsibility enters a gradient at most twelve times (twice each in
dS, in V~ and Z of O, in O, in D, in the write and in the read), each time with its relative error eta.
"""

import mpmath
import numpy as np
import pytest
import torch

from mixproof.reference import gma, operator
from mixproof.reference import gma_mixing as mixing
from mixproof.reference import gma_multi_head as layer
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.numbers.certified import certified_error, enclose

U = 2.0**-53
SIZES = [(1, 1, 1, 1), (2, 3, 1, 2), (7, 5, 3, 4), (33, 2, 4, 3), (gma.BLOCK + 6, 3, 2, 2)]  # T, K, R, V
NAMES = ["gma.bidirectional", "gma.cross", "gma.causal"]
MIXTURE = ("mu", "omega", "alpha", "v_min")


def draw(name, T, K, R, V, eps=1e-6, seed=0):
    rng = np.random.default_rng([seed, T, K, R, V])
    normal = rng.standard_normal
    S = T + 3 if name == "gma.cross" else T
    I = {"q": normal((T, R)), "k": normal((S, R)), "v": normal((S, V))}
    I |= {"mu": normal((K, R)), "omega": normal((K, R)), "alpha": normal(K), "eps": eps, "v_min": 0.05}
    G = {"O": normal((T, V))}
    if name == "gma.causal":
        I |= {"S0": normal((K, V)), "Z0": 3 * rng.random(K)}
        G |= {"S": normal((K, V)), "Z": normal(K)}
    return I, G


def mixture(I):
    return {name: I[name] for name in MIXTURE}


def logit_sizes(x, mu, omega, alpha, v_min):
    """max_k |rounding error of s_k| / U, see gamma_error in test_gma.py."""
    R = mu.shape[1]
    var = np.logaddexp(omega, 0) + v_min
    maha = np.sum((x[:, None] - mu) ** 2 / var, axis=2)
    logs = np.sum(np.abs(np.log(var)), axis=1)
    return float(np.max((R + 11) * maha / 2 + 3 * R + (R + 3) * logs / 2 + 2 * np.abs(alpha) + 2 * maha, initial=0))


def majorant(I, G, causal):
    """The gradients with absolute values throughout, by the dense form."""
    GQ, GK = (gma.responsibilities(I[x], **mixture(I)) for x in "qk")
    K, V = GQ.shape[1], I["v"].shape[1]
    S0, Z0 = np.abs(I.get("S0", np.zeros((K, V)))), I.get("Z0", np.zeros(K))
    R, r = np.abs(G.get("S", np.zeros((K, V)))), np.abs(G.get("Z", np.zeros(K)))
    v = np.abs(I["v"])
    M = mixing.affinity(GQ, GK, causal)
    D = (GQ @ Z0 + np.sum(M, axis=1) + I["eps"])[:, None]
    dU = np.abs(G["O"]) / D
    dD = np.sum(dU * ((GQ @ S0 + M @ v) / D), axis=1, keepdims=True)
    P = np.where(np.tri(*M.shape, dtype=bool), dU @ v.T + dD, 0) if causal else dU @ v.T + dD
    dGQ = dU @ S0.T + dD * Z0 + P @ GK
    dGK = v @ R.T + r + P.T @ GQ
    grads = {"v": GK @ R + M.T @ dU, "S0": R + GQ.T @ dU, "Z0": r + np.sum(GQ * dD, axis=0)}
    shared = {"mu": 0, "omega": 0, "alpha": 0}
    for name, gamma, dgamma in (("q", GQ, dGQ), ("k", GK, dGK)):
        d = pull_back_majorant(gamma, dgamma, I[name], I)
        grads[name] = d["x"]
        shared = {n: shared[n] + d[n] for n in shared}
    return grads | shared


def pull_back_majorant(gamma, dgamma, x, I):
    var = np.logaddexp(I["omega"], 0) + I["v_min"]
    dS = gamma * (np.abs(dgamma) + np.sum(gamma * np.abs(dgamma), axis=1, keepdims=True))
    E = np.abs(x[:, None] - I["mu"])
    W = dS[:, :, None] * E
    dalpha = np.sum(dS, axis=0)
    dvar = (np.sum(W * E, axis=0) / var + dalpha[:, None]) / var / 2
    domega = dvar / (1 + np.exp(-I["omega"]))
    return {"x": np.sum(W / var, axis=1), "mu": np.sum(W, axis=0) / var, "omega": domega, "alpha": dalpha}


def unit(I):
    """What one evaluation may be off by, relative to the majorant."""
    eta = 4 * U * max(logit_sizes(I[x], **mixture(I)) for x in I if x in "xqk")
    terms = sum(np.size(x) for x in ([0] * 40, *(I[x][:, 0] for x in I if x in "xqkv"), I["alpha"], I["mu"][0]))
    return 1.1 * (12 * (eta + len(I["alpha"]) * U) + 4 * terms * U)


def within(got, want, tolerance):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape
        assert np.all(np.abs(got[name] - want[name]) <= tolerance[name]), name


# --- against autograd ------------------------------------------------------------------------------------------------


def torch_gamma(x, I):
    var = torch.logaddexp(I["omega"], torch.zeros((), dtype=torch.float64)) + I["v_min"]
    maha = ((x[:, None] - I["mu"]) ** 2 / var).sum(-1)
    return torch.softmax(I["alpha"] - var.log().sum(-1) / 2 - maha / 2, dim=-1)


def torch_forward(name, I):
    GQ, GK = torch_gamma(I["q"], I), torch_gamma(I["k"], I)
    At = GQ @ GK.T
    if name != "gma.causal":
        return {"O": At @ I["v"] / (At.sum(1) + I["eps"])[:, None]}
    At = At.tril()
    O = (GQ @ I["S0"] + At @ I["v"]) / (GQ @ I["Z0"] + At.sum(1) + I["eps"])[:, None]
    return {"O": O, "S": I["S0"] + GK.T @ I["v"], "Z": I["Z0"] + GK.sum(0)}


def autograd(forward, I, G):
    leaves = {n: torch.tensor(x, requires_grad=True) if isinstance(x, np.ndarray) else x for n, x in I.items()}
    outputs = forward(leaves)
    sum((outputs[n] * torch.tensor(G[n])).sum() for n in G).backward()
    return {n: x.grad.numpy() for n, x in leaves.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_vjp_is_autograd(name, sizes, eps):
    I, G = draw(name, *sizes, eps=eps)
    want = autograd(lambda x: torch_forward(name, x), I, G)
    error = {n: 2 * unit(I) * m for n, m in majorant(I, G, name == "gma.causal").items()}
    within(operator(name).vjp(G, **I), want, error)
    if name == "gma.causal":
        within(gma.recurrent_vjp(G, **I), want, error)
        for chunk in (1, 2, 3, 5, sizes[0] + 1):
            within(gma.chunkwise_vjp(G, **I, chunk=chunk), want, error)


@pytest.mark.parametrize("sizes", SIZES)
def test_responsibilities_vjp_is_autograd(sizes):
    I, _ = draw("gma.bidirectional", *sizes)
    I = {"x": I["q"]} | mixture(I)
    G = {"gamma": np.random.default_rng(1).standard_normal((sizes[0], sizes[1]))}
    want = autograd(lambda x: {"gamma": torch_gamma(x["x"], x)}, I, G)
    gamma = gma.responsibilities(**I)
    error = {n: 2 * unit(I) * m for n, m in pull_back_majorant(gamma, G["gamma"], I["x"], I).items()}
    within(gma.responsibilities_vjp(G, **I), want, error)


def test_absent_state_is_zero_state():
    I, G = draw("gma.causal", 7, 3, 2, 2)
    zeros = I | {"S0": np.zeros((3, 2)), "Z0": np.zeros(3)}
    absent = {n: x for n, x in I.items() if n not in ("S0", "Z0")}
    for vjp in (gma.chunkwise_vjp, gma.recurrent_vjp):
        a, b = vjp(G, **absent), vjp(G | {"S": None}, **zeros)
        c = vjp(G | {"S": np.zeros((3, 2))}, **zeros)
        assert all(np.array_equal(b[n], c[n]) for n in c)
        assert all(np.array_equal(a[n], vjp(G, **zeros)[n]) for n in a)


def test_empty_sequence_passes_the_state_through():
    I, G = draw("gma.causal", 0, 3, 2, 2)
    for vjp in (gma.chunkwise_vjp, gma.recurrent_vjp):
        d = vjp(G, **I)
        assert np.array_equal(d["S0"], G["S"])
        assert np.array_equal(d["Z0"], G["Z"])
        assert all(d[n].shape == I[n].shape and not np.any(d[n]) for n in ("q", "k", "v", "mu", "omega", "alpha"))


# --- against other witnesses -----------------------------------------------------------------------------------------


def mp_loss(I, G):
    """<O, dO> + <S, dS> + <Z, dZ> of causal GMA token by token, in mpmath."""
    var = [[mpmath.log(1 + mpmath.exp(w)) + I["v_min"] for w in row] for row in I["omega"]]

    def gamma(x):
        square = [sum((a - m) ** 2 / s for a, m, s in zip(x, *c, strict=True)) for c in zip(I["mu"], var, strict=True)]
        e = [
            mpmath.exp(a - q / 2) / mpmath.sqrt(mpmath.fprod(s))
            for a, q, s in zip(I["alpha"], square, var, strict=True)
        ]
        return [x / sum(e) for x in e]

    S, Z, loss = [list(row) for row in I["S0"]], list(I["Z0"]), mpmath.mpf(0)
    K, V = range(len(S)), range(len(S[0]))
    for q, k, v, g in zip(I["q"], I["k"], I["v"], G["O"], strict=True):
        gq, gk = gamma(q), gamma(k)
        Z = [Z[c] + gk[c] for c in K]
        S = [[S[c][d] + gk[c] * v[d] for d in V] for c in K]
        D = sum(gq[c] * Z[c] for c in K) + I["eps"]
        loss += sum(g[d] * sum(gq[c] * S[c][d] for c in K) / D for d in V)
    return loss + sum(G["Z"][c] * Z[c] + sum(G["S"][c][d] * S[c][d] for d in V) for c in K)


def test_causal_vjp_is_a_difference_quotient_in_60_digits():
    I, G = draw("gma.causal", 3, 2, 2, 2)
    mpmath.mp.dps = 60
    mp = {n: np.vectorize(mpmath.mpf, otypes=[object])(x) if isinstance(x, np.ndarray) else x for n, x in I.items()}
    h = mpmath.mpf(10) ** -20  # the quotient is off by h^2 = 1e-40
    want = {}
    for n, x in mp.items():
        if n in ("eps", "v_min"):
            continue
        want[n] = np.zeros(x.shape)
        for at in np.ndindex(x.shape):
            ends = []
            for step in (h, -h):
                y = x.copy()
                y[at] = y[at] + step
                ends.append(mp_loss(mp | {n: y}, G))
            want[n][at] = float((ends[0] - ends[1]) / (2 * h))
    error = {n: unit(I) * m for n, m in majorant(I, G, causal=True).items()}
    for vjp in (gma.chunkwise_vjp, gma.recurrent_vjp):
        within(vjp(G, **I), want, error)


@pytest.mark.parametrize("name", NAMES)
def test_vjp_is_enclosed(name):
    I, G = draw(name, 7, 5, 3, 4)
    vjp = operator(name).vjp
    enclosures, got = enclose(vjp, {"cotangents": G, **I}), vjp(G, **I)
    error = {n: unit(I) * m for n, m in majorant(I, G, name == "gma.causal").items()}
    assert got.keys() == enclosures.keys()
    for n, x in got.items():
        assert np.all(enclosures[n].radius <= error[n] / 8)  # the enclosure is sharp, or the comparison is void
        assert np.all(certified_error(x, enclosures[n]) <= error[n]), n


# --- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gma.bidirectional", "gma.cross"])
@pytest.mark.parametrize("seed", range(5))
def test_conservation(name, seed):
    """What invariances of the output say about its gradients, spec by spec: prior shift, translation, scaling of one
    coordinate, linearity in V, constant V."""
    I, G = draw(name, 9, 4, 3, 2, eps=0.1, seed=seed)
    d, m, u = operator(name).vjp(G, **I), majorant(I, G, causal=False), unit(I)
    assert abs(np.sum(d["alpha"])) <= u * np.sum(m["alpha"])

    total, size = (sum(np.sum(x[n], axis=0) for n in ("q", "k", "mu")) for x in (d, m))
    assert np.all(np.abs(total) <= u * size)

    var = np.logaddexp(I["omega"], 0) + I["v_min"]
    scale = 2 * var * (1 + np.exp(-I["omega"]))  # d/d var = d/d omega / sigmoid(omega)
    total = sum(np.sum(I[n] * d[n], axis=0) for n in ("q", "k", "mu")) + np.sum(scale * d["omega"], axis=0)
    size = sum(np.sum(np.abs(I[n]) * m[n], axis=0) for n in ("q", "k", "mu")) + np.sum(scale * m["omega"], axis=0)
    assert np.all(np.abs(total) <= u * size)

    O = gma.cross(**I)
    assert abs(np.sum(O * G["O"]) - np.sum(I["v"] * d["v"])) <= 2 * u * np.sum(np.abs(I["v"]) * m["v"])
    W = np.sum(gma.attention(**{n: x for n, x in I.items() if n != "v"}), axis=1)
    want = W @ G["O"]
    assert np.all(np.abs(np.sum(d["v"], axis=0) - want) <= 2 * u * np.sum(m["v"], axis=0))


def test_causal_gradients_look_only_forward():
    I, G = draw("gma.causal", 9, 3, 2, 2)
    zero = {n: np.zeros_like(x) for n, x in G.items()}
    for vjp in (gma.chunkwise_vjp, gma.recurrent_vjp):
        early = vjp(zero | {"O": np.where(np.arange(9)[:, None] < 4, G["O"], 0)}, **I)
        assert all(not np.any(early[n][4:]) for n in "qkv")
        assert all(np.any(early[n][:4]) for n in "qkv")


def test_dead_component_has_no_gradient():
    """A component that underflows cannot revive: its gradients are exactly zero."""
    I, G = draw("gma.bidirectional", 9, 3, 2, 2)
    d = gma.bidirectional_vjp(G, **(I | {"alpha": np.array([0.0, -1e4, 0.0])}))
    assert not np.any(d["mu"][1])
    assert not np.any(d["omega"][1])
    assert d["alpha"][1] == 0


# --- multi-head ------------------------------------------------------------------------------------------------------


def draw_layer(mixture="per_head", context=False, biased=False, H=2, T=6, M=5, K=3, R=2, V=4):
    normal = np.random.default_rng(7).standard_normal
    heads = (H,) if mixture == "per_head" else ()
    I = {"X": normal((T, M)), "W_Q": normal((H, M, R)), "W_K": normal((H, M, R)), "W_V": normal((H, M, V))}
    I |= {"W_O": normal((H * V, M)), "mu": normal((*heads, K, R)), "omega": normal((*heads, K, R))}
    I |= {"alpha": normal((*heads, K))} | ({"Y": normal((T + 2, M))} if context else {})
    biases = {"b_Q": normal((H, R)), "b_K": normal((H, R)), "b_V": normal((H, V)), "b_O": normal(M)}
    return I | (biases if biased else {})


def torch_layer(I, causal, mixture):
    C = I.get("Y", I["X"])
    bQ, bK, bV = (I.get(n, torch.zeros(len(I["W_Q"]), 1)) for n in ("b_Q", "b_K", "b_V"))
    rows = []
    for h in range(len(I["W_Q"])):
        p = {n: I[n][h] if mixture == "per_head" else I[n] for n in ("mu", "omega", "alpha")} | {"v_min": 0.05}
        At = torch_gamma(I["X"] @ I["W_Q"][h] + bQ[h], p) @ torch_gamma(C @ I["W_K"][h] + bK[h], p).T
        At = At.tril() if causal else At
        rows.append(At @ (C @ I["W_V"][h] + bV[h]) / (At.sum(1) + 1e-6)[:, None])
    return {"O": torch.cat(rows, dim=1) @ I["W_O"] + I.get("b_O", 0)}


@pytest.mark.parametrize("mixture", ["per_head", "shared"])
@pytest.mark.parametrize(("kind", "biased"), [("self", False), ("causal", True), ("cross", True), ("cross", False)])
def test_layer_and_its_vjp_are_autograd(mixture, kind, biased):
    I, causal = draw_layer(mixture, kind == "cross", biased), kind == "causal"
    options = {"causal": causal, "mixture": mixture, "v_min": 0.05}
    G = {"O": np.random.default_rng(8).standard_normal((6, 5))}
    got, want = layer.multi_head_vjp(G, **I, **options), autograd(lambda x: torch_layer(x, causal, mixture), I, G)
    # here the bound is that of the gate: the same functions, on balls of float64 arithmetic
    reading = Reading(natural("float64"))
    balls = {n: reading.ball(x) for n, x in I.items()}
    bounds = layer.multi_head_vjp({"O": reading.ball(G["O"])}, **balls, **options)
    enclosures = enclose(layer.multi_head_vjp, {"cotangents": G, **I, **options})
    assert not reading.vacuous
    assert got.keys() == want.keys() == bounds.keys()
    for n in got:
        assert np.all(certified_error(got[n], enclosures[n]) <= tolerance(bounds[n], "float64")), n
        assert np.all(certified_error(want[n], enclosures[n]) <= tolerance(bounds[n], "float64")), n
    error = certified_error(layer.multi_head(**I, **options), enclose(layer.multi_head, {**I, **options}))
    assert np.all(error <= tolerance(layer.multi_head(**balls, **options), "float64"))


def test_heads_are_independent_and_their_components_nameless():
    """Relabelling the components of one head leaves the layer as it is, and changes head-averaged responsibilities."""
    I = draw_layer()
    swapped = I | {n: np.stack([I[n][0], I[n][1][::-1]]) for n in ("mu", "omega", "alpha")}
    reading = Reading(natural("float64"))
    bound = 2 * tolerance(layer.multi_head(**{n: reading.ball(x) for n, x in I.items()}), "float64")
    assert np.all(np.abs(layer.multi_head(**swapped) - layer.multi_head(**I)) <= bound)
    gammas, others = (
        layer.head_responsibilities(x["X"], x["W_Q"], x["mu"], x["omega"], x["alpha"]) for x in (I, swapped)
    )
    assert gammas.shape == (2, 6, 3)
    assert np.max(np.abs(np.mean(gammas, axis=0) - np.mean(others, axis=0))) > 0.01
    copies = I | {n: np.stack([I[n][0]] * 2) for n in ("mu", "omega", "alpha")}
    shared = I | {n: I[n][0] for n in ("mu", "omega", "alpha")}
    assert np.array_equal(layer.multi_head(**copies), layer.multi_head(**shared, mixture="shared"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mu": np.zeros((3, 3, 2))}, r"mu has shape \(3, 3, 2\).*expect \(2, any, 2\)"),
        ({"W_O": np.zeros((7, 5))}, r"W_O has shape \(7, 5\).*expect \(8, any\)"),
        ({"X": np.zeros((6, 4))}, r"X has shape \(6, 4\)"),
        ({"b_V": np.zeros((2, 3))}, r"b_V has shape \(2, 3\).*expect \(2, 4\)"),
        ({"mixture": "global"}, "mixture is 'global'; it must be one of per_head, shared"),
        ({"mixture": "shared"}, r"mu has shape \(2, 3, 2\).*'shared' expect \(any, 2\)"),
        ({"Y": np.zeros((3, 5)), "causal": True}, "only one sequence has an order"),
        ({"W_Q": np.zeros((5, 2))}, r"W_Q has shape \(5, 2\); expected \(H, M, R\)"),
    ],
)
def test_layer_names_the_bad_argument(change, message):
    with pytest.raises(ValueError, match=message):
        layer.multi_head(**(draw_layer() | change))
