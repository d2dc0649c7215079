"""Which differences from the reference other known issues explain. Imports nothing of the stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.issue import KnownIssue
    from pytest_trlcompat.catalog.known_issues import Catalog

__all__ = ["explained"]


def explained(
    differences: Sequence[Mapping[str, Any]],
    setting: Mapping[str, Any],
    subject: str,
    label: str,
    versions: Mapping[str, str],
    catalog: Catalog,
) -> tuple[list[str], Mapping[str, Any] | None]:
    """The known issues that explain differences, and the first difference that none does.

    An issue explains one where its entry names the quantity, and the catalogue predicts it to be a problem for the
    subject with these versions and strategy. A difference in a log or an evaluation changes nothing after it; any other
    one changes all that follows, which is explained with it.
    """
    possible = [each for each in catalog.values() if each.differences and _is_predicted(each, subject, label, versions)]
    by: list[str] = []
    for difference in differences:
        stage, where = str(difference["stage"]), str(difference.get("where", ""))
        ids = [each.id for each in possible if any(one.matches(stage, setting, where) for one in each.differences)]
        if not ids:
            return by, difference
        by += [each for each in ids if each not in by]
        if not stage.startswith(("logs[", "evaluation[")):
            break
    return by, None


def _is_predicted(issue: KnownIssue, subject: str, label: str, versions: Mapping[str, str]) -> bool:
    strategy = label.partition("-")[0]
    labels = [each for each in issue.labels() if each.partition("-")[0] == strategy]
    predictions = (issue.predict(subject, each, versions) for each in labels)
    return any(each is not None and each.verdict.is_own_problem for each in predictions)
