"""The equations of sequence mixers, one operator a file, over whatever numbers they are given. Needs only numpy."""

from __future__ import annotations

from importlib import import_module

from .spec import Operator

# one line per operator: name -> (module, attribute)
OPERATORS: dict[str, tuple[str, str]] = {
    "gma.responsibilities": ("gma", "RESPONSIBILITIES"),
    "gma.bidirectional": ("gma", "BIDIRECTIONAL"),
    "gma.causal": ("gma", "CAUSAL"),
    "gma.cross": ("gma", "CROSS"),
    "retention": ("retention", "OPERATOR"),
    "softmax_attention": ("softmax_attention", "OPERATOR"),
}


def operator(name: str) -> Operator:
    """The operator called `name`. Raises KeyError with the nearest known name."""
    if name not in OPERATORS:
        from difflib import get_close_matches

        near = get_close_matches(name, OPERATORS, n=1, cutoff=0.4)
        raise KeyError(f"no operator {name!r}" + (f'; did you mean "{near[0]}"?' if near else ""))
    module, attribute = OPERATORS[name]
    return getattr(import_module(f".{module}", __name__), attribute)
