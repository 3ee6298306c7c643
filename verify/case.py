"""Cases: a handful of ints and words from which the arrays of one experiment are drawn.

Hypothesis draws cases and the judge shrinks them; arrays are never drawn or shrunk. `atlas` lists the cases that every
implementation meets first: lengths around chunk edges, and one case of each regime of values.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mixproof.reference import operator as find_operator
from mixproof.reference.spec import Operator
from mixproof.verify.arithmetic import DTYPES, LARGEST, round_to
from mixproof.verify.errors import UsageError
from mixproof.verify.regimes import BOUNDED, DEFAULTS, REGIMES, Draw

STATES = ("absent", "zero", "random", "tiny", "large")
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One experiment. `sizes` holds B, H and the operator's dimensions; `chunk` 0 means the implementation's own;
    `at` is a position that some laws need (a split, a probe), -1 where the law chooses."""

    op: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str = "float32"
    parameters: str = "float32"
    regime: str = "normal"
    state: str = "absent"
    flag: bool = False
    chunk: int = 0
    at: int = -1
    seed: int = 0

    @property
    def operator(self) -> Operator:
        return find_operator(self.op)

    def size(self, axis: str) -> int:
        return dict(self.sizes)[axis]

    def resized(self, **sizes: int) -> Case:
        return dataclasses.replace(self, sizes=tuple((a, sizes.get(a, n)) for a, n in self.sizes))

    def arrays(self) -> Arrays:
        """The inputs: float64 arrays in canonical layout that the input dtype holds exactly, and Python scalars.

        Tokens are (B, H, tokens, ...), parameters (H, ...), states (B, H, ...); an absent state is left out."""
        operator, sizes = self.operator, dict(self.sizes)
        values: Arrays = {}
        for x in operator.inputs:
            if x.role == "scalar":
                values[x.name] = self.flag if x.domain == "flag" else x.default
            elif x.role != "state" or self.state != "absent":
                lead = {"token": ("B", "H"), "parameter": ("H",), "state": ("B", "H")}[x.role]
                shape = tuple(operator.size(a, sizes, values) for a in (*lead, *x.axes))
                values[x.name] = DEFAULTS[x.domain](self.generator(x.name), shape)
        draw = Draw(values, {x.name: x.domain for x in operator.inputs}, self.generator("regime"))
        REGIMES[self.regime].apply(draw)
        if operator.position and self.state != "absent":
            strides = (values[x.name] for x in operator.inputs if x.domain == "stride")
            values[operator.position] = prod(strides, start=sizes["P"])
        scale = {"zero": 0.0, "tiny": 2.0**-30, "large": 2.0**10}.get(self.state, 1.0)
        for x in operator.inputs:
            if x.role == "state" and x.name in values:
                values[x.name] = values[x.name] * (min(scale, 1.0) if x.domain in BOUNDED else scale)
            if x.role == "scalar" and isinstance(values[x.name], float):
                values[x.name] = float(round_to(np.asarray(values[x.name]), "float32"))
            elif x.role != "scalar" and x.name in values:
                dtype = self.dtype if x.role == "token" else self.parameters
                most = LARGEST[dtype] / 16  # finite, and so are sums of a few
                values[x.name] = round_to(np.clip(values[x.name], -most, most), dtype)
        return values

    def cotangents(self, outputs: Mapping[str, np.ndarray]) -> Arrays:
        """Random upstream gradients, one for each output, rounded to that output's dtype; not uniform, never 1."""
        roles = {y.name: y.role for y in self.operator.outputs}
        return {
            name: round_to(
                self.generator("d" + name).normal(size=np.shape(value)),
                self.dtype if roles[name] == "token" else self.parameters,
            )
            for name, value in outputs.items()
        }

    def generator(self, name: str) -> np.random.Generator:
        """Random numbers of one array: they do not move when another array's shape shrinks."""
        return np.random.Generator(np.random.Philox(key=[self.seed, zlib.crc32(name.encode())]))

    def __str__(self) -> str:
        """Readable and parseable; fields at their defaults are left out."""
        words = [f"{axis}={n}" for axis, n in self.sizes]
        for f in dataclasses.fields(self)[2:]:
            value = getattr(self, f.name)
            if value != f.default or f.name == "dtype":
                words.append(f"{f.name}={int(value) if isinstance(value, bool) else value}")
        return " ".join(words)


