"""Where the obvious formula for GMA goes wrong and the reference does not; and what bad input is answered with.

The wrong formulas are evaluated in float32 where that needs milder numbers; the reference then gets float32 too.
"""

import math

import numpy as np
import pytest

from mixproof.reference import gma, operator
from mixproof.reference.primitives import softmax, softplus

F = np.float32
UNIT_VARIANCE = math.log(math.e - 1)  # softplus of it is 1


def omega_of(var, dtype=np.float64):
    return np.log(np.expm1(np.asarray(var, dtype=np.float64))).astype(dtype)


def close(got, want, ulps):
    """|got - want| <= ulps * eps * |want| in the precision of got."""
    got, want = np.asarray(got), np.asarray(want, dtype=np.float64)
    assert np.all(np.abs(got - want) <= ulps * np.finfo(got.dtype).eps * np.abs(want)), got


def density_form(x, mu, var):
    """(2) and (3) as they stand, equal priors."""
    E = x[:, None] - mu
    with np.errstate(all="ignore"):
        tau = np.asarray(2 * np.pi, x.dtype)
        N = np.exp(-np.sum(E * E / var, axis=2) / 2) / np.sqrt(np.prod(tau * var, axis=1))
        return N / np.sum(N, axis=1, keepdims=True)


@pytest.mark.parametrize(("dtype", "x"), [(np.float32, 20.0), (np.float64, 60.0)])
def test_h1_densities_vanish_far_from_every_mean(dtype, x):
    tokens, mu, omega = np.array([[x]], dtype), np.array([[0], [1]], dtype), np.full((2, 1), UNIT_VARIANCE, dtype)
    assert np.all(np.isnan(density_form(tokens, mu, np.ones((2, 1), dtype))))
    small = 1 / (1 + math.exp(x - 0.5))
    # the logit gap x - 1/2 is a difference of x^2 / 2, whose rounding exp takes as a relative error
    close(gma.responsibilities(tokens, mu, omega, np.zeros(2, dtype)), [[small, 1 - small]], 8 * x * x)


def test_h2_determinants_overflow():
    d = 64
    mu, var = np.stack([np.zeros(d, F), np.full(d, 0.01, F)]), np.full((2, d), 0.01, F)
    assert np.all(np.isnan(density_form(np.zeros((1, d), F), mu, var)))
    got = gma.responsibilities(np.zeros((1, d), F), mu, omega_of(var, F), np.zeros(2, F))
    want = 1 / (1 + math.exp(-0.32))
    close(got, [[want, 1 - want]], 8 * d * abs(math.log(0.01)))


def test_h2b_logarithm_of_a_product():
    var = np.full((1, 64), 0.1, F)
    with np.errstate(divide="ignore"):
        assert np.log(np.prod(var)) == -np.inf
    s = gma.logits(np.zeros((1, 64), F), np.zeros((1, 64), F), omega_of(var, F), np.zeros(1, F))
    close(s, [[32 * math.log(10)]], 64)


def test_h3_softplus():
    with np.errstate(over="ignore"):
        assert np.log(1 + np.exp(F(-18))) == 0
        assert np.log(1 + np.exp(F(89))) == np.inf
        assert np.log(1 + np.exp(-40.0)) == 0
    close(softplus(np.array([-18, 89], F)), [math.log1p(math.exp(-18)), 89], 4)
    close(softplus(np.array([-40.0, 710.0])), [math.exp(-40), 710], 4)


def test_h4_softplus_alone_is_no_floor():
    x, mu, omega, alpha = np.zeros((1, 1), F), np.zeros((2, 1), F), np.array([[-110], [0]], F), np.zeros(2, F)
    assert softplus(omega)[0, 0] == 0
    with pytest.raises(ValueError, match=r"omega is as low as -110.*floor v_min"):
        gma.responsibilities(x, mu, omega, alpha)
    floor = 1e-3
    want = 1 / (1 + math.sqrt(floor / (math.log(2) + floor)))
    close(gma.responsibilities(x, mu, omega, alpha, v_min=floor), [[want, 1 - want]], 32)


def test_h5_expanded_square_cancels():
    x, mu, var = np.array([[10000.75]], F), np.array([[10000], [10001]], F), F(0.25)
    expanded = (x * x - 2 * x @ mu.T + (mu * mu).T) / var
    assert np.max(np.abs(expanded - [[2.25, 0.25]])) > 30
    got = gma.responsibilities(x, mu, omega_of(np.full((2, 1), 0.25), F), np.zeros(2, F))
    close(got, [[1 / (1 + math.e), 1 / (1 + 1 / math.e)]], 32)


def test_h6_self_sensitivity_of_a_saturated_component():
    gamma = softmax(np.array([[20, 0]], F))
    assert np.all((gamma * (1 - gamma))[0, 0] == 0)
    J = gma.jacobian(gamma)
    want = math.exp(-20) / (1 + math.exp(-20)) ** 2
    close(np.diagonal(J[0]), [want, want], 64)
    close(J[0, 0, 1], -want, 64)


def test_h11_logarithm_of_the_prior():
    alpha = np.array([0, -120], F)
    with np.errstate(divide="ignore"):
        assert np.log(softmax(alpha))[1] == -np.inf
    s = gma.logits_as_printed(np.zeros((1, 1), F), np.zeros((2, 1), F), np.full((2, 1), UNIT_VARIANCE, F), alpha)
    close(s[0, 1] - s[0, 0], -120, 4)


