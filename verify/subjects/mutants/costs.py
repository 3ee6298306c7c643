"""Right, but not at the price that is declared: what autograd keeps, or what is computed, grows with the square of the
number of tokens. In PyTorch, which is imported when they run."""

from __future__ import annotations

from typing import Any

from mixproof.verify.subjects.mutants import Mutant

CHUNK = 8
AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "gamma": "H", "S0": "BHKV"}


def powers_of_all(q: Any, k: Any, v: Any, gamma: Any, scale: float = 1.0, S0: Any = None, chunk: int = CHUNK) -> Any:
    """Chunk by chunk, but from a mask of all pairs of tokens, which backward needs."""
    from mixproof.verify.subjects.torch import _linear as linear

    def form(q: Any, k: Any, v: Any, gamma: Any, S: Any, scale: float) -> Any:
        T = q.shape[2]
        return linear.chunkwise(q, k, v, linear.constant(gamma, T, T), S, scale, chunk)

    return linear.run(form, AXES, (q, k, v, gamma, S0), scale)


def one_chunk(q: Any, k: Any, v: Any, gamma: Any, scale: float = 1.0, S0: Any = None, chunk: int = CHUNK) -> Any:
    """All tokens as one chunk; backward computes the mask of all pairs anew, from the inputs."""
    from mixproof.verify.subjects.torch import _linear as linear

    def form(q: Any, k: Any, v: Any, gamma: Any, S: Any, scale: float) -> Any:
        T = q.shape[2]
        return linear.recompute(q, k, v, linear.spread(gamma, T), S, scale, max(T, 1))

    return linear.run(form, AXES, (q, k, v, gamma, S0), scale)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "powers_of_all", "retention", "a mask of all pairs of tokens kept for backward", ("saved_memory",),
        batched=powers_of_all, framework="torch",
    ),
    Mutant(
        "one_chunk", "retention", "one chunk for all tokens, whatever its size", ("operations",), batched=one_chunk,
        framework="torch",
    ),
)  # fmt: skip
