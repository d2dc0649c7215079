"""What a student samples in a distillation: with which arguments, from which model, and how it is shown in tables.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.comparison import Difference
from pytest_trlcompat.conformance.grpo.methods import Method
from pytest_trlcompat.conformance.grpo.quantities import drawn
from pytest_trlcompat.conformance.grpo.records import Recording as Sampled
from pytest_trlcompat.conformance.grpo.watching import fixed_completions, watched_tables

if TYPE_CHECKING:
    from pytest_trlcompat.conformance.distillation.prompts import PromptData
    from pytest_trlcompat.conformance.supervised.records import Recording, Row

__all__ = ["METHOD", "differences", "rows_of", "watched", "watched_trainer"]

METHOD = Method("distillation", "1.10")
_SAMPLED, _SAMPLERS = "sampled", "samplers"


@contextlib.contextmanager
def watched(data: PromptData, recording: Recording) -> Iterator[None]:
    """Within, fixed completions replace what the student draws; record sampling arguments and tables of completions."""
    from transformers.generation import GenerationMixin

    sampling = recording.extras[_SAMPLED] = Sampled({})
    samplers: list[Any] = []
    with fixed_completions(data, sampling, 1), watched_tables(sampling, METHOD):
        fixed = GenerationMixin.generate

        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            samplers.append(self)
            return fixed(self, *args, **kwargs)

        recording.extras[_SAMPLERS] = samplers
        GenerationMixin.generate = generate
        try:
            yield
        finally:
            GenerationMixin.generate = fixed
            del recording.extras[_SAMPLERS]  # models must not be sent to other ranks


def watched_trainer(trainer_class: type, recording: Recording) -> type:
    """A subclass that records whether it samples for an evaluation, and from which model."""

    class Watched(trainer_class):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            recording.extras[_SAMPLED].in_evaluation = True
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                recording.extras[_SAMPLED].in_evaluation = False

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            # TRL may sample from a module beneath the wrappers of the student.
            student_modules = {id(module) for module in self.model.modules()}
            samplers = recording.extras[_SAMPLERS]
            recording.extras["others"] = recording.extras.get("others", 0) + sum(
                id(sampler) not in student_modules for sampler in samplers
            )
            samplers.clear()
            if self.teacher_model is not None:
                recording.extras["teacher"] = str(next(self.teacher_model.parameters()).dtype)
            return super().compute_loss(model, *args, **kwargs)

    Watched.__name__ = trainer_class.__name__
    return Watched


def rows_of(inputs: Mapping[str, Any]) -> list[Row]:
    """Each prompt with its completion, without padding, and a mask of the tokens that the student sampled."""
    rows: list[Row] = []
    ids, real = inputs["completion_ids"], inputs["completion_mask"]
    counted = real * inputs["tool_mask"] if inputs.get("tool_mask") is not None else real
    prompts_and_masks = inputs["prompt_ids"].tolist(), inputs["prompt_mask"].tolist()
    for prompt, is_prompt, answer, is_answer, counts in zip(
        *prompts_and_masks, ids.tolist(), real.tolist(), counted.tolist(), strict=True
    ):
        prompt_ids = [token for token, is_real in zip(prompt, is_prompt, strict=True) if is_real]
        places = [place for place, is_real in enumerate(is_answer) if is_real]
        sampled = [float(counts[place]) for place in places]
        row = [*prompt_ids, *(answer[place] for place in places)]
        rows.append({"ids": tuple(map(float, row)), "mask": (*[0.0] * len(prompt_ids), *sampled)})
    return rows


def differences(
    recordings: Sequence[Recording],
    rows: Sequence[Row],
    processing_class: Any,
    ends: Sequence[int],
    dtype: str = "torch.float32",
) -> Iterator[Difference]:
    """What differs in sampling: its arguments, its model, its calls per step, the order of prompts, and tables.

    Args:
        dtype: of the teacher's weights. It is compared since it changes a loss by hardly more than rounding.
        rows: what the dataset of the training must become.
        processing_class: the processing class.
        ends: token ids that end a completion.
    """
    main = recordings[0]
    accumulated = int(main.arguments["gradient_accumulation_steps"])
    size = int(main.arguments["per_device_train_batch_size"]) * accumulated
    for rank, recording in enumerate(recordings):
        sampling = recording.extras[_SAMPLED]
        training = [call for call in sampling.generated if not call.evaluation]
        for number, call in enumerate(sampling.generated):
            place = f"rank {rank}, call {number}"
            yield from drawn(call.arguments, main.arguments, ends, place)
        # "Prompts across gradient accumulation steps are batched into a single call."
        sizes = [len(call.prompts) for call in training]
        calls = [size] * -(-len(recording.training) // accumulated)
        if not recording.after_resuming and sizes != calls:
            yield Difference("generation[prompts]", f"rank {rank}", calls, sizes, math.inf, 0.0)
        if foreign_samplers := recording.extras.get("others"):
            yield Difference("generation[model]", f"rank {rank}", [0], [foreign_samplers], math.inf, 0.0)
        if recording.extras.get("teacher", dtype) != dtype:
            yield Difference("teacher[dtype]", f"rank {rank}", [dtype], [recording.extras["teacher"]], math.inf, 0.0)
    yield from _order(recordings, rows)
    yield from _tables(main, rows, processing_class)


def _order(recordings: Sequence[Recording], rows: Sequence[Row]) -> Iterator[Difference]:
    """``shuffle_dataset``: whether the prompts of the first pass are in the order of the dataset."""
    calls = [
        [call.prompts for call in recording.extras[_SAMPLED].generated if not call.evaluation]
        for recording in recordings
    ]
    sampled_prompts = [
        prompt for together in zip(*calls, strict=False) for rank_prompts in together for prompt in rank_prompts
    ][: len(rows)]
    expected_prompts = [
        [int(token) for token in row["ids"][: row["mask"].index(1.0)]] for row in rows[: len(sampled_prompts)]
    ]
    shuffled = bool(recordings[0].arguments["shuffle_dataset"])
    if (sampled_prompts != expected_prompts) is not shuffled:
        expected_order = "shuffled" if shuffled else "as the dataset has them"
        yield Difference("data[order]", "prompts", [expected_order], [str(sampled_prompts[:2])], math.inf, 0.0)


def _tables(main: Recording, rows: Sequence[Row], processing_class: Any) -> Iterator[Difference]:
    """There must be one table for each line that is logged, with each completion next to its own prompt."""
    tables = main.extras[_SAMPLED].tables
    if not tables and not main.arguments.get("log_completions"):
        return
    known = set()
    for row in rows:
        first = row["mask"].index(1.0)
        ids = [int(token) for token in row["ids"]]
        known.add(tuple(processing_class.decode(part, skip_special_tokens=True) for part in (ids[:first], ids[first:])))
    distinct = [table for number, table in enumerate(tables) if not number or table != tables[number - 1]]
    if len(distinct) != len(main.logs):
        yield Difference("table", "number of tables", [len(main.logs)], [len(distinct)], math.inf, 0.0)
    for shown, answers, _ in distinct:
        pairs = [*zip(shown, answers, strict=False)]
        wrong = [pair for pair in pairs if pair not in known]
        if wrong or not pairs or len(shown) != len(answers):
            yield Difference("table", "completions", [], [str(wrong[:2])], math.inf, 0.0)