def parse(op: str, text: str) -> Case:
    """The case that `str(case)` wrote. Raises UsageError naming the word that is wrong."""
    operator = find_operator(op)
    axes = ("B", "H", *operator.dimensions)
    sizes: dict[str, int] = {}
    fields: dict[str, Any] = {}
    kinds = {f.name: type(f.default) for f in dataclasses.fields(Case) if f.name not in ("op", "sizes")}
    for word in text.split():
        name, _, value = word.partition("=")
        try:
            if name in axes:
                sizes[name] = int(value)
            else:
                fields[name] = bool(int(value)) if kinds[name] is bool else kinds[name](value)
        except (KeyError, ValueError):
            raise UsageError(
                f"case: cannot read {word!r}; expected NAME=VALUE with NAME in {', '.join((*axes, *kinds))}"
            ) from None
    if missing := [a for a in axes if a not in sizes]:
        raise UsageError(f"case: no size for {', '.join(missing)}")
    if too_small := [f"{a}={n}" for a, n in sizes.items() if n < (0 if a in operator.token_axes else 1)]:
        raise UsageError(f"case: {too_small[0]} is not a size")
    words = {"dtype": DTYPES, "parameters": DTYPES, "regime": tuple(REGIMES), "state": STATES}
    for name, known in words.items():
        if fields.get(name, known[0]) not in known:
            raise UsageError(f"case: no {name} {fields[name]!r}; there are {', '.join(known)}")
    if fields.get("chunk", 0) < 0 or fields.get("seed", 0) < 0:
        raise UsageError(f"case: chunk and seed are not negative: {text!r}")
    return Case(op, tuple((a, sizes[a]) for a in axes), **fields)