def test_h15_huge_common_logit():
    def evaluate(dtype):
        omega = np.full((2, 1), UNIT_VARIANCE, dtype)
        return gma.responsibilities(np.array([[1e4]], dtype), np.array([[0], [1e-4]], dtype), omega, np.zeros(2, dtype))

    want = 1 / (1 + math.exp(-1))
    assert evaluate(F).tolist() == [[0.5, 0.5]]  # no float32 formula by absolute logits can tell them apart
    # x is 1, var within 4 eps of 1, so the logits x^2 / 2 = 5e7 carry 8 eps of themselves; mu^2 / 2 is 5e-9 of the gap
    close(evaluate(np.float64), [[1 - want, want]], 8 * 5e7 * 2 + 5e-9 / np.finfo(float).eps)


def test_h18_exponential_of_a_difference_to_logsumexp():
    for dtype, s in ((F, 5e7), (np.float64, 1e16)):
        alpha = np.array([s, s], dtype)
        lse = alpha[0] + np.log(np.sum(np.exp(alpha - alpha[0])))
        assert abs(np.sum(np.exp(alpha - lse)) - 1) > 0.3
        x = np.zeros((1, 1), dtype)
        gamma = gma.responsibilities(x, np.zeros((2, 1), dtype), np.full((2, 1), UNIT_VARIANCE, dtype), alpha)
        assert gamma.tolist() == [[0.5, 0.5]]


# --- bad input -------------------------------------------------------------------------------------------------------


def inputs():
    normal = np.random.default_rng(0).standard_normal
    T, K, R, V = 4, 3, 2, 5
    tokens = {"q": normal((T, R)), "k": normal((T, R)), "v": normal((T, V))}
    return tokens | {"mu": normal((K, R)), "omega": normal((K, R)), "alpha": normal(K), "eps": 1e-6, "v_min": 0.0}


BAD = [
    ({"k": np.zeros((5, 2))}, ValueError, r"k has shape \(5, 2\): axis T is 5"),
    ({"q": np.zeros((4, 3))}, ValueError, r"k has shape \(4, 2\): axis R is 2, but another argument has R=3"),
    ({"v": np.zeros(4)}, ValueError, r"v has shape \(4,\).*expects \(T, V\)"),
    ({"alpha": np.zeros(4)}, ValueError, r"alpha has shape \(4,\): axis K is 4"),
    ({"omega": np.zeros((2, 3))}, ValueError, "omega has shape"),
    ({"mu": np.zeros((0, 2)), "omega": np.zeros((0, 2)), "alpha": np.zeros(0)}, ValueError, "K = 0 components"),
    ({"eps": 0.0}, ValueError, "eps is 0.0; it must be > 0"),
    ({"eps": -1e-6}, ValueError, "eps is -1e-06"),
    ({"eps": math.nan}, ValueError, "eps is nan"),
    ({"v_min": -0.1}, ValueError, "v_min is -0.1; it must be >= 0"),
    ({"mu": np.full((3, 2), np.nan)}, ValueError, "mu contains NaN"),
    ({"omega": np.full((3, 2), np.nan)}, ValueError, "omega contains NaN"),
    ({"alpha": np.full(3, np.nan)}, ValueError, "alpha contains NaN"),
    ({"alpha": np.full(3, -np.inf)}, ValueError, "alpha is -inf for every component"),
    ({"q": np.zeros((4, 2), dtype=int)}, TypeError, "q is int64; gma.* expects a floating-point array"),
    ({"v": np.zeros((4, 5), dtype=bool)}, TypeError, "v is bool"),
    ({"alpha": [0.0, 0.0, 0.0]}, TypeError, "alpha is list"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[m for _, _, m in BAD])
@pytest.mark.parametrize("name", ["gma.bidirectional", "gma.causal"])
def test_bad_input_is_named(name, change, error, message):
    op = operator(name)
    for function in (form.function for form in op.forms):
        with pytest.raises(error, match=message):
            function(**(inputs() | change))
    with pytest.raises(error, match=message):
        op.vjp({"O": np.zeros((4, 5))}, **(inputs() | change))


def test_bad_state_chunk_and_cotangent():
    with pytest.raises(ValueError, match=r"Z0 has shape \(4,\): axis K is 4"):
        gma.chunkwise(**inputs(), S0=np.zeros((3, 5)), Z0=np.zeros(4))
    with pytest.raises(ValueError, match="chunk is 0"):
        gma.chunkwise(**inputs(), chunk=0)
    with pytest.raises(ValueError, match=r"cotangent of O has shape \(4, 1\); O has shape \(4, 5\)"):
        gma.bidirectional_vjp({"O": np.zeros((4, 1))}, **inputs())
    with pytest.raises(ValueError, match="cotangents names 'S'; the outputs are O"):
        gma.bidirectional_vjp({"O": np.zeros((4, 5)), "S": np.zeros((3, 5))}, **inputs())
    with pytest.raises(ValueError, match=r"k has shape \(4, 3\)"):
        gma.cross(**(inputs() | {"k": np.zeros((4, 3))}))


def test_good_input_at_the_edge_passes():
    I = inputs()
    assert gma.cross(**(I | {"k": I["k"][:3], "v": I["v"][:3]})).shape == (4, 5)
    assert np.all(gma.responsibilities(I["q"], I["mu"], I["omega"], np.array([0, 0, -np.inf]))[:, 2] == 0)
    assert np.all(np.isnan(gma.bidirectional(**(I | {"v": np.full((4, 5), np.nan)}))))  # a token may hold anything
    assert gma.bidirectional(**(I | {"omega": np.full((3, 2), -800.0), "v_min": 0.1})).shape == (4, 5)
