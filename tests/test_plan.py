"""The budget plan: how it is made, that what is committed fits the mutants, the laws and the atlas of today, and that
the profile smoke judges it. No test here depends on a clock."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from mixproof.reference import OPERATORS
from mixproof.reference import operator as find_operator
from mixproof.verify import judge as judging
from mixproof.verify import plan
from mixproof.verify.case import Domain, atlas, parse
from mixproof.verify.cells import laws_for
from mixproof.verify.judge import PROFILES, judge
from mixproof.verify.laws import LAWS
from mixproof.verify.laws import law as find_law
from mixproof.verify.power import matrix
from mixproof.verify.power.matrix import kill_matrix, smoke
from mixproof.verify.subjects.mutants import Mutant, mutants
from mixproof.verify.subjects.reference import subject as reference_subject

SMOKE = PROFILES["smoke"]
FLOAT32 = ("float32", "float32")
MUTANTS = {f"{m.operator}/{m.name}": m for m in mutants()}
OF_FEW = "ode_transformer.rk3"  # an operator with few mutants


@pytest.fixture(scope="module")
def rows():
    return kill_matrix(OF_FEW, everything=True)


# --- what is committed -----------------------------------------------------------------------------------------------


def test_the_record_is_of_these_mutants():
    record = set(plan.load()["mutants"])
    assert record == set(MUTANTS), f"measure the plan anew: {sorted(record ^ set(MUTANTS))}"


def test_every_mutant_has_a_killer():
    if names := plan.survivors(plan.load(), LAWS):
        pytest.fail(f"no law kills {', '.join(names)}", pytrace=False)


@pytest.mark.parametrize("law", LAWS)
def test_removing_a_law_names_the_mutants_that_would_survive(law, monkeypatch):
    # not delitem: it would put the law back at the end of the registry
    monkeypatch.setitem(globals(), "LAWS", {name: module for name, module in LAWS.items() if name != law})
    only = [name for name, killers in plan.load()["mutants"].items() if killers == [law]]
    assert only, f"no mutant is killed by {law} alone"
    with pytest.raises(pytest.fail.Exception) as failure:
        test_every_mutant_has_a_killer()
    assert str(failure.value) == f"no law kills {', '.join(only)}"


def test_each_mutant_is_killed_by_the_laws_it_names():
    record = plan.load()["mutants"]
    assert not [(name, law) for name, m in MUTANTS.items() for law in m.killed_by if law not in record[name]]


def test_what_laws_are_about():
    """By the record no law about outputs kills a mutant whose gradients alone are wrong, nor the other way round."""
    record = plan.load()["mutants"]
    for name, mutant in MUTANTS.items():
        about = {find_law(law).of for law in record[name]}
        wrong = {"outputs": "gradients", "gradients": "outputs"}.get(mutant.part)
        assert wrong not in about, (name, mutant.part, record[name])
    assert {find_law(law).of for law in LAWS} == {"outputs", "gradients", "both"}


@pytest.mark.parametrize("operator", sorted({m.operator for m in MUTANTS.values()}))
def test_planned_pairs_are_cases_of_their_laws(operator):
    subjects = [m.subject() for m in mutants(operator)]
    domains = {s.domain() for s in subjects if not s.unavailable()}
    laws = laws_for(find_operator(operator))
    assert plan.planned(operator)
    for row, (name, case) in zip(plan.load()["operators"][operator], plan.planned(operator), strict=True):
        assert name in laws
        listed = {plan.told(c, d) for d in domains for c in find_law(name).plan(d, True)}
        assert row["case"] in listed, f"{operator}/{name}: the atlas has no {row['case']!r} any more"
        assert row["kills"] > 0
        assert row["seconds"] > 0
        domain = next(d for d in domains if d.dtypes == (FLOAT32,))
        assert plan.told(plan.fitted(case, domain), domain) == row["case"]


def test_planned_pairs_kill_by_the_record():
    data = plan.load()
    assert set(data["operators"]) == {m.operator for m in MUTANTS.values()}
    assert plan.power(data) >= 0.95
    for operator, pairs in data["operators"].items():
        killed_by = [laws for name, laws in data["mutants"].items() if name.split("/")[0] == operator]
        assert sum(row["kills"] for row in pairs) <= len(killed_by)
        for law in {row["law"] for row in pairs}:
            kills = sum(row["kills"] for row in pairs if row["law"] == law)
            assert kills <= sum(law in laws for laws in killed_by), (operator, law)


def test_the_file_is_as_it_is_written(tmp_path):
    plan.write(plan.load(), tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == plan.PATH.read_text()


# --- planned cases elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("T", "chunk", "want"),
    [(7, 64, 63), (8, 64, 64), (9, 64, 65), (15, 64, 127), (17, 64, 129), (17, 512, 513), (17, 4, 9), (9, 1, 2)],
)
def test_lengths_keep_their_place_beside_the_chunk(T, chunk, want):
    domain = Domain("retention", (FLOAT32,), chunk=chunk)
    assert plan.fitted(parse("retention", f"B=1 H=1 T={T} K=2 V=3"), domain).size("T") == want


@pytest.mark.parametrize("T", [0, 1, 2, 5, 12, 19, 33])
def test_other_lengths_stay(T):
    for chunk in (1, 16, 64):
        domain = Domain("retention", (FLOAT32,), chunk=chunk)
        assert plan.fitted(parse("retention", f"B=1 H=1 T={T} K=2 V=3"), domain).size("T") == T


def test_keys_stay_one_more_or_less_than_queries():
    domain = Domain("softmax_attention", (FLOAT32,), chunk=64)
    text = "B=1 H=1 T=9 S={} D=2 V=3"
    sizes = [plan.fitted(parse("softmax_attention", text.format(S)), domain) for S in (8, 9, 10)]
    assert [(c.size("T"), c.size("S")) for c in sizes] == [(65, 64), (65, 65), (65, 66)]
    masked = plan.fitted(parse("softmax_attention", text.format(10) + " flag=1"), domain)
    assert (masked.size("T"), masked.size("S"), masked.flag) == (65, 65, True)


def test_a_domain_has_its_way():
    case = parse("retention", "B=2 H=3 T=9 K=5 V=3 state=large regime=weak_decay seed=4")
    narrow = Domain(
        "retention", (FLOAT32,), 16, ("B", "H"), (("T", 16), ("K", 4)), (("V", 8),), stateful=False, causal_only=True
    )
    fitted = plan.fitted(case, narrow)
    assert dict(fitted.sizes) == {"B": 1, "H": 1, "T": 32, "K": 8, "V": 8}
    assert (fitted.state, fitted.regime, fitted.seed, fitted.flag) == ("absent", "weak_decay", 4, False)
    words = ("gma.bidirectional", "B=1 H=1 T=9 R=2 V=2 K=2 flag=1")
    assert not plan.fitted(parse(*words), Domain(words[0], (FLOAT32,))).flag  # it has none


def test_dtypes_take_turns_but_for_one_that_a_law_chose():
    kinds = (("float64", "float64"), FLOAT32, ("bfloat16", "float32"))
    domain = Domain("retention", kinds, 16)
    case = parse("retention", "B=1 H=1 T=9 K=2 V=3")
    met = [plan.fitted(case, domain, turn) for turn in range(4)]
    assert [(c.dtype, c.parameters) for c in met] == [*kinds, kinds[0]]
    chosen = dataclasses.replace(case, dtype="float64", parameters="float64")
    assert {plan.fitted(chosen, domain, turn).dtype for turn in range(4)} == {"float64"}
    assert plan.told(chosen, Domain("retention", (FLOAT32,), 8)).endswith("dtype=float64 parameters=float64")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_what_is_told_can_be_found_again(operator, chunk):
    domain = Domain(operator, (FLOAT32,), chunk)
    for extreme in (False, True):
        for case in atlas(domain, True, extreme):
            assert plan.fitted(parse(operator, plan.told(case, domain)), domain) == case


# --- making it -------------------------------------------------------------------------------------------------------


def row(name, **laws):
    """A mutant `op/NAME`; laws map cases to (killed, seconds)."""
    entries = {
        law: {"killed": any(k for k, _ in cases.values()), "each": [[c, *seen] for c, seen in cases.items()]}
        for law, cases in laws.items()
    }
    return {"mutant": f"op/{name}", "laws": entries}


def chosen(rows):
    return [(r["law"], r["case"], r["kills"]) for r in plan.make(rows)["operators"]["op"]]


def test_the_plan_takes_most_kills_a_second():
    cheap, dear = {"a": (True, 1.0)}, {"b": (True, 5.0)}
    some = [row(str(i), forward=cheap, split=dear) for i in range(3)]
    others = [row(f"other {i}", forward={"a": (False, 1.0)}, split=dear) for i in range(3)]
    assert chosen(some + others) == [("forward", "a", 3), ("split", "b", 3)]  # 3 a second, not 6 in five
    assert chosen(others) == [("split", "b", 3)]


def test_of_nearly_equal_pairs_the_first_is_taken():
    fast, slow = {"a": (True, 0.8)}, {"a": (True, 1.0)}
    assert chosen([row("x", forward=slow, written=fast)]) == [("forward", "a", 1)]
    assert chosen([row("x", forward={"a": (True, 2.0)}, written=fast)]) == [("written", "a", 1)]


def test_an_oracle_is_paid_by_a_few():
    """The first of many mutants computes it: four implementations share what a hundred mutants did."""
    rows = [row(str(i), forward={"a": (True, 9.0 if i == 0 else 1.0)}) for i in range(100)]
    (pair,) = plan.make(rows)["operators"]["op"]
    assert pair["seconds"] == 3.0


def test_the_plan_ends_with_enough():
    rows = [row(str(i), forward={"a": (i < 98, 1.0), "b": (i >= 98, 1.0)}) for i in range(100)]
    assert chosen(rows) == [("forward", "a", 98)]
    rows += [row("immortal", forward={"a": (False, 1.0), "b": (False, 1.0)})]
    assert chosen(rows) == [("forward", "a", 98), ("forward", "b", 2)]


def test_drift_names_what_changed():
    committed = {"operators": {}, "mutants": {"op/a": ["forward", "split"], "op/b": ["vjp"], "op/gone": ["vjp"]}}
    now = [
        row("a", forward={"c": (True, 1.0)}, split={"c": (False, 1.0)}, vjp={"c": (True, 1.0)}),
        row("b"),  # could not be run: says nothing
        row("new", forward={"c": (True, 1.0)}),
    ]
    assert plan.drift(committed, now) == [
        "op/gone: in the plan, and no mutant any more",
        "op/a: killed by split no more",
        "op/a: vjp kills it, and the plan does not say so",
        "op/new: a mutant, and not in the plan",
    ]
    assert not plan.drift(plan.make(now), now)


def test_new_figures_replace_those_of_their_operators():
    old = {"operators": {"a": [1], "b": [2], "gone": [3]}, "mutants": {"a/x": [], "a/y": [], "b/x": [], "gone/x": []}}
    new = {"operators": {"b": [4], "c": [5]}, "mutants": {"b/z": ["vjp"], "c/x": []}}
    assert plan.merged(old, new, ("c", "a", "b")) == {
        "operators": {"c": [5], "a": [1], "b": [4]},
        "mutants": {"c/x": [], "a/x": [], "a/y": [], "b/z": ["vjp"]},
    }


# --- the matrix ------------------------------------------------------------------------------------------------------


def test_a_row_is_plain_data(rows):
    assert json.loads(json.dumps(rows)) == rows
    assert [r["mutant"] for r in rows] == [f"{OF_FEW}/{m.name}" for m in mutants(OF_FEW)]
    for r in rows:
        mutant = MUTANTS[r["mutant"]]
        assert (r["what"], r["source"], r["part"]) == (mutant.what, mutant.source, mutant.part)
        assert r["named"] == list(mutant.killed_by)
        assert list(r["laws"]) == [law for law in LAWS if law in r["laws"]]  # as the registry lists them
        for law, entry in r["laws"].items():
            assert entry["killed"] == any(killed for _, killed, _ in entry["each"]) == bool(entry["case"])
            assert entry["cases"] == len(entry["each"])
            assert sum(killed for _, killed in entry["regimes"].values()) == sum(k for _, k, _ in entry["each"])
            assert sum(tried for tried, _ in entry["regimes"].values()) <= entry["cases"]
            assert (entry["ratio"] == "inf" or entry["ratio"] > 1) == entry["killed"], (r["mutant"], law)
            assert entry["seconds"] > 0


def test_the_first_kill_is_that_of_the_first_law_that_kills(rows):
    for r in rows:
        laws = list(r["laws"])
        first = next(i for i, law in enumerate(laws) if r["laws"][law]["killed"])
        assert r["first"]["law"] == laws[first]
        spent = sum(r["laws"][law]["seconds"] for law in laws[: first + 1])
        assert abs(r["first"]["seconds"] - spent) < 1e-9


def test_a_killing_case_kills_again(rows):
    for r in rows:
        law = r["first"]["law"]
        case = parse(OF_FEW, r["laws"][law]["case"])
        assert judging.evaluate(MUTANTS[r["mutant"]].subject(), find_law(law), case).broken


def test_the_committed_record_is_what_is_found(rows):
    part = {"mutants": {n: laws for n, laws in plan.load()["mutants"].items() if n.split("/")[0] == OF_FEW}}
    assert not plan.drift(part, rows)


def test_in_short_the_same_die(rows):
    """By the laws about what is wrong with them alone, each until its first kill."""
    for full, r in zip(rows, kill_matrix(OF_FEW), strict=True):
        mutant = MUTANTS[r["mutant"]]
        asked = {law for law in full["laws"] if matrix.judges(mutant, find_law(law), False)}
        assert set(r["laws"]) == asked
        assert set(mutant.killed_by) <= asked < set(full["laws"])
        for law, entry in r["laws"].items():
            assert entry["killed"] == full["laws"][law]["killed"]
            assert sum(killed for _, killed in entry["regimes"].values()) == entry["killed"]
            assert "each" not in entry


def test_an_exception_is_no_kill(monkeypatch):
    def raises(**inputs):
        raise ValueError("no")

    ours = dataclasses.replace(next(m for m in mutants(OF_FEW) if m.forward), forward=raises)
    monkeypatch.setattr(matrix, "mutants", lambda operator: [ours])
    (r,) = kill_matrix(OF_FEW)
    assert (r["laws"], r["first"]) == ({}, None)


def test_an_attention_matrix_of_nan_is_no_bug_of_ours():
    """It has no singular values."""
    operator = find_operator("gma.bidirectional")

    def lost(**inputs):
        return operator.forms[0].function(**inputs) * np.nan

    verdict = judge(Mutant("lost", operator.name, "", (), forward=lost).subject(), "low_rank", PROFILES["short"])
    assert (verdict.status, verdict.ratio) == ("fail", float("inf"))


def test_what_cannot_run_is_judged_by_no_law(monkeypatch):
    monkeypatch.setattr("mixproof.verify.subject.Subject.unavailable", lambda self: "no such machine")
    assert all((r["laws"], r["first"]) == ({}, None) for r in kill_matrix(OF_FEW))


# --- the profile smoke -----------------------------------------------------------------------------------------------


def test_planned_pairs_kill():
    found = smoke(OF_FEW)
    dead = [r["mutant"] for r in found if r["first"]]
    assert len(dead) >= 0.95 * len(found)
    assert len(dead) == sum(row["kills"] for row in plan.load()["operators"][OF_FEW])
    assert {r["first"]["law"] for r in found if r["first"]} == set(plan.laws_for(OF_FEW))


def cases_of(monkeypatch, subject, law):
    """The verdict of the profile smoke, and the cases that it met."""
    met = []

    def evaluate(subject, law, case):
        met.append(case)
        return judged(subject, law, case)

    judged = judging.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(judging, "evaluate", evaluate)
        return judge(subject, law, SMOKE), met


def test_smoke_judges_the_planned_cases_alone(monkeypatch):
    subject = reference_subject("retention", "reference.chunkwise")
    domain = subject.domain()
    planned = [(law, plan.fitted(case, domain, i)) for i, (law, case) in enumerate(plan.planned("retention"))]
    assert {case.dtype for _, case in planned} == {"float64", "float32"}
    for law in laws_for(subject.operator):
        verdict, met = cases_of(monkeypatch, subject, law)
        if find_law(law).reason_not(subject):
            assert (verdict.status, met) == ("not applicable", []), law
            continue
        want = [case for name, case in planned if name == law]
        assert met == want, law
        if want:
            assert verdict.status == "pass"
        else:
            assert verdict.why == "profiles short, ci and nightly judge this law"


def test_a_planned_case_that_compares_nothing_has_a_stand_in(monkeypatch):
    subject = reference_subject("retention", "reference.chunkwise")
    nothing = parse("retention", "B=1 H=1 T=0 K=1 V=1")
    monkeypatch.setattr(plan, "planned", lambda operator: [("causality", nothing)])
    verdict, met = cases_of(monkeypatch, subject, "causality")
    assert verdict.status == "pass"
    assert met[0].size("T") == 0
    assert len(met) > 1


def test_an_operator_without_a_plan_meets_core_laws_twice(monkeypatch):
    monkeypatch.setattr(plan, "planned", lambda operator: [])
    subject = reference_subject("retention", "reference.chunkwise")
    for law in laws_for(subject.operator):
        verdict, met = cases_of(monkeypatch, subject, law)
        assert len(met) == (2 if find_law(law).core else 0)
        assert verdict.status in (("pass",) if find_law(law).core else ("not run", "not applicable"))


def test_smoke_kills_as_the_plan_says():
    name = plan.laws_for(OF_FEW)[0]
    killed = [r["mutant"] for r in smoke(OF_FEW) if r["first"] and r["first"]["law"] == name]
    assert killed
    for mutant in killed[:2]:
        assert judge(MUTANTS[mutant].subject(), name, SMOKE).status == "fail"
