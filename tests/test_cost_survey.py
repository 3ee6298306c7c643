"""Costs of the survey's mixers: against what the reference forms hold and hand on, and against the printed figures."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest

from mixproof.reference import ccgqa, cost_survey, gqla, gta, iha, mla, mlra, mtla, tucker
from mixproof.reference.spec import Operator
from mixproof.verify.claims.evidence import draw


def kept(operator: Operator, form: int = 0, **sizes: int) -> list[np.ndarray]:
    """The states that a call leaves behind."""
    results = operator.forms[form].function(**draw(operator, **sizes))
    return [y for y, out in zip(results, operator.outputs, strict=True) if out.role == "state"]


def numbers(arrays: Iterable[np.ndarray]) -> int:
    return sum(x.size for x in arrays)


def weights(operator: Operator, names: tuple[str, ...], **sizes: int) -> int:
    return sum(math.prod(sizes[a] for a in x.axes) for x in operator.inputs if x.name in names)


# --- caches ----------------------------------------------------------------------------------------------------------


def test_caches_are_what_the_operators_keep() -> None:
    T, latent = 5, {"T": 5, "K": 4, "R": 2, "L": 3, "V": 4}
    assert numbers(kept(mla.OPERATOR, **latent, N=2)) == T * cost_survey.latent_cache(3, 2)
    assert numbers(kept(gqla.OPERATOR, **latent, G=2, M=3)) == T * cost_survey.latent_cache(3, 2)
    assert numbers(kept(mlra.CONCATENATED, **latent, X=2, M=2)) == T * cost_survey.latent_cache(2 * 3, 2)
    assert numbers(kept(iha.OPERATOR, T=T, N=2, J=3, K=4, V=4)) == T * cost_survey.head_cache(2, 4)
    assert numbers(kept(gta.OPERATOR, T=T, G=2, M=3, K=4, V=5, L=6)) == T * cost_survey.shared_map_cache(2, 4, 1, 6)


@pytest.mark.parametrize("T", [1, 2, 5, 6])
def test_merged_slots(T: int) -> None:
    slots = kept(mtla.OPERATOR, T=T, N=2, K=2, R=2, L=3, V=2)
    assert numbers(slots) == cost_survey.merged_cache(T, 3, 2, stride=2)


def test_what_convolutions_keep_beside_the_cache() -> None:
    sizes = {"T": 5, "G": 2, "M": 3, "K": 4, "V": 4, "W": 3, "J": 2}
    *beside, Kc, Vc = kept(ccgqa.OPERATOR, **sizes)
    assert numbers(beside) == cost_survey.convolution_state(24, 8, taps=5)
    assert numbers((Kc, Vc)) == 5 * cost_survey.head_cache(2, 4)


def test_a_device_loads_its_block_and_the_rotary_key() -> None:
    assert sum(cost_survey.block_cache(512, 4, 64) for _ in range(4)) == cost_survey.latent_cache(512, 64) + 3 * 64


def test_printed_percentages() -> None:
    grouped = cost_survey.head_cache(8, 128)
    assert 100 * cost_survey.latent_cache(512, 64) / grouped == 28.125  # section 9
    assert round(100 * cost_survey.expanded_cache(8, 128, 64) / grouped, 1) == 103.1
    assert cost_survey.shared_map_cache(1, 64, 1, 128) / cost_survey.head_cache(5, 64) == 0.3  # 70% less, section 13
    multi_head = 6 * cost_survey.head_cache(8, 64)
    ratios = [multi_head / cost_survey.merged_cache(6, 256, 32, stride) for stride in (2, 3)]
    assert [round(r, 2) for r in ratios] == [7.11, 10.67]  # section 14 prints 8.3 for all memory
    assert 4 * cost_survey.latent_cache(256) == cost_survey.head_cache(1, 512)  # section 8 prints a half


# --- weights ---------------------------------------------------------------------------------------------------------


def test_up_projections() -> None:
    up = ("Uk", "Uv")
    sizes = {"K": 4, "V": 4, "L": 6}
    assert weights(mla.OPERATOR, up, N=6, **sizes) == cost_survey.up_projections(6, 4, 6)
    assert weights(gqla.OPERATOR, up, G=2, **sizes) == cost_survey.up_projections(2, 4, 6)
    assert weights(mlra.CONCATENATED, up, X=2, M=3, **sizes | {"L": 3}) == cost_survey.up_projections(6, 4, 6, blocks=2)
    assert weights(mlra.OPERATOR, up, X=2, N=6, **sizes | {"L": 3}) == cost_survey.up_projections(6, 4, 6)


def test_layers() -> None:
    E, H, d = 16, 4, 4
    factored = weights(tucker.OPERATOR, ("Fq", "Gq", "Fk", "Gk", "Fv", "Gv", "W_O"), Q=3, E=E, L=5, X=2, N=H, K=d, V=d)
    assert cost_survey.factored_layer(E, 3, 5, 2) == factored
    assert cost_survey.grouped_layer(E, H, H) == 4 * E * E
    assert cost_survey.grouped_layer(E, H, 1) == 2 * E * E + 2 * E * d
    assert cost_survey.latent_layer(E, 5) == 2 * E * E + 5 * E + cost_survey.up_projections(H, d, 5)
    assert cost_survey.compressed_layer(E, 1) == cost_survey.grouped_layer(E, H, H)
    assert cost_survey.compressed_layer(E, 4) == E * E


def test_mixing() -> None:
    sizes = {"G": 2, "M": 3, "K": 4, "W": 3, "J": 2}
    assert weights(ccgqa.OPERATOR, ("w1q", "w2q"), **sizes) == cost_survey.mixing_weights(24, 4, 3, 2)
    assert weights(ccgqa.OPERATOR, ("w1k", "w2k"), **sizes) == cost_survey.mixing_weights(8, 4, 3, 2)
    assert weights(iha.OPERATOR, ("aq", "ak", "av"), N=4, J=3) == cost_survey.pseudo_head_mixes(4, 3)


# --- operations ------------------------------------------------------------------------------------------------------


def test_rows_of_weights() -> None:
    """One by one: maximum n - 1, difference n, exp n, sum n - 1, quotient n; five of n each for the sigmoid."""
    assert cost_survey.softmax_row(8) == 7 + 8 + 8 + 7 + 8
    assert cost_survey.sigmoid_row(8) == 5 * 8


def test_products() -> None:
    assert cost_survey.core_products(3, 4, 5) == 3 * 3 * 4 + 3 * 3 * 5
    assert cost_survey.pseudo_head_products(3, 8, 2) == 2 * cost_survey.core_products(3 * 2, 4, 4)  # two heads of four
    assert cost_survey.retention_chunks(8, 4, 2, 3) == (2 * (4 * 4 * 2 + 4 * 4 * 3), 2 * 8 * 2 * 3)
    assert cost_survey.selective_scan(5, 2, 3) == 5 * 2 * 3 * 3


@pytest.mark.parametrize("stride", [1, 2, 3, 7])
def test_slots_seen_are_those_that_the_mask_shows(stride: int) -> None:
    """Values that mark what each token reads: its own weights on slots, counted where they are not zero."""
    T = 7
    zero = np.zeros((T, 1, 2))
    marks = np.eye(T)
    x = {"qc": zero, "qr": zero, "c": marks, "w": np.zeros(T), "kr": zero[:, 0], "Uk": np.zeros((1, 2, T))}
    O = mtla.parallel(**x, Uv=marks[None], stride=stride)[0][:, 0]
    read = [len({s // stride for s in np.flatnonzero(row)}) for row in O]
    assert sum(read) == cost_survey.slots_seen(T, stride)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="rank is 5, which 2 parts do not divide"):
        cost_survey.block_cache(5, 2)
    with pytest.raises(ValueError, match="d_model is 10, which 4 parts do not divide"):
        cost_survey.grouped_layer(10, 4, 2)
    with pytest.raises(ValueError, match="rotary is -1; it must be at least 1"):
        cost_survey.latent_cache(4, -1)
    with pytest.raises(TypeError, match=r"tokens is 2\.0; expected a whole number"):
        cost_survey.merged_cache(2.0, 4, 2, 2)
