"""The quantities of a training of GRPO or RLOO, expected and recorded, in the order in which its steps compute them.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison
from pytest_trlcompat.conformance.comparison import Comparison, Difference, Quantity, compare_with_reference, stated
from pytest_trlcompat.conformance.grpo import environments, tools
from pytest_trlcompat.conformance.grpo.expected import ExpectedTraining, targets_of
from pytest_trlcompat.conformance.grpo.methods import GRPO, Method
from pytest_trlcompat.conformance.grpo.records import Recording
from pytest_trlcompat.conformance.grpo.sampling import target_of
from pytest_trlcompat.conformance.training import unrecorded_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "clipped_by_rounding",
    "compare",
    "drawn",
    "expected_quantities",
    "is_drawn_so",
    "recorded_quantities",
]


def expected_quantities(expected: ExpectedTraining, logging_steps: int, transformers: int) -> Iterator[Quantity]:
    """Everything that a recording can show, in the order in which steps compute it."""
    import torch

    from pytest_trlcompat import reference

    generations: list[Any] = []
    pending: list[Mapping[str, float]] = []
    near_bounds: list[Mapping[str, float]] = []
    micro_batch = 0
    settings = expected.settings
    reused = settings.micro_batches_per_generation * settings.num_iterations
    same_policy = _SAME_POLICY if settings.gradient_accumulation_steps % reused == 0 else ""
    counted = 0
    for number, step in enumerate(expected.steps):
        for generation in step.generations:
            # Several steps may train on the same generation, whose quantities are listed once.
            if any(generation is earlier for earlier in generations):
                continue
            place = f"generation {len(generations)}"
            generations.append(generation)
            yield Quantity("completion_mask", place, generation.tokens.loss_mask.double())
            yield Quantity("advantages", place, generation.advantages.advantages)
            mask = generation.tokens.loss_mask
            if expected.method is GRPO:
                yield Quantity("old_logprobs", place, generation.old_logprobs, mask, unrecorded=same_policy)
            else:  # RLOO sums over whole completions; rows that are excluded from the loss are left out
                sums = generation.old_logprobs.where(mask, 0.0).sum(1, keepdim=True)
                rows = mask.any(1, keepdim=True)
                yield Quantity("old_sequence_logprobs", place, sums, rows, unrecorded=same_policy)
            if generation.reference_logprobs is not None:
                yield Quantity("reference_logprobs", place, generation.reference_logprobs, mask)
        for batch in step.micro_batches:
            # The reference lists the micro-batches of all ranks one after the other.
            place = f"step {number}, rank {batch.rank}, micro-batch {micro_batch // expected.settings.world_size}"
            micro_batch += 1
            tokens = step.generations[batch.generation].tokens.of_rows(batch.rows)
            mask = tokens.loss_mask
            pixels = [inputs["pixel_values"] for inputs in tokens.inputs if "pixel_values" in inputs]
            if pixels:
                yield Quantity("pixel_values", place, torch.cat(pixels).double().flatten(1))
            yield Quantity("logprobs", place, batch.logprobs, mask)
            yield Quantity("entropies", place, batch.entropies, mask)
        place = f"step {number}"
        if logging_steps == 1:
            yield Quantity("logs[grad_norm]", place, step.grad_norm.reshape(1), rounding=_rounding(step.grad_norm))
        for name, gradient in step.clipped_gradients.items():
            yield Quantity(f"gradients[{name}]", place, gradient)
        for name, weight in step.weights.items():
            yield Quantity(f"weights[{name}]", place, weight)
        pending.append(step.logs)
        near_bounds.append(clipped_by_rounding(step, expected.settings, expected.method))
        if (number + 1) % logging_steps == 0:
            by_rounding = reference.average_logs(near_bounds)
            for name, value in reference.average_logs(pending).items():
                if name == "grad_norm" and logging_steps == 1:
                    continue
                # Trainer of Transformers 4 rounds the loss that it logs to four places.
                rounding = 1e-4 if name == "loss" and transformers < 5 else by_rounding.get(name, 0.0)
                values = torch.tensor([value], dtype=torch.float64)
                unrecorded = _UNCHANGED if name == "num_tokens" and len(generations) == counted else ""
                yield Quantity(f"logs[{name}]", place, values, rounding=rounding, unrecorded=unrecorded)
            pending, near_bounds, counted = [], [], len(generations)
    for number, evaluation in enumerate(expected.evaluations):
        for name, value in evaluation.logs.items():
            yield Quantity(f"evaluation[{name}]", f"evaluation {number}", torch.tensor([value], dtype=torch.float64))


_SAME_POLICY = "each step trains on whole generations, so that the policy that it trains is the one that sampled"
_UNCHANGED = "nothing was sampled since the last line, and nothing counted"


def clipped_by_rounding(step: Any, settings: Any, method: Method = GRPO) -> dict[str, float]:
    """How far rounding may move each clip ratio of a step, which counts ratios of policies beyond a bound.

    A ratio of policies is assumed to be off by at most :data:`_RATIO_OFF` of itself, an advantage by
    :data:`_ADVANTAGE_OFF`, which may give an advantage of 0 either sign.
    """
    distances: dict[str, float] = {}
    for ratio, advantage in itertools.product((1 - _RATIO_OFF, 1 + _RATIO_OFF), (-_ADVANTAGE_OFF, _ADVANTAGE_OFF)):
        batches = [dataclasses.replace(batch, weights=batch.weights * ratio) for batch in step.micro_batches]
        generations = [
            _with_advantages(generation, generation.advantages.advantages + advantage)
            for generation in step.generations
        ]
        for name, value in method.training_metrics(batches, generations, settings).items():
            if name.startswith("clip_ratio/"):
                distances[name] = max(distances.get(name, 0.0), abs(value - step.logs[name]))
    return distances


_RATIO_OFF, _ADVANTAGE_OFF = 1e-4, 1e-6


def _with_advantages(generation: Any, values: torch.Tensor) -> Any:
    return dataclasses.replace(generation, advantages=dataclasses.replace(generation.advantages, advantages=values))


def recorded_quantities(
    recordings: Sequence[Recording], expected: ExpectedTraining
) -> Mapping[tuple[str, str], torch.Tensor]:
    """The same quantities of a recording, as far as it has them, by stage and place."""
    import torch

    recorded: dict[tuple[str, str], torch.Tensor] = {}
    main = recordings[0]
    settings = expected.settings
    per_generation = settings.micro_batches_per_generation * settings.num_iterations
    for index, layout in enumerate(expected.layouts):
        rows: dict[str, dict[int, Any]] = {}
        for rank, recording in enumerate(recordings):
            batches = [batch for batch in recording.micro_batches if not batch.evaluation]
            batches = batches[index * per_generation : (index + 1) * per_generation]
            for batch, places in zip(batches, layout, strict=False):  # iterations repeat the same rows
                for name, values in batch.values.items():
                    if name not in ("logprobs", "entropies"):
                        rows.setdefault(name, {}).update(zip(places[rank], values, strict=True))
        for name, by_row in rows.items():
            if len(by_row) == len(expected.rollouts[index].prompts):
                ordered = [by_row[row] for row in range(len(by_row))]
                recorded[name, f"generation {index}"] = _padded(ordered)
    for rank, recording in enumerate(recordings):
        batches = [batch for batch in recording.micro_batches if not batch.evaluation]
        for number, batch in enumerate(batches):
            step = number // settings.gradient_accumulation_steps
            place = f"step {step}, rank {rank}, micro-batch {number}"
            for name in ("logprobs", "entropies"):
                if batch.values.get(name):
                    recorded[name, place] = _padded(batch.values[name])
            if batch.pixel_values is not None:
                recorded["pixel_values", place] = batch.pixel_values
    for number, step in enumerate(main.steps):
        place = f"step {number}"
        for name, gradient in (step.gradients or {}).items():
            recorded[f"gradients[{name}]", place] = gradient
        for name, weight in step.weights.items():
            recorded[f"weights[{name}]", place] = weight
    logging_steps = int(main.arguments["logging_steps"])
    for number, entry in enumerate(main.logs):
        if "clip_ratio" in entry and not main.arguments.get("use_liger_loss"):  # as 0.16 calls it
            entry = {**entry, "clip_ratio/region_mean": entry["clip_ratio"]}
        for name, value in entry.items():
            recorded[f"logs[{name}]", f"step {(number + 1) * logging_steps - 1}"] = torch.tensor(
                [value], dtype=torch.float64
            )
    for number, (_, entry) in enumerate(main.evaluations):
        for name, value in entry.items():
            if isinstance(value, (int, float)):
                recorded[f"evaluation[{name}]", f"evaluation {number}"] = torch.tensor([value], dtype=torch.float64)
    return recorded


def _rounding(norm: torch.Tensor) -> float:
    """Four units in the last place of a 16-bit norm: gradients, their norms and the norm of these are rounded."""
    import torch

    kind = torch.finfo(norm.dtype)
    return 0.0 if kind.bits > 16 else 4 * float(norm.abs()) * kind.eps


def _padded(rows: Sequence[Any]) -> torch.Tensor:
    import torch

    if not isinstance(rows[0], list):
        return torch.tensor(rows, dtype=torch.float64)
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def _sampling(recordings: Sequence[Recording], expected: ExpectedTraining) -> Iterator[Difference]:
    """What differs before a model has computed anything: prompts, sampling arguments, arguments of reward functions."""
    main = recordings[0]
    ends = expected.settings.eos_token_id
    for index in range(len(expected.rollouts)):
        place = f"generation {index}"
        calls = [[call for call in recording.generated if not call.evaluation][index] for recording in recordings]
        yield from drawn(calls[0].arguments, main.arguments, ends, place, expected.never_sampled)
        yield from _prompts(calls, targets_of(main, "training"), expected, place)
        for call in calls:
            yield from _rewarded(call, place)
            yield from _turns(call, main.arguments, place)
    yield from _called(recordings)
    if main.prompts_before_resuming:
        resumed_prompts = [call.prompts for call in main.generated if not call.evaluation]
        if resumed_prompts != main.prompts_before_resuming:
            yield Difference("prompts", "after resuming", main.prompts_before_resuming, resumed_prompts, math.inf, 0.0)
    for name, value in (main.arguments.get("gradient_checkpointing_kwargs") or {}).items():
        other_values = [keywords.get(name) for keywords in main.checkpointed if keywords.get(name) != value]
        if other_values and main.arguments["gradient_checkpointing"]:
            yield Difference(f"checkpointing[{name}]", "training", [value], other_values[:1], math.inf, 0.0)
    if main.seeded:
        yield Difference("seed", "built", [], main.seeded[:4], math.inf, 0.0)
    if main.arguments.get("shuffle_dataset") is False:
        yield from _in_order(calls_of(recordings), [ids for ids, _ in main.asked["training"]], expected)
    if main.tables:
        yield from _tables(main, expected)
    for name, (before, after) in main.changed.items():
        yield Difference(f"config[{name}]", "built", [str(before)], [str(after)], math.inf, 0.0)
    for call in (call for recording in recordings for call in recording.generated if call.evaluation):
        yield from drawn(call.arguments, main.arguments, ends, "evaluation", expected.never_sampled)
        yield from _rewarded(call, "evaluation")


def drawn(
    generation_arguments: Mapping[str, Any],
    arguments: Mapping[str, Any],
    ends: Sequence[int],
    place: str,
    never: Sequence[int] = (),
) -> Iterator[Difference]:
    """Arguments of generation that are not those of the config, where ``None`` switches a choice off.

    Tokens of ``never`` must be suppressed: they stand for an image, and a completion with one that has no image has no
    log-probability.
    """
    expected: dict[str, Any] = {"do_sample": True, "max_new_tokens": arguments["max_completion_length"]}
    for name, off in _SWITCHED_OFF.items():
        if name in arguments:
            expected[name] = off if arguments[name] is None else arguments[name]
    expected |= arguments.get("generation_kwargs") or {}
    for name, value in expected.items():
        if not is_drawn_so(name, generation_arguments[name], value):
            yield Difference(f"generation[{name}]", place, [value], [generation_arguments[name]], math.inf, 0.0)
    multiple = arguments.get("pad_to_multiple_of")
    if multiple and "width" in generation_arguments and generation_arguments["width"] % int(multiple):
        yield Difference(
            "generation[width]", place, [f"a multiple of {multiple}"], [generation_arguments["width"]], math.inf, 0.0
        )
    named = generation_arguments["eos_token_id"]
    declared = {int(token_id) for token_id in (named if isinstance(named, list) else [] if named is None else [named])}
    if not set(ends) <= declared:
        yield Difference("generation[eos_token_id]", place, list(ends), sorted(declared), math.inf, 0.0)
    suppressed = sorted(generation_arguments.get("suppress_tokens") or [])
    if not set(never) <= set(suppressed):
        yield Difference("generation[suppress_tokens]", place, list(never), suppressed, math.inf, 0.0)


def is_drawn_so(name: str, value: Any, expected: Any, near: float = 1e-9) -> bool:
    """Whether an argument of generation has the expected value; ``None`` switches it off.

    Args:
        near: the allowed difference.
    """
    seen = _SWITCHED_OFF.get(name) if value is None else value
    return seen is not None and abs(float(seen) - float(expected)) <= near


_SWITCHED_OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values that have the effect of no such argument: "If `None`, top-k-filtering is disabled"."""


