"""Compute with the reference what a recorded training must give, from the same prompts and completions.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.comparison import StepCountMismatch
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.grpo import tools
from pytest_trlcompat.conformance.grpo.methods import GRPO, Method
from pytest_trlcompat.conformance.grpo.records import Generated, Recording
from pytest_trlcompat.conformance.grpo.sampling import LOGGED, logged_numbers, name_of

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.reference import Rollout

__all__ = ["ExpectedTraining", "computed"]


@dataclass(frozen=True)
class ExpectedTraining:
    """
    Attributes:
        steps: of the reference.
        evaluations: of the reference, in the order of the recording.
        layouts: for each generation, see :data:`pytest_trlcompat.reference.Layout`.
        rollouts: one for each generation.
        never_sampled: token ids that no completion may have: the placeholders of images.
    """

    steps: tuple[Any, ...]
    evaluations: tuple[Any, ...]
    layouts: list[list[list[list[int]]]]
    rollouts: list[Any]
    settings: Any
    method: Method = GRPO
    never_sampled: tuple[int, ...] = ()


def settings_of(
    arguments: Mapping[str, Any], conventions: Conventions, world_size: int, method: Method = GRPO
) -> reference.SamplingSettings:
    """The reference's settings: from the arguments of a trainer and the conventions of its release.

    Args:
        conventions: of the trainer's release.
    """
    names = {field.name for field in fields(method.settings)}
    chosen = dict(conventions.absent)
    chosen |= {name: value for name, value in arguments.items() if name in names}
    if chosen.get("reward_weights") is not None:
        chosen["reward_weights"] = tuple(chosen["reward_weights"])
    # Transformers makes enumerations of these texts.
    chosen["lr_scheduler_type"] = str(getattr(chosen["lr_scheduler_type"], "value", chosen["lr_scheduler_type"]))
    chosen["optim"] = str(getattr(chosen["optim"], "value", chosen["optim"]))
    # Recorded prompts are truncated already.
    chosen.pop("max_prompt_length", None)
    # It may come from the model, see _aux_loss_coef.
    chosen.pop("router_aux_loss_coef", None)
    # Transformers writes -1 where the number of epochs says how long it trains.
    if chosen.get("max_steps", -1) < 0:
        chosen["max_steps"] = None
    if chosen.get("reward_clip_range") is not None:
        chosen["reward_clip_range"] = tuple(chosen["reward_clip_range"])
    undecided = method.undecided(**conventions.undecided)
    settings: reference.SamplingSettings = method.settings(
        **{**chosen, "world_size": world_size, "undecided": undecided}
    )
    return settings


def computed(
    recordings: Sequence[Recording],
    policy: torch.nn.Module,
    tokenizer: Any,
    rewards: Sequence[Callable[..., Any]],
    conventions: Conventions,
    ends: tuple[int, ...],
    reference_model: Any = None,
    padded: bool = False,
    method: Method = GRPO,
    inputs: Mapping[tuple[int, ...], Mapping[str, torch.Tensor]] | None = None,
    never_sampled: tuple[int, ...] = (),
) -> ExpectedTraining:
    """
    Args:
        recordings: of all ranks.
        policy: as it was before training, in evaluation mode.
        rewards: functions of :func:`~pytest_trlcompat.conformance.grpo.objects.rewards_of_reference`.
        ends: token ids that end a completion.
        reference_model: the policy by default.
        padded: whether models see rows with padding in front, as in a batch of a trainer.
        inputs: further inputs of models, its images, by the token ids of a prompt.
        never_sampled: token ids of the placeholders of images.

    Raises:
        StepCountMismatch: the micro-batches of a generation are not the rows that were sampled, or a group has several
            prompts.
    """
    settings = settings_of(recordings[0].arguments, conventions, len(recordings), method)
    settings = dataclasses.replace(settings, eos_token_id=ends, pad_token_id=0)
    settings = dataclasses.replace(settings, router_aux_loss_coef=_aux_loss_coef(recordings[0].arguments, policy))
    calls = [[call for call in recording.generated if not call.evaluation] for recording in recordings]
    # Later code takes the n-th call of each rank as one generation.
    if len({len(rank_calls) for rank_calls in calls}) != 1:
        raise StepCountMismatch(f"ranks sampled {[len(rank_calls) for rank_calls in calls]} times")
    rollouts, layouts = [], []
    longest = settings.max_completion_length
    for index, together in enumerate(zip(*calls, strict=True)):
        rollout = _rollout(together, tokenizer, rewards, targets_of(recordings[0], "training"), longest, inputs)
        try:
            rollout.check_groups(settings.num_generations)
        except ValueError as error:
            raise StepCountMismatch(f"generation {index}: {error}") from error
        rollouts.append(rollout)
        batches = [_of_generation(recording, index) for recording in recordings]
        layouts.append(_layout(rollout, batches, settings.micro_batches_per_generation, settings.num_iterations, index))
    steps = method.train(policy, rollouts, settings, layouts=layouts, reference_model=reference_model, padded=padded)
    if any(name_of(function) == "reward_logging" for function in rewards):
        steps = _with_logged(steps)
    evaluations = tuple(
        _evaluation(
            method, recordings, number, policy, steps, tokenizer, rewards, settings, reference_model, padded, inputs
        )
        for number in range(len(recordings[0].evaluations))
    )
    return ExpectedTraining(steps, evaluations, layouts, rollouts, settings, method, never_sampled)


def _aux_loss_coef(arguments: Mapping[str, Any], policy: torch.nn.Module) -> float:
    """The weight of the auxiliary loss: the argument's, else the one of a model whose config asks for the loss."""
    config: Any = policy.config
    if not hasattr(config, "output_router_logits"):
        return 0.0
    coefficient = arguments.get("router_aux_loss_coef")
    return float(
        coefficient if coefficient is not None else config.router_aux_loss_coef if config.output_router_logits else 0.0
    )


