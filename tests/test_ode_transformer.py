"""The ODE Transformer's block: against PyTorch and autograd, the orders of its methods, what its coefficients cost."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from sympy import QQ
from sympy.polys.rings import ring

from mixproof.reference import operator
from mixproof.reference.ode_transformer import linearised
from mixproof.reference.runge_kutta import (
    CLASSICAL,
    EULER,
    HEUN,
    KUTTA,
    Tableau,
    rk1,
    rk2,
    rk2_gated,
    rk2_learned,
    rk3,
    rk4,
    step,
)
from mixproof.verify.arithmetic import natural
from mixproof.verify.numbers.ball import Reading, tolerance
from mixproof.verify.subjects.mutants.ode_transformer import of_layer, released_rk3

NAMES = ("rk1", "rk2", "rk2_learned", "rk2_gated", "rk3", "rk4")
PLAIN = {"rk1": (rk1, EULER), "rk2": (rk2, HEUN), "rk3": (rk3, KUTTA), "rk4": (rk4, CLASSICAL)}
SIZES = [(1, 4, 3, 1), (5, 4, 3, 2), (4, 6, 5, 3)]  # T, E, F, heads


def find(name):
    return operator(f"ode_transformer.{name}")


def draw(name, T, E, F, heads, seed=0):
    g = np.random.default_rng([seed, T, E, F])
    sizes = {"T": T, "E": E, "F": F, "2E": 2 * E, "1": 1}
    I = {x.name: g.standard_normal([sizes[a] for a in x.axes]) for x in find(name).inputs if x.role != "scalar"}
    I |= {n: x / (2 * np.sqrt(len(x))) for n, x in I.items() if n.startswith("W_")}
    I |= {n: 1 + 0.2 * x for n, x in I.items() if n.startswith("gain")}
    return I | {"heads": heads, "eps": 1e-5}, {"Y": g.standard_normal((T, E))}


def bounds(name, I, G=None):
    """Twice what an honest float64 implementation may be off by, of the output or of every gradient."""
    reading = Reading(natural("float64"), recomputes=G is not None)
    balls = {n: reading.ball(x) if isinstance(x, np.ndarray) else x for n, x in I.items()}
    o = find(name)
    results = o.vjp({"Y": reading.ball(G["Y"])}, **balls) if G else {"Y": o.forms[0].function(**balls)}
    assert not reading.vacuous
    return {n: 2 * tolerance(b, "float64") for n, b in results.items()}


def block_of(I):
    return {n: x for n, x in I.items() if n not in ("X", "gamma1", "gamma2", "W_g", "b_g")}


# --- the block and its methods, in PyTorch ---------------------------------------------------------------------------


def torch_branch(torch, x, heads, eps):
    """F with norms of PyTorch, attention written out head by head."""

    def norm(X, i):
        return torch.nn.functional.group_norm(X, 1, x[f"gain{i}"], x[f"bias{i}"], eps)

    def F(y):
        N, d = norm(y, 1), y.shape[1] // heads
        parts = []
        for h in range(heads):
            c = slice(h * d, (h + 1) * d)
            q, k, v = N @ x["W_Q"][:, c], N @ x["W_K"][:, c], N @ x["W_V"][:, c]
            parts.append(torch.softmax(q @ k.T / math.sqrt(d), dim=1) @ v)
        S = torch.cat(parts, dim=1) @ x["W_O"]
        return S + torch.relu(norm(y + S, 2) @ x["W_1"] + x["b_1"]) @ x["W_2"] + x["b_2"]

    return F


def torch_method(torch, name, F, y, x):
    """Each formula as the paper prints it."""
    F1 = F(y)
    if name == "rk1":
        return y + F1
    if name in ("rk2", "rk2_learned", "rk2_gated"):
        F2 = F(y + F1)
        if name == "rk2":
            return y + 1 / 2 * (F1 + F2)
        if name == "rk2_learned":
            return y + x["gamma1"] * F1 + x["gamma2"] * F2
        g = torch.sigmoid(torch.cat([F1, F2], dim=1) @ x["W_g"] + x["b_g"])
        return y + g * F1 + (1 - g) * F2
    F2 = F(y + 1 / 2 * F1)
    if name == "rk3":
        return y + 1 / 6 * (F1 + 4 * F2 + F(y - F1 + 2 * F2))
    F3 = F(y + 1 / 2 * F2)
    return y + 1 / 6 * (F1 + 2 * F2 + 2 * F3 + F(y + F3))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_operator_and_its_vjp_are_autograd(name, sizes):
    torch = pytest.importorskip("torch")
    I, G = draw(name, *sizes)
    x = {n: torch.tensor(a, requires_grad=True) for n, a in I.items() if n not in ("heads", "eps")}
    Y = torch_method(torch, name, torch_branch(torch, x, I["heads"], I["eps"]), x["X"], x)
    Y.backward(torch.tensor(G["Y"]))
    bound, of_gradients = bounds(name, I)["Y"], bounds(name, I, G)
    for form in find(name).forms:
        assert np.all(np.abs(form.function(**I) - Y.detach().numpy()) <= bound), form.name
    got = find(name).vjp(G, **I)
    assert got.keys() == x.keys()
    for n, d in got.items():
        assert np.all(np.abs(d - x[n].grad.numpy()) <= of_gradients[n]), n


@pytest.mark.parametrize("name", NAMES)
def test_tolerances_tell_a_missing_term(name):
    """Enough is left of float64: each of these changes some output by more than a thousand tolerances, and so would
    the loss of a gradient."""
    I, G = draw(name, 5, 4, 3, 2)
    forward, bound = find(name).forms[0].function, bounds(name, I)["Y"]
    for change in (
        {"eps": 2e-5},
        {"heads": 1},
        {"b_2": 0 * I["b_2"]},
        {"W_O": 0 * I["W_O"]},
        {"bias2": 0 * I["bias2"]},
    ):
        assert np.max(np.abs(forward(**(I | change)) - forward(**I)) / bound) > 1e3, change
    of_gradients = bounds(name, I, G)
    for n, d in find(name).vjp(G, **I).items():
        assert np.max(np.abs(d) / of_gradients[n]) > 1e3, n


def test_euler_is_the_residual_layer():
    """Claim O5: with F the residual branch, RK1 is the pre-norm encoder layer that PyTorch ships."""
    torch = pytest.importorskip("torch")
    I, _ = draw("rk1", 5, 4, 3, 2)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, norm_first=True, batch_first=True).double().train()
    named = {
        "self_attn.in_proj_weight": np.concatenate([I["W_Q"], I["W_K"], I["W_V"]], axis=1).T,
        "self_attn.in_proj_bias": np.zeros(12), "self_attn.out_proj.weight": I["W_O"].T,
        "self_attn.out_proj.bias": np.zeros(4), "linear1.weight": I["W_1"].T, "linear1.bias": I["b_1"],
        "linear2.weight": I["W_2"].T, "linear2.bias": I["b_2"], "norm1.weight": I["gain1"], "norm1.bias": I["bias1"],
        "norm2.weight": I["gain2"], "norm2.bias": I["bias2"],
    }  # fmt: skip
    layer.load_state_dict({n: torch.tensor(x) for n, x in named.items()})
    Y = layer(torch.tensor(I["X"])[None])[0].detach().numpy()
    assert np.all(np.abs(find("rk1").forms[0].function(**I) - Y) <= bounds("rk1", I)["Y"])


def test_gradient_of_the_branch_is_a_complex_step():
    """Without the rectifier's kinks in reach: directional derivatives from one evaluation at X + i h V, exactly."""
    I, G = draw("rk1", 4, 4, 3, 2)
    block, V = block_of(I), np.random.default_rng(1).standard_normal((4, 4))

    def branch(Z):  # analytic: comparisons and moduli look at real parts
        def norm(x, i):
            E = x - np.mean(x, axis=1, keepdims=True)
            return E / np.sqrt(np.mean(E * E, axis=1, keepdims=True) + 1e-5) * block[f"gain{i}"] + block[f"bias{i}"]

        Q, K, U = (norm(Z, 1) @ block[n] for n in ("W_Q", "W_K", "W_V"))
        A = []
        for c in (slice(0, 2), slice(2, 4)):
            e = np.exp(Q[:, c] @ K[:, c].T / math.sqrt(2))
            A.append(e / np.sum(e, axis=1, keepdims=True) @ U[:, c])
        S = np.concatenate(A, axis=1) @ block["W_O"]
        H = norm(Z + S, 2) @ block["W_1"] + block["b_1"]
        return S + np.where(H.real > 0, H, 0) @ block["W_2"] + block["b_2"]

    slope = np.sum(branch(I["X"] + 1e-40j * V).imag * G["Y"]) / 1e-40
    F, back = linearised(I["X"], **block)
    d = back(G["Y"])["X"]
    assert np.all(np.abs(F - branch(I["X"]).real) <= bounds("rk1", I)["Y"])
    assert abs(np.sum(d * V) - slope) <= np.sum(np.abs(V) * bounds("rk1", I, G)["X"])
    assert abs(slope) > 1e-2


