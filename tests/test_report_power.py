"""The words, columns and page of a power study, from a made-up one."""

from __future__ import annotations

import copy
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from mixproof.verify.report import power
from mixproof.verify.report import power_figures as figures

LAWS = ("forward", "vjp", "split", "exact")
FORMATS = ("float32", "bfloat16")


def law(killed, ratio, tried=4, died=1, regime="normal"):
    return {
        "killed": killed,
        "ratio": ratio,
        "regimes": {regime: [tried, died if killed else 0]},
        "case": "B=1 H=1 T=9 dtype=float32" if killed else "",
        "seconds": 0.25,
        "cases": tried,
    }


def mutant(name, what, named, laws, source=""):
    killers = [law for law, result in laws.items() if result["killed"]]
    first = {"law": killers[0], "seconds": 0.01 * len(name)} if killers else None
    return {
        "mutant": name,
        "what": what,
        "source": source,
        "part": "outputs",
        "named": named,
        "laws": laws,
        "first": first,
    }


def made_up():
    """Three operators of two families, five mutants, all killed by each law that they name."""
    matrix = [
        mutant(
            "retention/tail_decay",
            "the last chunk decayed as if it were full",
            ["split"],
            {"forward": law(False, 0.31), "split": law(True, 41712.0)},
            "tala-tail-decay",
        ),
        mutant("retention/vjp.scale", "q's gradient not scaled", ["vjp"], {"vjp": law(True, 12.5)}),
        mutant(
            "tala/leak",
            "the next key let in",
            ["forward"],
            {"forward": law(True, "inf"), "split": law(False, 0.0, regime="equal")},
            "tala-tail-decay",
        ),
        mutant("tala.n1/eps", "eps outside the root", ["forward"], {"forward": law(True, 2.0, died=3)}),
        mutant("tala.n1/sign", "the sign of v flipped", ["forward"], {"forward": law(True, 7e7, regime="large")}),
    ]
    laws = [
        {
            "law": "forward",
            "kills": 3,
            "only": ["tala/leak", "tala.n1/eps", "tala.n1/sign"],
            "seconds": 1.0,
            "cases": 16,
        },
        {"law": "vjp", "kills": 1, "only": ["retention/vjp.scale"], "seconds": 0.25, "cases": 4},
        {"law": "split", "kills": 1, "only": ["retention/tail_decay"], "seconds": 0.5, "cases": 8},
        {"law": "exact", "kills": 0, "only": [], "seconds": 0.0, "cases": 0},
    ]
    duels = [
        {
            "format": format,
            "inputs": inputs,
            "mutants": 5,
            "cases": 40,
            "judges": {
                figures.JUDGE: {"killed": 5, "apart": 5, "survivors": []},
                "allclose 1e-2": {"killed": 3, "apart": 2, "survivors": ["tala.n1/eps", "retention/tail_decay"]},
            }
            | ({"gradcheck": {"killed": 1, "survivors": ["tala/leak"]}} if format == "float32" else {}),
        }
        for format in FORMATS
        for inputs in ("users", "atlas")
    ]
    honest = [
        {
            "operator": operator,
            "format": format,
            "cases": 1000,
            "vacuous": 3,
            "worst": worst,
            "worst_case": f"T=17 of {operator} in {format}, sums in pairs",
            "alarms": {
                "users": {figures.JUDGE: 0, "allclose 1e-2": 1},
                "atlas": {figures.JUDGE: 0, "allclose 1e-2": 50},
            },
            "counts": {"users": 200, "atlas": 800},
            "failures": [],
        }
        for operator, worst in (("retention", 0.5), ("tala", 0.93))
        for format in FORMATS
    ]
    plan = {
        "operators": {"tala": [{"law": "forward", "case": "B=2 H=1 T=7 K=3", "kills": 3, "seconds": 0.0033}]},
        "mutants": {row["mutant"]: row["named"] for row in matrix},
    }
    return {
        "schema": 1,
        "profile": "ci",
        "seed": 0,
        "environment": {"numpy": "2.4.1", "torch": "2.13.0"},
        "seconds": 412.3,
        "cores": 2,
        "matrix": matrix,
        "duels": duels,
        "honest": honest,
        "twins": [mutant("tala/honest", "nothing changed", [], {"forward": law(False, 0.4), "split": law(False, 0.2)})],
        "plan": plan,
        "drift": [],
        "sources": {
            "tala-tail-decay": {"kind": "tail-chunk", "trigger": "T % C != 0", "public": "fla e361dd3a"},
            "gma-no-max": {"kind": "exp underflow", "trigger": "far from every mean", "public": "own"},
        },
        "laws": laws,
    }