def _with_logged(steps: Sequence[Any]) -> tuple[Any, ...]:
    """The steps with the mean of what :func:`~pytest_trlcompat.conformance.grpo.sampling.reward_logging` logs."""
    with_logs, last = [], None
    for step in steps:
        if step.generations[-1] is not last:
            last = step.generations[-1]
            numbers = logged_numbers(last.advantages.rewards[:, 0].tolist())
            if numbers:
                step = dataclasses.replace(step, logs={**step.logs, LOGGED: sum(numbers) / len(numbers)})
        with_logs.append(step)
    return tuple(with_logs)


def targets_of(recording: Recording, part: str) -> dict[tuple[int, ...], int]:
    """The number in the column ``target`` by the token ids of a prompt, truncated as ``max_prompt_length`` says."""
    limit = recording.arguments.get("max_prompt_length")
    return {ids if limit is None else ids[-limit:]: target for ids, target in recording.asked[part]}


def _of_generation(recording: Recording, index: int) -> list[Any]:
    """The micro-batches on which a rank trained between the generation ``index`` of training and the next one."""
    places = [place for place, call in enumerate(recording.generated) if not call.evaluation]
    start = places[index]
    end = places[index + 1] if index + 1 < len(places) else len(recording.generated)
    return [
        micro_batch
        for micro_batch in recording.micro_batches
        if not micro_batch.evaluation and start <= micro_batch.generation < end
    ]


