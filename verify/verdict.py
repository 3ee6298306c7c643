"""Evidence and verdicts: what a law saw, and what the judge made of it. Only plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Evidence:
    """One comparison. `bound` 0 everywhere means that bits must agree. `axes` names the dimensions of the arrays.

    `radius` is the oracle's own possible error; `vacuous` says why the comparison decides nothing, where it does."""

    label: str
    got: np.ndarray
    want: np.ndarray
    bound: np.ndarray | float
    axes: tuple[str, ...] = ()
    radius: np.ndarray | float = 0.0
    vacuous: str = ""
    note: str = ""

    def ratios(self) -> np.ndarray:
        """|got - want| / bound, element by element; 0 where equal, inf where only one is finite or the bound is 0."""
        got, want = np.asarray(self.got, dtype=float), np.asarray(self.want, dtype=float)
        bound = np.broadcast_to(self.bound, got.shape)
        with np.errstate(all="ignore"):
            error = np.abs(got - want)
            same = (got == want) | (np.isnan(got) & np.isnan(want))
            ratio = np.where(bound > 0, error / bound, np.inf)
        return np.where(same, 0.0, np.where(np.isnan(ratio), np.inf, ratio))

    @property
    def ratio(self) -> float:
        ratios = self.ratios()
        return float(ratios.max()) if ratios.size else 0.0

    @property
    def bitwise(self) -> bool:
        return not np.any(self.bound)

    @property
    def decided(self) -> bool:
        """False where the oracle's own error could change the verdict."""
        if self.vacuous:
            return False
        if not np.any(self.radius):
            return True
        bound = np.broadcast_to(self.bound, np.shape(self.got))
        with np.errstate(all="ignore"):
            error = np.abs(np.asarray(self.got, dtype=float) - self.want)
            close = np.abs(error - bound) <= np.minimum(self.radius, bound / 2)
        return not bool(np.any(close & (error > bound)))


@dataclass(frozen=True)
class Where:
    """The worst element of a comparison."""

    label: str
    index: tuple[int, ...]
    axes: tuple[str, ...]
    got: float
    want: float
    bound: float

    @staticmethod
    def worst(evidence: Evidence) -> Where:
        ratios = evidence.ratios()
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratios)), ratios.shape)) if ratios.ndim else ()
        bound = np.broadcast_to(evidence.bound, ratios.shape)
        got, want = np.asarray(evidence.got, dtype=float), np.asarray(evidence.want, dtype=float)
        return Where(evidence.label, index, evidence.axes, float(got[index]), float(want[index]), float(bound[index]))

    @property
    def place(self) -> str:
        return f"{self.label}[{', '.join(map(str, self.index))}]" if self.index else self.label

    def __str__(self) -> str:
        bound = f"bound {self.bound:.2g}" if self.bound else "bound 0 (must be bit-equal)"
        error = abs(self.got - self.want)
        names = f"   ({', '.join(self.axes)})" if self.axes and len(self.axes) == len(self.index) else ""
        return f"{self.place}{names}   got {self.got:.6g}   want {self.want:.6g}   |error| {error:.2g}   {bound}"


STATUSES = ("pass", "fail", "undecided", "not run", "not applicable", "error")


@dataclass(frozen=True)
class Verdict:
    """What the judge decided about one cell, operator/implementation/law.

    `status` is pass, fail, undecided, not run (this machine cannot), not applicable (no machine would), or error (a bug
    of ours). `ratio` is the worst error / bound. `withheld` says which declared dtype was left out, and why."""

    cell: str
    status: str
    ratio: float = 0.0
    bitwise: bool = False
    statement: str = ""
    cases: int = 0
    vacuous: int = 0
    case: str = ""
    context: str = ""
    where: str = ""
    equals: str = ""
    why: str = ""
    withheld: str = ""
    replay: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        return self.cell.split("/")[0]

    @property
    def subject(self) -> str:
        return self.cell.split("/")[1]

    @property
    def law(self) -> str:
        return self.cell.split("/")[2]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; infinite ratios become the string "inf"."""
        data = {k: v for k, v in self.__dict__.items() if v not in ("", {})}
        return data | {"ratio": self.ratio if np.isfinite(self.ratio) else "inf"}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Verdict:
        """The verdict that `as_dict` wrote; fields of a later version are left out."""
        known: dict[str, Any] = {f.name: data[f.name] for f in fields(Verdict) if f.name in data}
        known["ratio"] = float(data["ratio"])
        return Verdict(**known)
