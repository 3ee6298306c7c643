"""Settings for every test: the same examples on every run and machine, and no time limit per example."""

from __future__ import annotations

import sys

import hypothesis
import mpmath
import pytest

hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _precision() -> None:
    """mpmath and Arb keep their precision in a global: a test starts at 53 bits, whatever ran before it."""
    mpmath.mp.prec = 53
    if flint := sys.modules.get("flint"):
        flint.ctx.prec = 53
