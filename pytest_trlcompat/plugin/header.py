"""The one line of a pytest run's header: which known issues bite what is installed.

Imports no package of the stack, and what a fresh answer needs only where there is no kept one: pytest's start waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from pytest_trlcompat import __version__
from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.verdict import SEVERITY, Verdict

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.known_issues import KnownIssue
    from pytest_trlcompat.doctor.given import Given

__all__ = ["Cache", "line", "line_once"]

_KEY = "trlcompat/header"
_NAMED = 4
"""Issues that the line names, the worst ones; it must stay a line."""


class Cache(Protocol):
    """As much of pytest's ``config.cache`` as is needed."""

    def get(self, key: str, default: object, /) -> object: ...

    def set(self, key: str, value: object, /) -> None: ...


def line_once(installed: Mapping[str, str], cache: Cache | None) -> str | None:
    """:func:`line`, from pytest's cache where neither the stack nor the catalogue has changed since the last run.

    Reading the whole catalogue takes tens of milliseconds, a kept answer less than one.
    """
    if cache is None:  # -p no:cacheprovider
        return line(installed)
    asked = [__version__, *known_issues.fingerprint(), *evidence.fingerprint(), dict(installed)]
    kept = cache.get(_KEY, None)
    if isinstance(kept, dict) and kept.get("asked") == asked:
        return str(kept["line"]) if kept["line"] else None
    answer = line(installed)
    cache.set(_KEY, {"asked": asked, "line": answer})
    return answer


def line(installed: Mapping[str, str]) -> str | None:
    """``2 known issues bite this stack: grpo-logits-to-keep (wasteful), ...``; ``None`` where none does.

    It says as well when the stack's torch is none of those with which the published sweep was measured. Nobody asked,
    so what cannot be judged (no trl, a version that is none) is passed over without a word.
    """
    from pytest_trlcompat.doctor.given import GivenError, of_mentions, pin
    from pytest_trlcompat.doctor.torch import other_torch

    if "trl" not in installed:
        return None
    try:
        mentions = [pin(package, version, "installed here") for package, version in installed.items()]
    except GivenError:
        return None
    given = of_mentions(mentions, "installed here", complete=True)
    told = sorted(filter(None, (_told(issue, given) for issue in known_issues.load().values())))
    torch = other_torch(given, evidence.published_torches())
    if not told and not torch:
        return None
    bite = {0: "no known issue bites", 1: "1 known issue bites"}.get(len(told), f"{len(told)} known issues bite")
    shown = [text for _, text in told[:_NAMED]] + ([f"and {len(told) - _NAMED} more"] if len(told) > _NAMED else [])
    named = f": {', '.join(shown)}" if shown else ""
    return "; ".join(filter(None, [f"{bite} this stack{named}", torch, "see: trlcompat doctor"]))


def _told(issue: KnownIssue, given: Given) -> tuple[int, str] | None:
    """How bad an issue is, and what the header says of it."""
    from pytest_trlcompat.doctor.bites import biting, chosen

    considered, _ = chosen((), given)
    by_verdict: dict[Verdict, dict[str, None]] = {}
    for strategy, prediction, _ in biting(issue, given, considered):
        by_verdict.setdefault(prediction.verdict, {})[strategy] = None
    if not by_verdict:
        return None
    parts = [
        verdict.value if set(considered) <= set(labels) else f"{verdict} under {' '.join(labels)}"
        for verdict, labels in by_verdict.items()
    ]
    return min(map(SEVERITY.index, by_verdict)), f"{issue.id} ({', '.join(parts)})"
