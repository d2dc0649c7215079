"""Compute with the reference what a training of the legacy RLOO must give, from the same queries and responses.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_trlcompat.conformance.comparison import StepCountMismatch
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.on_policy.expected import episodes, layouts, numbers, settings_of
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["Untrained", "computed"]


@dataclass(frozen=True)
class Untrained:
    """The models as they were before the training.

    Attributes:
        reward_model: a classifier with one label, or ``None``.
        reward_function: in its place; gives the score of the token ids of a query and the kept part of its response.
    """

    policy: torch.nn.Module
    reward_model: torch.nn.Module | None
    reference_model: torch.nn.Module
    reward_function: Callable[[Sequence[int]], float] | None = None


def computed(
    recordings: Sequence[OnPolicyRecording], models: Untrained, conventions: Conventions
) -> tuple[reference.FirstRLOOStep, ...]:
    """What the reference gives for the queries and responses of all ranks.

    Args:
        conventions: of the trainer's release.

    Raises:
        StepCountMismatch: there is no batch, the micro-batches of one are not its rows, or its rows are not ``rloo_k``
            times its prompts.
    """
    from pytest_trlcompat import reference

    settings = settings_of(recordings, conventions, reference.FirstRLOOSettings, reference.FirstRLOOUndecided)
    batches = episodes(recordings)
    for number, batch in enumerate(batches):
        _check_groups(number, batch, settings)
    function = models.reward_function
    if function is not None:
        batches = [_scored(batch, function, settings.stop_token_id) for batch in batches]
    return reference.first_rloo_train(
        models.policy.eval(),
        batches,
        settings,
        reward_model=None if function is not None else numbers(models.reward_model),
        reference_model=models.reference_model.eval(),
        layouts=layouts(recordings, len(batches), settings),
    )


def _check_groups(number: int, batch: reference.Episodes, settings: reference.FirstRLOOSettings) -> None:
    """Check that each rank has first one response to every prompt, then another one to every prompt, and so on."""
    size = len(batch.queries) // settings.world_size
    for start in range(0, len(batch.queries), size):
        queries = [list(query) for query in batch.queries[start : start + size]]
        prompts = queries[: size // settings.rloo_k]
        if queries != prompts * settings.rloo_k:
            raise StepCountMismatch(
                f"batch {number}: its queries are not {settings.rloo_k} times the same prompts: {queries}"
            )


def _scored(
    batch: reference.Episodes, function: Callable[[Sequence[int]], float], stop_token_id: int | None
) -> reference.Episodes:
    """The batch with scores of responses up to their first stop token."""
    responses = [_until(response, stop_token_id) for response in batch.responses]
    pairs = zip(batch.queries, responses, strict=True)
    return replace(batch, scores=[function([*query, *response]) for query, response in pairs])


def _until(response: Sequence[int], stop_token_id: int | None) -> Sequence[int]:
    ids = list(response)
    return ids[: ids.index(stop_token_id) + 1] if stop_token_id in ids else ids
