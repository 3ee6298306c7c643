"""The ledger: sentences of the papers made checkable, each with a verdict and a check that finds the verdict again.

A claim is a check function below `@claim(...)`; a paper's claims are those in its modules. Nothing is imported until
they are asked for.

    proved           for all inputs, by symbolic or exact proof
    holds            in every case that was tried
    holds only if    `why` is the condition: with it the claim held, without it it failed
    refuted          `why` is a counterexample
    not checkable    `why` is what is missing: a measurement, or a text that contradicts itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from mixproof.verify.errors import UsageError

# paper -> modules with its claims; the order is that of the report
PAPERS: dict[str, tuple[str, ...]] = {
    "gma": (
        "gma_costs",
        "gma_algebra",
        "gma_equations",
        "gma_gradients",
        "gma_stability",
        "gma_profile",
        "gma_results",
        "gma_diagnosis",
        "gma_taxonomy",
    ),
    "mixformer": (
        "mixformer_attention",
        "mixformer_features",
        "mixformer_forms",
        "mixformer_memory",
        "mixformer_rivals",
        "mixformer_costs",
        "mixformer_results",
        "mixformer_sizes",
        "mixformer_text",
    ),
    "survey": (
        "survey",
        "survey_recurrent",
        "survey_memory",
        "survey_latent",
        "survey_heads",
        "survey_compressed",
        "survey_text",
    ),
}
VERDICTS = ("proved", "holds", "holds only if", "refuted", "not checkable")
KINDS = (
    "symbolic proof",
    "exact arithmetic",  # over the integers, the rationals or a finite field
    "certified interval",
    "property test",  # at drawn inputs
    "evaluation",  # at given ones
    "recomputation",  # of printed numbers and counts
    "reading of a text",
)
WITH_REASON = VERDICTS[2:]


@dataclass(frozen=True)
class Finding:
    """What a check found: a verdict, and the numbers that it rests on, in one line."""

    verdict: str
    numbers: str


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper in our words, what we hold of it, and how that is found again. `evidence` is one of KINDS;
    `why` is the condition, the counterexample, or what is missing."""

    id: str
    text: str
    source: str
    verdict: str
    evidence: str
    why: str
    check: Callable[[], Finding]

    @property
    def paper(self) -> str:
        return self.id.split(".")[0]

    def as_dict(self) -> dict[str, str]:
        """All but the function, whose name is given instead."""
        data = {name: value for name, value in vars(self).items() if name != "check"}
        return data | {"check": f"{self.check.__module__}.{self.check.__name__}"}


def claim(
    id: str, text: str, *, source: str, verdict: str, evidence: str, why: str = ""
) -> Callable[[Callable[[], Finding]], Claim]:
    """Turns a check into a Claim. Raises ValueError for an unknown verdict or kind of evidence, and for a verdict with
    a condition, a counterexample or a gap that does not say which."""
    if verdict not in VERDICTS:
        raise ValueError(f"{id}: no verdict {verdict!r}; there are {', '.join(VERDICTS)}")
    if evidence not in KINDS:
        raise ValueError(f"{id}: no kind of evidence {evidence!r}; there are {', '.join(KINDS)}")
    if (verdict in WITH_REASON) != bool(why):
        raise ValueError(f"{id}: {verdict!r} {'needs a' if not why else 'has no'} `why`")
    return lambda check: Claim(id, text, source, verdict, evidence, why, check)


def unchecked(id: str, text: str, *, source: str, why: str) -> Claim:
    """A claim that nothing here can decide."""

    def reason() -> Finding:
        return Finding("not checkable", why)

    return Claim(id, text, source, "not checkable", "reading of a text", why, reason)


# --- what a check found, as a finding --------------------------------------------------------------------------------


def proved(true: bool, numbers: str) -> Finding:
    """By an argument that covers all inputs."""
    return Finding("proved" if true else "refuted", numbers)


def holds(true: bool, numbers: str) -> Finding:
    """In all cases that were tried, or not in one of them."""
    return Finding("holds" if true else "refuted", numbers)


def conditional(within: bool, beyond: bool, numbers: str) -> Finding:
    """Whether the claim holds where the condition does, and where it does not."""
    return Finding("refuted" if not within else "holds" if beyond else "holds only if", numbers)


# --- the ledger ------------------------------------------------------------------------------------------------------


def ledger(paper: str = "") -> dict[str, Claim]:
    """All claims by id, or those of one paper. Raises UsageError for an unknown paper, ValueError for one id twice."""
    if paper and paper not in PAPERS:
        raise UsageError(f"no claims of {paper!r}; there are those of {', '.join(PAPERS)}")
    found: dict[str, Claim] = {}
    for name in [paper] if paper else PAPERS:
        claims: dict[str, Claim] = {}
        for module in PAPERS[name]:
            for c in vars(import_module(f"{__name__}.{module}")).values():
                if isinstance(c, Claim):
                    if c.id in claims or c.id in found:
                        raise ValueError(f"two claims are called {c.id}")
                    claims[c.id] = c
        found |= {id: claims[id] for id in _in_order(claims)}
    return found


def _in_order(ids: Iterable[str]) -> list[str]:
    """By letter as they come, then by number."""
    known = list(ids)
    letters = list(dict.fromkeys(_letter(id) for id in known))
    return sorted(known, key=lambda id: (letters.index(_letter(id)), int(id.split(".")[1][1:])))


def _letter(id: str) -> str:
    return id.split(".")[1][0]


def find(id: str) -> Claim:
    """One claim. Raises UsageError for an unknown id, with those that are near."""
    claims = ledger()
    if id not in claims:
        near = get_close_matches(id, claims, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UsageError(f"no claim {id!r}{hint}   (mixproof claims)")
    return claims[id]
