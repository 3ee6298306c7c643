"""Diagnostics of responsibilities: numbers worked by hand, the paper's own, and laws."""

import math

import numpy as np
import pytest

from mixproof.reference import diagnostics as d

EPS = np.finfo(float).eps


def draw(T, K, seed=0, sharpness=2.0):
    e = np.exp(sharpness * np.random.default_rng([seed, T, K]).standard_normal((T, K)))
    return e / np.sum(e, axis=1, keepdims=True)


def labels(T, R, seed=0):
    return np.random.default_rng([seed, T, R]).integers(0, R, size=T)


def near(got, want, terms):
    """Sums of `terms` numbers of size at most 1 + |want|, one logarithm each."""
    assert abs(got - want) <= 8 * terms * EPS * (1 + abs(want)), got


# Two tokens, two components: (3/4, 1/4) and (1/4, 3/4), and a third token that is certain.
HAND = np.array([[0.75, 0.25], [0.25, 0.75], [1.0, 0.0]])


def test_worked_by_hand():
    assert np.all(np.abs(d.usage(HAND) - [2 / 3, 1 / 3]) <= EPS)
    near(d.usage_entropy(HAND), (math.log(3) - 2 / 3 * math.log(2)) / math.log(2), 2)
    h = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    near(d.token_entropy(HAND), 2 * h / 3, 6)
    near(d.mean_max(HAND), 2.5 / 3, 3)
    assert d.assignments(HAND).tolist() == [0, 1, 0]
    assert d.active_components(HAND) == 2
    assert d.assignments(np.array([[0.5, 0.5]])).tolist() == [0]  # a tie goes to the lowest index


def test_labels_worked_by_hand():
    z, c = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 1])
    assert d.contingency(z, c).tolist() == [[2, 1], [0, 3]]
    near(d.purity(z, c), 5 / 6, 4)
    near(d.entropy(c), math.log(3) - 2 / 3 * math.log(2), 2)
    information = 1 / 3 * math.log(2) + 1 / 6 * math.log(1 / 2) + 1 / 2 * math.log(3 / 2)
    near(d.mutual_information(z, c), information, 4)
    near(d.normalised_mutual_information(z, c), information / d.entropy(c), 4)


