"""The result: its verdict line, its JSON, and the report to paste into an upstream issue."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_trlcompat import __version__
from pytest_trlcompat._escaping import code, fenced, in_html, in_row
from pytest_trlcompat.bisect.attribution import Culprit
from pytest_trlcompat.bisect.bisector import ChangePoint
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.progress import duration
from pytest_trlcompat.bisect.session import Step
from pytest_trlcompat.matrix.locks import Lock

__all__ = ["Result", "markdown"]

_MAX_NAMES = 6
"""Inconclusive candidates that are named."""


@dataclass(frozen=True)
class Result:
    """What a command found.

    Attributes:
        question: what was searched for, as JSON values.
        about: what was broken or fixed, for people: ``grpo-logits-to-keep``.
        command: repeats the search.
        seconds: of this command, without the steps kept from earlier ones.
    """

    question: Mapping[str, Any]
    about: str
    command: str
    culprit: Culprit
    steps: Sequence[Step]
    seconds: float

    @property
    def change_point(self) -> ChangePoint:
        """Of the most precise search."""
        return self.culprit.change_points[-1][1]

    @property
    def before_name(self) -> str:
        return "last_bad" if self.culprit.find_fix else "last_good"

    @property
    def after_name(self) -> str:
        return "first_good" if self.culprit.find_fix else "first_bad"

    @property
    def headline(self) -> str:
        """The culprit, in one line; where some before it are inconclusive, that it may be one of these."""
        verb = "fixed" if self.culprit.find_fix else "broke"
        return f"{self._name()}{self._or_earlier()} {verb} {self.about} ({self.change_point.signature})"

    @property
    def verdict(self) -> str:
        """The headline, the last candidate before it, the confidence and the cost."""
        parts = [f"{self.before_name.replace('_', ' ')}: {self._before()}"]
        if self.change_point.inconclusive:
            parts.append(f"between them {self.inconclusive}")
        if self.culprit.others:
            parts.append(f"together with {', '.join(self.culprit.others)}")
        parts.append(f"confidence {100 * self.culprit.confidence:.3g} %")
        return f"{self.headline}; {'; '.join(parts)}\n{self.cost}"

    @property
    def inconclusive(self) -> str:
        """A sentence about the inconclusive candidates at the change."""
        names = [candidate.version[:10] for candidate in self.change_point.inconclusive]
        if len(names) == 1:
            return f"{names[0]} is inconclusive, so it may be the cause"
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return f"{', '.join(names[:_MAX_NAMES])}{more} are inconclusive, so one of these may be the cause"

    @property
    def cost(self) -> str:
        """Candidates tested, compared with what every search needs."""
        lines = []
        for name, point in self.culprit.change_points:
            bound = information_bound(point)
            lines.append(
                f"{name}: tested {point.tested} of {point.count} candidates, both ends included, {point.skipped} "
                f"inconclusive; {point.tested - 2} between the ends, where {bound:.1f} are needed on average"
            )
        runs = sum(not step.from_journal for step in self.steps)
        return "\n".join([*lines, f"{runs} run{'' if runs == 1 else 's'} in {duration(self.seconds)}"])

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 2,
            "command": self.command,
            "question": dict(self.question),
            "verdict": self.headline,
            "culprit": self._culprit(),
            "failure": {check: failure.to_json() for check, failure in self.change_point.signature.failures.items()},
            "locks": self._locks(),
            "searches": [self._search(name, point) for name, point in self.culprit.change_points],
            "seconds": round(self.seconds, 1),
            "steps": [_step(step) for step in self.steps],
        }

    # Parts

    def _name(self) -> str:
        culprit = self.culprit
        if culprit.commit is not None:
            package = f"{culprit.package} " if culprit.package else ""
            return f"{package}{culprit.commit.short} ({culprit.commit.subject})"
        if culprit.release_versions is not None:
            return f"{culprit.package} {culprit.release_versions[1]}"
        return self.change_point.after.label

    def _or_earlier(self) -> str:
        count = len(self.change_point.inconclusive)
        if count == 1:
            return ", or the one before it, which is inconclusive,"
        return f", or one of the {count} before it, which are inconclusive," if count else ""

    def _before(self) -> str:
        culprit = self.culprit
        if culprit.commits is not None:
            release = f" (release {culprit.release_versions[0]})" if culprit.release_versions else ""
            return f"{culprit.commits.before.version[:10]}{release}"
        return culprit.release_versions[0] if culprit.release_versions else self.change_point.before.label

    def _culprit(self) -> dict[str, Any]:
        culprit = self.culprit
        ends = culprit.release_versions or (self.change_point.before.version, self.change_point.after.version)
        culprit_json: dict[str, Any] = {
            "package": culprit.package,
            self.before_name: ends[0],
            self.after_name: ends[1],
            "confidence": round(culprit.confidence, 6),
            "inconclusive": [candidate.version for candidate in self.change_point.inconclusive],
            "together_with": list(culprit.others),
            "notes": list(culprit.notes),
        }
        if culprit.days is not None:
            days = culprit.days
            culprit_json["days"] = {self.before_name: days.before.version, self.after_name: days.after.version}
        if culprit.commits is not None and culprit.commit is not None:
            culprit_json["commits"] = {
                self.before_name: culprit.commits.before.version,
                self.after_name: culprit.commits.after.version,
                "subject": culprit.commit.subject,
                "day": culprit.commit.day,
            }
        if culprit.attribution is not None:
            culprit_json["alone"] = culprit.attribution.alone
        return culprit_json

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

    def _search(self, name: str, point: ChangePoint) -> dict[str, Any]:
        return {
            "phase": name,
            "candidates": point.count,
            "tested": point.tested,
            "inconclusive": point.skipped,
            "bound": round(information_bound(point), 2),
            "confidence": round(point.confidence, 6),
            self.before_name: point.before.version,
            self.after_name: point.after.version,
        }


def information_bound(point: ChangePoint) -> float:
    """Bits of information in the position of the change: good or bad answers that are needed on average."""
    return math.log2(point.count - 1)


def _step(step: Step) -> dict[str, Any]:
    return {
        "phase": step.phase,
        "candidate": step.candidate.version,
        "label": step.candidate.label,
        "answer": step.answer.value,
        "why": step.why,
        "kept": step.from_journal,
        **step.observation.to_json(),
    }


def markdown(result: Result) -> str:
    """Markdown to paste into an upstream issue: what was found, the confidence, what changed, how to reproduce it.

    Raises:
        ImportError: without ``jinja2``.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        # It is Markdown, in which code blocks are written as they are.
        autoescape=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(fenced=fenced, in_html=in_html, in_row=in_row)
    environment.filters["requirements"] = _requirements
    failing = next(step for step in reversed(result.steps) if step.answer.value == "bad" and step.observation.failed)
    failure = _evidence(failing.observation, result)
    return environment.get_template("report.md.j2").render(
        result=result,
        heading=_heading(result),
        culprit=result.culprit,
        changes=result.culprit.changes,
        failure=failure,
        failing=failing,
        version=__version__,
    )


def _heading(result: Result) -> str:
    """The headline, a command that was tested as code."""
    before, about, after = result.headline.partition(result.about)
    command = re.fullmatch(r"`(.*)`(| under [^`]*)", about, re.DOTALL)
    shown = f"{code(command[1])}{in_row(command[2])}" if command else in_row(about)
    return " ".join(part for part in (in_row(before), shown, in_row(after)) if part)


def _evidence(observation: Observation, result: Result) -> str:
    """What was measured in the checks that failed, tracebacks as they are."""
    blocks = []
    for check in result.change_point.signature.failures:
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
