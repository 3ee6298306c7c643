"""What the functions of GMA take: their inputs as the operators declare them, and what plain arrays are checked for.

The letters are those of gma.py and gma_mixing.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .primitives import Array, softplus
from .spec import Input, Operator, check_shapes


def tokens(name: str, rows: str, columns: str, domain: str) -> Input:
    """A token input with named axes."""
    return Input(name, (rows, columns), "token", domain)


MIXTURE = (
    Input("mu", ("K", "R"), "parameter", "mean"),
    Input("omega", ("K", "R"), "parameter", "log_variance"),
    Input("alpha", ("K",), "parameter", "logit"),
)
EPS = Input("eps", (), "scalar", "epsilon", default=1e-6, differentiable=False)
V_MIN = Input("v_min", (), "scalar", "floor", default=0.0, differentiable=False)
SELF = (tokens("q", "T", "R", "routing"), tokens("k", "T", "R", "routing"), tokens("v", "T", "V", "value"))
CONTEXT = (tokens("q", "T", "R", "routing"), tokens("k", "S", "R", "routing"), tokens("v", "S", "V", "value"))
MEMORY = (
    Input("S0", ("K", "V"), "state", "state", carries="S"),
    Input("Z0", ("K",), "state", "mass", carries="Z"),
)
# of the mixing algebra, over any field: responsibilities are inputs
FIELD = (
    tokens("GQ", "T", "K", "field"),
    tokens("GK", "T", "K", "field"),
    tokens("V", "T", "D", "field"),
    Input("eps", (), "scalar", "field"),
)
FIELD_MEMORY = (Input("S0", ("K", "D"), "state", "field"), Input("Z0", ("K",), "state", "field"))


def check(operator: Operator, **inputs: Array) -> None:
    """Raises ValueError or TypeError naming the argument that makes no sense. Other number systems pass unchecked."""
    for name, x in inputs.items():
        if isinstance(x, (list, tuple)) or (isinstance(x, np.ndarray) and x.dtype.kind not in "fO"):
            kind = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
            raise TypeError(f"{name} is {kind}; {operator.name} expects a floating-point array")
    for name, domain in (("eps", "> 0"), ("v_min", ">= 0")):
        x = inputs.get(name, 1.0)
        if isinstance(x, (int, float, np.floating)) and not (0 < x < np.inf or (name == "v_min" and x == 0)):
            raise ValueError(f"{name} is {x}; it must be {domain} and finite")
    plain = {name: x for name, x in inputs.items() if isinstance(x, np.ndarray) and x.dtype.kind == "f"}
    if check_shapes(operator, plain).get("K") == 0:
        raise ValueError("mu, omega and alpha describe K = 0 components; at least one is needed")
    for name in ("mu", "omega", "alpha"):
        if name in plain and np.any(np.isnan(plain[name])):
            raise ValueError(f"{name} contains NaN")
    if "alpha" in plain and np.all(np.isneginf(plain["alpha"])):
        raise ValueError("alpha is -inf for every component: the prior is empty")
    if "omega" in plain and inputs["v_min"] == 0 and np.any(softplus(plain["omega"]) == 0):
        low = np.min(plain["omega"])
        raise ValueError(f"omega is as low as {low}: the variance underflows to 0; a floor v_min > 0 is needed")


def check_cotangents(cotangents: Mapping[str, Array], **shapes: tuple[int, ...]) -> None:
    """Raises ValueError for a cotangent of no output, or of another shape than its output."""
    for name, G in cotangents.items():
        if name not in shapes:
            raise ValueError(f"cotangents names {name!r}; the outputs are {', '.join(shapes)}")
        if isinstance(G, np.ndarray) and G.shape != shapes[name]:
            raise ValueError(f"the cotangent of {name} has shape {G.shape}; {name} has shape {shapes[name]}")
