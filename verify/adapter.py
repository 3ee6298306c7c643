"""`mixproof new OPERATOR`: an adapter with the operator's inputs, shapes and equation filled in; one line to edit."""

from __future__ import annotations

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Input
from mixproof.verify.errors import UsageError

TEMPLATE = '''"""Adapter for MixProof. Run:  mixproof check THIS_FILE"""

from mixproof.verify import implements

# {name}: {summary}
# source: {source}
#
{shapes}
#
# returns {outputs}


@implements("{name}", layout="B T H D", dtypes=("float32",){chunk})
def mine({arguments}):
    from my_kernels import {function}  # <- your code

    return {function}({call})
'''


def adapter(name: str) -> str:
    """The text of an adapter. Raises UsageError for an unknown operator."""
    try:
        op = find_operator(name)
    except KeyError as error:
        raise UsageError(f"{error.args[0]} (mixproof list)") from None
    shapes = "\n".join(f"#   {x.name:8s} {_shape(x)}" for x in op.inputs)
    outputs = ", ".join(
        f"{y.name} ({', '.join(('B', y.axes[0], 'H', *y.axes[1:]) if y.role == 'token' else ('B', 'H', *y.axes))})"
        for y in op.outputs
    )
    return TEMPLATE.format(
        name=op.name,
        summary=op.summary,
        source=op.source,
        shapes=shapes,
        outputs=outputs,
        arguments=", ".join(_argument(x) for x in op.inputs),
        call=", ".join(x.name for x in op.inputs),
        function=op.name.replace(".", "_"),
        chunk=", chunk=64" if any(f.chunked for f in op.forms) else "",
    )


def _argument(x: Input) -> str:
    return f"{x.name}={x.default!r}" if x.optional else x.name


def _shape(x: Input) -> str:
    if x.role == "token":
        return f"(B, {x.axes[0]}, H, {x.axes[1]})"
    if x.role == "parameter":
        return f"({', '.join(('H', *x.axes))}{',' if not x.axes else ''})   one set per head"
    if x.role == "state":
        return f"({', '.join(('B', 'H', *x.axes))})   or None: initial state, continued by the output {x.carries}"
    return f"number, default {x.default}"
