"""What GMA and the mixers it is compared with cost: parameters, operations, storage, state. Counts, not measurements.

Source: GMA paper, section 3.4, equation (12), Tables 1 to 3. `*_as_printed` are the paper's expressions; the function
of the same name without the suffix is what the equations need. Sizes are whole numbers:

    tokens N     components K     heads H     d_model D     d_r, d_v routing and value dimensions of one head

Storage and state are counted in numbers, not bytes, for one head of one sequence.
"""

from __future__ import annotations

EAGER_ATTENTION_TENSORS = 4  # N x N tensors alive at the peak of an eager forward and backward pass, fitted to Table 1
EAGER_GMA_TENSORS = 8  # N x K tensors alive at that of GMA, the slope of Table 1 in K


# --- parameters ------------------------------------------------------------------------------------------------------


def projections(d_model: int, bias: bool = False) -> int:
    """W_Q, W_K, W_V, W_O of all heads, d_model^2 each, and optionally a bias for each."""
    check_sizes(d_model=d_model)
    return 4 * d_model**2 + (4 * d_model if bias else 0)


def mixture(components: int, d_r: int, heads: int = 1) -> int:
    """Means, variances and prior logits: H K (2 d_r + 1). With heads=1, one mixture shared by all heads."""
    check_sizes(components=components, d_r=d_r, heads=heads)
    return heads * components * (2 * d_r + 1)


def gma_layer(d_model: int, heads: int, components: int, bias: bool = False) -> int:
    """4 D^2 + K (2 D + H): projections and one mixture per head with d_r = D / H. Tables 2 and 3 count biases too."""
    if d_model % heads:
        raise ValueError(f"d_model is {d_model}, which {heads} heads do not divide")
    return projections(d_model, bias) + mixture(components, d_model // heads, heads)


def linformer_layer(d_model: int, tokens: int, rank: int, bias: bool = False) -> int:
    """4 D^2 and two projections of the sequence axis, N x rank: the only mixer here whose parameters grow with N."""
    check_sizes(tokens=tokens, rank=rank)
    return projections(d_model, bias) + 2 * tokens * rank


def mamba_layer(d_model: int, d_state: int = 16, d_conv: int = 4, expand: int = 2) -> int:
    """Input and output projections, convolution, Delta B C projections (Delta of rank D / 16), A and D."""
    check_sizes(d_model=d_model, d_state=d_state, d_conv=d_conv, expand=expand)
    inner, rank = expand * d_model, -(-d_model // 16)
    convolution = inner * (d_conv + 1)
    selection = inner * (rank + 2 * d_state) + rank * inner + inner
    return 2 * d_model * inner + convolution + selection + inner * d_state + inner + inner * d_model


def transformer(
    mixer: int, layers: int, d_model: int, d_ff: int, vocabulary: int, positions: int, classes: int = 0
) -> int:
    """A pre-norm Transformer around mixers of `mixer` parameters each: token and position embeddings (output tied),
    two-layer MLP with biases, two LayerNorms a block and a last one, and a classifier if classes > 0."""
    check_sizes(mixer=mixer, layers=layers, d_model=d_model, d_ff=d_ff, vocabulary=vocabulary, positions=positions)
    block = mixer + 2 * d_model * d_ff + d_ff + d_model + 4 * d_model
    head = (d_model + 1) * classes
    return (vocabulary + positions) * d_model + layers * block + 2 * d_model + head


# --- operations ------------------------------------------------------------------------------------------------------


def responsibility_terms_as_printed(tokens: int, components: int, d_r: int) -> int:
    """2 N K d_r + 2 N K: quadratic terms and normalisations of section 3.4, each counted as one."""
    check_sizes(tokens=tokens, components=components, d_r=d_r)
    return 2 * tokens * components * d_r + 2 * tokens * components


def gma_flops(tokens: int, components: int, d_r: int, d_v: int) -> int:
    """Floating-point operations of one bidirectional head after the projections; exp, max and division count as one.

    Responsibilities of q and k: difference, square, product with 1 / var, sum for each of N K d_r coordinates, then
    constant, maximum, shift, exp, sum, quotient; V~ and Z; the reading, its normaliser and the quotient. (12)"""
    check_sizes(tokens=tokens, components=components, d_r=d_r, d_v=d_v)
    NK = tokens * components
    responsibilities = 2 * NK * (4 * d_r + 6)
    aggregation = 2 * NK * d_v + NK
    broadcasting = 2 * NK * d_v + 2 * NK + tokens + tokens * d_v
    return responsibilities + aggregation + broadcasting


def attention_flops(tokens: int, d_k: int, d_v: int) -> int:
    """Operations of one head of softmax attention: scores, scale and softmax (5 an entry), reading.  (1)"""
    check_sizes(tokens=tokens, d_k=d_k, d_v=d_v)
    return tokens**2 * (2 * d_k + 1 + 5 + 2 * d_v)


# --- storage and state -----------------------------------------------------------------------------------------------


def gma_storage_as_printed(tokens: int, components: int, d_v: int) -> int:
    """2 N K + K d_v + K + N d_v: responsibilities, latent memory, its mass, output."""
    check_sizes(tokens=tokens, components=components, d_v=d_v)
    return 2 * tokens * components + components * d_v + components + tokens * d_v


def gma_storage(tokens: int, components: int, d_r: int, d_v: int, cumulative: bool = False) -> int:
    """The least that a backward pass without recomputation keeps: the printed count, and its inputs q, k, v and
    normaliser D; also all N memories if `cumulative`, the causal form by a materialised prefix sum."""
    printed = gma_storage_as_printed(tokens, components, d_v)
    inputs = tokens * (2 * d_r + d_v + 1)
    return printed + inputs + (tokens * gma_state(components, d_v) if cumulative else 0)


def gma_chunk_storage(chunk: int, components: int, d_v: int) -> int:
    """What the chunkwise causal form works on at once: C^2 + 2 C K + C d_v + K (d_v + 1), whatever N is."""
    check_sizes(chunk=chunk)
    return chunk**2 + 2 * chunk * components + chunk * d_v + gma_state(components, d_v)


def difference_storage(tokens: int, components: int, d_r: int) -> int:
    """N K d_r: all differences x - mu at once, which the difference-first form takes unless it goes by blocks."""
    check_sizes(tokens=tokens, components=components, d_r=d_r)
    return tokens * components * d_r


def gma_state(components: int, d_v: int) -> int:
    """K (d_v + 1): what causal GMA carries from token to token, independent of N."""
    check_sizes(components=components, d_v=d_v)
    return components * (d_v + 1)


def attention_state(tokens: int, d_k: int, d_v: int) -> int:
    """N (d_k + d_v): the key-value cache of softmax attention."""
    check_sizes(tokens=tokens, d_k=d_k, d_v=d_v)
    return tokens * (d_k + d_v)


def eager_crossover(components: int) -> int:
    """Tokens from which an eager GMA layer keeps less than an eager softmax attention layer: 8 N K < 4 N^2."""
    check_sizes(components=components)
    return EAGER_GMA_TENSORS * components // EAGER_ATTENTION_TENSORS


def check_sizes(**sizes: int) -> None:
    """Raises TypeError or ValueError for what is not a whole number >= 1, by name."""
    for name, n in sizes.items():
        if not isinstance(n, int) or isinstance(n, bool):
            raise TypeError(f"{name} is {n!r}; expected a whole number")
        if n < 1:
            raise ValueError(f"{name} is {n}; it must be at least 1")
