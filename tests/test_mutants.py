"""Mutants: each law kills one that no other law does, public bugs are among them, and a failure is named after its
mutant. The builders of the mutants, with nothing changed, raise no alarm: it is the change that kills.

That every mutant dies by the laws that it names is the business of `mixproof power`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mixproof.reference import retention as reference_retention
from mixproof.verify import judge as judging
from mixproof.verify.case import atlas
from mixproof.verify.cells import laws_for
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.laws import LAWS
from mixproof.verify.laws import law as find_law
from mixproof.verify.subjects.mutants import (
    Mutant,
    convolution,
    gma,
    gma_vjp,
    mome,
    mutants,
    retention,
    softmax_attention,
    tala_decays,
    tala_decays_vjp,
)
from mixproof.verify.subjects.mutants.solitary import SOLITARY
from mixproof.verify.subjects.mutants.sources import NOT_MODELLED, SAME, SOURCES

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
    "cca",
    "ccgqa",
)
# the bugs that were found in public code, by their names in the design record
PUBLIC = (
    "tala-tail-decay", "tala-h0-short", "tala-idx-wrap", "tala-mask-after-exp", "tala-factored-exp",
    "tala-safe-exp-zero", "tala-tail-nomask", "tala-global-cumsum", "tala-inter-exclusive", "tala-leak-state",
    "tala-vsplit-state", "tala-bf16-state", "tala-no-dht", "tala-dv-scale", "tala-dq-lastblock", "tala-dg-nofinal",
    "tala-do-raw-T", "tala-dS-bf16", "tala-vl-empty", "tala-vl-reset-aligned", "gma-no-logdet", "gma-key-over-time",
    "gma-no-max", "gma-den-chunk", "gma-den-clamp", "gma-tail-pad", "gma-resume-noZ", "gma-mask-v-only", "gma-Z-bf16",
    "gma-den-detach", "gma-jac-diag", "gma-dvar-nologdet", "scan-sp-overflow", "scan-euler-A", "scan-pad-decay",
    "scan-state-noB", "scan-D-after", "scan-h0-first-chunk", "scan-seq-ignored", "scan-state-bf16", "scan-logspace",
    "attn-max0", "attn-nan-block", "attn-finite-mask", "attn-tail-zero", "attn-top-left", "attn-win-plus1",
    "attn-drop-causal-mask", "attn-mask-first-block", "attn-pad-scale", "attn-no-rescale", "attn-sink-raw",
    "attn-tf32", "attn-stale-scale", "attn-lse-base2", "attn-bwd-tail", "attn-no-delta", "mla-scale-latent",
    "mla-rope-twice", "mla-rope-layout", "mla-no-mscale", "mla-uk-head0", "mla-dv-as-dn", "rope-pos-bf16",
    "conv-fs-short", "conv-fs-post", "conv-block-halo", "conv-has-initial", "conv-cross-seq", "conv-dfs-clamp",
    "conv-dst-pass", "conv-silu-post", "delta-err-before-decay", "delta-state-fp16", "l2norm-eps", "titans-mom-reset",
    "titans-read-start", "route-w-biased", "route-no-eps", "route-norm-all", "rms-eps-out",
)  # fmt: skip
# laws about the wrapper that all builders share
CALLING = ("independence", "layout", "unchanged", "written", "deterministic")


@pytest.fixture
def _no_shrinking(monkeypatch):
    """Whether a mutant dies does not need the smallest case on which it does, nor a name for it."""
    monkeypatch.setattr(judging, "SHRINK_SECONDS", 0.0)
    monkeypatch.setattr(judging, "diagnose", lambda *_: "")


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


# --- every law is needed ---------------------------------------------------------------------------------------------


# those of one operator one after the other: they share oracle values
BY_OPERATOR = sorted(LAWS, key=lambda law: SOLITARY[law].split("/")[0])


def together(name):
    """On one process."""
    return pytest.mark.xdist_group(f"mutants of {name.split('/')[0]}")


def concerned(mutant):
    """The laws that could see the mutant: one with right gradients is no business of those that look at nothing else,
    and the other way round."""
    blind = {"outputs": "gradients", "gradients": "outputs"}.get(mutant.part)
    return [law for law in laws_for(mutant.subject().operator) if find_law(law).of != blind]


@pytest.mark.usefixtures("_no_shrinking")
@pytest.mark.parametrize("law", [pytest.param(x, marks=together(SOLITARY[x])) for x in BY_OPERATOR])
def test_law_kills_a_mutant_that_no_other_law_kills(law):
    mutant = MUTANTS[SOLITARY[law]]
    subject = mutant.subject()
    if reason := subject.unavailable():
        pytest.skip(reason)
    found = verdicts(subject, concerned(mutant))
    assert died(found.pop(law)), f"{law} no longer kills {SOLITARY[law]} ({mutant.what})"
    assert {v.status for v in found.values()} <= {"pass", "not applicable"}, row(found)
    assert mutant.killed_by == (law,)


def test_every_law_has_its_mutant():
    lost = [name for law, name in SOLITARY.items() if law not in LAWS]
    assert not lost, f"no law is left that kills {', '.join(lost)}"
    assert list(SOLITARY) == list(LAWS)
    kills = Counter(law for m in MUTANTS.values() for law in m.killed_by)
    assert set(kills) == set(LAWS)


# --- public bugs -----------------------------------------------------------------------------------------------------


def test_public_bugs_are_modelled():
    """Each is what some mutant stands for, or there is a reason why no operator can have it."""
    modelled = {m.source for m in MUTANTS.values()} - {""}
    assert modelled == set(SOURCES)
    assert not modelled & set(NOT_MODELLED)
    assert sorted(PUBLIC) == sorted({*SOURCES, *NOT_MODELLED})
    for bug in SOURCES.values():
        assert all(bug), bug


def test_same_mistakes_are_found_by_name():
    names = {m.name for m in MUTANTS.values()} | set(MUTANTS)
    for source, same in SAME.items():
        assert source in SOURCES
        assert set(same) <= names


def test_mutants_are_many_and_named_apart():
    assert len(MUTANTS) == len(mutants())
    for family in FAMILIES:
        of = [m for m in MUTANTS.values() if m.operator.startswith(family)]
        assert len(of) >= (6 if family in ("gqla", "cca") else 12)  # most of their mistakes are those of mla and ccgqa
        for operator in {m.operator for m in of}:
            for part in ("forward", "vjp", "batched"):
                words = Counter(m.what for m in of if m.operator == operator and getattr(m, part))
                assert max(words.values(), default=1) == 1, words.most_common(2)
    assert all(m.killed_by for m in MUTANTS.values())


def test_mutant_with_a_memory_has_one_of_its_own():
    """What one implementation under test has seen does not change another's results."""
    mutant = MUTANTS["gma.causal/stale_scalars"]
    one, other = mutant.subject(), mutant.subject()
    assert one.function is not other.function
    case = next(c for c in atlas(one.domain(), small=True) if c.size("T") > 1)
    inputs = one.inputs(case)
    one.run(inputs | {"eps": 0.5}, case.dtype)
    assert not np.array_equal(one.run(inputs, case.dtype)["O"], other.run(inputs, case.dtype)["O"])


def test_the_readme_counts_mutants_and_public_bugs():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    told = [m for m in MUTANTS.values() if m.source]
    bugs = {m.source for m in told}
    assert f"{len(MUTANTS):,} deliberately wrong implementations, {len(told)} of them models of {len(bugs)}" in readme
    assert f"Share of {len(MUTANTS):,} mutants rejected" in readme


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
        Mutant("through", "mamba.block", "", (), vjp=convolution.backward()),
    ],
    ids=lambda m: f"{m.operator}/{m.name}",
)
def test_builder_with_nothing_changed_raises_no_alarm(builder):
    subject = builder.subject()
    laws = [find_law(name) for name in concerned(builder) if name not in CALLING]
    kept = [x.name for x in laws if x.core or x.exactness == "bitwise" or x.name in ("extremes", "forms", "linearity")]
    found = verdicts(subject, kept)
    assert {v.status for v in found.values()} <= {"pass", "not applicable"}, row(found)
    assert {"extremes", "forward" if builder.forward else "vjp"} <= {
        law for law, v in found.items() if v.status == "pass"
    }


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