# --- orders ----------------------------------------------------------------------------------------------------------


SERIES, H, F0, F1, F2, F3, F4, G1, G2 = ring("h, f:5, g1, g2", QQ)  # f and its derivatives at y = 0; two weights


def right(y):
    """f(y), as far as h^5."""
    total, power = SERIES(0), SERIES(1)
    for k, f in enumerate((F0, F1, F2, F3, F4)):
        total += f * power / math.factorial(k)
        power = cut(power * y)
    return cut(total)


def cut(y):
    return SERIES.from_dict({powers: c for powers, c in y.items() if powers[0] <= 5})


def flow():
    """The solution of y' = f(y), y(0) = 0 at time h, by Picard's iteration."""
    y = SERIES(0)
    for _ in range(6):
        y = cut(SERIES.from_dict({(n + 1, *rest): c / (n + 1) for (n, *rest), c in right(y).items()}))
    return y


def local_error(method):
    """(order p, the coefficient of h^(p + 1) in the solution minus the step)."""
    error = flow() - cut(method(lambda y: cut(H * right(y)), SERIES(0)))
    least = min(powers[0] for powers in error)
    leading = SERIES.from_dict({(0, *rest): c for (n, *rest), c in error.items() if n == least})
    return least - 1, leading


@pytest.mark.parametrize(("name", "order"), [("rk1", 1), ("rk2", 2), ("rk3", 3), ("rk4", 4)])
def test_order_of_a_method_by_its_series(name, order):
    assert local_error(PLAIN[name][0])[0] == order


