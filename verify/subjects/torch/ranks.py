"""Processes that stand for the devices of one job: a sharded function runs on each of them, the caller sees one result.

How to have the gate judge a function of your own that runs under torch.distributed: declare an implementation that cuts
its inputs, runs the function on every rank, and joins what comes back. The gradients pass through it too.

    import torch
    from mixproof.verify import implements
    from mixproof.verify.subjects.torch.ranks import Ranks

    ranks = Ranks(4)  # the processes start with the first call

    def part(q, k, v, gamma, scale, S0):  # runs on each rank; the default process group is there
        ...
        return O, S

    @implements("retention", dtypes=("float64", "float32"))
    def mine(q, k, v, gamma, scale=1.0, S0=None):
        parts = zip(*(x.tensor_split(4, dim=1) for x in (q, k, v)))
        results = ranks(part, [(*x, gamma, scale, S0 if rank == 0 else None) for rank, x in enumerate(parts)])
        return torch.cat([O for O, _ in results], dim=1), results[-1][1]

in a file that `mixproof check FILE` is given. Gradients are those of all ranks as one function of all arguments: an
argument that several ranks are given gets the sum of theirs, so all-reduce adds up cotangents as it adds up values.

A rank that raises, dies, or does not answer in time ends the call with one RankError. All processes are then gone, and
the next call starts new ones. On Linux they are forked from a server that has imported PyTorch, so that is cheap.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mixproof.verify.subject import first_line

START = 120.0  # seconds to import PyTorch and to meet
GRACE = 0.5  # seconds for others to say what happened to them, once one has failed
_COLLECTIVES = "distributed_c10d.py"  # on the stack of a rank that waits for another one


class RankError(RuntimeError):
    """A rank raised, died, or gave no answer. The first line says which rank and what; what is known of where it was,
    a traceback or a stack, follows."""


class Ranks:
    """`count` processes joined by torch.distributed, whose default group they are.

    timeout     seconds that one call may take
    backend     of torch.distributed, with devices that it can reach

    Raises ValueError for a value outside these."""

    def __init__(self, count: int, timeout: float = 60.0, backend: str = "gloo") -> None:
        if count < 1:
            raise ValueError(f"count is {count}; there must be at least one rank")
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout}; it must be positive")
        self.count, self.timeout, self.backend = count, timeout, backend
        self._workers: list[_Worker] = []
        self._folder = Path()
        self._stop: Callable[[], Any] = lambda: None

    def __call__(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[tuple[Tensor, ...]]:
        """`function(*arguments[rank])` on each rank: a tuple of the tensors that it returned there. Differentiable.

        Raises what `run` raises."""
        tensors = [x for args in arguments for x in args if isinstance(x, Tensor)]
        counts: list[int] = []
        flat = iter(_Call.apply(self, function, arguments, counts, *tensors))
        return [tuple(next(flat) for _ in range(n)) for n in counts]

    def run(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]], timeout: float | None = None
    ) -> list[Any]:
        """`function(*arguments[rank])` on each rank, and what it returned there, whatever it is.

        Raises ValueError for arguments of too few or too many ranks, and for what another process cannot be sent;
        RankError for a rank that raised, died, or gave no answer in time: no process is left then."""
        if len(arguments) != self.count:
            raise ValueError(f"there are arguments for {len(arguments)} ranks; there are {self.count} ranks")
        try:
            jobs = [pickle.dumps((function, tuple(args))) for args in arguments]
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ValueError(
                f"{first_line(error)}: what runs on a rank is sent to another process; define it at the top of a module"
            ) from None
        if not self._workers:
            self._start()
        for worker, job in zip(self._workers, jobs, strict=True):
            worker.job.write_bytes(job)
            with contextlib.suppress(OSError):  # it died since; that is seen below
                worker.connection.send(())
        self._answered(self.timeout if timeout is None else timeout)
        return [pickle.loads(worker.job.read_bytes()) for worker in self._workers]

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        self._stop()
        self._workers = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes that there are now, by rank."""
        return [worker.process.pid for worker in self._workers]

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        context.set_forkserver_preload([__name__])
        folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._folder = Path(folder.name)
        self._workers = []
        self._stop = weakref.finalize(self, _end, self._workers, folder)
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            job = self._folder / f"job-{rank}"
            options = (rank, self.count, self.backend, self.timeout, self._folder, theirs)
            process = context.Process(target=_work, args=options, name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, job))
        self._answered(START)

    def _answered(self, seconds: float) -> None:
        """Wait until every rank has done what it was told. If one has not, or the wait is cut short, all are ended."""
        try:
            if failure := self._failure(seconds):
                raise RankError(failure)
        except BaseException:
            for worker in self._workers:
                worker.process.kill()
            self.close()
            raise

    def _failure(self, seconds: float) -> str:
        """Which rank did not do what it was told, and what is known of it; or nothing."""
        waiting, raised, dead = dict(enumerate(self._workers)), {}, []
        deadline = time.monotonic() + seconds
        while waiting:
            streams = [worker.connection for worker in waiting.values()]
            ready = wait(streams, max(0.0, deadline - time.monotonic()))  # of a dead process it is at its end
            if not ready:
                break
            for rank, worker in list(waiting.items()):
                if worker.connection in ready:
                    del waiting[rank]
                    try:
                        if text := worker.connection.recv():
                            raised[rank] = text
                    except (EOFError, OSError):
                        dead.append(rank)
            if raised or dead:
                deadline = min(deadline, time.monotonic() + GRACE)
        if dead:  # others may have raised for the loss of it
            return self._death(dead[0])
        for rank, text in raised.items():  # the first one
            return f"rank {rank} of {self.count} raised {text}"
        return self._silence(list(waiting), seconds) if waiting else ""

    def _death(self, rank: int) -> str:
        process = self._workers[rank].process
        process.join(GRACE)
        code = process.exitcode
        how = f"was killed by signal {-code}, {signal.strsignal(-code)}" if code is not None and code < 0 else "ended"
        return f"rank {rank} of {self.count} {how} (exit code {code}){_indented(self._stack(rank))}"

    def _silence(self, ranks: list[int], seconds: float) -> str:
        """Named are those that wait for nobody; then where each of them is."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 4 * GRACE
        while time.monotonic() < deadline and not all(map(self._stack, ranks)):
            time.sleep(GRACE / 5)
        time.sleep(GRACE / 5)  # to write it to its end
        stacks = {rank: self._stack(rank) for rank in ranks}
        guilty = [rank for rank, stack in stacks.items() if _COLLECTIVES not in stack] or ranks
        named = f"rank{'s' * (len(guilty) > 1)} {', '.join(map(str, guilty))} of {self.count}"
        where = {rank: stack or "stopped, or busy outside Python" for rank, stack in stacks.items()}
        told = "".join(f"\nrank {rank}:{_indented(text)}" for rank, text in where.items())
        return f"{named} gave no answer within {seconds:g} s{told}"

    def _stack(self, rank: int) -> str:
        """What a rank wrote of where it was, innermost first, as far as this module."""
        path = self._folder / f"stack-{rank}"
        return path.read_text().split(f'\n  File "{__file__}"')[0].strip() if path.exists() else ""


class _Worker(NamedTuple):
    """`job` is the file in which a call lies, and then what it returned: the connection holds short words only, so
    that nobody waits for a process that does not read."""

    process: Any
    connection: Connection
    job: Path


def _end(workers: list[_Worker], folder: tempfile.TemporaryDirectory[str]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.process.join(GRACE)
        worker.process.kill()
        worker.process.join()
        worker.process.close()
    folder.cleanup()


def _indented(text: str) -> str:
    return "".join(f"\n  {line}" for line in text.splitlines())


# --- what a rank does ------------------------------------------------------------------------------------------------


def _work(rank: int, count: int, backend: str, seconds: float, folder: Path, connection: Connection) -> None:
    """Meet the others, then run what is in the file of jobs, whenever there is word of it."""
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):  # nobody listens any more
        place = (folder / "store").as_uri()
        limit = timedelta(seconds=START + seconds)  # for ranks whose caller is gone; any other finds out before
        connection.send(_attempted(lambda: dist.init_process_group(backend, place, limit, count, rank)))
        while True:
            connection.recv()
            connection.send(_attempted(lambda: _done(folder / f"job-{rank}")))


def _attempted(step: Callable[[], Any]) -> str:
    """What a step raised and where, or nothing."""
    try:
        step()
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        return f"{first_line(error)}\n\n{''.join(traceback.format_exception(error.with_traceback(trace)))}"
    return ""


def _done(job: Path) -> None:
    function, arguments = pickle.loads(job.read_bytes())
    job.write_bytes(pickle.dumps(function(*arguments)))


# --- gradients -------------------------------------------------------------------------------------------------------


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ranks, function, arguments, counts, *tensors):
        ctx.ranks, ctx.function = ranks, function
        ctx.arguments = [[x.detach().clone() if isinstance(x, Tensor) else x for x in args] for args in arguments]
        results = ranks.run(_outputs, [(function, args) for args in ctx.arguments])
        ctx.counts = [len(ys) for ys in results]
        counts.extend(ctx.counts)
        return tuple(y for ys in results for y in ys)

    @staticmethod
    def backward(ctx, *cotangents):
        flat = iter(cotangents)
        upstream = [[next(flat) for _ in range(n)] for n in ctx.counts]
        jobs = [(ctx.function, args, up) for args, up in zip(ctx.arguments, upstream, strict=True)]
        return None, None, None, None, *(g for gs in ctx.ranks.run(_gradients, jobs) for g in gs)


def _outputs(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return _tuple(function(*arguments))


def _gradients(function: Callable[..., Any], arguments: Sequence[Any], cotangents: list[Tensor]) -> list[Tensor | None]:
    """Of sum <output, cotangent> for every tensor. All tensors are leaves on all ranks: backwards they meet again."""
    leaves = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    terms = [(y * c).sum() for y, c in zip(_tuple(function(*leaves)), cotangents, strict=True) if y.requires_grad]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    wanted = [x for x in tensors if x.requires_grad]
    found = iter(torch.autograd.grad(terms, wanted, allow_unused=True) if terms else [None] * len(wanted))
    return [next(found) if x.requires_grad else None for x in tensors]


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)
