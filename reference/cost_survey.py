"""What the survey's mixers cost: what they cache, how many weights and operations they need. Counts, not measurements.

Source: survey, sections 2, 3 and 8 to 16, whose percentages they are held against. Sizes are whole numbers, and what
is counted are numbers, not bytes, for one layer and one sequence:

    tokens n     heads H     groups G of heads     d_model E     d_head d_h     rank r of a latent     rotary d_r
"""

from __future__ import annotations

from .cost import check_sizes

# --- caches, numbers a token where `tokens` is not asked for ----------------------------------------------------------


def head_cache(groups: int, d_head: int) -> int:
    """2 G d_h: a key and a value for each group; G = H is multi-head attention, G = 1 multi-query."""
    check_sizes(groups=groups, d_head=d_head)
    return 2 * groups * d_head


def latent_cache(rank: int, rotary: int = 0) -> int:
    """r + d_r: MLA and the absorbed path of GQLA keep a latent, and a rotary key if that is decoupled."""
    check_sizes(rank=rank)
    return rank + _rotary(rotary)


def expanded_cache(groups: int, d_head: int, rotary: int = 0) -> int:
    """2 G d_h + d_r: the grouped path of GQLA."""
    return head_cache(groups, d_head) + _rotary(rotary)


def block_cache(rank: int, blocks: int, rotary: int = 0) -> int:
    """r / L + d_r: what one of L devices of MLRA loads; the rotary key is on each."""
    return latent_cache(_part("rank", rank, blocks), rotary)


def shared_map_cache(keys: int, d_head: int, latents: int, d_latent: int) -> int:
    """n_k d_h + n_c d_l: keys and latent values of GTA."""
    check_sizes(keys=keys, d_head=d_head, latents=latents, d_latent=d_latent)
    return keys * d_head + latents * d_latent


def merged_cache(tokens: int, rank: int, rotary: int, stride: int) -> int:
    """ceil(n / s) (r + d_r): the slots of MTLA for all tokens."""
    check_sizes(tokens=tokens, stride=stride)
    return -(-tokens // stride) * latent_cache(rank, rotary)


def convolution_state(width: int, kv_width: int, taps: int) -> int:
    """What CCA keeps beside its cache, however long the sequence: k_1 + k_2 - 2 rows of queries and keys, and the row
    of values that comes one token late. `taps` is k_1 + k_2."""
    check_sizes(width=width, kv_width=kv_width, taps=taps)
    return (taps - 2) * (width + kv_width) + kv_width


# --- weights ----------------------------------------------------------------------------------------------------------


def up_projections(groups: int, d_head: int, rank: int, blocks: int = 1) -> int:
    """2 G d_h r: keys and values of MLA (G = H) and GQLA from their latents. As the survey prints MLRA, each head has
    its own one of L blocks, r / L wide; in the released code it has all of them, as in MLA."""
    check_sizes(groups=groups, d_head=d_head)
    return 2 * groups * d_head * _part("rank", rank, blocks)


def grouped_layer(d_model: int, heads: int, groups: int) -> int:
    """2 E^2 + 2 E^2 G / H: queries and output, keys and values."""
    return 2 * d_model**2 + 2 * d_model * groups * _part("d_model", d_model, heads)


def latent_layer(d_model: int, rank: int) -> int:
    """2 E^2 + 3 r E: queries and output, one map down to the latent, two up."""
    check_sizes(d_model=d_model, rank=rank)
    return 2 * d_model**2 + 3 * rank * d_model


def factored_layer(d_model: int, q_rank: int, k_rank: int, v_rank: int) -> int:
    """2 E (q + k + v) + E^2: core and factor of each of the three projections that section 11 factors, and W_O."""
    check_sizes(d_model=d_model, q_rank=q_rank, k_rank=k_rank, v_rank=v_rank)
    return 2 * d_model * (q_rank + k_rank + v_rank) + d_model**2


def compressed_layer(d_model: int, compression: int) -> int:
    """4 E^2 / C: queries, keys, values and output of CCA; convolutions and temperatures are `mixing_weights`."""
    return 4 * d_model * _part("d_model", d_model, compression)


def mixing_weights(width: int, d_head: int, taps_time: int, taps_heads: int) -> int:
    """w (k_1 + k_2 d_h): both convolutions of w channels without biases, which is also their operations a token."""
    check_sizes(width=width, d_head=d_head, taps_time=taps_time, taps_heads=taps_heads)
    return width * (taps_time + taps_heads * d_head)


def pseudo_head_mixes(heads: int, pseudo: int) -> int:
    """3 H^2 P: a mix of all heads for each pseudo-head of each head, in queries, keys and values of IHA."""
    check_sizes(heads=heads, pseudo=pseudo)
    return 3 * heads**2 * pseudo


# --- operations -------------------------------------------------------------------------------------------------------


def softmax_row(tokens: int) -> int:
    """5 n - 2 for a row of weights: maximum, difference, exp, sum, quotient."""
    check_sizes(tokens=tokens)
    return 5 * tokens - 2


def sigmoid_row(tokens: int) -> int:
    """5 n for the same: bias, change of sign, exp, one more, quotient."""
    check_sizes(tokens=tokens)
    return 5 * tokens


def core_products(tokens: int, scores: int, values: int) -> int:
    """n^2 (s + v) multiplications of all heads with s channels of scores and v of values, mask not made use of."""
    check_sizes(tokens=tokens, scores=scores, values=values)
    return tokens**2 * (scores + values)


def retention_chunks(tokens: int, chunk: int, d_k: int, d_v: int) -> tuple[int, int]:
    """Multiplications of one head of chunkwise retention: n c (d_k + d_v) inside chunks, 2 n d_k d_v with the state."""
    check_sizes(tokens=tokens, d_k=d_k, d_v=d_v)
    return _part("tokens", tokens, chunk) * chunk**2 * (d_k + d_v), 2 * tokens * d_k * d_v


def selective_scan(tokens: int, d_inner: int, d_state: int) -> int:
    """3 n d N multiplications of Mamba's recurrence: decay, input, output."""
    check_sizes(tokens=tokens, d_inner=d_inner, d_state=d_state)
    return 3 * tokens * d_inner * d_state


def pseudo_head_products(tokens: int, d_model: int, pseudo: int) -> int:
    """2 P^2 n^2 E multiplications of IHA: H heads of E / H channels, each over n P places."""
    check_sizes(pseudo=pseudo)
    return core_products(tokens * pseudo, d_model, d_model)


def slots_seen(tokens: int, stride: int) -> int:
    """sum_t ceil((t + 1) / s): the pairs of a query and a slot that MTLA's mask lets through."""
    check_sizes(tokens=tokens, stride=stride)
    return sum(-(-(t + 1) // stride) for t in range(tokens))


# --- sizes ------------------------------------------------------------------------------------------------------------


def _part(name: str, whole: int, parts: int) -> int:
    """Raises ValueError if the parts are not equal."""
    check_sizes(**{name: whole, "parts": parts})
    if whole % parts:
        raise ValueError(f"{name} is {whole}, which {parts} parts do not divide")
    return whole // parts


def _rotary(width: int) -> int:
    """The width of a rotary key; zero where there is none."""
    if width != 0:
        check_sizes(rotary=width)
    return width
