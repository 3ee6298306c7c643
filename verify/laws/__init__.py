"""The laws, one a file. A law returns evidence and decides nothing; every law that an operator allows is applied to
every implementation of it."""

from __future__ import annotations

from importlib import import_module

from mixproof.verify.laws.law import Law

# one line per law: name -> module; the order is that of the report
LAWS: dict[str, str] = {
    "forward": "forward",
    "vjp": "vjp",
    "extremes": "extremes",
    "causality": "causality",
    "gradient_causality": "gradient_causality",
    "future_length": "future_length",
    "forms": "forms",
    "split": "split",
    "linearity": "linearity",
    "homogeneity": "homogeneity",
    "reset": "reset",
    "left_padding": "left_padding",
    "cocycle": "cocycle",
    "constant_value": "constant_value",
    "row_sums": "row_sums",
    "hull": "hull",
    "low_rank": "low_rank",
    "permutation": "permutation",
    "relabelling": "relabelling",
    "experts": "experts",
    "translation": "translation",
    "gradient_identities": "gradient_identities",
    "euler": "euler",
    "lipschitz": "lipschitz",
    "independence": "independence",
    "layout": "layout",
    "unchanged": "unchanged",
    "written": "written",
    "deterministic": "deterministic",
    "saved_memory": "saved_memory",
    "operations": "operations",
    "exact": "exact",
    "certified": "certified",
}


def law(name: str) -> Law:
    """The law called `name`. Raises KeyError for an unknown one."""
    if name not in LAWS:
        raise KeyError(f"no law {name!r}; there are {', '.join(LAWS)}")
    return import_module(f"{__name__}.{LAWS[name]}").LAW
