"""The gate's power: every mutant dies by the laws that it names, every law kills, and a failure is named after its
mutant. The builders of the mutants, with nothing changed, raise no alarm: it is the change that kills."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from mixproof.reference import gma as reference_gma
from mixproof.reference import gma_mixing
from mixproof.reference import retention as reference_retention
from mixproof.reference.spec import Form
from mixproof.verify import judge as judging
from mixproof.verify.cells import laws_for
from mixproof.verify.declare import implements
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.laws import LAWS
from mixproof.verify.subject import Subject
from mixproof.verify.subjects.mutants import (
    Mutant,
    gma,
    gma_vjp,
    mome,
    mutants,
    retention,
    softmax_attention,
    tala_decays,
    tala_decays_vjp,
)
from mixproof.verify.subjects.reference import subject as reference_subject

SHORT = PROFILES["short"]
MUTANTS = {f"{m.operator}/{m.name}": m for m in mutants()}
FAMILIES = (
    "gma",
    "tala",
    "linear_attention",
    "gated_linear_attention",
    "retention",
    "multi_scale_retention",
    "mome",
    "mixformer",
    "ode_transformer",
    "softmax_attention",
    "sigmoid_attention",
    "mla",
    "gqla",
    "mlra",
    "mamba",
    "linear_transformer",
    "performer",
    "linformer",
    "tucker",
    "iha",
    "gta",
    "titans",
    "mtla",
    "ccgqa",
)
# laws about something that no NumPy mutant has (what autograd keeps, what torch counts), or about the reference itself
ELSEWHERE = {
    "saved_memory": "test_quadratic_implementation_is_caught",
    "operations": "test_quadratic_implementation_is_caught",
    "exact": "test_wrong_form_is_caught",
    "certified": "test_form_that_loses_digits_is_caught",
}


@pytest.fixture
def _no_shrinking(monkeypatch):
    """Whether a mutant dies does not need the smallest case on which it does."""
    monkeypatch.setattr(judging, "SHRINK_SECONDS", 0.0)


def verdicts(subject, laws):
    return {law: judge(subject, law, SHORT) for law in laws}


def row(found):
    """A row of the kill matrix: each law with its error / bound."""
    marks = {"pass": "", "fail": "KILLED ", "not applicable": None, "not run": None}
    cells = [(law, marks.get(v.status, v.status), v) for law, v in found.items()]
    return "\n".join(f"  {law:20s} {mark}{v.ratio:.3g} {v.why}" for law, mark, v in cells if mark is not None)


def died(verdict):
    """Broken by what it computed, not by an exception."""
    return verdict.status == "fail" and "raised" not in verdict.why


# --- every mutant dies, every law kills ------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_shrinking")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed_by_the_laws_it_names(name):
    mutant = MUTANTS[name]
    found = verdicts(mutant.subject(), mutant.killed_by)
    survived = [law for law, v in found.items() if not died(v)]
    if survived:
        everything = verdicts(mutant.subject(), laws_for(mutant.subject().operator))
        pytest.fail(f"{name} ({mutant.what}) survives {', '.join(survived)}\n{row(everything)}", pytrace=False)


def test_every_law_kills_a_mutant():
    kills = Counter(law for m in MUTANTS.values() for law in m.killed_by)
    idle = [law for law in LAWS if not kills[law] and law not in ELSEWHERE]
    matrix = "\n".join(
        f"{law:20s} {', '.join(n for n, m in MUTANTS.items() if law in m.killed_by) or ELSEWHERE.get(law, '-')}"
        for law in LAWS
    )
    assert not idle, f"laws that kill nothing: {', '.join(idle)}\n{matrix}"
    assert not set(kills) - set(LAWS)
    for test in ELSEWHERE.values():
        assert test in globals()


def test_mutants_are_many_and_named_apart():
    assert len(MUTANTS) == len(mutants())
    for family in FAMILIES:
        of = [m for m in MUTANTS.values() if m.operator.startswith(family)]
        assert len(of) >= (6 if family == "gqla" else 12)  # most of its mistakes are those of mla
        for operator in {m.operator for m in of}:
            for part in ("forward", "vjp", "batched"):
                words = Counter(m.what for m in of if m.operator == operator and getattr(m, part))
                assert max(words.values(), default=1) == 1, words.most_common(2)
    assert all(m.killed_by for m in MUTANTS.values())


@pytest.mark.usefixtures("_no_shrinking")
def test_a_leak_below_rounding_is_seen_by_the_bitwise_law_alone():
    """A weight of 1e-6 on the next key changes outputs by less than float16 could show, so no tolerance finds it."""
    leak = dataclasses.replace(MUTANTS["gma.causal/leak"], dtype="float16")
    found = verdicts(leak.subject(), ("forward", "causality"))
    assert found["forward"].status == "pass"
    assert found["causality"].status == "fail"


@pytest.mark.parametrize(
    "builder",
    [
        Mutant("gma", "gma.causal", "", (), forward=gma.causal(mix=gma.chunks()), vjp=gma_vjp.causal()),
        Mutant("mixture", "gma.causal", "", (), gma.causal(gma.mixture()), gma_vjp.causal(query=gma_vjp.pull_back())),
        Mutant("gma", "gma.bidirectional", "", (), forward=gma.cross(), vjp=gma_vjp.full()),
        Mutant("gma", "gma.responsibilities", "", (), forward=gma.mixture(), vjp=gma_vjp.pull_back()),
        Mutant("chunks", "retention", "", (), forward=retention.chunkwise(), vjp=retention.vjp()),
        *(
            Mutant("chunks", name, "", (), forward=tala_decays.chunkwise(name), vjp=tala_decays_vjp.vjp(name))
            for name in tala_decays.TABLES
        ),
        Mutant("routed", "mome", "", (), forward=mome.routed(), vjp=mome.routed_vjp(mome.sweep())),
        Mutant(
            "scored",
            "mome.write_mix",
            "",
            (),
            forward=mome.scored(mome.written),
            vjp=mome.scored_vjp(mome.written, lambda d: d["w"]),
        ),
        Mutant("scored", "mome.top_k", "", (), forward=mome.scored(mome.decayed), vjp=mome.scored_vjp(mome.decayed)),
        Mutant("scored", "mome.top_k_hold", "", (), forward=mome.scored(mome.held), vjp=mome.scored_vjp(mome.held)),
        Mutant("parallel", "softmax_attention", "", (), softmax_attention.parallel(), softmax_attention.vjp()),
        Mutant("blocks", "softmax_attention", "", (), forward=softmax_attention.blockwise()),
    ],
    ids=lambda m: f"{m.operator}/{m.name}",
)
def test_builder_with_nothing_changed_raises_no_alarm(builder):
    subject = builder.subject()
    found = verdicts(subject, laws_for(subject.operator))
    assert {v.status for v in found.values()} <= {"pass", "not applicable"}, row(found)
    assert found["forward"].status == "pass"


# --- the diagnosis ---------------------------------------------------------------------------------------------------

# those that no other mutant equals on their smallest case
NAMED = {
    "forward": (
        "gma.responsibilities/no_log_determinant",
        "gma.responsibilities/over_tokens",
        "gma.bidirectional/eps_per_slot",
        "gma.bidirectional/prior_twice",
        "gma.cross/unnormalised_keys",
        "gma.causal/exclusive_prefix",
        "gma.causal/padded_tail",
        "gma.causal/mass_not_resumed",
        "gma.causal/tf32_operands",
        "tala/gain_outside",
        "tala/global_positions",
        "mome/collapse",
        "mome/query_router",
        "mome.top_k/normalised_over_all",
        "retention/tail_decay",
        "retention/exclusive_read",
        "retention/bfloat16_state",
        "softmax_attention/padded_scores",
        "softmax_attention/plus_one",
    ),
    "extremes": ("gma.causal/clamped_mass", "softmax_attention/finite_mask"),
    "vjp": (
        "gma.causal/vjp.no_memory_cotangent",
        "gma.bidirectional/vjp.constant_mass",
        "gma.responsibilities/vjp.no_log_determinant",
        "tala/vjp.no_state_cotangent",
        "mome/vjp.no_router_keys",
        "retention/vjp.no_state_cotangent",
        "softmax_attention/vjp.no_delta",
    ),
}


@pytest.mark.parametrize(("law", "name"), [(law, name) for law, names in NAMED.items() for name in names])
def test_failure_is_named_after_its_mutant(law, name):
    verdict = judge(MUTANTS[name].subject(), law, SHORT)
    assert verdict.status == "fail"
    assert f"the reference with {MUTANTS[name].what}   (" in verdict.equals, verdict.equals
    ratio = float(verdict.equals.rpartition("(")[2].split()[0])
    assert ratio <= 1


def test_an_unknown_mistake_is_not_named():
    """Outputs a third too large are no mutant's."""

    def scaled(q, k, v, gamma, scale=1.0, S0=None, chunk=8):
        O, S = reference_retention.chunkwise(q, k, v, gamma, scale, S0, chunk)
        return O * 1.375, S

    verdict = judge(Mutant("scaled", "retention", "", (), forward=scaled).subject(), "forward", SHORT)
    assert (verdict.status, verdict.equals) == ("fail", "")