def _prompts(
    calls: Sequence[Any], known: Mapping[tuple[int, ...], int], expected: ExpectedTraining, place: str
) -> Iterator[Difference]:
    """Groups must each have one prompt of the dataset, "truncated left" to ``max_prompt_length``, all different."""
    rows = [tuple(prompt) for call in calls for prompt in call.prompts]
    size = expected.settings.num_generations
    for row, prompt in enumerate(rows):
        if prompt not in known or prompt != rows[row - row % size]:
            first = list(rows[row - row % size])
            yield Difference("prompts", f"{place}, row {row}", first, list(prompt), math.inf, 0.0)
    groups = rows[::size]
    if len(set(groups)) != len(groups):
        yield Difference("prompts", place, [len(groups)], [len(set(groups))], math.inf, 0.0)


def calls_of(recordings: Sequence[Recording]) -> list[list[Any]]:
    """Calls of ``generate`` in training: for each generation, a list over ranks."""
    by_rank = [[call for call in recording.generated if not call.evaluation] for recording in recordings]
    return [list(together) for together in zip(*by_rank, strict=True)]


def _in_order(
    calls: Sequence[Sequence[Any]], dataset_prompts: Sequence[tuple[int, ...]], expected: ExpectedTraining
) -> Iterator[Difference]:
    """Without shuffling, prompts must be drawn in the order of the dataset."""
    size = expected.settings.num_generations
    sampled_prompts = [
        tuple(prompt) for together in calls for prompt in [p for call in together for p in call.prompts][::size]
    ]
    expected_prompts = [dataset_prompts[number % len(dataset_prompts)] for number in range(len(sampled_prompts))]
    if sampled_prompts != expected_prompts:
        yield Difference("prompts", "order", expected_prompts, sampled_prompts, math.inf, 0.0)


