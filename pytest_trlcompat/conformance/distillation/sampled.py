"""What a student samples in a distillation: how, from which model, and what its trainer makes of it.

Runs inside a rank; imports the stack only inside functions.
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
    """Put the fixed completions in place of what the student draws; keep how, and tables of completions."""
    from transformers.generation import GenerationMixin

    sampling = recording.beside[_SAMPLED] = Sampled({})
    samplers: list[Any] = []
    with fixed_completions(data, sampling, 1), watched_tables(sampling, METHOD):
        fixed = GenerationMixin.generate

        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            samplers.append(self)
            return fixed(self, *args, **kwargs)

        recording.beside[_SAMPLERS] = samplers
        GenerationMixin.generate = generate
        try:
            yield
        finally:
            GenerationMixin.generate = fixed
            del recording.beside[_SAMPLERS]  # models, which no rank sends to another


def watched_trainer(trainer_class: type, recording: Recording) -> type:
    """The trainer, which says what it samples for, and from which model."""

    class Watched(trainer_class):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            recording.beside[_SAMPLED].in_evaluation = True
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                recording.beside[_SAMPLED].in_evaluation = False

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            student_modules = {id(module) for module in self.model.modules()}
            samplers = recording.beside[_SAMPLERS]
            recording.beside["others"] = recording.beside.get("others", 0) + sum(
                id(sampler) not in student_modules for sampler in samplers
            )
            samplers.clear()
            if self.teacher_model is not None:
                recording.beside["teacher"] = str(next(self.teacher_model.parameters()).dtype)
            return super().compute_loss(model, *args, **kwargs)

    Watched.__name__ = trainer_class.__name__
    return Watched


def rows_of(inputs: Mapping[str, Any]) -> list[Row]:
    """Each prompt with its completion, without padding, and which tokens the student sampled."""
    rows: list[Row] = []
    ids, real = inputs["completion_ids"], inputs["completion_mask"]
    counted = real * inputs["tool_mask"] if inputs.get("tool_mask") is not None else real
    asked = inputs["prompt_ids"].tolist(), inputs["prompt_mask"].tolist()
    for prompt, is_prompt, answer, is_answer, counts in zip(
        *asked, ids.tolist(), real.tolist(), counted.tolist(), strict=True
    ):
        prompt_ids = [token for token, is_real in zip(prompt, is_prompt, strict=True) if is_real]
        places = [place for place, is_real in enumerate(is_answer) if is_real]
        sampled = [float(counts[place]) for place in places]
        row = [*prompt_ids, *(answer[place] for place in places)]
        rows.append({"ids": tuple(map(float, row)), "mask": (*[0.0] * len(prompt_ids), *sampled)})
    return rows


def differences(
    recordings: Sequence[Recording], rows: Sequence[Row], words: Any, ends: Sequence[int], dtype: str = "torch.float32"
) -> Iterator[Difference]:
    """How tokens would have been drawn; that the student draws them, once for each step; and tables of completions.

    Args:
        dtype: of the teacher's weights: what it changes of a loss is hardly more than its rounding.
        rows: that the training's dataset must become.
        words: the processing class.
        ends: token ids that end a completion.
    """
    main = recordings[0]
    accumulated = int(main.arguments["gradient_accumulation_steps"])
    size = int(main.arguments["per_device_train_batch_size"]) * accumulated
    for rank, recording in enumerate(recordings):
        sampling = recording.beside[_SAMPLED]
        training = [call for call in sampling.generated if not call.evaluation]
        for number, call in enumerate(sampling.generated):
            place = f"rank {rank}, call {number}"
            yield from drawn(call.arguments, main.arguments, ends, place)
        # "Prompts across gradient accumulation steps are batched into a single call."
        sizes = [len(call.prompts) for call in training]
        calls = [size] * -(-len(recording.training) // accumulated)
        if not recording.after_resuming and sizes != calls:
            yield Difference("generation[prompts]", f"rank {rank}", calls, sizes, math.inf, 0.0)
        if others := recording.beside.get("others"):
            yield Difference("generation[model]", f"rank {rank}", [0], [others], math.inf, 0.0)
        if recording.beside.get("teacher", dtype) != dtype:
            yield Difference("teacher[dtype]", f"rank {rank}", [dtype], [recording.beside["teacher"]], math.inf, 0.0)
    yield from _order(recordings, rows)
    yield from _tables(main, rows, words)


def _order(recordings: Sequence[Recording], rows: Sequence[Row]) -> Iterator[Difference]:
    """``shuffle_dataset``: of the first pass, whether prompts are drawn as the dataset has them."""
    calls = [
        [call.prompts for call in recording.beside[_SAMPLED].generated if not call.evaluation]
        for recording in recordings
    ]
    sampled_prompts = [
        prompt for together in zip(*calls, strict=False) for rank_prompts in together for prompt in rank_prompts
    ][: len(rows)]
    asked = [[int(token) for token in row["ids"][: row["mask"].index(1.0)]] for row in rows[: len(sampled_prompts)]]
    shuffled = bool(recordings[0].arguments["shuffle_dataset"])
    if (sampled_prompts != asked) is not shuffled:
        expected_order = "shuffled" if shuffled else "as the dataset has them"
        yield Difference("data[order]", "prompts", [expected_order], [str(sampled_prompts[:2])], math.inf, 0.0)


def _tables(main: Recording, rows: Sequence[Row], words: Any) -> Iterator[Difference]:
    """One table for each line that is logged; each completion stands beside its own prompt."""
    tables = main.beside[_SAMPLED].tables
    if not tables and not main.arguments.get("log_completions"):
        return
    known = set()
    for row in rows:
        first = row["mask"].index(1.0)
        ids = [int(token) for token in row["ids"]]
        known.add(tuple(words.decode(part, skip_special_tokens=True) for part in (ids[:first], ids[first:])))
    distinct = [table for number, table in enumerate(tables) if not number or table != tables[number - 1]]
    if len(distinct) != len(main.logs):
        yield Difference("table", "number of tables", [len(main.logs)], [len(distinct)], math.inf, 0.0)
    for shown, answers, _ in distinct:
        pairs = [*zip(shown, answers, strict=False)]
        wrong = [pair for pair in pairs if pair not in known]
        if wrong or not pairs or len(shown) != len(answers):
            yield Difference("table", "completions", [], [str(wrong[:2])], math.inf, 0.0)