def test_released_third_order_method_is_of_order_two():
    """F_3 at y + F_2, where y - F_1 + 2 F_2 is meant: sum b_i a_ij c_j = 1/12, and not 1/6."""
    assert local_error(released_rk3) == (2, F0 * F1**2 / 12)


def test_a_gate_has_order_one_unless_it_is_halfway():
    """Claim O2 is false: weights g and 1 - g of Heun's slopes are consistent, and no more."""

    def weighed(g):
        return lambda F, y: step(Tableau(HEUN.a, (g, 1 - g)), F, y)

    assert local_error(weighed(G1)) == (1, F0 * F1 * (2 * G1 - 1) / 2)
    assert local_error(weighed(SERIES(1) / 2))[0] == 2


def test_learned_coefficients_start_at_order_zero():
    """gamma = (1, 1), as the released code fills them: the step is twice as long as the layer's."""
    assert local_error(lambda F, y: rk2_learned(F, y, 1, 1)) == (0, -F0)
    assert local_error(lambda F, y: rk2_learned(F, y, G1, G2)) == (0, F0 * (1 - G1 - G2))


def trees(method):
    """Butcher's conditions of order 1 to 4, tree by tree: (order, weight of the tree, 1 / its density)."""
    b, n = method.b, len(method.b)
    a = [[*row, *[Fraction(0)] * (n - len(row))] for row in method.a]
    c = [sum(row) for row in a]

    def through(x):
        return [sum(a[i][j] * x[j] for j in range(n)) for i in range(n)]

    def total(*factors):
        return sum(b[i] * math.prod(x[i] for x in factors) for i in range(n))

    squares, ac = [x * x for x in c], through(c)
    return (
        (1, total(), 1), (2, total(c), 2), (3, total(c, c), 3), (3, total(ac), 6), (4, total(c, c, c), 4),
        (4, total(c, ac), 8), (4, total(through(squares)), 12), (4, total(through(ac)), 24),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "order"), [("rk1", 1), ("rk2", 2), ("rk3", 3), ("rk4", 4)])