def _tables(main: Recording, expected: ExpectedTraining) -> Iterator[Difference]:
    """There must be a table for every logging step, with all completions since the last; repetitions are ignored."""
    steps = len(expected.steps) // int(main.arguments["logging_steps"])
    tables = [table for number, table in enumerate(main.tables) if not number or table != main.tables[number - 1]]
    if len(tables) != steps:
        yield Difference("table", "number of tables", [steps], [len(tables)], math.inf, 0.0)
    rows = sum(len(rollout.prompts) for rollout in expected.rollouts)
    shown = sum(len(prompts) for prompts, _, _ in tables)
    if shown != rows:
        yield Difference("table", "number of completions", [rows], [shown], math.inf, 0.0)
    for prompts, completions, rewards in tables:
        counts = {len(prompts), len(completions), *map(len, rewards.values())}
        if len(counts) != 1:
            yield Difference("table", "lengths of columns", [], sorted(counts), math.inf, 0.0)


def _rewarded(call: Any, place: str) -> Iterator[Difference]:
    """Reward functions must get each completion with its own prompt and columns."""
    for name, columns in call.rewarded.items():
        original = environments.without_observation if "environments" in columns else str
        targets = [target_of(_words(original(text))) for text in columns["prompts"]]
        if "target" in columns and columns["target"] != targets:
            yield Difference(f"reward_arguments[{name}.target]", place, targets, columns["target"], math.inf, 0.0)
        counts = [len(call.prompts), len(columns["completions"])]
        if counts[0] != counts[1]:
            yield Difference(f"reward_arguments[{name}]", place, counts[:1], counts[1:], math.inf, 0.0)
        # It is not documented whether reward functions hear of a call whose result does not fit the completion.
        rows = zip(call.completions, call.sampled or [], columns.get("environments", []), strict=False)
        for row, (completion, sampled, calls) in enumerate(rows):
            answered, all_calls = tools.answered(completion, sampled), tools.called(completion, sampled)
            if calls not in (answered, all_calls):
                stage, where = f"reward_arguments[{name}.environments]", f"{place}, row {row}"
                yield Difference(stage, where, answered, calls, math.inf, 0.0)