@dataclass(frozen=True)
class Domain:
    """Which cases an implementation supports: its dtypes, chunk size, axes that must be 1, size rules, state."""

    op: str
    dtypes: tuple[tuple[str, str], ...]
    chunk: int = 64
    single: tuple[str, ...] = ()
    multiple_of: tuple[tuple[str, int], ...] = ()
    at_least: tuple[tuple[str, int], ...] = ()
    stateful: bool = True
    causal_only: bool | None = None

    def fit(self, axis: str, n: int) -> int:
        """The nearest supported size at or above n."""
        if axis in self.single:
            return 1
        n = max(n, dict(self.at_least).get(axis, 0 if axis == "T" else 1))
        m = lcm(dict(self.multiple_of).get(axis, 1), find_operator(self.op).multiple_of.get(axis, 1))
        return -(-n // m) * m

    def case(self, sizes: Mapping[str, int], **fields: Any) -> Case:
        operator = find_operator(self.op)
        flag = fields.pop("flag", False)
        if self.causal_only is not None:
            flag = self.causal_only
        flag = flag and any(x.domain == "flag" for x in operator.inputs)
        sizes = _others(sizes["V"]) | dict(sizes)
        sizes = {a: self.fit(a, sizes[a]) for a in ("B", "H", *operator.dimensions)}
        if flag and "S" in sizes:
            sizes["S"] = sizes["T"]  # a causal mask is defined for self-attention only
        if not (operator.state and self.stateful):
            fields["state"] = "absent"
        return Case(self.op, tuple(sizes.items()), flag=flag, **fields)

    def lengths(self) -> list[int]:
        """Sequence lengths worth trying: nothing, one, around the chunk, several chunks, primes."""
        C = self.chunk
        several = {2 * C - 1, 2 * C + 1} if C <= 128 else set()  # several chunks of that size cost too much
        return sorted({0, 1, 2, 3, 7, C - 1, C, C + 1} | several)

    def regimes(self, extreme: bool = False) -> list[str]:
        operator = find_operator(self.op)
        domains, axes = {x.domain for x in operator.inputs}, set(operator.dimensions)
        return [
            w
            for w, r in REGIMES.items()
            if (not r.needs or r.needs & domains) and r.extreme == extreme and {a for a, _ in r.sizes} <= axes
        ]


def _others(V: int) -> dict[str, int]:
    """Sizes that follow from the number of value channels, unless a plan says them: experts or blocks X, hidden
    features F, heads N in groups G of M, latent channels L, pseudo-heads J, channels E of a model, width W of a
    convolution, rank Q, tokens P in a cache."""
    sizes = {"X": 1 + (V - 1) % 5, "F": 1 + 3 * V % 7, "N": 1 + V % 3, "G": 1 + V % 2, "M": 1 + V // 2 % 3}
    sizes |= {"L": 1 + 3 * V % 5, "J": 1 + V // 2 % 3, "E": 1 + 2 * V % 7, "W": 1 + V % 4, "Q": 1 + V % 3}
    return sizes | {"P": 1 + (V + 1) % 4}


def atlas(domain: Domain, small: bool = False, extreme: bool = False) -> Iterator[Case]:
    """The cases tried first, fixed for all time: each length, each regime, each state, each dtype.

    `small` passes once over lengths and regimes, the dtypes in turn: of slow implementations, and in short profiles."""
    odd = [(1, 1, 1), (2, 3, 5), (3, 2, 7), (5, 4, 2), (16, 8, 16), (2, 1, 3)]
    heads = [(1, 1), (1, 2), (2, 1), (1, 3), (1, 1), (2, 2)]
    C = domain.chunk
    lengths = domain.lengths()
    if small:
        lengths = [T for T in lengths if T in (0, 1, C - 1, C + 1, 2 * C + 1)]
    for d, (dtype, parameters) in enumerate(domain.dtypes):
        regimes = [r for r in domain.regimes(extreme) if r != "normal"]
        plan = [] if extreme else [(T, "normal") for T in lengths]
        short = [T for T in lengths if T <= 129]  # enough for a regime; longer ones cost more than they find
        plan += [(short[(3 * i + 5) % len(short)] or 5, r) for i, r in enumerate(regimes)]
        for i, (T, regime) in enumerate(plan):
            rhythm = len(domain.dtypes) if small else (1, 2, 2, 4)[d]
            if i % rhythm != d % rhythm:
                continue  # the dtypes share one pass; in the long atlas, those beyond the first take turns
            K, R, V = odd[(i + i // len(odd)) % len(odd)]
            B, H = heads[i % len(heads)]
            sizes = {"B": B, "H": H, "T": T, "S": max(1, T + (i % 3) - 1), "K": K, "R": R, "V": V, "D": R + 1}
            sizes["X"] = (4, 3, 2, 5, 1, 3, 4, 5, 2, 3, 2)[i % 11]  # no law picks every eleventh case
            sizes |= dict(REGIMES[regime].sizes)
            # Of the extremes, `disjoint` needs a small state (a large one fills the denominator), `negative` the flag.
            # The flag has no period that a law's selection of every second or fourth case could fall in step with.
            # Those that take turns would meet every second state only.
            turn = i + (i // 6 if d > 1 else 0) if small else i // rhythm
            state = ("random", *STATES)[(turn + d + 2 * extreme) % (1 + len(STATES))]
            state = "random" if REGIMES[regime].sizes else state  # a cache of that size, not its absence
            flag = (i // 2 + i // 4 + extreme) % 2 == 0
            fields = dict(dtype=dtype, parameters=parameters, regime=regime, state=state, flag=flag, seed=i)
            yield domain.case(sizes, **fields)


def cases(domain: Domain, small: bool = False, extreme: bool = False) -> st.SearchStrategy[Case]:
    """Any case that the implementation supports, biased to chunk edges."""
    lengths = st.sampled_from(domain.lengths()) | st.integers(
        0, domain.chunk + 2 if small else min(2 * domain.chunk + 2, 300)
    )
    dims = st.integers(1, 9)
    sizes = st.fixed_dictionaries(
        {"B": st.integers(1, 2), "H": st.integers(1, 3), "T": lengths, "S": lengths.map(lambda n: max(n, 1))}
        | {a: dims for a in ("K", "R", "V", "D")}
    )
    fields = st.fixed_dictionaries(
        {
            "kinds": st.sampled_from(domain.dtypes),
            "regime": st.sampled_from(domain.regimes(extreme)),
            "state": st.sampled_from(STATES),
            "flag": st.booleans(),
            "seed": st.integers(0, 2**16),
        }
    )

    def build(sizes: dict[str, int], fields: dict[str, Any]) -> Case:
        dtype, parameters = fields["kinds"]
        rest = {k: v for k, v in fields.items() if k != "kinds"}
        sizes = sizes | dict(REGIMES[rest["regime"]].sizes)
        return domain.case(sizes, dtype=dtype, parameters=parameters, **rest)

    return st.builds(build, sizes, fields)


def smaller(case: Case, domain: Domain) -> Iterator[Case]:
    """Simpler neighbours of a case, simplest first: the judge walks down while the law stays broken."""
    simple = {"regime": "normal", "state": "absent", "seed": 0, "flag": False, "chunk": 0}
    for name, value in simple.items():
        if getattr(case, name) != value:
            fields = {name: value}
            candidate = dataclasses.replace(case, **fields)
            if name != "flag" or domain.causal_only is None:
                yield candidate
    if case.state not in ("absent", "zero", "random"):
        yield dataclasses.replace(case, state="random")
    for axis, n in case.sizes:
        if case.flag and axis == "S":
            continue  # moves with T
        tried = set()
        for target in (1, n // 2, n - domain.chunk, n - 1):
            small = domain.fit(axis, target) if target > 0 else n
            if small < n and small not in tried:
                tried.add(small)
                changed = {axis: small}
                if case.flag and axis == "T" and "S" in dict(case.sizes):
                    changed = {"T": small, "S": small}
                yield case.resized(**changed)
