"""Costs of MixFormer: what (21) leaves out, when its state is smaller than a cache, which models its sizes can be."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixproof.reference import cost
from mixproof.reference import cost_mixformer as mf

A2B = {"layers": 12, "d_model": 1024, "d_ff": 896, "experts": 64}  # Table 4: A0.3B-2B
A7B = {"layers": 16, "d_model": 2048, "d_ff": 1024, "experts": 64}  # A1B-7B
HEADS = {1024: 8, 2048: 16}
SIZE = st.integers(1, 2000)


def billions(n, digits=3):
    return f"{float(round(Fraction(n, 10**9), digits)):.{digits}f}"


# --- (21) ------------------------------------------------------------------------------------------------------------


@given(SIZE, SIZE, SIZE, SIZE)
def test_the_printed_total_is_the_sum_of_its_terms(N, d, k, f):
    terms = N * cost.projections(d) + mf.tala_as_printed(N, d) + mf.mome_as_printed(N, k) + mf.ffn_as_printed(d, f)
    assert mf.total_as_printed(N, d, k, f) == terms


@given(SIZE, SIZE, st.integers(1, 8), SIZE, SIZE)
def test_every_token_costs_the_same_but_not_as_printed(N, d_head, H, k, f):
    """The printed FFN is that of one token, so twice the tokens are not twice the printed operations."""
    d = d_head * H
    assert mf.total(2 * N, d, H, k, f) == 2 * mf.total(N, d, H, k, f)
    assert mf.total_as_printed(2 * N, d, k, f) == 2 * mf.total_as_printed(N, d, k, f) - 2 * d * f
    assert mf.ffn(N, d, f) == N * mf.ffn_as_printed(d, f)


@given(SIZE, SIZE, st.integers(1, 32))
def test_the_printed_tala_is_enough_for_three_heads(N, d_head, H):
    assert (mf.tala(N, d_head * H, H) <= mf.tala_as_printed(N, d_head * H)) == (H >= 3)


def test_tala_at_the_size_of_table_4():
    assert f"{mf.tala(4096, 1024, 8):.2e}" == "1.61e+09"
    assert f"{mf.tala_as_printed(4096, 1024):.2e}" == "4.29e+09"


def test_operations_counted_by_hand():
    """Two heads of two channels. A token in a head: 4 decays, 4 updates, 4 products of the reading."""
    assert mf.tala(1, 4, 2) == 2 * (4 + 4 + 4)
    # and three experts: as many states, k * v (2), its product with W (2 x 3) and 3 weighted outputs (2 each) in a head
    assert mf.mome(1, 4, 2, 3) == 3 * 24 + 2 * (2 + 6 + 6)
    assert mf.total(1, 4, 2, 1, 5) == 64 + 24 + 40
    assert mf.total(1, 4, 2, 3, 5) == 64 + 100 + 40


def test_the_printed_experts_are_a_router_without_memories():
    """The memories alone are 3 d d_head for each token and expert, of which (21) has one."""
    memories = 3 * mf.state(1024, 8, 64)
    assert memories == 393_216 * mf.mome_as_printed(1, 64)
    assert mf.mome(1, 1024, 8, 64) - memories == 1024 * (1 + 64 + 64)


def test_the_ffn_of_table_4_does_not_expand():
    """Section 4.6 has d' > d."""
    for model in (A2B, A7B):
        assert model["d_ff"] < model["d_model"]
        assert model["d_model"] // HEADS[model["d_model"]] == 128


# --- state and storage -----------------------------------------------------------------------------------------------


def test_states_are_a_cache_of_4096_tokens():
    """64 experts save nothing before; a single state does from token 65 on."""
    assert mf.state(1024, 8, 64) == 8_388_608 == mf.key_value_cache(4096, 1024)
    assert mf.cache_crossover(1024, 8, 64) == 4096
    assert mf.cache_crossover(1024, 8) == 64
    assert mf.key_value_cache(64, 1024) == mf.state(1024, 8)


@given(SIZE, st.integers(1, 16), st.integers(1, 64))
def test_crossover(d_head, H, k):
    d = d_head * H
    N = mf.cache_crossover(d, H, k)
    assert mf.key_value_cache(N + 1, d) > mf.state(d, H, k)
    assert N == 0 or mf.key_value_cache(N, d) <= mf.state(d, H, k)
    assert mf.key_value_cache(N + 1, d) == H * cost.attention_state(N + 1, d_head, d_head)


