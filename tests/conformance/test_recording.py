"""What is kept of a training, in the form that the reference knows."""

from __future__ import annotations

from typing import Any

from pytest_trlcompat.conformance.grpo.recording import joined
from pytest_trlcompat.conformance.grpo.records import Generated, MicroBatchRecord, Recording


def call(number: int, evaluation: bool = False) -> Generated:
    rewarded: dict[str, Any] = {"letters": {"target": [number]}}
    return Generated([[number]], [[number + 10]], {}, rewarded, evaluation)


def test_calls_of_generate_for_the_micro_batches_of_one_step_become_one() -> None:
    found = Recording({}, [call(0), call(7, evaluation=True), call(1), call(2), call(3)])
    # An evaluation within the first of two iterations over the first two calls, and one iteration over the others.
    found.micro_batches = [MicroBatchRecord(0, []), MicroBatchRecord(1, [], evaluation=True)]
    found.micro_batches += [MicroBatchRecord(each, []) for each in (2, 2, 2, 3, 4)]
    found.prompts_before_resuming = [[[0]], [[1]], [[2]], [[3]]]
    together = joined(found, 2)
    assert [each.prompts for each in together.generated] == [[[0], [1]], [[7]], [[2], [3]]]
    assert [each.completions for each in together.generated] == [[[10], [11]], [[17]], [[12], [13]]]
    assert together.generated[0].rewarded == {"letters": {"target": [0, 1]}}
    assert [each.generation for each in together.micro_batches] == [0, 1, 0, 0, 0, 2, 2]
    assert together.prompts_before_resuming == [[[0], [1]], [[2], [3]]]


def test_one_call_for_a_generation_is_left_as_it_is() -> None:
    found = Recording({}, [call(0), call(1)])
    assert joined(found, 1) is found
    assert [each.prompts for each in found.generated] == [[[0]], [[1]]]
