"""What the ranks of test_sharded.py run: the sharded functions as they are or with one mistake, and ways to fail."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist

from mixproof.verify.subjects.torch import sharded

before, gathered, agreed, hidden = sharded.before, sharded.gathered, sharded.agreed, sharded.hidden
all_reduce = dist.all_reduce


def changed(change, function, *arguments):
    with MISTAKES[change]():
        return function(*arguments)


def instead(name, function):
    return lambda: patch.object(sharded, name, function)


def inclusive(A, U, differentiable, group):
    return A * before(A, U, differentiable, group) + U


def ranks_for_blocks(*arguments):
    blocks, differentiable = agreed(*arguments)
    return [1 for _ in blocks], differentiable


def own_maximum(x, op=dist.ReduceOp.SUM, group=None):
    return all_reduce(x, op, group) if op == dist.ReduceOp.SUM else None


class NotAdded(sharded._Added):
    @staticmethod
    def backward(ctx, *cotangents):
        return cotangents[0], None


class NotPassedBack(sharded._Before):
    @staticmethod
    def backward(ctx, *cotangents):
        return None, 0 * cotangents[0], None


MISTAKES = {
    "none": nullcontext,
    "not reduced": instead("added", lambda Z, differentiable, group: Z),
    "ranks for blocks": instead("agreed", ranks_for_blocks),
    "not decayed": instead("before", lambda A, U, *rest: before(torch.ones_like(A), U, *rest)),
    "neighbour only": instead("before", lambda A, U, *rest: before(torch.zeros_like(A), U, *rest)),
    "wrong rank": instead("gathered", lambda x, group: (g := gathered(x, group))[-1:] + g[:-1]),
    "inclusive": instead("before", inclusive),
    "not passed on": instead("before", lambda A, U, *rest: torch.zeros_like(U)),
    "own maximum": lambda: patch.object(dist, "all_reduce", own_maximum),
    "own positions": instead("hidden", lambda Q, keys, *rest: hidden(Q, range(len(keys)), *rest)),
    "cotangents not added": instead("_Added", NotAdded),
    "cotangents not passed back": instead("_Before", NotPassedBack),
}


def who():
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def outcome(function, arguments):
    """What a rank raised for its arguments, as text."""
    try:
        with torch.set_grad_enabled(arguments.pop("grad", True)):
            return function(**arguments)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def in_group(function, arguments, groups):
    """On every rank, or with the ranks in turn in one of some groups."""
    turns = [range(turn, dist.get_world_size(), groups) for turn in range(groups or 0)]
    made = [dist.new_group(list(turn)) for turn in turns]
    results = function(**arguments, group=made[dist.get_rank() % groups] if groups else None)
    return results if isinstance(results, tuple) else (results,)


def fail(how, guilty):
    """One rank fails; the others wait for it."""
    if dist.get_rank() == guilty:
        WAYS[how]()
    dist.all_reduce(torch.ones(3))


def raises():
    raise ValueError("the sky fell")


def leaves():
    raise SystemExit(4)


WAYS = {
    "raises": raises,
    "leaves": leaves,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "ends": lambda: os._exit(3),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "sleeps": lambda: time.sleep(1000),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def gradients_of_some():
    """Of the last rank's values, which alone require any; the q, k and v of a rank are its number, from 1."""
    x = [torch.full((1, 2, 1, 1), 1.0 + dist.get_rank()) for _ in range(3)]
    x[2].requires_grad_(dist.get_rank() == dist.get_world_size() - 1)
    O, S = sharded.retention(*x, torch.full((1,), 0.5))
    (O.sum() + S.sum()).backward()
    return x[2].grad
