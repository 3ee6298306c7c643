"""Repairs of Triton's interpreter, one a canary, each wrapping the function that errs (`__wrapped__` is the original).

They patch classes of `triton.runtime.interpreter`, which compiled kernels do not touch, and the autotuner, where a
compiled kernel takes the original way.
"""

from __future__ import annotations

import ast
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mixproof.verify.subjects.triton import interpreter

interpreter.start()

import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.runtime import interpreter as tri  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """owner.name = make(original)."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


# ---- speed


def vectorised_scan() -> None:
    """Not a defect, but hours: the interpreter scans one number at a time. Here all rows of the axis take a step
    together, with the same operations in the same order."""

    def make(original):
        def scan(self, input):
            parts = [np.moveaxis(x.handle.data, self.axis, 0) for x in input]
            kinds = [x.dtype.scalar for x in input]
            rows = [tuple(self.to_tensor(p[0], k) for p, k in zip(parts, kinds, strict=True))]
            for i in range(1, len(parts[0])):
                token = (self.to_tensor(p[i], k) for p, k in zip(parts, kinds, strict=True))
                combined = self.combine_fn.fn(*rows[-1], *token)
                rows.append(combined if isinstance(combined, tuple) else (combined,))
            columns = (np.stack([x.handle.data for x in column]) for column in zip(*rows, strict=True))
            moved = (np.ascontiguousarray(np.moveaxis(x, 0, self.axis)) for x in columns)
            return [self.to_tensor(x, k) for x, k in zip(moved, kinds, strict=True)]

        return scan

    _wrap(tri.ScanOps, "generic_scan", make)


# ---- typing and control flow


def autotuner() -> None:
    """`Autotuner._bench` times each configuration with a driver's stop watch. Here all tie: the first one wins."""

    def make(original):
        def bench(self, *args, config, **meta):
            fn = self.fn
            while hasattr(fn, "fn") and not isinstance(fn, tri.InterpretedFunction):
                fn = fn.fn
            if isinstance(fn, tri.InterpretedFunction):
                return [0.0, 0.0, 0.0]
            return original(self, *args, config=config, **meta)

        return bench

    _wrap(Autotuner, "_bench", make)


def loop_variable() -> None:
    """`for i in range(..)` yields Python integers. The compiler makes i a scalar of the type of the bounds, with
    `.to` and C division; static_range stays as it is."""

    def scalars(arg1, arg2=None, step=None, **hints) -> Iterator[tl.tensor]:
        start, stop = (0, arg1) if arg2 is None else (arg1, arg2)
        step = 1 if step is None else step
        semantic = tri.interpreter_semantic
        first, *others = (semantic.to_tensor(x).dtype for x in (start, stop, step))
        dtype = functools.reduce(semantic.integer_promote_impl, others, first)
        for i in range(int(start), int(stop), int(step)):
            yield semantic.scalar_constant(i, dtype)

    def visit_For(self, node):
        self.generic_visit(node)
        call = node.iter
        if isinstance(call, ast.Call) and "range" in (getattr(call.func, "id", ""), getattr(call.func, "attr", "")):
            call.func = ast.copy_location(ast.Name(id=scalars.__name__, ctx=ast.Load()), call.func)
        return node

    scalars.__name__ = "_range_of_scalars"
    setattr(tri, scalars.__name__, scalars)  # kernels see the names of this module
    tri.ASTTransformer.visit_For = visit_For
    tri.InterpretedFunction.rewritten_fn.clear()  # the canary, and any kernel that ran before