@pytest.fixture
def study():
    return made_up()


def spare(study, index):
    """Nothing kills this mutant any more."""
    row = study["matrix"][index]
    for result in row["laws"].values():
        result.update(killed=False, ratio=0.4)
    row["first"] = None


# --- the terminal -----------------------------------------------------------------------------------------------------


def test_the_summary_of_a_study_that_holds(study):
    assert (
        power.terminal(study)
        == """\
mixproof power   profile ci   seed 0   412 s on 2 cores

mutants killed, by family: 5 of 5, 100 %
  retention      2/2    tala           3/3

law        kills  alone  cases  seconds  kills/s
  forward      3      3     16      1.0        3
  vjp          1      1      4      0.2        4
  split        1      1      8      0.5        2
  exact        0             0      0.0        -
  kill nothing: exact

regime    cases  kills   share  most by
  normal     20      6  30.0 %  forward 4, split 1, vjp 1
  large       4      1  25.0 %  forward 1
  kill nothing: equal

slowest first kills
    0.20 s  retention/tail_decay  split
    0.19 s  retention/vjp.scale   vjp
    0.12 s  tala.n1/sign          forward
    0.11 s  tala.n1/eps           forward
    0.09 s  tala/leak             forward

public bugs: 1 of 1 kind, modelled by 2 mutants, 2 killed

rivals on users' inputs: aligned shapes, normal values
                                float32          bfloat16
                         kills   alarms    kills   alarms
  allclose 1e-2         60.0 %    0.5 %   60.0 %    0.5 %
  gradcheck             20.0 %        -        -        -
  mixproof, tolerance    100 %      0 %    100 %      0 %
  of 5 mutants; of 400 honest cases a format

rivals on our atlas: short, odd and extreme cases
                                float32          bfloat16
                         kills   alarms    kills   alarms
  allclose 1e-2         60.0 %    6.2 %   60.0 %    6.2 %
  gradcheck             20.0 %        -        -        -
  mixproof, tolerance    100 %      0 %    100 %      0 %
  mixproof, all laws     100 %      0 %        -        -
  of 5 mutants; of 1,600 honest cases a format

told apart: the mutant rejected, the reference accepted in the same case
                                  users             atlas
                       float32 bfloat16  float32 bfloat16
  allclose 1e-2         40.0 %   40.0 %   40.0 %   40.0 %
  gradcheck                  -        -        -        -
  mixproof, tolerance    100 %    100 %    100 %    100 %
  mixproof, all laws         -        -    100 %        -

honest cases    judged  alarms  vacuous  error/bound  worst in
  float32        2,000       0    0.3 %         0.93  tala
  bfloat16       2,000       0    0.3 %         0.93  tala
  worst: tala, float32: T=17 of tala in float32, sums in pairs

plan of smoke: 1 case, 0 s, 3 of 5 mutants killed by the record

5 mutants, 4,000 honest cases: every mutant is killed by each law that it names, no honest alarm, no
  drift"""
    )
    assert power.exit_code(study) == 0


def test_what_fails_comes_last_by_name(study):
    spare(study, 0)
    study["matrix"][2]["named"] = ["forward", "split", "vjp"]
    study["honest"][1]["alarms"]["atlas"][figures.JUDGE] = 2
    study["honest"][1]["failures"] = ["T=17 regime=growing, in one fused sum"]
    study["drift"] = ["tala/leak: killed by split no more"]
    assert power.terminal(study).split("\n\n")[-4:] == [
        "SURVIVE   no law kills: 1\n"
        "  retention/tail_decay   the reference with the last chunk decayed as if it were full   [split 0.4]\n"
        "SPARED    by a law that they name: 1\n"
        "  tala/leak   the reference with the next key let in   [split 0, vjp did not judge it]",
        "ALARMS    honest evaluations rejected: 2\n"
        "  retention, bfloat16: 2 cases\n"
        "      T=17 regime=growing, in one fused sum",
        "DRIFT     the plan and this study differ: 1\n  tala/leak: killed by split no more",
        "5 mutants, 4,000 honest cases: 1 mutant that no law kills, 1 mutant spared by a law that they name,\n"
        "  2 honest alarms, 1 drift of the plan",
    ]
    assert "  retention      1/2 !  tala           3/3" in power.terminal(study)
    assert "1 killed; not all of tala-tail-decay" in power.terminal(study)


