"""The result: its verdict line, its JSON, and the report to paste into an upstream issue.

Imports only the standard library and the rooms below; the report needs ``jinja2``.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_trlcompat import __version__
from pytest_trlcompat.bisect.culprit import Culprit
from pytest_trlcompat.bisect.hunt import Step, Turn
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.progress import duration
from pytest_trlcompat.matrix.locks import Lock

__all__ = ["Result", "markdown"]

_NAMED = 6
"""Candidates that cannot tell which a verdict line names."""


@dataclass(frozen=True)
class Result:
    """What a command found.

    Attributes:
        question: what was asked, as JSON values.
        about: what turned, for people: ``grpo-logits-to-keep``.
        command: asks the same again.
        seconds: of this command; steps that were kept from earlier ones not included.
    """

    question: Mapping[str, Any]
    about: str
    command: str
    culprit: Culprit
    steps: Sequence[Step]
    seconds: float

    @property
    def turn(self) -> Turn:
        """The most precise search."""
        return self.culprit.turns[-1][1]

    @property
    def before_name(self) -> str:
        return "last_bad" if self.culprit.find_fix else "last_good"

    @property
    def after_name(self) -> str:
        return "first_good" if self.culprit.find_fix else "first_bad"

    @property
    def headline(self) -> str:
        """One line: who did it."""
        did = "cured" if self.culprit.find_fix else "broke"
        return f"{self._who()} {did} {self.about} ({self.turn.standard})"

    @property
    def verdict(self) -> str:
        """The headline, its neighbours, how sure it is and what it cost."""
        before = "last bad" if self.culprit.find_fix else "last good"
        parts = [f"{before}: {self._before()}"]
        if self.turn.unknown:
            names = [candidate.version[:10] for candidate in self.turn.unknown]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            parts.append(f"between them {', '.join(names[:_NAMED])}{more} cannot tell, so it may be one of these")
        if self.culprit.others:
            parts.append(f"together with {', '.join(self.culprit.others)}")
        parts.append(f"confidence {100 * self.culprit.confidence:.3g} %")
        return f"{self.headline}; {'; '.join(parts)}\n{self.cost}"

    @property
    def cost(self) -> str:
        """Candidates asked against what no search can do without."""
        lines = []
        for name, turn in self.culprit.turns:
            bound = bound_of(turn)
            lines.append(
                f"{name}: {turn.asked} of {turn.count} asked, both ends among them, {turn.skipped} could not tell; "
                f"{turn.asked - 2} between the ends against a bound of {bound:.1f}"
            )
        runs = sum(not step.kept for step in self.steps)
        return "\n".join([*lines, f"{runs} run{'' if runs == 1 else 's'} in {duration(self.seconds)}"])

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "command": self.command,
            "question": dict(self.question),
            "verdict": self.headline,
            "culprit": self._culprit(),
            "failure": {check: failure.to_json() for check, failure in self.turn.standard.watched.items()},
            "locks": self._locks(),
            "searches": [self._search(name, turn) for name, turn in self.culprit.turns],
            "seconds": round(self.seconds, 1),
            "steps": [_step(step) for step in self.steps],
        }

    # Parts

    def _who(self) -> str:
        culprit = self.culprit
        if culprit.commit is not None:
            of = f"{culprit.package} " if culprit.package else ""
            return f"{of}{culprit.commit.short} ({culprit.commit.subject})"
        if culprit.release_versions is not None:
            return f"{culprit.package} {culprit.release_versions[1]}"
        return self.turn.after.label

    def _before(self) -> str:
        culprit = self.culprit
        if culprit.commits is not None:
            release = f", of releases {culprit.release_versions[0]}" if culprit.release_versions else ""
            return f"{culprit.commits.before.version[:10]}{release}"
        return culprit.release_versions[0] if culprit.release_versions else self.turn.before.label

    def _culprit(self) -> dict[str, Any]:
        culprit = self.culprit
        ends = culprit.release_versions or (self.turn.before.version, self.turn.after.version)
        found: dict[str, Any] = {
            "package": culprit.package,
            self.before_name: ends[0],
            self.after_name: ends[1],
            "confidence": round(culprit.confidence, 6),
            "cannot_tell": [candidate.version for candidate in self.turn.unknown],
            "together_with": list(culprit.others),
            "notes": list(culprit.notes),
        }
        if culprit.days is not None:
            days = culprit.days
            found["days"] = {self.before_name: days.before.version, self.after_name: days.after.version}
        if culprit.commits is not None and culprit.commit is not None:
            found["commits"] = {
                self.before_name: culprit.commits.before.version,
                self.after_name: culprit.commits.after.version,
                "subject": culprit.commit.subject,
                "day": culprit.commit.day,
            }
        if culprit.attributed is not None:
            found["alone"] = culprit.attributed.alone
        return found

    def _locks(self) -> dict[str, Any] | None:
        before, after, changes = self.culprit.before_lock, self.culprit.after_lock, self.culprit.changes
        if before is None or after is None or changes is None:
            return None
        return {
            "before": dict(before.packages),
            "after": dict(after.packages),
            "moved": {name: list(versions) for name, versions in changes.moved.items()},
            "gone": dict(changes.gone),
            "came": dict(changes.came),
        }

    def _search(self, name: str, turn: Turn) -> dict[str, Any]:
        return {
            "phase": name,
            "candidates": turn.count,
            "asked": turn.asked,
            "cannot_tell": turn.skipped,
            "bound": round(bound_of(turn), 2),
            "confidence": round(turn.confidence, 6),
            self.before_name: turn.before.version,
            self.after_name: turn.after.version,
        }


def bound_of(turn: Turn) -> float:
    """Bits that tell one of the places apart at which the answer could turn."""
    return math.log2(turn.count - 1)


def _step(step: Step) -> dict[str, Any]:
    return {
        "phase": step.phase,
        "candidate": step.candidate.version,
        "label": step.candidate.label,
        "answer": step.answer.value,
        "why": step.why,
        "kept": step.kept,
        **step.observation.to_json(),
    }


def markdown(result: Result) -> str:
    """Markdown to paste into an upstream issue: what was found, how sure it is, what changed, how to see it again.

    Raises:
        ImportError: without ``jinja2``.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=False,  # Markdown, in which code blocks are written as they are
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["in_row"] = _in_row
    environment.filters["requirements"] = _requirements
    failing = next(step for step in reversed(result.steps) if step.answer.value == "bad" and step.observation.failed)
    return environment.get_template("report.md.j2").render(
        result=result,
        culprit=result.culprit,
        changes=result.culprit.changes,
        failure=_evidence(failing.observation, result),
        failing=failing,
        version=__version__,
    )


def _evidence(observation: Observation, result: Result) -> str:
    """What was measured in the checks that turned, tracebacks as they are."""
    blocks = []
    for check in result.turn.standard.watched:
        if check in observation.failed:
            facts = {"failure": str(observation.failed[check]), **dict(observation.evidence.get(check, {}))}
            blocks.append("\n".join([f"[{check}]", *(f"{name}: {_fact(value)}" for name, value in facts.items())]))
    return "\n\n".join(blocks)


def _fact(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return value if "\n" not in value else "\n" + textwrap.indent(value.strip("\n"), "  ")


def _requirements(lock: Lock) -> str:
    return "\n".join(lock.requirements)


def _in_row(text: object) -> str:
    """Text that cannot break a Markdown table."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())