@given(SIZE, st.integers(1, 16), SIZE)
def test_storage_is_quadratic_only_in_the_parallel_form(N, H, B):
    assert mf.chunkwise_storage(N, H, B) <= min(H * N * B, mf.parallel_storage(N, H))
    assert mf.chunkwise_storage(N * B, H, B) == H * N * B * B
    assert mf.chunkwise_storage(N, H, N) == mf.parallel_storage(N, H)


def test_ragged_chunks_are_counted():
    assert mf.chunkwise_storage(5, 1, 2) == 4 + 4 + 1


# --- parameters ------------------------------------------------------------------------------------------------------


def test_the_printed_architecture_has_72_and_336_million_parameters():
    """Named 2B and 7B."""
    small, large = (mf.parameters_as_printed(heads=HEADS[m["d_model"]], **m) for m in (A2B, A7B))
    assert (billions(small, 4), billions(large, 4)) == ("0.0724", "0.3356")
    assert billions(small + mf.embeddings(50_304, 1024)) == "0.175"
    assert small - mf.parameters("memory", **A2B) == 12 * (8 - 1024) * 64  # the same but for the router's shape


READINGS = {  # 2B and 7B, in billions
    "SwiGLU": ("2.165", "6.713"),
    "ReLU FFN": ("1.46", "4.57"),
    "K V": ("1.66", "8.79"),
    "Q K V O": ("3.24", "17.2"),
    "one projection": ("0.88", "4.63"),
    "memory": ("0.07", "0.34"),
}


def test_every_reading_is_listed():
    assert set(READINGS) == set(mf.EXPERTS)


@pytest.mark.parametrize("reading", READINGS)
def test_only_gated_ffn_experts_fit_both_names(reading):
    """2B and 7B within a tenth; its active parameters with 8 of 64 experts are then 0.3B and 1B as well."""
    counts = [mf.parameters(reading, **model) for model in (A2B, A7B)]
    for n, printed in zip(counts, READINGS[reading], strict=True):
        assert billions(n, len(printed.split(".")[1])) == printed
    fits = all(abs(n - size) < size / 10 for n, size in zip(counts, (2 * 10**9, 7 * 10**9), strict=True))
    assert fits == (reading == "SwiGLU")


def test_active_parameters():
    active = [mf.parameters("SwiGLU", **model, active=8) for model in (A2B, A7B)]
    assert tuple(map(billions, active)) == ("0.315", "1.076")
    vocabulary = mf.embeddings(50_304, 2048)
    total = mf.parameters("SwiGLU", **A7B)
    assert (billions(total + vocabulary), billions(active[1] + vocabulary)) == ("6.919", "1.282")
    assert mf.parameters("SwiGLU", **A7B, active=64) == total


def test_parameters_counted_by_hand():
    """One block, d = 2, d' = 3, 5 experts: 16 for Q K V O, 18 a SwiGLU expert, 10 for the router."""
    assert mf.parameters("SwiGLU", layers=1, d_model=2, d_ff=3, experts=5) == 16 + 5 * 18 + 10
    assert mf.parameters_as_printed(layers=1, d_model=2, heads=1, d_ff=3, experts=5) == 16 + 12 + 5


def test_free_gains_would_fill_the_rest():
    """A T x T matrix in every head of 2B and 7B, if T were 4481 and 5102: no such length is in the paper."""
    lengths = []
    for model, size in ((A2B, 2 * 10**9), (A7B, 7 * 10**9)):
        H, L = HEADS[model["d_model"]], model["layers"]
        rest = size - mf.parameters_as_printed(heads=H, **model)
        T = mf.gain_tokens(rest, L, H)
        assert L * H * T**2 <= rest < L * H * (T + 1) ** 2
        lengths.append(T)
    assert lengths == [4481, 5102]


def test_training_7b_with_adam_takes_more_than_four_cards_of_24_gib():
    """Even without embeddings and activations."""
    assert mf.ADAM_BYTES * mf.parameters("SwiGLU", **A7B) > 4 * 24 * 2**30


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="d_model is 10, which 3 heads do not divide"):
        mf.state(10, 3)
    with pytest.raises(ValueError, match="experts is 0; it must be at least 1"):
        mf.mome(4, 4, 2, 0)
    with pytest.raises(TypeError, match=r"tokens is 2\.5"):
        mf.ffn(2.5, 4, 4)
    with pytest.raises(ValueError, match="reading is 'MLP'; it must be one of memory, SwiGLU"):
        mf.parameters("MLP", **A2B)
    with pytest.raises(ValueError, match="active is 0"):
        mf.parameters("SwiGLU", **A2B, active=0)
