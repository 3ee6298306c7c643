"""What MixFormer costs: operations, state, storage, parameters. Counts, not measurements.

Source: MixFormer paper, section 4.6, equation (21), sections 5.1 and 5.3, Tables 2 and 4. `*_as_printed` are the
paper's expressions; the function of the same name without the suffix is what the equations need. Sizes are whole
numbers:

    tokens N     d_model d     heads H of d_head = d / H channels     experts k     d_ff d'

An operation is a multiplication, with the addition that may follow it: so (21) counts its projections. States and
storage are counted in numbers, not bytes, for one layer and one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

from .cost import check_sizes, projections

ADAM_BYTES = 16  # a parameter: weight and gradient in 16 bits, master weight and two moments in 32


# --- operations of one layer -----------------------------------------------------------------------------------------


def total_as_printed(tokens: int, d_model: int, experts: int, d_ff: int) -> int:
    """4 N d^2 + N d^2 + N k + 2 d d': projections, TALA, memory experts, and the FFN of a single token.  (21)"""
    check_sizes(tokens=tokens, d_model=d_model, experts=experts, d_ff=d_ff)
    return 5 * tokens * d_model**2 + tokens * experts + 2 * d_model * d_ff


def total(tokens: int, d_model: int, heads: int, experts: int, d_ff: int) -> int:
    """4 N d^2 + 2 N d d' and, for the mixing, TALA, or memory experts if there are several."""
    mixing = tala(tokens, d_model, heads) if experts == 1 else mome(tokens, d_model, heads, experts)
    return tokens * projections(d_model) + mixing + ffn(tokens, d_model, d_ff)


def tala_as_printed(tokens: int, d_model: int) -> int:
    """N d^2.  (21)"""
    check_sizes(tokens=tokens, d_model=d_model)
    return tokens * d_model**2


def tala(tokens: int, d_model: int, heads: int) -> int:
    """3 N d d_head: each token decays, updates and reads H states of d_head^2 numbers.  (15)"""
    return 3 * tokens * state(d_model, heads)


def mome_as_printed(tokens: int, experts: int) -> int:
    """N k.  (21)"""
    check_sizes(tokens=tokens, experts=experts)
    return tokens * experts


def mome(tokens: int, d_model: int, heads: int, experts: int) -> int:
    """k times what TALA needs; the router, k_n * v_n and its product with W in each head; the k outputs weighted."""
    memories = 3 * tokens * state(d_model, heads, experts)
    router = tokens * d_model * (1 + experts)
    return memories + router + tokens * d_model * experts


def ffn_as_printed(d_model: int, d_ff: int) -> int:
    """2 d d'.  (21)"""
    check_sizes(d_model=d_model, d_ff=d_ff)
    return 2 * d_model * d_ff


def ffn(tokens: int, d_model: int, d_ff: int) -> int:
    """2 N d d'.  (20)"""
    check_sizes(tokens=tokens)
    return tokens * ffn_as_printed(d_model, d_ff)


# --- state and storage of one layer ----------------------------------------------------------------------------------


def state(d_model: int, heads: int, experts: int = 1) -> int:
    """k d d_head: what is carried from token to token, k states of d_head x d_head in each head.  (15) (17)"""
    check_sizes(experts=experts)
    return experts * d_model * _d_head(d_model, heads)


def key_value_cache(tokens: int, d_model: int) -> int:
    """2 N d: what softmax attention keeps."""
    check_sizes(tokens=tokens, d_model=d_model)
    return 2 * tokens * d_model


def cache_crossover(d_model: int, heads: int, experts: int = 1) -> int:
    """Tokens up to which a cache of keys and values takes no more than the states: k d_head / 2."""
    return state(d_model, heads, experts) // (2 * d_model)


def parallel_storage(tokens: int, heads: int) -> int:
    """H N^2: the masked scores of the parallel form.  (14)"""
    check_sizes(tokens=tokens, heads=heads)
    return heads * tokens**2


def chunkwise_storage(tokens: int, heads: int, chunk: int) -> int:
    """H N B at most: the masked scores of all chunks.  (16)"""
    check_sizes(tokens=tokens, heads=heads, chunk=chunk)
    return heads * sum(min(chunk, tokens - s) ** 2 for s in range(0, tokens, chunk))


# --- parameters ------------------------------------------------------------------------------------------------------

# Where the experts could be for the paper's sizes: parameters (shared, of each expert) of a block, without the router.
EXPERTS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "memory": lambda d, f: (4 * d * d + 2 * d * f, 0),  # as printed: states are no parameters
    "SwiGLU": lambda d, f: (4 * d * d, 3 * d * f),
    "ReLU FFN": lambda d, f: (4 * d * d, 2 * d * f),
    "K V": lambda d, f: (2 * d * d + 2 * d * f, 2 * d * d),
    "Q K V O": lambda d, f: (2 * d * f, 4 * d * d),
    "one projection": lambda d, f: (4 * d * d + 2 * d * f, d * d),
}


def parameters_as_printed(layers: int, d_model: int, heads: int, d_ff: int, experts: int) -> int:
    """L (4 d^2 + 2 d d' + H k): projections, FFN and the 1 x k_e router of each head.  (10) (18) (20)

    Gains and biases of norms, and embeddings, are not counted here or below."""
    check_sizes(layers=layers, d_model=d_model, heads=heads, d_ff=d_ff, experts=experts)
    return layers * (projections(d_model) + ffn_as_printed(d_model, d_ff) + heads * experts)


def parameters(reading: str, layers: int, d_model: int, d_ff: int, experts: int, active: int | None = None) -> int:
    """L (shared + k each + d k): with a router of d x k, and experts as `reading` of `EXPERTS` says. With `active`,
    those that one token uses, if it is sent to that many experts."""
    check_sizes(layers=layers, d_model=d_model, d_ff=d_ff, experts=experts)
    if reading not in EXPERTS:
        raise ValueError(f"reading is {reading!r}; it must be one of {', '.join(EXPERTS)}")
    shared, each = EXPERTS[reading](d_model, d_ff)
    used = experts if active is None else active
    check_sizes(active=used)
    return layers * (shared + used * each + d_model * experts)


def embeddings(vocabulary: int, d_model: int, tied: bool = False) -> int:
    """Token embeddings, and as many again for the output unless tied."""
    check_sizes(vocabulary=vocabulary, d_model=d_model)
    return (1 if tied else 2) * vocabulary * d_model


def gain_tokens(available: int, layers: int, heads: int) -> int:
    """The longest T for which a free T x T gain G in every head fits: L H T^2 <= `available` parameters.  (14)"""
    check_sizes(available=available, layers=layers, heads=heads)
    return isqrt(available // (layers * heads))


def _d_head(d_model: int, heads: int) -> int:
    check_sizes(d_model=d_model, heads=heads)
    if d_model % heads:
        raise ValueError(f"d_model is {d_model}, which {heads} heads do not divide")
    return d_model // heads
