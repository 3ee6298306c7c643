"""Operators across processes: what ranks compute together is judged as if one had computed it, by the same laws and
within the same bounds; mistakes between ranks are seen by them; and a rank that fails ends the call, not the caller."""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("torch")

import rank_jobs as jobs
import torch

from mixproof.verify import judge as judging
from mixproof.verify.declare import ATTRIBUTE, implements
from mixproof.verify.judge import Profile, judge
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.torch import sharded
from mixproof.verify.subjects.torch.ranks import RankError, Ranks

if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

SHORT = Profile("short", 0, small=True)  # the short atlas of cases, no random ones


@pytest.fixture(scope="module")
def ranks():
    """`ranks(n)` are n processes, the same for all tests."""
    pools = {n: Ranks(n) for n in (2, 4)}
    yield pools.__getitem__
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True)
def _no_shrinking(monkeypatch):
    monkeypatch.setattr(judging, "SHRINK_SECONDS", 0.0)


# --- the whole from its parts ----------------------------------------------------------------------------------------


def cuts(n, ranks):
    """n as parts that grow with the rank: uneven, and empty where there is little."""
    edges = [n * r * r // ranks**2 for r in range(ranks + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def linear(ranks, change, function, q, k, v, decays, scale, S0, chunk):
    parts = [[x[:, c] if x.ndim > 1 else x for x in (q, k, v, decays)] for c in cuts(q.shape[1], ranks.count)]
    rest = [(scale, S0 if rank == 0 else None, chunk) for rank in range(ranks.count)]
    results = ranks(jobs.changed, [(change, function, *p, *r) for p, r in zip(parts, rest, strict=True)])
    return torch.cat([O for O, _ in results], dim=1), results[-1][1]


def retention(ranks, change):
    def whole(q, k, v, gamma, scale=1.0, S0=None, chunk=16):
        return linear(ranks, change, sharded.retention, q, k, v, gamma, scale, S0, chunk)

    return whole


def time_varying_tala(ranks, change):
    def whole(q, k, v, a, scale=1.0, S0=None, chunk=16):
        return linear(ranks, change, sharded.time_varying_tala, q, k, v, a, scale, S0, chunk)

    return whole


def gated_linear_attention(ranks, change):
    def whole(q, k, v, g, scale=1.0, S0=None, chunk=16):
        return linear(ranks, change, sharded.gated_linear_attention, q, k, v, g, scale, S0, chunk)

    return whole


def mlra(ranks, change):
    def whole(qc, qr, c, kr, gain, Uk, Uv, scale=None, base=10000.0, eps=1e-6, C0=None, Kr0=None, chunk=16):
        parts = [
            (qc, qr, c[:, :, b], kr, gain[b], Uk[b], Uv[b], scale, base, eps, C0 if C0 is None else C0[:, :, b], Kr0)
            for b in cuts(len(Uk), ranks.count)
        ]
        results = ranks(jobs.changed, [(change, sharded.mlra, *part, chunk) for part in parts])
        return results[-1][0], torch.cat([C for _, C, _ in results], dim=2), results[0][2]

    return whole


def cached_attention(ranks, change):
    def whole(q, k, v, scale=None, K0=None, V0=None):
        K, V = (y if x is None else torch.cat([x, y], dim=1) for x, y in ((K0, k), (V0, v)))
        parts = [(q, K[:, c], V[:, c], scale) for c in cuts(K.shape[1], ranks.count)]
        results = ranks(jobs.changed, [(change, sharded.cached_attention, *part) for part in parts])
        return results[1][0], K, V

    return whole


OPERATORS = {
    "retention": (retention, "B T H D"),
    "tala.time_varying": (time_varying_tala, "B T H D"),
    "gated_linear_attention.simple": (gated_linear_attention, "B T H D"),
    "mlra": (mlra, "B T D"),
    "softmax_attention.cached": (cached_attention, "B T D"),
}
LINEAR = tuple(OPERATORS)[:3]


def verdict(ranks, operator, law, change="none"):
    make, layout = OPERATORS[operator]
    function = implements(operator, name="sharded", layout=layout, dtypes=("float64", "float32"), chunk=16)(
        make(ranks, change)
    )
    return judge(Subject(getattr(function, ATTRIBUTE)[0], function), law, SHORT)


@pytest.mark.parametrize("law", ["forward", "split", "vjp"])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_together_are_the_operator(ranks, count, operator, law):
    found = verdict(ranks(count), operator, law)
    assert found.status == "pass", found.why + found.where
    assert found.cases > 3


@pytest.mark.parametrize(
    ("operator", "change", "law", "count"),
    [
        ("mlra", "not reduced", "forward", 2),
        ("mlra", "ranks for blocks", "forward", 2),
        ("mlra", "cotangents not added", "vjp", 2),
        *((operator, "not decayed", "forward", 4) for operator in LINEAR),
        *((operator, "wrong rank", "forward", 2) for operator in LINEAR),
        ("retention", "neighbour only", "forward", 4),
        ("retention", "inclusive", "forward", 2),
        ("retention", "not passed on", "forward", 2),
        ("retention", "cotangents not passed back", "vjp", 2),
        ("tala.time_varying", "not decayed", "vjp", 4),
        ("softmax_attention.cached", "not reduced", "forward", 2),
        ("softmax_attention.cached", "own maximum", "forward", 2),
        ("softmax_attention.cached", "own positions", "forward", 2),
        ("softmax_attention.cached", "cotangents not added", "vjp", 2),
    ],
)
def test_mistakes_between_ranks_are_seen(ranks, operator, change, law, count):
    found = verdict(ranks(count), operator, law, change)
    assert found.status == "fail"
    assert "raised" not in found.why, found.why
