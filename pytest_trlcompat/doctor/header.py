"""The one line of a pytest run's header: which known issues bite what is installed. Imports no package of the stack."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_trlcompat import catalog
from pytest_trlcompat.catalog import KnownIssue
from pytest_trlcompat.doctor.diagnosis import biting, chosen
from pytest_trlcompat.doctor.given import Given, GivenError, of_mentions, pin

__all__ = ["line"]


def line(installed: Mapping[str, str]) -> str | None:
    """``2 known issues bite this stack: grpo-logits-to-keep (wasteful), ...``; ``None`` where none does.

    Nobody asked, so what cannot be judged (no trl, a version that is none) is passed over without a word.
    """
    try:
        mentions = [pin(package, version, "installed here") for package, version in installed.items()]
    except GivenError:
        return None
    if "trl" not in installed:
        return None
    given = of_mentions(mentions, "installed here", complete=True)
    told = [text for issue in catalog.load().values() if (text := _told(issue, given))]
    if not told:
        return None
    bite = "1 known issue bites" if len(told) == 1 else f"{len(told)} known issues bite"
    return f"{bite} this stack: {', '.join(told)}; more by: trlcompat doctor"


def _told(issue: KnownIssue, given: Given) -> str:
    considered, _ = chosen((), given)
    by_verdict: dict[str, list[str]] = {}
    for strategy, verdict, _, _ in biting(issue, given, considered):
        labels = by_verdict.setdefault(verdict.value, [])
        labels += [strategy] if strategy not in labels else []
    parts = [
        verdict if set(considered) <= set(labels) else f"{verdict} under {' '.join(labels)}"
        for verdict, labels in by_verdict.items()
    ]
    return f"{issue.id} ({', '.join(parts)})" if parts else ""