def test_order_of_a_method_by_its_trees(name, order):
    """Also for systems, where two trees of order four are no longer one."""
    met = {p: [w * density == 1 for q, w, density in trees(PLAIN[name][1]) if q == p] for p in range(1, 5)}
    assert all(all(met[p]) for p in range(1, order + 1))
    assert order == 4 or not all(met[order + 1])


@pytest.mark.parametrize("name", PLAIN)
def test_nested_is_the_tableau_exactly(name):
    """Over the fractions, on a system of two equations."""
    method, tableau = PLAIN[name]
    y = np.array([Fraction(1, 3), Fraction(-2, 5)], dtype=object)
    z = method(lambda y: np.array([y[1] + y[0] * y[1], -y[0] + y[1] ** 2 / 7]), y)
    assert np.array_equal(z, step(tableau, lambda y: np.array([y[1] + y[0] * y[1], -y[0] + y[1] ** 2 / 7]), y))


METHODS = {
    "rk1": (rk1, 1),
    "rk2": (rk2, 2),
    "rk3": (rk3, 3),
    "rk4": (rk4, 4),
    "released rk3": (released_rk3, 2),
    "learned at (1, 1)": (lambda F, y: rk2_learned(F, y, 1.0, 1.0), 0),
    "learned at (1/2, 1/2)": (lambda F, y: rk2_learned(F, y, 0.5, 0.5), 2),
    "gate of 1/2": (lambda F, y: rk2_gated(F, y, np.zeros((4, 1)), np.zeros(())), 2),
    "gate of 0.6": (lambda F, y: rk2_gated(F, y, np.zeros((4, 1)), np.log(np.array(1.5))), 1),
    "gate that reads": (lambda F, y: rk2_gated(F, y, np.ones((4, 1)), np.log(np.array(1.5))), 1),
}


@pytest.mark.parametrize("name", METHODS)
def test_error_falls_with_the_order_of_the_method(name):
    """A pendulum swings for a time of one; n steps and 2 n steps differ by a factor 2^order in their error."""
    method, order = METHODS[name]

    def swung(method, n):
        y = np.array([[1.0, 0.25]])
        for _ in range(n):
            y = method(lambda y: np.stack([y[:, 1], -np.sin(y[:, 0])], axis=1) / n, y)
        return y

    truth = swung(rk4, 1024)
    errors = [np.linalg.norm(swung(method, n) - truth) for n in (64, 128)]
    assert abs(math.log2(errors[0] / errors[1]) - order) < 0.1


# --- what the coefficients do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_a_linear_equation_gets_its_stability_polynomial(name):
    """F(y) = z y gives 1 + z + .. + z^s / s!, s the number of slopes. Claim O1 needs small steps: at z = -4 Euler is
    nearer to exp(-4) = 0.018 than the methods above it, which grow where the solution decays."""
    method, tableau = PLAIN[name]
    evaluated = []

    def slope(y):
        evaluated.append(y)
        return z * y

    for z in (Fraction(-4), Fraction(1, 3), Fraction(2)):
        exact = sum(z**k / math.factorial(k) for k in range(len(tableau.b) + 1))
        assert method(slope, Fraction(1)) == step(tableau, slope, Fraction(1)) == exact
    assert len(evaluated) == 6 * len(tableau.b)  # claim O3: order and slopes agree up to four
    z = Fraction(-4)
    assert method(slope, Fraction(1)) == {"rk1": -3, "rk2": 5, "rk3": Fraction(-17, 3), "rk4": 5}[name]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_branch_tokens_pass(name):
    """Bitwise, forward and backward."""
    I, G = draw(name, 5, 4, 3, 2)
    silent = I | {n: 0 * I[n] for n in ("W_O", "W_2", "b_2")}
    for form in find(name).forms:
        assert np.array_equal(form.function(**silent), I["X"])
    assert np.array_equal(find(name).vjp(G, **silent)["X"], G["Y"])


