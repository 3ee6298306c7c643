"""The ledger of MixFormer, C1 to C31: what is declared is found, and something else in the paper's place is heard."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from mixproof.reference import (
    cost,
    cost_mixformer,
    feature_maps,
    linear_attention,
    mixformer,
    mome_routers,
    retention,
    softmax_attention,
    tala,
    tala_normalised,
)
from mixproof.reference import tala_masks as masks
from mixproof.reference import tala_printed as printed
from mixproof.reference.primitives import group_norm, softmax
from mixproof.verify.claims import KINDS, Claim, mixformer_attention, mixformer_features, mixformer_forms
from mixproof.verify.claims import mixformer_memory as memory

MODULES = (mixformer_attention, mixformer_forms, mixformer_features, memory)
CLAIMS = [c for module in MODULES for c in vars(module).values() if isinstance(c, Claim)]
BY_ID = {c.id.removeprefix("mixformer."): c for c in CLAIMS}


def test_all_are_there_once() -> None:
    assert set(BY_ID) == {f"C{i}" for i in range(1, 32)}
    assert len(CLAIMS) == len(BY_ID)


@pytest.mark.parametrize("id", sorted(BY_ID))
def test_what_is_declared_is_found(id: str) -> None:
    c = BY_ID[id]
    found = c.check()
    assert found.verdict == c.verdict, found.numbers
    assert "\n" not in found.numbers
    assert len(found.numbers) < 400
    assert "  " not in c.text + c.why + found.numbers
    assert c.evidence in KINDS


def test_the_numbers_in_a_reason_are_those_that_are_found() -> None:
    """Where they are decimal: rounded, or for a bound rounded up."""
    for id in ("C1", "C7", "C14", "C16", "C19", "C23"):
        printed_numbers = re.findall(r"\d+\.\d+", BY_ID[id].why)
        found = [Fraction(x) for x in re.findall(r"\d+\.\d+", BY_ID[id].check().numbers)]
        assert printed_numbers
        for number in printed_numbers:
            unit = Fraction(1, 10 ** len(number.split(".")[1]))
            up = id == "C16"
            assert any(
                (0 <= Fraction(number) - x < unit) if up else abs(Fraction(number) - x) <= unit / 2 for x in found
            )


def by_hand(q: Any, k: Any, v: Any, omega: Any, G: Any, reading: str) -> Any:
    """(12) without its normaliser."""
    return masks.mix(q, k, v, masks.per_source(omega, G))


def literally_right(q: Any, k: Any, v: Any, D: Any) -> Any:
    return masks.mix(q, k, v, D)


def decays_of_the_keys(q: Any, k: Any, v: Any, h: float, G: float) -> tuple[Any, None]:
    return masks.mix(q, k, v, masks.cocycle(np.exp(-np.sum(k, axis=1)))), None


def post_norm(X: Any, *weights: Any, heads: int) -> Any:
    return group_norm(X, 0.0)


def dropped(l: Any, top: int) -> Any:
    return softmax(l) * mome_routers.selected(l, top)


def undecayed(q: Any, k: Any, v: Any, gamma: Any) -> Any:
    return retention_recurrent(q, k, v, 0 * gamma + 1)


retention_recurrent = retention.recurrent
LINEAR = linear_attention.OPERATOR.exact
SWAPPED = dataclasses.replace(LINEAR[1], function=lambda q, k, **rest: LINEAR[1].function(q=k, k=q, **rest))

BROKEN: list[tuple[str, str, list[tuple[Any, str, Any]]]] = [
    ("C1", "refuted", [(softmax_attention, "parallel", mixformer_attention.in_sums)]),
    (
        "C2",
        "refuted",
        [(linear_attention, "OPERATOR", dataclasses.replace(linear_attention.OPERATOR, exact=(LINEAR[0], SWAPPED)))],
    ),
    ("C2", "refuted", [(mixformer_attention, "multiplications", lambda *shapes: 1)]),
    ("C3", "holds", [(mixformer_attention, "typed_product", lambda k, v: k @ v.T)]),
    ("C4", "holds", [(masks, "free_gain", lambda omega, G: masks.geometric(omega, len(G)))]),
    ("C4", "refuted", [(masks, "cocycle", lambda a: np.tril(a[:, None] + a * a))]),
    ("C5", "holds", [(retention, "recurrent", undecayed)]),
    ("C6", "holds", [(mixformer_features, "as_a_factor", np.exp)]),
    ("C6", "refuted", [(feature_maps, "phi_b", mixformer_features.as_a_factor)]),
    ("C7", "holds", [(printed, "column_phi_a", np.exp), (printed, "column_phi_b", np.exp)]),
    ("C8", "holds", [(printed, "eq12_per_source", by_hand)]),
    (
        "C9",
        "holds",
        [(printed, "eq14_free_G", lambda q, k, v, omega, G: masks.mix(q, k, v, masks.cocycle(masks.decays_of(G))))],
    ),
    ("C9", "refuted", [(masks, "cocycle", lambda a: np.tril(a[:, None] + 0 * a))]),
    ("C10", "holds", [(printed, "eq16_printed", retention.chunkwise)]),
    ("C11", "holds", [(printed, "eq14_literal", literally_right)]),
    ("C13", "holds", [(tala, "parallel", decays_of_the_keys)]),
    ("C14", "holds", [(memory, "OMEGA", "1 - exp(-h * theta)")]),
    ("C15", "refuted", [(tala, "log_omega", lambda h: -1 / (h + 1))]),
    ("C16", "holds", [(feature_maps, "phi_b", np.exp)]),
    ("C16", "holds", [(mixformer_features, "kernel_bound", lambda d: d)]),
    ("C16", "refuted", [(feature_maps, "phi_a", feature_maps.phi_b)]),
    ("C17", "holds", [(masks, "per_source", lambda omega, G: masks.geometric(omega, len(G)))]),
    ("C18", "refuted", [(tala_normalised, "n2", tala_normalised.n3)]),
    ("C18", "holds", [(tala_normalised, "n1", tala_normalised.n2)]),
    ("C19", "holds", [(printed, "eq16_printed", retention.chunkwise)]),
    ("C20", "holds", [(mixformer, "chunkwise", post_norm)]),
    ("C21", "holds", [(tala, "parallel", lambda *x: tala.chunkwise(*x, chunk=16))]),
    ("C21", "refuted", [(cost_mixformer, "chunkwise_storage", lambda T, heads, chunk: heads * T * T)]),
    ("C22", "refuted", [(masks, "geometric", lambda a, T: a ** np.abs(np.subtract.outer(np.arange(T), np.arange(T))))]),
    ("C23", "holds", [(tala, "omega", lambda h: 0.9999)]),
    ("C23", "refuted", [(tala, "omega", lambda h: 0.5)]),
    ("C24", "refuted", [(masks, "read_mix", lambda E, a: masks.geometric(a[0], len(E)))]),
    ("C24", "holds", [(masks, "geometric", lambda a, T: masks.cocycle(2 * np.stack([a] * T)))]),
    ("C25", "refuted", [(mome_routers, "top_weights", dropped)]),
    ("C26", "holds", [(mome_routers, "R2", lambda k, v, w: k * v @ np.stack([w, w**2, w**3, w**4]))]),
    ("C26", "refuted", [(mome_routers, "R3", lambda k, v, W: mome_routers.R2(k, v, W[0]))]),
    ("C30", "holds", [(masks, "read_mix", lambda E, a: 2 * masks.geometric(a[1], len(E)))]),
    ("C31", "refuted", [(cost, "attention_flops", lambda tokens, d_k, d_v: tokens * d_k)]),
]


@pytest.mark.parametrize(("id", "otherwise", "changes"), BROKEN, ids=lambda x: x if isinstance(x, str) else "")
def test_a_check_hears_what_it_checks(
    monkeypatch: pytest.MonkeyPatch, id: str, otherwise: str, changes: list[tuple[Any, str, Callable[..., Any]]]
) -> None:
    """With something else in place of what the paper describes, or of what we hold against it, another verdict."""
    for place, name, wrong in changes:
        monkeypatch.setattr(place, name, wrong)
    assert BY_ID[id].check().verdict == otherwise != BY_ID[id].verdict