def _turns(call: Any, arguments: Mapping[str, Any], place: str) -> Iterator[Difference]:
    """Each sampled turn must be followed by the result of the tool that it calls, or by nothing."""
    limit, iterations = int(arguments["max_completion_length"]), arguments.get("max_tool_calling_iterations")
    for row, (completion, sampled) in enumerate(zip(call.completions, call.sampled or [], strict=False)):
        wrong = tools.differing(completion, sampled, limit, iterations)
        if wrong is not None:
            yield Difference("turns", f"{place}, row {row}", *wrong, math.inf, 0.0)


def _called(recordings: Sequence[Recording]) -> Iterator[Difference]:
    """The tool must be called for each result in a completion, and for nothing that no completion asks for.

    It is not documented whether it is called where its result does not fit the completion.
    """
    for rank, recording in enumerate(recordings):
        rows = [row for call in recording.generated for row in zip(call.completions, call.sampled or [], strict=False)]
        called = Counter(number for row in rows for number in tools.called(*row))
        answered = Counter(number for row in rows for number in tools.answered(*row))
        calls = Counter(recording.tool_calls)
        if calls - called or answered - calls:
            answered_calls = sorted(answered.elements())
            yield Difference("tool_calls", f"rank {rank}", answered_calls, sorted(recording.tool_calls), math.inf, 0.0)