def test_the_released_code_multiplies_what_should_pass():
    """It takes the whole layer for the branch: without a branch its steps are those of y' = y."""
    assert of_layer(rk2)(lambda y: 0 * y, Fraction(1)) == Fraction(5, 2)
    assert of_layer(rk4)(lambda y: 0 * y, Fraction(1)) == Fraction(65, 24)


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_branch_is_added_once(name):
    """Weights that sum to one add b_2, whatever they are; those of the learned method must be asked."""
    I, _ = draw(name, 5, 4, 3, 2)
    constant = I | {n: 0 * I[n] for n in ("W_O", "W_2")}
    total = I["gamma1"] + I["gamma2"] if name == "rk2_learned" else 1
    Y = find(name).forms[0].function(**constant)
    assert np.all(np.abs(Y - (I["X"] + total * I["b_2"])) <= bounds(name, constant)["Y"])


SPECIAL = {
    "a gate of 1/2": ("rk2_gated", {"W_g": np.zeros((8, 1)), "b_g": np.zeros(())}, "rk2"),
    "an open gate": ("rk2_gated", {"W_g": np.zeros((8, 1)), "b_g": np.array(800.0)}, "rk1"),
    "gamma = (1/2, 1/2)": ("rk2_learned", {"gamma1": np.array(0.5), "gamma2": np.array(0.5)}, "rk2"),
    "gamma = (1, 0)": ("rk2_learned", {"gamma1": np.array(1.0), "gamma2": np.array(0.0)}, "rk1"),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_weights_are_other_methods(case):
    name, weights, other = SPECIAL[case]
    I, G = draw(name, 5, 4, 3, 2)
    I |= weights
    plain = {"X": I["X"], **block_of(I)}
    Y = find(name).forms[0].function(**I)
    assert np.all(np.abs(Y - find(other).forms[0].function(**plain)) <= bounds(name, I)["Y"])
    got, want, bound = find(name).vjp(G, **I), find(other).vjp(G, **plain), bounds(name, I, G)
    assert all(np.all(np.abs(d - got[n]) <= bound[n]) for n, d in want.items())


@pytest.mark.parametrize("name", NAMES)
def test_an_encoder_sees_all_tokens_and_not_their_order(name):
    I, _ = draw(name, 5, 4, 3, 2)
    order, forward = np.array([3, 0, 4, 1, 2]), find(name).forms[0].function
    Y, bound = forward(**I), bounds(name, I)["Y"]
    assert np.all(np.abs(forward(**I | {"X": I["X"][order]}) - Y[order]) <= bound[order])
    changed = forward(**I | {"X": np.where(np.arange(5)[:, None] < 4, I["X"], 1 - I["X"])})
    assert np.all(np.abs(changed - Y) > 1e3 * bound)


def test_heads_that_do_not_divide_and_arguments_that_are_missing():
    I, G = draw("rk4", 5, 4, 3, 2)
    for form in (*find("rk4").forms, find("rk4").vjp):
        call = getattr(form, "function", lambda **I: find("rk4").vjp(G, **I))
        with pytest.raises(ValueError, match="X has 4 channels, which 3 heads do not divide"):
            call(**I | {"heads": 3})
        with pytest.raises(ValueError, match="heads is 0; it must be at least 1"):
            call(**I | {"heads": 0})
        with pytest.raises(TypeError, match="missing a required argument: 'b_2'"):
            call(**{n: x for n, x in I.items() if n != "b_2"})
    I, _ = draw("rk2_gated", 5, 4, 3, 2)
    with pytest.raises(ValueError, match=r"W_g has shape \(4, 1\): axis 2E is 4, but the other arguments make it 8"):
        find("rk2_gated").forms[0].function(**I | {"W_g": I["W_g"][:4]})


# --- the module in PyTorch -------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def made(torch, method="rk2", **options):
    from mixproof.verify.subjects.torch.ode_transformer import ODETransformerBlock

    torch.manual_seed(0)
    return ODETransformerBlock(**{"d_model": 6, "heads": 3, "method": method, "hidden": 5} | options)


def tokens(torch, dtype=None):
    return torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1)).to(dtype or torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_module_is_the_function_and_its_parameters_are_those_of_the_operator(torch, name):
    from mixproof.verify.subjects.torch import ode_transformer

    layer, X = made(torch, name, eps=0.25), tokens(torch)
    parameters = dict(layer.named_parameters())
    assert set(parameters) == {x.name for x in find(name).inputs if x.role == "parameter"}
    Y = layer(X)
    assert torch.equal(Y, getattr(ode_transformer, name)(X, **parameters, heads=3, eps=0.25))
    for changed in (made(torch, name), made(torch, name, eps=0.25, heads=2)):
        assert not torch.equal(changed(X), Y)
    other = made(torch, name, eps=0.25)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(X), Y)
    Y.square().sum().backward()
    assert all(torch.count_nonzero(p.grad) == p.numel() for n, p in parameters.items() if n != "b_1")