@pytest.mark.parametrize(("width", "formats"), [(80, 2), (100, 4)])
def test_it_fits_the_screen(width, formats):
    study = large(mutants=300)
    spare(study, 7)
    study["drift"] = ["gated_linear_attention/" + "x" * 30 + ": killed by " + "gradient_identities " * 9] * 30
    for part in ("duels", "honest"):
        study[part] += [row | {"format": f"f{row['format']}"} for row in study[part]] if formats == 4 else []
    lines = power.terminal(study, width).splitlines()
    assert max(map(len, lines)) <= width
    assert "  and 10 more" in lines


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 9, "0 %"), (9, 9, "100 %"), (1, 10**4, "< 0.1 %"), (9999, 10**4, "> 99.9 %"), (1, 3, "33.3 %"), (0, 0, "-")],
)
def test_all_and_none_are_said_of_all_and_none_alone(part, whole, text):
    assert figures.percent(part, whole) == text


# --- whether it passes ------------------------------------------------------------------------------------------------


def test_a_mutant_that_a_named_law_spares_fails_it_though_another_kills(study):
    study["matrix"][2]["named"].append("split")
    assert power.exit_code(study) == 1
    assert figures.killed(study["matrix"][2])


@pytest.mark.parametrize("index", range(5))
def test_any_survivor_fails_it(study, index):
    spare(study, index)
    assert power.exit_code(study) == 1


def test_a_mutant_that_no_law_looked_at_fails_it(study):
    study["matrix"][1].update(laws={}, first=None)
    assert power.exit_code(study) == 1
    assert "[vjp did not judge it]" in power.terminal(study)


def test_a_mutant_that_cannot_run_here_is_counted_apart(study):
    study["matrix"][1].update(laws={}, first=None, not_run="torch is not installed")
    assert power.exit_code(study) == 0
    assert " ".join(power.closing(study).split()).startswith("4 mutants, 4,000 honest cases: every mutant")
    assert power.closing(study).endswith("(1 mutant not run: torch is not installed)")


@pytest.mark.parametrize("inputs", ["users", "atlas"])
def test_an_alarm_of_ours_fails_it_and_one_of_a_rival_does_not(study, inputs):
    study["honest"][0]["alarms"][inputs]["allclose 1e-2"] = 99
    assert power.exit_code(study) == 0
    study["honest"][0]["alarms"][inputs][figures.JUDGE] = 1
    assert power.exit_code(study) == 1


def test_a_listed_alarm_fails_it_though_none_was_counted(study):
    study["honest"][0]["failures"] = ["T=1"]
    assert power.exit_code(study) == 1


def test_drift_fails_it(study):
    study["drift"] = ["tala/leak: killed by split no more"]
    assert power.exit_code(study) == 1


@pytest.mark.parametrize("part", figures.PARTS)
def test_a_part_that_holds_nothing_never_passes_unless_it_was_not_asked_for(study, part):
    study[part] = []
    assert power.exit_code(study) == 5
    assert f"nothing in {part}" in power.closing(study)
    power.terminal(study)
    power.html(study)
    study["parts"] = [p for p in figures.PARTS if p != part]
    assert power.exit_code(study) == 0


def test_an_empty_study_says_so():
    empty = {"schema": 1, "profile": "ci", "seed": 0}
    assert power.exit_code(empty) == 5
    assert power.terminal(empty) == "mixproof power   profile ci   seed 0\n\nnothing in matrix, duels, honest"
    assert "nothing in matrix" in power.html(empty)


