"""Which differences from the reference other known issues explain. Imports nothing of the stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.catalog.verdict import Verdict

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.attribution import Failed
    from pytest_trlcompat.catalog.issue import KnownIssue
    from pytest_trlcompat.catalog.known_issues import Catalog

__all__ = ["changes_what_follows", "explained", "failed_by"]


def explained(
    differences: Sequence[Mapping[str, Any]],
    setting: Mapping[str, Any],
    subject: str,
    label: str,
    versions: Mapping[str, str],
    catalog: Catalog,
) -> tuple[list[str], Mapping[str, Any] | None]:
    """The known issues that explain differences, and the first difference that none does.

    An issue explains one where its entry names the quantity, and the catalogue predicts it to be ``silent`` for the
    subject with these versions and strategy. One that changes what follows explains that as well, see
    :func:`changes_what_follows`.
    """
    possible = [each for each in catalog.values() if each.differences and _is_predicted(each, Verdict.SILENT, subject, label, versions)]
    by: list[str] = []
    for difference in differences:
        stage = str(difference["stage"])
        ids = [each.id for each in possible if any(one.matches(stage, setting) for one in each.differences)]
        if not ids:
            return by, difference
        by += [each for each in ids if each not in by]
        if changes_what_follows(stage):
            break
    return by, None


def changes_what_follows(stage: str) -> bool:
    """Whether quantities after it are others with it: not of a number that is only logged or returned, and not of how
    tokens would have been drawn, since completions are given."""
    return not stage.startswith(_ALONE)


_ALONE = ("config[", "evaluate()[", "evaluation[", "generation[", "logs[", "reward_arguments[", "seed", "table")


def failed_by(
    failure: Failed, subject: str, label: str, versions: Mapping[str, str], catalog: Catalog
) -> list[str]:
    """The known issues whose symptom an exception is, and which the catalogue predicts to be ``broken``."""
    return [
        each.id
        for each in catalog.values()
        if each.shows(failure.classes, failure.message, failure.location)
        and _is_predicted(each, Verdict.BROKEN, subject, label, versions)
    ]


def _is_predicted(issue: KnownIssue, verdict: Verdict, subject: str, label: str, versions: Mapping[str, str]) -> bool:
    strategy = label.partition("-")[0]
    labels = [each for each in issue.labels() if each.partition("-")[0] == strategy]
    predictions = (issue.predict(subject, each, versions) for each in labels)
    return any(each is not None and each.verdict is verdict for each in predictions)
