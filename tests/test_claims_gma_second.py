"""The ledger of GMA, C37 to C71: each check finds its verdict again, and another one when what it reads is wrong."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

from mixproof.reference import cost, diagnostics, gma, gma_mixing, gma_multi_head, primitives
from mixproof.verify.claims import Claim, gma_diagnosis, gma_profile, gma_results, gma_tables, gma_taxonomy
from mixproof.verify.claims.gma_tables import Mean, Profile, fits, quotient, rounded, value, within

MODULES = (gma_profile, gma_results, gma_diagnosis, gma_taxonomy)
CLAIMS = {c.id: c for module in MODULES for c in vars(module).values() if isinstance(c, Claim)}
PROFILES, GMA_PROFILES = gma_tables.PROFILES, gma_tables.GMA_PROFILES
ACCURACIES, PERPLEXITIES = gma_tables.ACCURACIES, gma_tables.PERPLEXITIES


def test_the_second_half_is_covered() -> None:
    assert set(CLAIMS) == {f"gma.C{i}" for i in range(37, 72)}
    assert not [c for c in vars(gma_tables).values() if isinstance(c, Claim)]


@pytest.mark.parametrize("id", CLAIMS)
def test_a_check_finds_its_verdict(id: str) -> None:
    c = CLAIMS[id]
    found = c.check()
    assert found.verdict == c.verdict, found.numbers
    assert re.search(r"\d", found.numbers)
    assert "\n" not in found.numbers


# --- what is printed -------------------------------------------------------------------------------------------------


def test_ranges_of_printed_numbers() -> None:
    assert value("1.02M") == 1_020_000
    assert rounded("0.50") == (Fraction(495, 1000), Fraction(505, 1000))
    assert rounded("610K") == (609_500, 610_500)
    assert rounded("1.02M") == (1_015_000, 1_025_000)
    assert within(0.2862, "0.286")
    assert not within(0.2866, "0.286")
    low, high = quotient("2.0", "1.0")
    assert (low, high) == (Fraction(195, 105), Fraction(205, 95))


def test_functions_that_round_to_what_is_printed() -> None:
    lines = [(N, 1) for N in (1, 2, 4)]
    exact = fits(lines, ["1.0", "2.0", "4.0"])
    assert min(a for a, _ in exact) < 1 < max(a for a, _ in exact)
    assert all(abs(a * N + b - N) <= Fraction(1, 20) for a, b in exact for N in (1, 2, 4))
    assert fits(lines, ["1.0", "2.0", "4.4"]) == []
    assert fits([(N * N, N) for N in (1, 2, 4)], ["1.0", "2.0", "4.4"])


# --- what is wrong ---------------------------------------------------------------------------------------------------


def profile(name: str, **changed: tuple[str, str, str]) -> dict[str, Profile]:
    return PROFILES | {name: PROFILES[name]._replace(**changed)}


def mine(K: int, **changed: tuple[str, str, str]) -> dict[int, Profile]:
    return GMA_PROFILES | {K: GMA_PROFILES[K]._replace(**changed)}


def row(name: str, column: int, cell: Mean) -> dict[str, tuple[Mean, ...]]:
    cells = list(ACCURACIES[name])
    cells[column] = cell
    return ACCURACIES | {name: tuple(cells)}


FLOPS, WEIGH, AFFINITY = cost.gma_flops, gma_taxonomy._polynomial_weights, gma_mixing.affinity


@pytest.mark.parametrize(
    ("id", "place", "name", "wrong", "verdict"),
    [
        (37, gma_tables, "PROFILES", profile("eager", memory=("1.47", "2.94", "5.88")), "refuted"),
        (37, gma_tables, "PROFILES", profile("eager", memory=("1.47", "5.81", "24.07")), "refuted"),
        (38, gma_tables, "GMA_PROFILES", mine(64, memory=("0.35", "0.71", "2.37")), "refuted"),
        (39, cost, "gma_flops", lambda *sizes: FLOPS(*sizes) + sizes[1] ** 2, "refuted"),
        (40, cost, "EAGER_GMA_TENSORS", 2, "refuted"),
        (41, cost, "projections", lambda d_model: d_model, "holds"),
        (41, cost, "gma_flops", lambda *sizes: FLOPS(*sizes) * sizes[1], "refuted"),
        (42, gma_tables, "PROFILES", profile("Performer", memory=("0.28", "0.55", "1.10")), "holds"),
        (42, gma_tables, "GMA_PROFILES", mine(64, speed=("688K", "722K", "1.42M")), "refuted"),
        (43, gma_tables, "GMA_PROFILES", mine(256, speed=("416K", "430K", "337K")), "refuted"),
        (44, gma_tables, "GMA_PROFILES", mine(512, memory=("1.39", "3.17", "6.32")), "holds"),
        (44, gma_tables, "GMA_PROFILES", mine(256, memory=("1.85", "1.70", "3.39")), "refuted"),
        (45, gma_tables, "ACCURACIES", row("SDPA", 2, Mean("52.78", "0.48")), "refuted"),
        (46, gma_tables, "ACCURACIES", row("GMA", 2, Mean("53.07", "0.32")), "refuted"),
        (46, gma_tables, "ACCURACIES", row("Mamba", 2, Mean("62.20", "0.58")), "refuted"),
        (47, gma_tables, "ACCURACIES", row("GMA", 1, Mean("64.87", "0.21")), "refuted"),
        (48, gma_tables, "PERPLEXITIES", PERPLEXITIES | {"Mamba": Mean("41.80", "0.21")}, "refuted"),
        (49, gma_tables, "PERPLEXITIES", PERPLEXITIES | {"GMA 256": Mean("42.12", "0.21")}, "refuted"),
        (50, cost, "attention_flops", lambda *sizes: 10**10, "refuted"),
        (51, gma_tables, "CATEGORIES", gma_tables.CATEGORIES | {"eos": (739, "0.011")}, "refuted"),
        (52, diagnostics, "purity", lambda z, c: 0.29, "refuted"),
        (53, gma_tables, "NORMALISED", "0.250", "refuted"),
        (53, gma_diagnosis, "_least_entropy", lambda *cap: 1.7, "holds"),
        (54, gma_tables, "SHUFFLED", gma_tables.SHUFFLED | {"mutual_information": Mean("0.0087", "0.0003")}, "refuted"),
        (55, gma_tables, "SHUFFLED", gma_tables.SHUFFLED | {"purity": Mean("0.286", "0.001")}, "refuted"),
        (56, gma_tables, "USAGE_ENTROPY", "0.833", "refuted"),
        (57, gma_tables, "USAGE_ENTROPY", "0.400", "refuted"),
        (58, gma_diagnosis, "HEADS", 64, "holds"),
        (59, gma_multi_head, "multi_head", lambda X, *layer: layer[4][1], "holds"),
        (60, gma_tables, "PURITY", "0.302", "refuted"),
        (61, gma_tables, "INFORMATION", "1.100", "refuted"),
        (62, gma_diagnosis, "COMPONENTS", 5, "refuted"),
        (63, gma_mixing, "affinity", lambda GQ, GK: AFFINITY(GQ, GK[::-1]), "refuted"),
        (64, gma_mixing, "affinity", lambda GQ, GK: AFFINITY(GQ[:, 1:], GK[:, 1:]), "refuted"),
        (65, primitives, "mahalanobis", lambda x, mu, var: np.abs(x - mu), "holds"),
        (66, gma_taxonomy, "_polynomial_weights", lambda *case: WEIGH(*case) and [Fraction(-1)], "refuted"),
        (67, gma_taxonomy, "_divergence", lambda p, q: float(p @ q - 1), "refuted"),
        (69, gma, "attention", lambda q, **rest: np.eye(len(q)), "refuted"),
        (70, gma_tables, "GMA_PROFILES", mine(64, speed=("688K", "422K", "242K")), "refuted"),
        (71, gma_tables, "PROFILES", profile("SDPA", speed=("3.33M", "1.34M", "538K")), "holds"),
    ],
)
def test_a_check_hears_what_it_checks(
    monkeypatch: pytest.MonkeyPatch, id: int, place, name: str, wrong, verdict
) -> None:
    gma_diagnosis._shuffled.cache_clear()
    monkeypatch.setattr(place, name, wrong)
    found = CLAIMS[f"gma.C{id}"].check()
    assert found.verdict == verdict != CLAIMS[f"gma.C{id}"].verdict, found.numbers