def test_extremes():
    certain = np.eye(4)[[0, 1, 2, 3, 3]]
    assert d.token_entropy(certain) == 0
    assert d.mean_max(certain) == 1
    assert d.usage_entropy(np.eye(4)[[2, 2]]) == 0
    near(d.usage_entropy(np.full((3, 4), 0.25)), 1, 4)
    near(d.token_entropy(np.full((3, 4), 0.25)), 1, 12)
    z = labels(50, 5)
    near(d.mutual_information(z, z), d.entropy(z), 25)
    near(d.normalised_mutual_information(z, z), 1, 25)
    assert d.purity(z, z) == 1
    product = np.arange(12)
    near(d.mutual_information(product // 4, product % 4), 0, 12)  # independent


def test_tables_4_and_6_of_the_paper():
    """Category counts add up, their entropy with MI 0.427 gives the printed NMI, the majority the printed baseline."""
    counts = [18757, 18359, 10306, 8714, 4208, 2451, 1481, 738, 334, 188]
    c = np.repeat(np.arange(10), counts)
    assert len(c) == 64 * 1024
    assert f"{d.entropy(c):.5f}" == "1.75276"
    assert f"{0.427 / d.entropy(c):.3f}" == "0.244"
    assert f"{d.purity(np.zeros(len(c), dtype=int), c):.3f}" == "0.286"


@pytest.mark.parametrize("seed", range(20))
def test_laws(seed):
    T, K, H = 30, 5, 4
    gammas = np.stack([draw(T, K, seed * H + h) for h in range(H)])
    gamma = d.head_average(gammas)
    slack = 8 * T * K * EPS
    assert d.token_entropy(gamma) <= d.usage_entropy(gamma) + slack  # Jensen
    log_K = math.log(K)
    of_heads = [d.usage_entropy(g) * log_K for g in gammas]
    assert d.usage_entropy(gamma) * log_K <= np.mean(of_heads) + math.log(H) + slack
    assert d.usage_entropy(gamma) * log_K >= np.mean(of_heads) - slack
    assert d.mean_max(gamma) >= max(d.mean_max(g) for g in gammas) / H - slack
    z, c = d.assignments(gamma), labels(T, 4, seed)
    information = d.mutual_information(z, c)
    assert -slack <= information <= min(d.entropy(z), d.entropy(c)) + slack
    assert d.purity(z, c) >= np.max(np.bincount(c)) / T - slack
    near(d.mutual_information(c, z), information, T)  # symmetric
    relabelled = np.random.default_rng(seed).permutation(K)[z]
    near(d.mutual_information(relabelled, c), information, T)
    assert d.purity(relabelled, c) == d.purity(z, c)
    assert d.active_components(gamma) == len(set(z.tolist()))


def test_permutation_baseline():
    z, c = labels(400, 6), labels(400, 4, seed=1)
    c = np.where(np.arange(400) < 200, z % 4, c)  # half of the tokens are associated
    base = d.permutation_baseline(z, c, np.random.default_rng(0), permutations=300)
    again = d.permutation_baseline(z, c, np.random.default_rng(0), permutations=300)
    assert base == again
    assert base != d.permutation_baseline(z, c, np.random.default_rng(1), permutations=300)
    exact = d.expected_mutual_information(z, c)
    sampled = base["mutual_information"]
    assert abs(sampled.mean - exact) <= 5 * sampled.std / math.sqrt(300)  # five standard errors, seed fixed
    assert d.mutual_information(z, c) > sampled.mean + 10 * sampled.std
    assert d.purity(z, c) > base["purity"].mean + 10 * base["purity"].std
    ratio = base["normalised_mutual_information"].mean / sampled.mean
    near(ratio, 1 / d.entropy(c), 400 * 300)  # shuffling keeps H(C)


def test_spread_of_two_permutations():
    z, c = labels(40, 3), labels(40, 3, seed=1)
    rng = np.random.default_rng(5)
    a, b = (d.purity(z, rng.permutation(c)) for _ in range(2))
    base = d.permutation_baseline(z, c, np.random.default_rng(5), permutations=2)["purity"]
    assert a != b
    near(base.mean, (a + b) / 2, 2)
    near(base.std, abs(a - b) / math.sqrt(2), 2)


def test_expected_mutual_information_by_enumeration():
    """Three tokens, z = (0, 0, 1), c = (0, 1, 1): of the three places of category 0, two leave I of the first kind."""
    z, c = np.array([0, 0, 1]), np.array([0, 1, 1])
    values = [d.mutual_information(z, np.array(p)) for p in ([0, 1, 1], [1, 0, 1], [1, 1, 0])]
    near(d.expected_mutual_information(z, c), sum(values) / 3, 64)
    assert d.expected_mutual_information(z, np.zeros(3, dtype=int)) == 0


def test_explained_variance():
    gamma = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    ratio = d.explained_variance(gamma)
    near(ratio[0], 1, 9)  # all points on one line
    gamma = draw(40, 6)
    ratio = d.explained_variance(gamma)
    near(np.sum(ratio), 1, 6)
    assert np.all(np.diff(ratio) <= 0)
    assert ratio[-1] <= (40 * 6 * EPS) ** 2 / np.sum((gamma - np.mean(gamma, axis=0)) ** 2)  # rank <= K - 1
    assert ratio[0] >= 1 / 5
    eigenvalues = np.linalg.eigvalsh(np.cov(gamma.T))[::-1]
    assert np.all(np.abs(ratio - eigenvalues / np.sum(eigenvalues)) <= 40 * 6 * EPS)


BAD = [
    (lambda: d.usage(np.ones(3)), ValueError, r"gamma has shape \(3,\); expected \(tokens, components\)"),
    (lambda: d.usage(np.ones((2, 0))), ValueError, r"gamma has shape \(2, 0\)"),
    (lambda: d.usage(np.zeros((0, 3))), ValueError, "gamma has no tokens"),
    (lambda: d.usage(np.array([[0.5, 0.5], [0.5, 0.49]])), ValueError, r"gamma\[1\] sums to 0.99; rows"),
    (lambda: d.assignments(np.array([[1.5, -0.5]])), ValueError, r"gamma\[0, 1\] is -0.5"),
    (lambda: d.assignments(np.array([[np.nan, 1.0]])), ValueError, r"gamma\[0, 0\] is nan"),
    (lambda: d.mean_max(np.array([[1, 0]])), TypeError, "gamma is int64; expected floating-point"),
    (lambda: d.usage_entropy(np.ones((2, 1))), ValueError, "gamma has one component"),
    (lambda: d.head_average(HAND), ValueError, r"gammas has shape \(3, 2\); expected \(heads, tokens, components\)"),
    (lambda: d.head_average(HAND[None] / 2), ValueError, r"gammas\[0\] sums to 0.5"),
    (lambda: d.purity(labels(3, 2), labels(4, 2)), ValueError, "c has 4 labels; z has 3"),
    (lambda: d.purity(np.ones((2, 2), dtype=int), labels(4, 2)), ValueError, r"z has shape \(2, 2\); expected one"),
    (lambda: d.purity(np.array([]), np.array([])), ValueError, "z and c have no tokens"),
    (lambda: d.purity(labels(2, 2), np.array([0.5, 1.0])), TypeError, "c is float64; labels are whole numbers"),
    (lambda: d.purity(np.array([0, -1]), labels(2, 2)), ValueError, "z contains -1"),
    (lambda: d.entropy(np.array([], dtype=int)), ValueError, "labels is empty"),
    (
        lambda: d.normalised_mutual_information(labels(5, 3), np.ones(5, dtype=int)),
        ValueError,
        "c has a single category",
    ),
    (
        lambda: d.permutation_baseline(labels(5, 3), labels(5, 2), 0),
        TypeError,
        "rng is int; expected a numpy Generator",
    ),
    (
        lambda: d.permutation_baseline(labels(5, 3), labels(5, 2), np.random.default_rng(0), permutations=1),
        ValueError,
        "permutations is 1",
    ),
    (lambda: d.explained_variance(HAND[:1]), ValueError, "gamma has 1 tokens"),
    (lambda: d.explained_variance(np.full((3, 2), 0.5)), ValueError, "equal rows"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_rows_of_lower_precision_pass():
    """Softmax in float32, and rounded to float16, both sum to one up to their own rounding."""
    gamma = draw(20, 128)
    for dtype in (np.float32, np.float16):
        assert len(d.assignments(gamma.astype(dtype))) == 20
    with pytest.raises(ValueError, match="sums to"):
        d.assignments(gamma.astype(np.float16).astype(np.float64))  # renormalise first: the dtype promises more