def _rollout(
    together: Sequence[Generated],
    tokenizer: Any,
    rewards: Sequence[Callable[..., Any]],
    known: Mapping[Any, int],
    longest: int,
    inputs: Mapping[tuple[int, ...], Mapping[str, torch.Tensor]] | None,
) -> Rollout:
    """The rows of all ranks, with the rewards that the functions give them.

    Args:
        known: the number in the column ``target`` of each prompt.
        longest: length of a completion, results of tools included.
    """
    from pytest_trlcompat import reference

    prompts = [prompt for call in together for prompt in call.prompts]
    completions = [completion[:longest] for call in together for completion in call.completions]
    sampled = None
    spoken = completions
    called: list[Any] = [[] for _ in completions]
    if any(call.sampled is not None for call in together):
        sampled = [row[:longest] for call in together for row in call.sampled or []]
        spoken = [tools.words_of(*row) for row in zip(completions, sampled, strict=True)]
        called = [tools.called(*row) for row in zip(completions, sampled, strict=True)]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in spoken]
    # A prompt that is in no dataset is reported where prompts are compared.
    targets = [known.get(tuple(prompt), 0) for prompt in prompts]
    prompt_texts = [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
    scores = [function(completions=texts, prompts=prompt_texts, target=targets, called=called) for function in rewards]
    names = [name_of(function) for function in rewards]
    prompt_inputs = [(inputs or {}).get(tuple(prompt), {}) for prompt in prompts]
    return reference.Rollout(prompts, completions, list(zip(*scores, strict=True)), names, sampled, prompt_inputs)


def _layout(
    rollout: Rollout, batches: Sequence[Sequence[Any]], micro_batches: int, iterations: int, index: int
) -> list[list[list[int]]]:
    """The rows of each rank in each micro-batch.

    Raises:
        StepCountMismatch: they are not every row exactly once, or iterations differ.
    """
    counts = {len(rank_batches) for rank_batches in batches}
    if counts != {micro_batches * iterations}:
        raise StepCountMismatch(
            f"generation {index} was trained on in {sorted(counts)} micro-batches, "
            f"and steps_per_generation x num_iterations = {micro_batches * iterations}"
        )
    if any(not batch.rows for rank in batches for batch in rank):  # 0.14 shows no tokens
        from pytest_trlcompat import reference

        return reference.contiguous_layout(len(rollout.prompts), world_size=len(batches), micro_batches=micro_batches)
    layouts = []
    for iteration in range(iterations):
        unused = [(tuple(p), tuple(c)) for p, c in zip(rollout.prompts, rollout.completions, strict=True)]
        layout = []
        for micro_batch in range(micro_batches):
            ranks = []
            for rank in batches:
                rows = []
                for prompt, completion in rank[iteration * micro_batches + micro_batch].rows:
                    place = next((number for number, row in enumerate(unused) if _is(row, prompt, completion)), None)
                    if place is None:
                        raise StepCountMismatch(
                            f"micro-batch {micro_batch} of iteration {iteration} of generation {index} has a row "
                            f"that was not sampled, or was trained on already: prompt {prompt}, completion {completion}"
                        )
                    # Completions may be equal: each sampled row is found once.
                    unused[place] = ((), ())
                    rows.append(place)
                ranks.append(rows)
            layout.append(ranks)
        layouts.append(layout)
    if any(layout != layouts[0] for layout in layouts):
        raise StepCountMismatch(f"iterations over generation {index} have rows in other micro-batches: {layouts}")
    return layouts[0]


def _is(row: tuple[tuple[int, ...], tuple[int, ...]], prompt: tuple[int, ...], completion: tuple[int, ...]) -> bool:
    """Whether a row has this prompt and this completion, which may have padding, a single token, at its end."""
    padding = completion[len(row[1]) :]
    return bool(row[0]) and row[0] == prompt and row[1] == completion[: len(row[1])] and len(set(padding)) <= 1


def _evaluation(
    method: Method,
    recordings: Sequence[Recording],
    number: int,
    policy: torch.nn.Module,
    steps: Sequence[Any],
    tokenizer: Any,
    rewards: Sequence[Callable[..., Any]],
    settings: Any,
    reference_model: Any,
    padded: bool,
    inputs: Mapping[tuple[int, ...], Mapping[str, torch.Tensor]] | None,
) -> Any:
    """What an evaluation must give, with the weights of the reference at that step."""
    import torch

    after = recordings[0].evaluations[number][0]
    then = copy.deepcopy(policy)
    if after:
        parameters = dict(then.named_parameters())
        with torch.no_grad():
            for name, weight in steps[after - 1].weights.items():
                parameters[name].copy_(weight)
    calls = [list(_evaluation_calls(recording, number)) for recording in recordings]
    known = targets_of(recordings[0], "evaluation")
    rollouts = [
        _rollout(together, tokenizer, rewards, known, settings.max_completion_length, inputs)
        for together in zip(*calls, strict=True)
    ]
    # A copy, which is mixed with the policy below.
    compared = copy.deepcopy(policy if reference_model is None else reference_model)
    if settings.sync_ref_model:
        _synchronise(compared, steps[:after], settings)
    return method.evaluate(then, rollouts, settings, reference_model=compared, padded=padded)


def _synchronise(model: torch.nn.Module, steps: Sequence[Any], settings: Any) -> None:
    """Mix the policy into the reference model wherever these steps do."""
    import torch

    from pytest_trlcompat import reference

    parameters = dict(model.named_parameters())
    for number, step in enumerate(steps, 1):
        if number % settings.ref_model_sync_steps == 0:
            mixed = reference.mix_weights(step.weights, dict(parameters), settings.ref_model_mixup_alpha)
            with torch.no_grad():
                for name, value in mixed.items():
                    parameters[name].copy_(value)


def _evaluation_calls(recording: Recording, number: int) -> Iterator[Generated]:
    """The calls of one evaluation; all evaluations have equally many, one after the other."""
    calls = [call for call in recording.generated if call.evaluation]
    per_evaluation = len(calls) // len(recording.evaluations)
    yield from calls[number * per_evaluation : (number + 1) * per_evaluation]
