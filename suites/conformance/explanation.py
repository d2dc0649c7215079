"""Which differences from the reference other known issues explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
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
    possible = [
        issue
        for issue in catalog.values()
        if issue.differences and _is_predicted(issue, {Verdict.SILENT}, subject, label, versions)
    ]
    sharded = not label.startswith(("single-", "ddp-"))
    by: list[str] = []
    for difference in differences:
        stage, where = str(difference["stage"]), str(difference.get("where", ""))
        # Under a strategy that shards gradients, weights are the first that is seen of them.
        names = [stage, stage.replace("weights[", "gradients[")] if sharded else [stage]
        ids = [
            issue.id
            for issue in possible
            if any(pattern.matches(name, setting, where) for pattern in issue.differences for name in names)
        ]
        if not ids:
            return by, difference
        by += [issue_id for issue_id in ids if issue_id not in by]
        if changes_what_follows(stage):
            break
    return by, None


def changes_what_follows(stage: str) -> bool:
    """Whether a difference in this quantity changes the quantities after it.

    A number that is only logged or returned changes nothing. How tokens would have been drawn changes nothing, since
    completions are fixed in advance, and neither does a wrong row, since the reference then trains on that row.
    """
    return not stage.startswith(_ALONE)


_ALONE = (
    "best_model[",
    "checkpointing[",
    "config[",
    "data[",
    "evaluate()[",
    "evaluation[",
    "generation[",
    "logs[",
    "reward_arguments[",
    "seed",
    "table",
)


def failed_by(
    failure: Failed, subject: str, label: str, versions: Mapping[str, str], catalog: Catalog, trainer: str = "grpo"
) -> list[str]:
    """The known issues whose symptom an exception is, and which the catalogue predicts to be ``broken``, or whose own
    suite is stopped before by another one that need not meet this training.

    Args:
        trainer: whose training it ended, one of :data:`~pytest_trlcompat.conformance.rows.TRAINERS`.
    """
    return [
        issue.id
        for issue in catalog.values()
        if issue.kind in ("", trainer)
        and issue.shows(failure.classes, failure.message, failure.location)
        and _is_predicted(issue, {Verdict.BROKEN, Verdict.BLOCKED}, subject, label, versions)
    ]


def _is_predicted(
    issue: KnownIssue, verdicts: Set[Verdict], subject: str, label: str, versions: Mapping[str, str]
) -> bool:
    """Under the strategy of a label, or, where no suite measures the issue there, with DDP or in one process.

    One that meets every trainer is there also with releases that lack the trainer by which it is measured.
    """
    if not issue.trainer:
        present = tuple(prediction for prediction in issue.predictions if prediction.verdict is not Verdict.ABSENT)
        issue = replace(issue, predictions=present)
    strategy = label.partition("-")[0]
    labels = [issue_label for issue_label in issue.labels() if issue_label.partition("-")[0] == strategy]
    elsewhere = ("single",) if strategy == "single" else ("single", "ddp")
    labels = labels or [issue_label for issue_label in issue.labels() if issue_label.partition("-")[0] in elsewhere]
    predictions = (issue.predict(subject, issue_label, versions) for issue_label in labels)
    return any(prediction is not None and prediction.verdict in verdicts for prediction in predictions)
