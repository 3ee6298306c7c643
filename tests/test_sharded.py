"""Operators across processes: what ranks compute together is judged as if one had computed it, by the same laws and
within the same bounds; mistakes between ranks are seen by them; and a rank that fails ends the call, not the caller."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch._C._distributed_c10d", reason="PyTorch without torch.distributed", exc_type=ImportError)

import rank_jobs as jobs
import torch

from mixproof.verify import judge as judging
from mixproof.verify.case import atlas
from mixproof.verify.declare import ATTRIBUTE, implements
from mixproof.verify.judge import Profile, evaluate, judge
from mixproof.verify.laws import law as find_law
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.torch import sharded
from mixproof.verify.subjects.torch.ranks import RankError, Ranks

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
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


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


def subject(ranks, operator, change="none"):
    make, layout = OPERATORS[operator]
    declare = implements(operator, name="sharded", layout=layout, dtypes=("float64", "float32"), chunk=16)
    function = declare(make(ranks, change))
    return Subject(getattr(function, ATTRIBUTE)[0], function)


@pytest.mark.parametrize("law", ["forward", "vjp"])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_together_are_the_operator(ranks, count, operator, law):
    found = judge(subject(ranks(count), operator), law, SHORT)
    assert found.status == "pass", found.why + found.where
    assert found.cases >= 8


@pytest.mark.parametrize("operator", ["retention", "mlra", "softmax_attention.cached"])
def test_their_states_go_into_the_next_call(ranks, operator):
    across = subject(ranks(4), operator)
    case = next(c for c in atlas(across.domain()) if c.size("T") in (3, 4, 5) and c.state == "random")
    outcome = evaluate(across, find_law("split"), case)
    assert outcome.worst is not None
    assert not outcome.broken, outcome


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
    found = judge(subject(ranks(count), operator, change), law, SHORT)
    assert found.status == "fail"
    assert "raised" not in found.why, found.why


@pytest.mark.parametrize("name", ["retention", "mlra", "cached_attention"])
def test_a_group_is_as_good_as_all_ranks(ranks, name):
    """Two groups of every second rank, at the same time."""
    function = getattr(sharded, name)
    arguments = [arguments_of(function, rank) for rank in range(2)]
    want = ranks(2).run(jobs.in_group, [(function, x, None) for x in arguments])
    got = ranks(4).run(jobs.in_group, [(function, x, 2) for x in arguments for _ in range(2)])
    for rank, results in enumerate(got):
        assert all(map(torch.equal, results, want[rank // 2]))


# --- arguments -------------------------------------------------------------------------------------------------------


def arguments_of(function, rank):
    """Small ones of one rank, by name."""
    g = torch.Generator().manual_seed(rank)
    sizes = {
        sharded.retention: {"q": (1, 2, 1, 3), "k": (1, 2, 1, 3), "v": (1, 2, 1, 2), "gamma": (1,)},
        sharded.mlra: {
            "qc": (1, 2, 2, 3), "qr": (1, 2, 2, 2), "c": (1, 2, 1, 4), "kr": (1, 2, 2), "gain": (1, 4),
            "Uk": (1, 2, 3, 4), "Uv": (1, 2, 2, 4),
        },
        sharded.cached_attention: {"q": (1, 3, 1, 1, 2), "k": (1, 2, 1, 2), "v": (1, 2, 1, 2)},
    }[function]  # fmt: skip
    return {name: torch.rand(shape, generator=g) for name, shape in sizes.items()}


BAD = [
    ("retention", 1, {"k": (1, 2, 1, 4)}, r"rank 1: k has shape \(1, 2, 1, 4\): axis K is 4, but q has K=3"),
    ("retention", 0, {"v": (1, 3, 1, 2)}, r"rank 0: v has shape \(1, 3, 1, 2\): axis T is 3, but q has T=2"),
    ("retention", 1, {"v": (1, 2, 1, 5)}, "rank 1: v is B=1, H=1, V=5, but on rank 0 it is B=1, H=1, V=2"),
    ("retention", 1, {"S0": (1, 1, 3, 2)}, "rank 1: S0 is given; it is the state before all tokens"),
    ("retention", 1, {"q": "double"}, "rank 1: dtype of the arithmetic is torch.float64, but on rank 0 it is torch.f"),
    ("retention", 1, {"gamma": 0.5}, "rank 1: gamma is float; expected a floating-point tensor"),
    ("retention", 0, {"gamma": "nan"}, "rank 0: gamma contains NaN"),
    ("retention", 1, {"scale": 2.0}, "rank 1: scale is 2.0, but on rank 0 it is 1.0"),
    ("retention", 1, {"scale": float("nan")}, "rank 1: scale is nan; it must be finite"),
    ("retention", 0, {"chunk": 0}, "rank 0: chunk is 0; it must be at least 1"),
    ("retention", 1, {"grad": False}, "rank 1: grad mode is False, but on rank 0 it is True"),
    ("mlra", 1, {"Uk": (2, 2, 3, 4)}, "rank 1: Uk has shape .*: axis X is 2, but c has X=1"),
    ("mlra", 1, {"qc": (1, 1, 2, 3)}, "rank 1: qr has shape .*: axis T is 2, but qc has T=1"),
    ("mlra", 0, {"C0": (1, 5, 1, 4)}, "rank 0: C0 and Kr0 hold the same tokens"),
    ("mlra", 1, {"C0": (1, 5, 1, 4), "Kr0": (1, 5, 2)}, "rank 1: C0 is B=1, P=5, L=4, but on rank 0 it is None"),
    ("mlra", 1, {"eps": -1.0}, "rank 1: eps is -1.0; it must be finite and not negative"),
    ("mlra", 1, {"base": 2.0}, "rank 1: base is 2.0, but on rank 0 it is 10000.0"),
    ("cached_attention", 1, {"v": (1, 3, 1, 2)}, "rank 1: v has shape .*: axis S is 3, but k has S=2"),
    ("cached_attention", 0, {"q": (1, 2, 1, 1, 2)}, "rank 1: q is B=1, T=3, G=1, M=1, K=2, but on rank 0 .*T=2"),
    ("cached_attention", None, {"q": (1, 9, 1, 1, 2)}, "all ranks together have 4 keys, but q has 9 tokens"),
]


@pytest.mark.parametrize(("name", "guilty", "changes", "message"), BAD)
def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks, name, guilty, changes, message):
    function = getattr(sharded, name)
    calls = [(function, arguments_of(function, rank), {}) for rank in range(2)]
    for _, kept, changed in calls if guilty is None else calls[guilty : guilty + 1]:
        changed |= {n: torch.ones(x) if isinstance(x, tuple) else x for n, x in changes.items()}
        changed |= {n: kept[n].double() for n, x in changed.items() if x == "double"}
        changed |= {n: kept[n] * torch.nan for n, x in changed.items() if x == "nan"}
    pool = ranks(2)
    before = pool.run(jobs.who, [(), ()])
    for told in pool.run(jobs.outcome, [(f, {**kept, **changed}) for f, kept, changed in calls]):
        assert re.search(message, told), told
    assert pool.run(jobs.who, [(), ()]) == before


def test_a_rank_whose_tensors_need_no_gradient_takes_part_backwards(ranks):
    """v of the last of two ranks, which reads it twice: its tokens n = 1, 2 give o_n = 2 S_n 2, and all of it S."""
    first, last = ranks(2).run(jobs.gradients_of_some, [(), ()])
    assert first is None
    # q k = 4, k = 2:  dv_1 = q k (1 + gamma) + k gamma,  dv_2 = q k + k
    assert last.flatten().tolist() == [4 * 1.5 + 2 * 0.5, 4 + 2]


# --- ranks that fail -------------------------------------------------------------------------------------------------

FAILURES = [
    ("raises", 2, r"\Arank 1 of 2 raised ValueError: the sky fell\n(.|\n)*in raises"),
    ("raises", 4, r"\Arank 3 of 4 raised ValueError: the sky fell\n(.|\n)*in raises"),
    ("leaves", 2, r"\Arank 1 of 2 raised SystemExit: 4\n(.|\n)*in leaves"),
    ("is killed", 2, r"\Arank 1 of 2 was killed by signal 9, Killed.* \(exit code -9\)\Z"),
    ("is killed", 4, r"\Arank 3 of 4 was killed by signal 9, Killed.* \(exit code -9\)\Z"),
    ("ends", 2, r"\Arank 1 of 2 ended \(exit code 3\)\Z"),
    ("crashes", 2, r"\Arank 1 of 2 was killed by signal 11, .* \(exit code -11\)\n(.|\n)*in fail"),
    (
        "sleeps",
        4,
        r"\Arank 3 of 4 gave no answer within 2 s\nrank 0:\n(.|\n)*in all_reduce\n(.|\n)*3:\n.*\n.*jobs",
    ),
    ("is stopped", 2, r"\Arank 1 of 2 gave no answer within 2 s\n(.|\n)*\nrank 1:\n  stopped, or busy outside"),
]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(("how", "count", "message"), FAILURES, ids=[f"{how}-{count}" for how, count, _ in FAILURES])
def test_a_rank_that_fails_ends_the_call_and_leaves_no_process(ranks, how, count, message):
    pool = ranks(count)
    pool.run(jobs.who, [()] * count)
    pids, start = pool.pids, time.monotonic()
    with pytest.raises(RankError) as error:
        pool.run(jobs.fail, [(how, count - 1)] * count, timeout=2 if "answer" in message else 60)
    assert time.monotonic() - start < 10
    assert re.search(message, str(error.value)), error.value
    assert len(pids) == count
    assert all(map(gone, pids))
    assert pool.pids == []
    again = pool.run(jobs.who, [()] * count)  # new ones
    assert [(rank, size) for rank, size, _ in again] == [(rank, count) for rank in range(count)]
    assert [pid for *_, pid in again] == pool.pids


def test_a_rank_that_died_between_calls_is_found_by_the_next(ranks):
    pool = ranks(2)
    pool.run(jobs.who, [(), ()])
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0 of 2 was killed by signal 9"):
        pool.run(jobs.who, [(), ()])
    assert len(pool.run(jobs.who, [(), ()])) == 2


def test_a_rank_that_fails_is_a_broken_law(ranks):
    """The gate goes on, and says which rank."""

    @implements("retention", name="fails", layout="B T H D", dtypes=("float64",))
    def fails(q, k, v, gamma, scale=1.0, S0=None):
        return ranks(2)(jobs.fail, [("raises", 1)] * 2)[0]

    found = judge(Subject(getattr(fails, ATTRIBUTE)[0], fails), "forward", SHORT)
    assert found.status == "fail"
    assert "RankError: rank 1 of 2 raised ValueError: the sky fell" in found.why


def test_closed_ranks_are_gone_and_start_again():
    with Ranks(2) as pool:
        pool.run(jobs.who, [(), ()])
        pids = pool.pids
    assert all(map(gone, pids))
    assert len(pool.run(jobs.who, [(), ()])) == 2
    pids = pool.pids
    del pool
    gc.collect()
    assert all(map(gone, pids))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: Ranks(0), "count is 0; there must be at least one rank"),
        (lambda pool: Ranks(2, timeout=0), "timeout is 0; it must be positive"),
        (lambda pool: pool.run(jobs.who, [()]), "arguments for 1 ranks; there are 2 ranks"),
        (lambda pool: pool.run(lambda: 0, [(), ()]), "define it at the top of a module"),
        (lambda pool: pool.run(jobs.who, [(lambda: 0,), ()]), "define it at the top of a module"),
    ],
)
def test_ranks_say_what_they_cannot_do(ranks, call, message):
    with pytest.raises(ValueError, match=message):
        call(ranks(2))
