"""What `pytest verify` runs: one test a cell, operator/implementation/law, one a claim. The plugin supplies both."""

import pytest

from mixproof.verify.plugin import judge_cell, recheck_claim


def test_law(mixproof_cell, request):
    verdict, objection = judge_cell(request, mixproof_cell)
    if objection:
        pytest.fail(objection, pytrace=False)
    if verdict.status in ("not run", "not applicable"):
        pytest.skip(f"{verdict.status}: {verdict.why}")


def test_claim(mixproof_claim, request):
    if objection := recheck_claim(request, mixproof_claim):
        pytest.fail(objection, pytrace=False)
