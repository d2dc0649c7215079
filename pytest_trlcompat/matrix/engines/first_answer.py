"""What a sweep says of the newest cell while it runs: the verdicts of the issues by which another model is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import SEVERITIES
from pytest_trlcompat.catalog.verdict import SUBJECTS, Record, is_wrong

__all__ = ["FirstAnswer"]


@dataclass
class FirstAnswer:
    """The verdicts of one cell that matter most, as they come.

    Attributes:
        cell_id: of the newest cell.
    """

    cell_id: str
    say: Callable[[str], None]
    _shown: dict[tuple[str, str, str], Record] = field(default_factory=dict)
    is_complete: bool = False

    def take(self, records: Iterable[Record]) -> None:
        """Show the first of all, then each that is a problem, or is not as predicted."""
        for record in records:
            if record.key in self._shown or not _matters(record):
                continue
            if not self._shown or record.verdict.is_own_problem or is_wrong(record):
                self.say(f"{self.cell_id}: {_described(record)}")
            self._shown[record.key] = record

    def complete(self) -> None:
        """All that matter most are there."""
        self.is_complete = True
        lines = [
            _summary(subject, [each for each in self._shown.values() if each.subject == subject])
            for subject in SUBJECTS
        ]
        wrong = sum(map(is_wrong, self._shown.values()))
        self.say(
            f"{self.cell_id}: {len(self._shown)} verdicts of issues by which another model is trained or saved, "
            f"{f'{wrong} not as predicted' if wrong else 'all as predicted'}. {'; '.join(lines)}. The others follow"
        )


def _matters(record: Record) -> bool:
    issue = known_issues.load().get(record.issue)
    return issue is not None and issue.severity == SEVERITIES[0] and not issue.is_search


def _described(record: Record) -> str:
    text = f"{record.issue}, {record.subject}, {record.strategy}: {record.verdict}"
    if is_wrong(record):
        return f"{text}, predicted {record.expected}" if record.expected else f"{text}, without a prediction"
    return text if record.expected is None else f"{text}, as predicted"


def _summary(subject: str, records: list[Record]) -> str:
    bad = {record.issue for record in records if record.verdict.is_own_problem}
    whose = "TRL's own trainers" if subject == SUBJECTS[0] else "the corrected ones"
    return f"{whose} have {len(bad)} of them" if bad else f"{whose} have none of them"
