"""The known issues that bite a live trainer: asked when its training begins, so that it takes milliseconds.

What the installed stack decides is the same for all trainings with a kind of trainer, and is kept in the user's cache:
of each issue that the stack shows the settings and strategies that show it, and what cures it. A training then asks
conditions alone. Imports no package of the stack.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from pytest_trlcompat import _cache, _data, stack
from pytest_trlcompat.catalog import index, known_issues
from pytest_trlcompat.catalog.issue import SEVERITIES, KnownIssue
from pytest_trlcompat.doctor.biting import bites
from pytest_trlcompat.training.axes import trainer_of_class
from pytest_trlcompat.training.conditions import no_defaults
from pytest_trlcompat.training.training import Training

__all__ = ["biting", "prepare", "shown"]

_KIND = "train-begin"
_OURS = "pytest_trlcompat.trainers."


def prepare(trainer: Any) -> None:
    """Read what the installed stack shows to users of a trainer, and its rows, so that :func:`biting` need not."""
    name = trainer_of_class(tuple(cls.__name__ for cls in type(trainer).__mro__))
    for issue, about in _shown(name, _installed()):
        bites(issue, about["labels"], Training(name), no_defaults)


def biting(trainer: Any) -> list[tuple[str, str, str]]:
    """Of a trainer that is built, the known issues that bite it and that it does not cure: id, severity, one line.

    Whatever its values do not settle is left out: the doctor says of that what to look at.
    """
    training = Training.of(trainer)
    answer = _shown(training.trainer, _installed())
    cures = {base.__name__ for base in (*type(trainer).__mro__, *type(trainer.args).__mro__) if _is_ours(base)}
    biting_here = [
        (issue.id, issue.severity, _line(issue, about, type(trainer).__name__))
        for issue, about in answer
        if not _is_cured(about, cures) and bites(issue, about["labels"], training, no_defaults).bites
    ]
    return sorted(biting_here, key=lambda entry: (SEVERITIES.index(entry[1]), entry[0]))


def _is_ours(cls: type) -> bool:
    return f"{cls.__module__}.".startswith(_OURS)


def _is_cured(about: Mapping[str, Any], cures: set[str]) -> bool:
    """Whether all that cures an issue is there; a cure that is not enough on this stack cures nothing."""
    return bool(about["cures"]) and cures.issuperset(about["cures"]) and not about["uncured"]


def _line(issue: KnownIssue, about: Mapping[str, Any], trainer: str) -> str:
    cure = f"cured({trainer}) cures it; " if about["cures"] and not about["uncured"] else ""
    wrong = issue.wrong.rstrip(".")
    return f"known issue {issue.id} ({issue.severity}) bites this training: {wrong} ({cure}trlcompat issue {issue.id})"


def _installed() -> tuple[tuple[str, str], ...]:
    return tuple(stack.installed().items())


@functools.cache
def _shown(trainer: str, versions: tuple[tuple[str, str], ...]) -> list[tuple[KnownIssue, Mapping[str, Any]]]:
    return shown(trainer, dict(versions))


def shown(trainer: str, versions: Mapping[str, str]) -> list[tuple[KnownIssue, Mapping[str, Any]]]:
    """The known issues that a stack shows to users of a trainer.

    Returns:
        Each issue, without its predictions, with ``labels``, under which it shows whatever other issues do, ``cures``,
        the mixins and configs without which it is not cured, and ``uncured``, why these are not enough.
    """
    folder = _data.fixtures()
    evidence = (folder / "evidence.json").stat()
    made_from = json.dumps([known_issues.fingerprint(), evidence.st_size, evidence.st_mtime_ns, dict(versions)])
    kind = f"{_KIND}-{trainer}"
    text = _cache.read(folder, kind)
    answer = None if text is None else _restored(text, made_from)
    if answer is None:
        answer = _asked(trainer, versions)
        stripped = [dataclasses.replace(issue, predictions=()) for issue, _ in answer]
        document = {"made_from": made_from, "issues": index.text_of(stripped), "stack": [about for _, about in answer]}
        _cache.write(folder, json.dumps(document), kind)
    return answer


def _restored(text: str, made_from: str) -> list[tuple[KnownIssue, Mapping[str, Any]]] | None:
    try:
        document = json.loads(text)
        issues = index.parse(document["issues"]) if document["made_from"] == made_from else None
        return None if issues is None else list(zip(issues, document["stack"], strict=True))
    except (KeyError, TypeError, ValueError):
        return None


def _asked(trainer: str, versions: Mapping[str, str]) -> list[tuple[KnownIssue, Mapping[str, Any]]]:
    """What :func:`shown` returns, from the catalogue and the evidence."""
    from pytest_trlcompat.doctor import training_diagnosis  # once for each stack

    return [
        (issue, {"labels": labels, "cures": cures, "uncured": uncured})
        for issue, labels, cures, uncured in training_diagnosis.shown_by_stack(trainer, versions)
    ]
