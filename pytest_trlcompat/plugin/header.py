"""The line in the header of a pytest run: which known issues affect the installed stack.

Imports no package of the stack, and the doctor only if no cached line is valid, since pytest imports it when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pytest_trlcompat import __version__
from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.verdict import SEVERITY, Verdict

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.issue import KnownIssue
    from pytest_trlcompat.catalog.regions import Projection

__all__ = ["Cache", "line", "line_once"]

_KEY = "trlcompat/header"
_NAMED = 4
"""How many issues the line names, the worst first, so that it stays short."""


class Cache(Protocol):
    """The part of pytest's ``config.cache`` that is used."""

    def get(self, key: str, default: object, /) -> object: ...

    def set(self, key: str, value: object, /) -> None: ...


def line_once(installed: Mapping[str, str], cache: Cache | None) -> str | None:
    """:func:`line`, from pytest's cache if neither the stack nor the catalogue has changed since the last run.

    Reading the whole catalogue takes tens of milliseconds, a cached line less than one.
    """
    if cache is None:  # -p no:cacheprovider
        return line(installed)
    key = [__version__, known_issues.fingerprint(), *evidence.fingerprint(), dict(installed)]
    cached = cache.get(_KEY, None)
    # Anything may stand in the cache, which other releases write too.
    if isinstance(cached, dict) and cached.get("key") == key and isinstance(cached.get("line", 0), (str, type(None))):
        return cached["line"] or None
    answer = line(installed)
    cache.set(_KEY, {"key": key, "line": answer})
    return answer


def line(installed: Mapping[str, str]) -> str | None:
    """``2 known issues affect this stack: grpo-logits-to-keep (wasteful), ...``; ``None`` if none does.

    It also says if the published sweep was not measured with the stack's torch. A stack that cannot be judged (without
    trl, or with an invalid version) gets no line.
    """
    from pytest_trlcompat.catalog.regions import Projection
    from pytest_trlcompat.doctor.applicable import considered_strategies, summary
    from pytest_trlcompat.doctor.beyond import other_torch
    from pytest_trlcompat.doctor.stack_spec import Mention, StackSpecError, of_mentions

    if "trl" not in installed:
        return None
    try:
        mentions = [Mention.of_version(package, version, "installed here") for package, version in installed.items()]
    # Nobody has requested the line, so that it raises no error.
    except StackSpecError:
        return None
    spec = of_mentions(mentions, "installed here", complete=True)
    considered, _ = considered_strategies((), spec)
    entries = (issue for issue in known_issues.load().values() if not issue.is_search)
    projection = Projection(spec.versions, spec.together)
    affected = sorted(filter(None, (_summary(issue, projection, considered) for issue in entries)))
    torch = other_torch(spec, evidence.published_torches())
    if not affected and not torch:
        return None
    affecting = [(severity, text) for severity, text in affected if SEVERITY[severity] is not Verdict.BLOCKED]
    named = [text for _, text in affecting[:_NAMED]]
    if len(affecting) > _NAMED:
        named.append(f"and {len(affecting) - _NAMED} more")
    unjudged = len(affected) - len(affecting)
    issues = summary(len(affecting), unjudged, ", ".join(named))
    return "; ".join(filter(None, [issues, torch, "see: trlcompat doctor"]))


def _summary(issue: KnownIssue, projection: Projection, considered: Sequence[str]) -> tuple[int, str] | None:
    """The severity of an issue, lowest first, and its text in the header; ``None`` if it does not affect the stack."""
    by_verdict: dict[Verdict, dict[str, None]] = {}
    for strategy, prediction, _ in projection.problems(issue, issue.predictions, considered):
        by_verdict.setdefault(prediction.verdict, {})[strategy] = None
    if not by_verdict:
        return None
    parts = [
        verdict.value if set(considered) <= set(labels) else f"{verdict} under {' '.join(labels)}"
        for verdict, labels in by_verdict.items()
    ]
    return min(map(SEVERITY.index, by_verdict)), f"{issue.id} ({', '.join(parts)})"