# --- laws about torch, and about the reference -----------------------------------------------------------------------


def test_quadratic_implementation_is_caught():
    """The masked affinity of all tokens, written out: right, but neither memory nor operations are linear."""
    torch = pytest.importorskip("torch")

    @implements("gma.causal", name="dense", dtypes=("float64",), chunk=8)
    def dense(q, k, v, mu, omega, alpha, eps=1e-6, v_min=0.0, S0=None, Z0=None):
        var = torch.nn.functional.softplus(omega, threshold=40) + v_min
        bias = alpha - var.log().sum(-1) / 2

        def gamma(x):
            E = x.transpose(1, 2)[..., None, :] - mu[:, None]
            return torch.softmax(bias[:, None] - (E * E / var[:, None]).sum(-1) / 2, dim=-1)

        GQ, GK, V = gamma(q), gamma(k), v.transpose(1, 2)
        M = (GQ @ GK.mT).tril()
        S = V.new_zeros((*V.shape[:2], alpha.shape[1], V.shape[3])) if S0 is None else S0
        Z = V.new_zeros((*V.shape[:2], alpha.shape[1])) if Z0 is None else Z0
        D = GQ @ Z[..., None] + M.sum(-1, keepdim=True) + eps
        return ((GQ @ S + M @ V) / D).transpose(1, 2), S + GK.mT @ V, Z + GK.sum(2)

    (declaration,) = dense.__mixproof__
    found = verdicts(Subject(declaration, dense), ("forward", "vjp", "saved_memory", "operations"))
    assert found["forward"].status == found["vjp"].status == "pass", row(found)
    assert found["saved_memory"].status == found["operations"].status == "fail", row(found)