# --- Markdown, JSON ---------------------------------------------------------------------------------------------------


def test_the_rivals_for_the_readme(study):
    expected = """\
| users' inputs: aligned shapes, normal values | float32 | bfloat16 |
|---|---:|---:|
| allclose 1e-2 | 60.0 % / 0.5 % | 60.0 % / 0.5 % |
| gradcheck | 20.0 % / - | - |
| **mixproof, tolerance** | **100 % / 0 %** | **100 % / 0 %** |

| our atlas: short, odd and extreme cases | float32 | bfloat16 |
|---|---:|---:|
| allclose 1e-2 | 60.0 % / 6.2 % | 60.0 % / 6.2 % |
| gradcheck | 20.0 % / - | - |
| **mixproof, tolerance** | **100 % / 0 %** | **100 % / 0 %** |
| **mixproof, all laws** | **100 % / 0 %** | **-** |

Share of 5 mutants rejected / share of honest evaluations rejected, 400 and 1,600 a format
(`mixproof power --profile ci`, seed 0).
"""
    assert power.markdown(study) == expected


def test_the_json_is_the_study_one_row_a_line(study):
    text = power.as_json(study)
    assert json.loads(text) == study
    rows = [line for line in text.splitlines() if '"mutant":' in line]
    assert len(rows) == 6  # five mutants, and a reference that is run as they are
    assert json.loads(rows[0].strip().rstrip(",")) == study["matrix"][0]
    assert json.loads(power.as_json({"matrix": []}))["schema"] == power.SCHEMA


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_the_json_holds_no_number_that_json_lacks(study, bad):
    study["matrix"][0]["laws"]["split"]["ratio"] = bad
    with pytest.raises(ValueError, match="JSON compliant"):
        power.as_json(study)


# --- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Rows of tables, links and anchors, and tags that stay open though HTML does not let one leave out their end."""

    OPTIONAL = frozenset({"tr", "td", "th", "thead", "tbody", "li", "p", "meta", "wbr", "html", "link"})

    def __init__(self, text):
        super().__init__()
        self.rows, self.open, self.tags, self.links, self.anchors = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.links += [value for key, value in attributes if key in ("href", "src", "srcset", "data", "action")]
        self.anchors += [given["id"]] if "id" in given else []
        if tag == "table":
            self.rows.append([])
        elif tag == "tr":
            self.rows[-1].append([])
        elif tag in ("td", "th"):
            self.rows[-1][-1].append(given.get("class", ""))
        if tag not in self.OPTIONAL:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.OPTIONAL:
            assert self.open.pop() == tag


def large(mutants=1400, laws=33, judged=33):
    """Larger than the tree's own study."""
    names = [f"gradient_identities_{i}"[:19] + str(i) for i in range(laws)]
    study = made_up()
    study["matrix"] = [
        mutant(
            f"gated_linear_attention_{i % 30}.simple_{i % 2}/vjp.overwritten_cotangents_{i}",
            "no decay from the chunk's start of what is read from the state and added",
            names[:2],
            {n: law(k < 20, 12345.0, regime=f"regime_{k}") for k, n in enumerate(names[:judged])},
            f"tala-tail-decay-{i % 70}",
        )
        for i in range(mutants)
    ]
    study["laws"] = [{"law": n, "kills": mutants, "only": [], "seconds": 12.5, "cases": 12345} for n in names]
    study["plan"]["operators"] = {f"o{i}": study["plan"]["operators"]["tala"] * 8 for i in range(60)}
    return study


def test_every_row_of_a_table_has_a_cell_for_each_column(study):
    page = Page(power.html(study))
    assert not page.open
    assert len(page.rows) >= 12
    for table in page.rows:
        assert len({len(row) for row in table}) == 1, table


def test_the_page_runs_nothing_and_fetches_nothing(study):
    text = power.html(study)
    page = Page(text)
    assert not {"script", "img", "iframe", "object", "link", "form"} & set(page.tags)
    assert {link.removeprefix("#") for link in page.links} == set(page.anchors)  # every link goes to a place of its own
    assert not re.search(r"https?:|url\(|@import|\bon\w+=", text)
    for wanted in ("prefers-color-scheme: dark", "@media print", 'name=viewport content="width=device-width'):
        assert wanted in text