def _words(text: str) -> str:
    return " ".join(word for word in text.split() if word.startswith("w"))


def compare(
    recordings: Sequence[Recording],
    expected: ExpectedTraining,
    near: Sequence[ExpectedTraining],
    transformers: int,
    unrecorded: Mapping[str, str] = MappingProxyType({}),
) -> Comparison:
    """Every quantity that differs, the first one first.

    Args:
        near: what is expected with weights changed by one unit in the last place, in several ways; needed only where
            :func:`exceeds_floor`.
        unrecorded: by stage, why this release does not show it; for
            :func:`~pytest_trlcompat.conformance.comparison.stated`.
    """
    return compare_with_reference(
        _stated(recordings[0], expected, transformers, unrecorded),
        recorded_quantities(recordings, expected),
        [_stated(recordings[0], neighbour, transformers, unrecorded) for neighbour in near],
        [*_sampling(recordings, expected)],
        [*_missing(recordings[0])],
    )


def exceeds_floor(
    recordings: Sequence[Recording],
    expected: ExpectedTraining,
    transformers: int,
    unrecorded: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """Whether a quantity is off by so much that :func:`compare` must know what is near."""
    listed = _stated(recordings[0], expected, transformers, unrecorded)
    return comparison.exceeds_floor(listed, recorded_quantities(recordings, expected))


def _stated(
    recording: Recording, expected: ExpectedTraining, transformers: int, unrecorded: Mapping[str, str]
) -> list[Quantity]:
    logging_steps = int(recording.arguments["logging_steps"])
    listed = [*expected_quantities(expected, logging_steps, transformers)]
    return stated(listed, {**unrecorded, **unrecorded_of(recording.steps)})


def _missing(recording: Recording) -> Iterator[Difference]:
    """What a training logs and an evaluation does not."""
    logged = {name for entry in recording.logs for name in entry} - _OF_TRAINING
    for kind, entries in (
        ("evaluation", [entry for _, entry in recording.evaluations]),
        ("evaluate()", recording.returned),
    ):
        for number, entry in enumerate(entries):
            for name in sorted(logged):
                if f"eval_{name}" not in entry:
                    yield Difference(f"{kind}[eval_{name}]", f"evaluation {number}", [name], [], math.inf, 0.0)


_OF_TRAINING = {"entropy_coef", "epoch", "grad_norm", "learning_rate", "loss", "step", "step_time", "num_tokens"}
