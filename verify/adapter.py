"""`mixproof new OPERATOR`: an adapter with the operator's inputs, shapes and equation filled in; one line to edit."""

from __future__ import annotations

import textwrap

from mixproof.reference.spec import Input
from mixproof.verify.declare import find

TEMPLATE = '''"""Adapter for MixProof. Edit the import below, then run:  mixproof check THIS_FILE"""

from my_kernels import {function} as kernel  # <- your function

from mixproof.verify import implements

# {name}: {summary}
# source: {source}
#
# Its inputs, with layout="B T H D"; leave out an optional one that your function does not take.
{shapes}
# It returns
{outputs}
#
# Declare what holds for yours (help(implements) lists everything):
#   layout="B H T D"                    the order of axes in token inputs and outputs
#   dtypes=("float32", "bfloat16")      input dtypes{chunk_note}
#   multiple_of={{"{T}": 16}}               sizes that it needs
#   gradients=False                     autograd does not run through it
#   requires=("triton",)                a kernel in Triton; devices=("cpu", "cuda") runs it on a GPU where there is one


@implements("{name}", layout="B T H D", dtypes=("float32",))
{head}
{body}
'''
CHUNK_NOTE = "\n#   chunk=64                            its chunk size: lengths around it are tried"


def adapter(name: str) -> str:
    """The text of an adapter. Raises UsageError for an unknown operator."""
    op = find(name)
    return TEMPLATE.format(
        name=op.name,
        summary=op.summary,
        source=op.source,
        shapes="\n".join(f"#   {x.name:8s} {_shape(x)}" for x in op.inputs),
        outputs="\n".join(f"#   {y.name:8s} ({', '.join(_axes(y.role, y.axes))})" for y in op.outputs),
        T=op.token_axes[0],
        head=_wrapped("def mine(", [f"{x.name}={x.default!r}" if x.optional else x.name for x in op.inputs], "):"),
        body=_wrapped("    return kernel(", [f"{x.name}={x.name}" if x.optional else x.name for x in op.inputs], ")"),
        function=op.name.replace(".", "_"),
        chunk_note=CHUNK_NOTE if any(f.chunked for f in op.forms) else "",
    )


def _wrapped(start: str, arguments: list[str], end: str) -> str:
    """A call on one line, or on several where it is long."""
    line = start + ", ".join(arguments) + end
    if len(line) <= 100:
        return line
    indent = " " * (len(start) - len(start.lstrip()))
    inner = textwrap.wrap(" ".join(f"{a}," for a in arguments), 96 - len(indent))
    return "\n".join([start, *(f"{indent}    {row}" for row in inner), indent + end])


def _axes(role: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    if role == "token":
        return ("B", axes[0], "H", *axes[1:])
    return ("H", *axes) if role == "parameter" else ("B", "H", *axes)


def _shape(x: Input) -> str:
    if x.role == "scalar":
        kind = "True or False" if x.domain == "flag" else "number or None" if x.default is None else "number"
        return f"{kind}, default {x.default}"
    shape = ", ".join(_axes(x.role, x.axes)) + ("," if x.role == "parameter" and not x.axes else "")
    if x.role == "state":
        return f"({shape}) or None: the initial state, which the output {x.carries} continues"
    return f"({shape}), one set per head" if x.role == "parameter" else f"({shape})"
