"""The report: Markdown to paste into an upstream issue. Imports ``jinja2``."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import jinja2

from pytest_trlcompat import __version__
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.result import Result
from pytest_trlcompat.matrix.locks import Lock

__all__ = ["markdown"]


def markdown(result: Result) -> str:
    """What was found, how sure it is, what changed there, the failure, and how to see it again."""
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
