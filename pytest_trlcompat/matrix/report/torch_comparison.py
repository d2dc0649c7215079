"""What torch alone changes: verdicts of cells that differ in nothing else that a person wrote down."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix.report.model import CellReport, Column

__all__ = ["TorchChange", "TorchComparison", "compare"]


@dataclass(frozen=True)
class TorchChange:
    """A verdict that differs between cells which have the same pins but for torch.

    Attributes:
        pins: what they have in common, as a person reads it.
        verdicts: release of torch and verdict, oldest first.
    """

    column: Column
    pins: str
    verdicts: tuple[tuple[str, Verdict], ...]

    def describe(self) -> str:
        """``upstream, zero3 (trl 0.15.2, transformers 4.48.3): broken with torch 2.6.0, ok with torch 2.13.0``."""
        parts: list[str] = []
        for verdict, alike in itertools.groupby(self.verdicts, lambda measured: measured[1]):
            releases = [torch for torch, _ in alike]
            span = " to ".join(releases if len(releases) < 3 else [releases[0], releases[-1]])
            parts.append(f"{verdict} with torch {span}")
        return f"{self.column.subject}, {self.column.strategy} ({self.pins}): {', '.join(parts)}"


@dataclass(frozen=True)
class TorchComparison:
    """What was compared.

    Attributes:
        compared: verdicts that were measured with the same pins and several releases of torch.
        changes: those of them that differ.
    """

    compared: int
    changes: tuple[TorchChange, ...]

    @property
    def summary(self) -> str:
        """One line for people; empty where nothing was compared."""
        if not self.compared:
            return ""
        verdicts = "1 verdict that was" if self.compared == 1 else f"{self.compared:,} verdicts that were"
        return f"torch alone changes {len(self.changes) or 'none'} of {verdicts} measured with more than one torch"

    def to_dict(self) -> dict[str, Any]:
        """For ``compat.json``."""
        changes = [
            {
                "issue": change.column.issue,
                "subject": change.column.subject,
                "strategy": change.column.strategy,
                "pins": change.pins,
                "verdicts": {torch: verdict.value for torch, verdict in change.verdicts},
            }
            for change in self.changes
        ]
        return {"compared": self.compared, "changes": changes}

    def of(self, issue: str) -> list[TorchChange]:
        """The changes of one known issue."""
        return [change for change in self.changes if change.column.issue == issue]


def compare(cells: Iterable[CellReport], columns: Sequence[Column]) -> TorchComparison:
    """Hold cells against each other whose pins and Python differ in torch alone.

    What was resolved may differ in what a torch asks for (sympy, setuptools); a verdict that is ``untestable`` says
    nothing about torch.
    """
    compared, changes = 0, []
    alike = itertools.groupby(sorted((cell for cell in cells if cell.versions_known), key=_others), _others)
    for _, group in alike:
        same = sorted(group, key=lambda cell: Version(cell.torch or "0"))
        if len({cell.torch for cell in same}) < 2:
            continue
        pins = ", ".join(f"{package} {version}" for package, version in _pins(same[0]).items())
        measured = [(cell.torch, {record.key: record.verdict for record in cell.verdicts}) for cell in same]
        for column in columns:
            key = (column.issue, column.subject, column.strategy)
            verdicts_by_torch = [(torch, verdicts[key]) for torch, verdicts in measured if key in verdicts]
            known = tuple((torch, verdict) for torch, verdict in verdicts_by_torch if verdict is not Verdict.UNTESTABLE)
            compared += len(known) > 1
            if len({verdict for _, verdict in known}) > 1:
                changes.append(TorchChange(column, pins, known))
    order = {column: number for number, column in enumerate(columns)}
    return TorchComparison(compared, tuple(sorted(changes, key=lambda change: order[change.column])))


def _pins(cell: CellReport) -> dict[str, str]:
    return {package: version for package, version in cell.named.items() if package != "torch"}


def _others(cell: CellReport) -> tuple[tuple[str, str], ...]:
    return (*sorted(_pins(cell).items()), ("as of", cell.sidecar.date or ""), ("python", cell.sidecar.python or ""))
