"""What summaries and reports are made of: lines with styles, the verdicts of a cell, and the words for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_trlcompat.catalog.verdict import Record, Verdict, is_wrong

__all__ = [
    "ALARM",
    "FAINT",
    "GOOD",
    "HEADING",
    "PROBLEMS",
    "STYLES",
    "CellSummary",
    "Line",
    "Part",
    "corrected",
    "counted",
    "expected",
    "least_to_most",
    "length",
    "measured",
    "sentence",
]

STYLES = {
    Verdict.OK: "green",
    Verdict.BROKEN: "red",
    Verdict.SILENT: "magenta",
    Verdict.WASTEFUL: "yellow",
    Verdict.BLOCKED: "blue",
    Verdict.ERROR: "bold red",
    Verdict.HANG: "bold red",
    Verdict.ABSENT: "dim",
    Verdict.UNTESTABLE: "cyan",
}
"""Words for the look of each verdict, as ``rich`` reads them."""

ALARM = "bold red"
FAINT = "dim"
GOOD = "bold green"
HEADING = "bold"

PROBLEMS = (Verdict.SILENT, Verdict.BROKEN, Verdict.WASTEFUL, Verdict.ERROR, Verdict.HANG, Verdict.BLOCKED)
"""In which users want to read of problems: first those that no error announces."""


@dataclass(frozen=True)
class Part:
    """A piece of a line; ``style`` holds words as in :data:`STYLES`."""

    text: str
    style: str = ""


Line = tuple[Part, ...]


@dataclass(frozen=True)
class CellSummary:
    """What the end of a run is made of.

    Attributes:
        release: of TRL; neighbouring cells are joined by it if there are too many.
        unfinished: why it has no verdicts or not all of them; empty for a cell that was tested.
    """

    name: str
    release: str
    records: Sequence[Record]
    unfinished: str = ""

    def issues(self, subject: str, verdict: Verdict) -> dict[str, list[Record]]:
        """The verdicts of one kind by known issue."""
        records: dict[str, list[Record]] = {}
        for record in self.records:
            if record.subject == subject and record.verdict is verdict:
                records.setdefault(record.issue, []).append(record)
        return records

    @property
    def wrong(self) -> list[Record]:
        return [record for record in self.records if is_wrong(record)]


def sentence(record: Record) -> str:
    """``grpo-a, upstream, fsdp1: silent, predicted ok``."""
    predicted = f"predicted {expected(record)}" if record.expected else "nothing was predicted"
    return f"{record.issue}, {record.subject}, {record.strategy}: {measured(record)}, {predicted}"


def measured(record: Record) -> str:
    """The verdict, with the issue that blocked."""
    return f"blocked by {record.blocked_by}" if record.blocked_by else str(record.verdict)


def expected(record: Record) -> str:
    """What was predicted: a verdict, with the issue that was expected to block where another one did; may be empty."""
    blocker = record.evidence.get("blocked_by_expected") if record.expected is Verdict.BLOCKED else None
    return f"blocked by {blocker}" if blocker else str(record.expected or "")


def counted(numbers: Iterable[tuple[Verdict, int]]) -> Line:
    """``3 silent, 1 broken``."""
    parts = [Part(f"{number} {verdict}", STYLES[verdict]) for verdict, number in numbers if number]
    return tuple(piece for part in parts for piece in (Part(", "), part))[1:]


def corrected(cells: Iterable[CellSummary]) -> tuple[str, bool]:
    """``61 ok`` or ``59 ok, 2 broken``, empty where nothing was measured; and whether some is a problem."""
    counts = Counter(record.verdict for cell in cells for record in cell.records if record.subject == "corrected")
    shown = [verdict for verdict in (Verdict.OK, *PROBLEMS, Verdict.UNTESTABLE) if counts[verdict]]
    return ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in shown), any(v.is_problem for v in shown)


def least_to_most(cells: Iterable[CellSummary], verdict: Verdict) -> str:
    """How many known issues have this verdict with TRL's own trainers, ``3`` in each cell or ``0-3``."""
    numbers = sorted({len(cell.issues("upstream", verdict)) for cell in cells})
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def length(line: Sequence[Part]) -> int:
    return sum(len(part.text) for part in line)
