"""Trainings on the rows of a dataset held against the reference: what is found where one of them is changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import tiny
from pytest_trlcompat.conformance.sft.adapter import ADAPTER
from pytest_trlcompat.conformance.supervised import quantities, recording
from pytest_trlcompat.conformance.supervised.expected import ExpectedTraining, computed
from pytest_trlcompat.conformance.supervised.records import MicroBatchRecord, Recording

trl = pytest.importorskip("trl")


def arguments(**changed: Any) -> dict[str, Any]:
    return {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2, "logging_steps": 1, **changed}


def recorded(*rows: tuple[int, ...], **changed: Any) -> Recording:
    batch = MicroBatchRecord([{"input_ids": ids} for ids in rows])
    return Recording(arguments(**changed), micro_batches=[batch])


def stages(found: Recording, *wanted: tuple[int, ...], size: int | None = None) -> list[tuple[str, list[Any]]]:
    rows = [{"input_ids": ids} for ids in wanted]
    different = quantities.rows_differing([found], {"training": (rows, len(rows) if size is None else size)})
    return [(each.stage, each.found) for each in different]


def test_rows_in_any_order_are_those_of_the_dataset() -> None:
    assert stages(recorded((7, 8), (5, 6)), (5, 6), (7, 8), (9, 9)) == []


def test_a_row_that_is_not_there_is_compared_with_the_one_that_is_most_like_it() -> None:
    rows = [{"input_ids": ids} for ids in ((5, 6), (7, 8))]
    (found,) = quantities.rows_differing([recorded((5, 6, 1))], {"training": (rows, 2)})
    assert (found.stage, found.expected, found.found) == ("data[input_ids]", [5, 6], [5, 6, 1])


def test_a_row_that_comes_twice_in_an_epoch_is_a_matter_of_order() -> None:
    (found,) = stages(recorded((5, 6), (5, 6)), (5, 6), (7, 8))
    assert found[0] == "data[order]"


def test_a_row_may_come_again_in_the_next_epoch() -> None:
    found = recorded((5, 6), (7, 8))
    found.micro_batches.append(MicroBatchRecord([{"input_ids": (7, 8)}, {"input_ids": (5, 6)}]))
    assert stages(found, (5, 6), (7, 8)) == []


def test_a_dataset_of_another_size_is_found() -> None:
    found = recorded((5, 6))
    found.sizes["training"] = 3
    assert stages(found, (5, 6), (7, 8)) == [("data[size]", [3])]


def test_what_is_wrong_with_a_batch_as_a_whole_is_found() -> None:
    found = recorded((5, 6))
    found.micro_batches[0].problems.append(("data[width]", "a multiple of 8", 3))
    assert stages(found, (5, 6)) == [("data[width]", [3])]


def test_a_resumed_training_must_go_on_with_the_rows_that_came_next() -> None:
    found = recorded((5, 6))
    found.before_resuming, found.after_resuming = [[{"input_ids": (7, 8)}]], [[{"input_ids": (5, 6)}]]
    assert [stage for stage, _ in stages(found, (5, 6), (7, 8))] == ["data[order]"]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, ExpectedTraining]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    model = tiny.qwen2(initializer_range=0.3, num_hidden_layers=1, directory=folder)
    setting = {"data": "prompt_completion", "gradient_accumulation_steps": 2, "evaluation": "after"}
    found = recording.record(ADAPTER, trl.SFTTrainer, model, setting)
    from pytest_trlcompat.conformance.conventions import of_installed

    return found, computed([found], ADAPTER, ADAPTER.models(model, setting), of_installed("sft"))


def differing(found: Recording, expected: ExpectedTraining) -> list[str]:
    import transformers

    major = int(transformers.__version__.partition(".")[0])
    from pytest_trlcompat.conformance import comparison
    from pytest_trlcompat.conformance.conventions import of_installed

    unrecorded = of_installed("sft").unrecorded_with(found.arguments)
    wanted = comparison.stated(quantities.expected_quantities(expected, 1, major), unrecorded)
    recorded = quantities.recorded_quantities([found])
    stages = [each.stage for each in comparison.differing(wanted, recorded, [wanted] * 3)]
    # Until 0.17 an evaluation that nobody scheduled is logged without its prefix.
    return [stage for stage in stages if "eval_mean_token_accuracy" not in stage]


def test_a_training_is_recorded_with_all_that_the_reference_computes(held: tuple[Recording, ExpectedTraining]) -> None:
    found, expected = held
    assert [step.micro_batches for step in found.steps] == [2, 4]
    assert expected.starts == (0, 2)
    assert len(found.training) == 4
    assert {len(each.rows) for each in found.training} == {4}
    assert len(expected.evaluations) == 1
    assert set(found.steps[0].gradients or ()) == set(found.steps[0].weights) == set(expected.steps[0].weights)
    names = {stage for stage, _ in quantities.recorded_quantities([found])}
    assert {"logs[loss]", "logs[grad_norm]", "logs[learning_rate]", "evaluation[eval_loss]"} <= names
    assert differing(found, expected) == []


def test_a_loss_that_is_off_by_a_hundredth_is_found(held: tuple[Recording, ExpectedTraining]) -> None:
    found, expected = held
    step = dataclasses.replace(expected.steps[0], loss=expected.steps[0].loss * 1.01)
    assert differing(found, dataclasses.replace(expected, steps=(step, expected.steps[1]))) == ["logs[loss]"]


def test_a_metric_that_an_evaluation_does_not_log_is_missing_where_something_was_measured(
    held: tuple[Recording, ExpectedTraining],
) -> None:
    found, expected = held
    ((steps, logged),) = found.evaluations
    (evaluation,) = expected.evaluations
    names = sorted(name for name in {*evaluation.logs} & {*logged} if name != "eval_loss")
    if not names:
        pytest.skip("this release logs nothing beside the loss")
    name = names[0]
    left = {each: value for each, value in logged.items() if each != name}
    without = dataclasses.replace(found, evaluations=[(steps, left)])
    of_training = frozenset({"epoch", "grad_norm", "learning_rate", "loss", "num_tokens", "step"})

    def stages_of(truth_held: ExpectedTraining) -> list[str]:
        found = quantities._missing(without, truth_held, of_training)
        return [each.stage for each in found if each.stage.startswith("evaluation[")]  # not what evaluate() returns

    assert stages_of(expected) == [f"evaluation[{name}]"]
    nothing = dataclasses.replace(evaluation, logs={each: v for each, v in evaluation.logs.items() if each != name})
    assert stages_of(dataclasses.replace(expected, evaluations=(nothing,))) == []