def float_argument() -> None:
    """A float argument is a float32 scalar for the compiler; a Python float takes part in no type promotion."""

    def make(original):
        def convert(arg):
            if isinstance(arg, float):
                return tl.tensor(tri.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
            return original(arg)

        return convert

    _wrap(tri, "_implicit_cvt", make)


def comparison() -> None:
    """`binary_op` labels its result with the operands' dtype, so that a later splat makes int64 of a mask."""

    def make(original):
        def binary_op(self, lhs, rhs, op):
            out = original(self, lhs, rhs, op)
            return tri.TensorHandle(out.data.astype(bool), tl.int1) if op in _COMPARISONS else out

        return binary_op

    _wrap(tri.InterpreterBuilder, "binary_op", make)


def builtin_alias() -> None:
    """`_patch_lang` hands the interpreter to attributes of modules; `arange = tl.arange` in a kernel's file escapes."""

    def interpreted(builtin):
        @functools.wraps(builtin)
        def call(*args, **kwargs):
            return builtin(*args, **(kwargs | {"_semantic": tri.interpreter_semantic}))

        vars(call).pop(tl.core.TRITON_BUILTIN)  # do not wrap it again
        return call

    seen: dict[int, tuple[dict, int, list]] = {}  # by namespace: itself, its size when it was searched, its modules

    def searched(names):
        if seen.get(id(names), (None, -1))[1] != len(names):
            names.update({n: interpreted(v) for n, v in names.items() if callable(v) and tl.core.is_builtin(v)})
            seen[id(names)] = (names, len(names), [m for m in names.values() if m is tl or m is tl.core])
        return seen[id(names)][2]

    def make(original):
        def patch_lang(fn):
            places = [tl.tensor.__add__, *(m.arange for m in searched(fn.__globals__))]
            if len(places) > 1 and not any(tl.core.is_builtin(f) for f in places):
                return tri._LangPatchScope()  # a device function inside a kernel: it is patched, and patching is slow
            return original(fn)

        return patch_lang

    _wrap(tri, "_patch_lang", make)


def libdevice_bodies() -> None:
    """The compiler replaces libdevice's stubs by calls; the interpreter calls them. float32 is computed in float64 and
    rounded once, so the `fast_` ones are better here than there."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    functions = {
        name: getattr(np, name)
        for name in ["exp", "exp2", "log", "log2", "log1p", "expm1", "tanh", "sin", "cos", "sqrt"]
    }
    functions |= {"rsqrt": lambda x: 1 / np.sqrt(x), "erf": erf}
    functions |= {f"fast_{name}f": getattr(np, name) for name in ["exp", "log", "log2", "tanh", "sin", "cos"]}

    def body(name, function):
        def call(arg0, _semantic=None):
            kind = arg0.dtype
            if kind not in (tl.float32, tl.float64):
                raise TypeError(f"libdevice.{name} has no {kind} form")
            y = function(arg0.handle.data.astype(np.float64)).astype(arg0.handle.data.dtype)
            return tl.tensor(tri.TensorHandle(y, kind), arg0.type)

        return call

    for name, function in functions.items():
        _wrap(libdevice, name, lambda _, n=name, f=function: body(n, f))


def floating_point_exception() -> None:
    """NumPy warns of overflow, division by zero and invalid operations; kernels go on with inf and nan."""

    def quiet(original):
        def call(self, *args, **kwargs):
            with np.errstate(all="ignore"):
                return original(self, *args, **kwargs)

        return call

    def quiet_nan(original):
        def min_max(self, *args, **kwargs):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All-NaN (slice|axis) encountered", RuntimeWarning)
                return original(self, *args, **kwargs)

        return min_max

    _wrap(tri.GridExecutor, "__call__", quiet)
    _wrap(tri.ReduceOps, "min_max", quiet_nan)


# ---- bfloat16: NumPy has none, so the interpreter stores the bits as uint16. Operate in float32, round to nearest
# even. For + - * / this equals rounding once (24 >= 2 * 8 + 2 digits); a reduction rounds only its result.


def bfloat16_cast() -> None:
    """`cast_impl` truncates float32, and converts other types to and from the number that the bits spell."""

    def make(original):
        def cast_impl(self, src, dst_type):
            if src.dtype.scalar == dst_type.scalar:
                return src
            src = _wide(src)
            if dst_type.scalar == tl.bfloat16:
                return _narrow(original(self, src, tl.float32))
            return original(self, src, dst_type) if dst_type.scalar != src.dtype.scalar else src

        return cast_impl

    _wrap(tri.InterpreterBuilder, "cast_impl", make)


def bfloat16_arithmetic() -> None:
    """`binary_op`, `unary_op`, fma and clamp apply integer arithmetic to the bits."""

    def make(original):
        def operation(self, *args):
            if not any(_is_bfloat16(x) for x in args):
                return original(self, *args)
            out = original(self, *(_wide(x) for x in args))
            return out if out.data.dtype == bool else _narrow(out)

        return operation

    for name in ("binary_op", "unary_op", "create_fma", "create_clampf"):
        _wrap(tri.InterpreterBuilder, name, make)


def bfloat16_reductions() -> None:
    """Reductions and scans hand the bits to np.sum, np.cumsum and so on."""

    def make(original):
        def apply_impl(self, inputs):
            narrow = [x.dtype == tl.bfloat16 for x in inputs]
            if not any(narrow):
                return original(self, inputs)
            wide = (_tensor(_wide(x.handle), x) if n else x for x, n in zip(inputs, narrow, strict=True))
            out = original(self, tuple(wide))
            out = list(out) if isinstance(out, (list, tuple)) else [out]
            # argmin and argmax take one input and give two results, the second an index
            return [_tensor(_narrow(y.handle), y) if y.dtype == tl.float32 and narrow[min(i, len(narrow) - 1)] else y
                    for i, y in enumerate(out)]  # fmt: skip

        return apply_impl

    _wrap(tri.ReduceOps, "apply_impl", make)
    _wrap(tri.ScanOps, "apply_impl", make)


def bfloat16_dot() -> None:
    """`create_dot` multiplies the bits. Products of bfloat16 are exact in float32."""

    def make(original):
        def create_dot(self, a, b, d, *options):
            out = original(self, _wide(a), _wide(b), _wide(d), *options)
            return _narrow(out) if _is_bfloat16(d) else out

        return create_dot

    _wrap(tri.InterpreterBuilder, "create_dot", make)


def _is_bfloat16(x: Any) -> bool:
    return isinstance(x, tri.TensorHandle) and x.dtype.scalar == tl.bfloat16


def _wide(x: Any) -> Any:
    """A bfloat16 handle as float32; anything else as it is."""
    if not _is_bfloat16(x):
        return x
    return tri.TensorHandle((np.asarray(x.data, np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def _narrow(x: tri.TensorHandle) -> tri.TensorHandle:
    """A float32 handle rounded to nearest even; nan stays nan."""
    bits = np.ascontiguousarray(x.data, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return tri.TensorHandle(np.where(np.isnan(x.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


def _tensor(handle: tri.TensorHandle, like: tl.tensor) -> tl.tensor:
    shape = [int(n) for n in like.shape]
    return tl.tensor(handle, tl.block_type(handle.dtype, shape) if shape else handle.dtype)


REPAIRS: dict[str, Callable[[], None]] = {
    "autotuner": autotuner,
    "loop variable": loop_variable,
    "float argument": float_argument,
    "comparison": comparison,
    "builtin alias": builtin_alias,
    "libdevice": libdevice_bodies,
    "floating-point exception": floating_point_exception,
    "bfloat16 cast": bfloat16_cast,
    "bfloat16 arithmetic": bfloat16_arithmetic,
    "bfloat16 reductions": bfloat16_reductions,
    "bfloat16 dot": bfloat16_dot,
}
