"""What `pytest verify` runs: one test a cell, operator/implementation/law. The plugin supplies the cells."""

import pytest

from mixproof.verify.plugin import judge_cell


def test_law(mixproof_cell, request):
    verdict, objection = judge_cell(request, mixproof_cell)
    if objection:
        pytest.fail(objection, pytrace=False)
    if verdict.status in ("not run", "not applicable"):
        pytest.skip(f"{verdict.status}: {verdict.why}")