@pytest.mark.parametrize(
    ("module", "attribute", "form", "wrong"),
    [
        (
            reference_gma,
            "CAUSAL",
            "recurrent",
            lambda GQ, GK, V, eps, S0, Z0: gma_mixing.recurrent(GQ, GK, V, eps + eps, S0, Z0),
        ),
        (reference_gma, "BIDIRECTIONAL", "dense", lambda GQ, GK, V, eps: gma_mixing.dense(GQ, GK + GK, V, eps)),
        (
            reference_retention,
            "OPERATOR",
            "recurrent",
            lambda q, k, v, gamma, scale, S0: reference_retention.recurrent(q, k, v, gamma, scale, S0 - S0),
        ),
    ],
    ids=["gma.causal", "gma.bidirectional", "retention"],
)
def test_wrong_form_is_caught(monkeypatch, module, attribute, form, wrong):
    """Over a field no rounding hides what a form does differently from the form of record."""
    operator = getattr(module, attribute)
    exact = tuple(dataclasses.replace(f, function=wrong) if f.name == form else f for f in operator.exact)
    right = judge(reference_subject(operator.name, f"reference.{form}"), "exact", SHORT)
    monkeypatch.setattr(module, attribute, dataclasses.replace(operator, exact=exact))
    verdict = judge(reference_subject(operator.name, f"reference.{form}"), "exact", SHORT)
    assert (right.status, verdict.status) == ("pass", "fail"), verdict


def test_form_that_loses_digits_is_caught(monkeypatch):
    """Tokens and means moved by 2^30: the same function, of which float64 keeps half the digits."""

    def moved(x, mu, omega, alpha, v_min=0.0):
        return gma.mixture()(x + 2.0**30, mu + 2.0**30, omega, alpha, v_min)

    operator = reference_gma.RESPONSIBILITIES
    forms = (*operator.forms, Form("plain", gma.mixture()), Form("moved", moved))
    monkeypatch.setattr(reference_gma, "RESPONSIBILITIES", dataclasses.replace(operator, forms=forms))
    plain = judge(reference_subject(operator.name, "reference.plain"), "certified", SHORT)
    verdict = judge(reference_subject(operator.name, "reference.moved"), "certified", SHORT)
    assert (plain.status, verdict.status) == ("pass", "fail"), verdict
    assert np.isfinite(verdict.ratio)