def test_what_came_from_outside_is_escaped(study):
    hostile = '<script>alert("x")</script>&'
    study["matrix"][0].update(what=hostile, mutant=f"retention/{hostile}", source=hostile)
    spare(study, 0)
    study["environment"][hostile] = hostile
    study["drift"] = [hostile]
    study["honest"][0]["worst_case"] = hostile
    study["plan"]["operators"]["tala"][0]["case"] = hostile
    text = power.html(study)
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;&amp;") >= 6


def test_the_page_of_the_whole_tree_is_below_a_megabyte():
    """Most operators are judged by about 20 laws."""
    assert len(power.html(large(judged=22)).encode()) < 1_000_000


def test_the_page_shows_a_mutant_by_each_law(study):
    """Killed by 41712 of the law it names; not killed, 0.31; infinite; killed 4 of 4 in its family's square."""
    text = power.html(study)
    assert '<th>tail_<wbr>decay<td>0.31<td><td class="n k5">4e4<td class=t>0.20' in text
    assert '<th>leak<td class="n k5">inf<td>0<td class=t>' in text
    assert '<td class=h5 title="tala, forward: 3 of 3">3' in text
    assert '<td class=h3 title="retention, vjp: 1 of 1">' not in text
    assert 'title="200 of 200 honest cases"' not in text
    assert 'title="3 of 5 mutants"><b>60.0 %</b><i><u style="width:60.0%">' in text


def test_the_page_names_the_public_bugs(study):
    row = "<code>tala-tail-decay</code><td class=n>2<td class=n>2<td>tail-chunk<td class=wide>T % C != 0"
    assert f"{row}<td class=wide>fla e361dd3a" in power.html(study)
    assert "gma-no-max" not in power.html(study)  # no mutant of this study stands for it
    del study["sources"]
    assert "<code>tala-tail-decay</code><td class=n>2<td class=n>2<td><td" in power.html(study)


def test_the_page_shows_what_fails_first(study):
    holds = power.html(study)
    assert "Holds." in holds
    assert "id=fails" not in holds
    study["matrix"][2]["named"].append("split")
    spare(study, 1)
    fails = power.html(study)
    assert "Fails." in fails
    assert fails.index("id=fails") < fails.index("id=matrix")
    assert "<code>retention/vjp.scale</code> the reference with q&#39;s gradient not scaled (vjp 0.4)" in fails
    assert "<td class=m>0!" in fails
    assert "<details open><summary><code>retention</code>" in fails


def test_every_shade_is_read_easily_in_both_schemes(study):
    """WCAG's contrast of at least 4.5 of each text on its ground."""

    def luminance(color):
        full = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
        parts = [int(full[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    schemes = re.findall(r":root \{(.*?)\}", power.html(study), re.DOTALL)
    assert len(schemes) == 2
    pairs = [[text, "page"] for text in ("text", "muted", "bad", "good", "kill")]
    pairs += [["muted", "panel"], ["muted", "h0"], ["bad", "bad-back"], ["text", "bad-back"]]
    pairs += [["on-light", f"h{i}"] for i in (1, 2, 3)] + [["on-dark", f"h{i}"] for i in (4, 5)]
    for scheme in schemes:
        colors = dict(re.findall(r"--([\w-]+): (#\w+)", scheme))
        for text, ground in pairs:
            low, high = sorted((luminance(colors[text]), luminance(colors[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_without_jinja2_the_page_says_what_to_install(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mixproof\[report\]'"):
        power.html(study)


def test_a_report_changes_nothing_in_the_study(study):
    before = copy.deepcopy(study)
    for made in (power.terminal, power.markdown, power.as_json, power.html, power.exit_code):
        made(study)
    assert study == before


def test_a_law_that_the_reference_breaks_fails_the_study(study):
    study["twins"][0]["laws"]["split"].update(killed=True, ratio=1.5)
    text = power.terminal(study)
    assert power.exit_code(study) == 1
    assert "tala/honest: the reference breaks split" in text
    assert "1 law that the reference breaks" in " ".join(text.split())
    assert "tala/honest" in power.html(study)