def test_a_new_block(torch):
    """Norms without effect, weights in range, a learned method at (1, 1), a gate halfway: where it is Heun's."""
    layer = made(torch, "rk2_learned", hidden=None)
    assert layer.W_1.shape == (6, 24)
    for n, p in layer.named_parameters():
        if n.startswith("W_"):
            most = p.detach().abs().max()
            assert 0.8 / math.sqrt(len(p)) < most <= 1 / math.sqrt(len(p))
        else:
            assert torch.equal(p, torch.ones_like(p) if n.startswith("ga") else torch.zeros_like(p)), n
    gated, heun, X = made(torch, "rk2_gated").double(), made(torch).double(), tokens(torch, torch.float64)
    assert all(torch.equal(p, gated.get_parameter(n)) for n, p in heun.named_parameters())
    I = {n: p.detach().numpy() for n, p in gated.named_parameters()} | {"heads": 3, "eps": 1e-5}
    bound = np.stack([bounds("rk2_gated", I | {"X": x.numpy()})["Y"] for x in X])
    assert np.all(np.abs((gated(X) - heun(X)).detach().numpy()) <= bound)


def test_autocast_rounds_nothing_and_half_precision_is_computed_wide(torch):
    layer, X = made(torch, "rk4"), tokens(torch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Y = layer(X)
    assert torch.equal(Y, layer(X))
    half = layer(X.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, layer(X.bfloat16().float()).bfloat16())


def test_options_and_arguments_of_the_module_that_make_no_sense(torch):
    from mixproof.verify.subjects.torch import ode_transformer

    for options, message in (
        ({"heads": 4}, "heads is 4; it must divide the 6 channels"),
        ({"d_model": 0}, "d_model is 0; it must be at least 1"),
        ({"hidden": 0}, "hidden is 0; it must be at least 1"),
        ({"method": "rk5"}, "method is 'rk5'; expected one of rk1, rk2, rk2_learned, rk2_gated, rk3, rk4"),
        ({"eps": -1.0}, "eps is -1.0; it must be finite and not negative"),
    ):
        with pytest.raises(ValueError, match=message):
            made(torch, **options)
    layer, X = made(torch, "rk2_gated"), tokens(torch)
    parameters = dict(layer.named_parameters())
    for change, message in (
        ({"X": X[0]}, r"X has shape \(7, 6\); expected axes \(B, T, E\)"),
        ({"X": X[..., :3]}, r"gain1 has shape \(6,\): axis E is 6, but X has E=3"),
        ({"W_2": layer.W_1}, r"W_2 has shape \(6, 5\): axis F is 6, but W_1 has F=5"),
        ({"W_g": layer.W_g[:6]}, r"W_g has shape \(6, 1\); expected \(12, 1\)"),
        ({"b_2": layer.b_2 * math.nan}, "b_2 contains NaN"),
        ({"heads": 4}, "heads is 4; it must divide the 6 channels"),
    ):
        with pytest.raises(ValueError, match=message):
            ode_transformer.rk2_gated(**{"X": X, "heads": 2} | parameters | change)
