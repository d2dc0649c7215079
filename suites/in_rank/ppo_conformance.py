"""PPO trainings with settings, each held against the reference. Runs inside the ranks.

Imports the stack only inside functions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from . import ppo_recording
from .sharding import failure

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

    from .ppo import Models
    from .ppo_recording import Recording

__all__ = ["CONVENTIONS", "hold"]

CONVENTIONS: Mapping[str, Any] = {
    "score_at": "after_last_token",
    "whiten_over": "rank",
    "whiten_correction": 1,
    "loss_mean": "micro_batches",
    "eos_counted_in": "sampled",
    "metrics_mean": "micro_batches",
    "ratio_var_over": "micro_batches",
    "schedule_steps": "batches",
}
"""What TRL has chosen where documentation leaves it open, in every release with PPO."""
_SHOWN = 40
_ULP = 2.0**-23
_FACTOR, _FLOOR, _SMALLEST = 30.0, 2e-5, 0.05


@dataclass(frozen=True)
class Quantity:
    """One quantity of a training: stage of the step, where, its numbers, and which of them count."""

    stage: str
    where: str
    values: torch.Tensor
    mask: torch.Tensor | None = None


class OutOfStep(Exception):
    """The trainer did not train on what it sampled as its arguments say; says what it did."""


def hold(
    subject: str, model: TinyModel, settings: Mapping[str, Mapping[str, Any]], seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Train with each setting, and compare.

    Returns:
        By setting: ``failure``, what the training ended in; ``differences``, each with ``stage``, ``where``,
        ``expected``, ``found``, ``off`` and ``allowed``, the first one first; ``compared``, how many quantities; and
        ``unknown``, what of the setting this release does not know. The first rank alone compares, for all ranks.
    """
    return {name: _held(subject, model, setting, seed) for name, setting in settings.items()}


def _held(subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int) -> dict[str, Any]:
    import dataclasses

    from pytest_trlcompat.trainers import PPOConfig

    unknown = sorted(set(setting) - {each.name for each in dataclasses.fields(PPOConfig)})
    found: dict[str, Any] = {"failure": None, "differences": [], "compared": 0, "unknown": unknown}
    with failure() as training:
        recorded, before = ppo_recording.record(subject, model, setting, seed)
    if training:
        return {**found, "failure": training["text"]}
    every = _of_all_ranks(recorded)
    return {**found, **_compared(every, before)} if recorded.rank == 0 else found


def _of_all_ranks(recorded: Recording) -> list[Recording]:
    import torch

    if not torch.distributed.is_initialized():
        return [recorded]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, recorded)
    return every


def _compared(recordings: list[Recording], before: Models) -> dict[str, Any]:
    def computed(perturbed: bool) -> tuple[reference.PPOStep, ...]:
        models = _neighbour(before) if perturbed else before
        return _truth(recordings, models)

    try:
        truth = computed(False)
    except OutOfStep as error:
        return {"differences": [{"stage": "updates", "where": "", "said": str(error)}]}
    found = _recorded(recordings)
    expected = list(_expected(truth))
    differences = differing(expected, found, lambda: list(_expected(computed(True))))
    return {"differences": differences[:_SHOWN], "compared": sum((one.stage, one.where) in found for one in expected)}


def _truth(recordings: Sequence[Recording], models: Models) -> tuple[reference.PPOStep, ...]:
    """What the reference gives for the queries and responses of a recording.

    Raises:
        OutOfStep: the micro-batches of a batch are not its rows.
    """
    from pytest_trlcompat import reference

    arguments = recordings[0].arguments
    size = int(arguments["local_batch_size"])
    settings = _settings(arguments, len(recordings))
    batches, layouts = [], []
    for batch in range(len(recordings[0].rows) // size):
        rows = [row for one in recordings for row in one.rows[batch * size : (batch + 1) * size]]
        batches.append(reference.Episodes([query for query, _ in rows], [response for _, response in rows]))
        layouts.append(_layout(recordings, batch, size, settings))
    return reference.ppo_train(
        models.model.eval(),
        _numbers(models.value_model),
        batches,
        settings,
        reward_model=_numbers(models.reward_model),
        reference_model=models.ref_model.eval(),
        layouts=layouts,
    )


def _settings(arguments: Mapping[str, Any], world_size: int) -> reference.PPOSettings:
    from pytest_trlcompat import reference

    names = {each.name for each in fields(reference.PPOSettings)}
    chosen = {name: value for name, value in arguments.items() if name in names}
    for name in ("lr_scheduler_type", "optim"):
        chosen[name] = str(getattr(arguments[name], "value", arguments[name]))
    if chosen.get("warmup_steps") == 0:
        chosen["warmup_steps"] = arguments.get("warmup_ratio") or 0
    micro_batch = int(arguments["per_device_train_batch_size"])
    mini_batch = int(arguments["local_batch_size"]) // int(arguments["num_mini_batches"])
    chosen["gradient_accumulation_steps"] = max(1, mini_batch // micro_batch)
    undecided = reference.PPOUndecided(**CONVENTIONS)
    return reference.PPOSettings(
        **{**chosen, "world_size": world_size, "pad_token_id": 0, "eos_token_id": 1, "undecided": undecided}
    )


def _layout(
    recordings: Sequence[Recording], batch: int, size: int, settings: reference.PPOSettings
) -> list[list[list[list[list[int]]]]]:
    epochs, minis, micros = settings.num_ppo_epochs, settings.num_mini_batches, settings.gradient_accumulation_steps
    ranks = []
    for rank, one in enumerate(recordings):
        own = [rows for number, rows in one.micro_batches if number == batch]
        if len(own) != epochs * minis * micros:
            raise OutOfStep(
                f"batch {batch} was trained on in {len(own)} micro-batches, not {epochs} x {minis} x {micros}"
            )
        sampled = [query + response for query, response in one.rows[batch * size : (batch + 1) * size]]
        placed = []
        for start in range(0, len(own), minis * micros):
            unused: list[Any] = [*sampled]
            for rows in own[start : start + minis * micros]:
                places = []
                for row in rows:
                    if row not in unused:
                        raise OutOfStep(f"batch {batch}: a micro-batch has a row that was not sampled or used: {row}")
                    places.append(unused.index(row))
                    unused[places[-1]] = None
                placed.append([rank * size + place for place in places])
        ranks.append(placed)
    numbers = iter(range(epochs * minis * micros))
    flat = [[rank[number] for rank in ranks] for number in numbers]
    each = [flat[start : start + micros] for start in range(0, len(flat), micros)]
    return [each[start : start + minis] for start in range(0, len(each), minis)]


def _numbers(model: Any) -> torch.nn.Module:
    """A model with one label as one that gives a number for each token."""
    import torch

    class Numbers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(model).eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            backbone = getattr(self.inner, self.inner.base_model_prefix)
            output = backbone(input_ids=input_ids, attention_mask=attention_mask)
            numbers: torch.Tensor = self.inner.score(output.last_hidden_state)
            return numbers

    return Numbers()


def _neighbour(models: Models) -> Models:
    """The models with each trained weight changed by -1, 0 or 1 unit in the last place of float32."""
    import torch

    changed = copy.deepcopy(models)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model in (changed.model, changed.value_model):
            for parameter in model.parameters():
                units = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_((1 + units * _ULP).to(parameter))
    return changed


def _expected(steps: Sequence[reference.PPOStep]) -> Iterator[Quantity]:
    """Everything that a recording can show, in the order in which steps make it."""
    import torch

    for batch, step in enumerate(steps):
        made, place = step.experience, f"batch {batch}"
        mask, states = made.tokens.completion_mask, made.step_mask
        yield Quantity("mask", place, mask.double(), torch.ones_like(mask))
        yield Quantity("logprobs", place, made.logprobs, mask)
        yield Quantity("reference_logprobs", place, made.reference_logprobs, mask)
        yield Quantity("values", place, made.values, states)
        yield Quantity("scores", place, made.scores)
        yield Quantity("rewards", place, made.rewards, states)
        yield Quantity("whitened_rewards", place, made.whitened_rewards, states)
        yield Quantity("estimates", place, made.returns - made.values, mask)
        yield Quantity("advantages", place, made.advantages, mask)
        counts: dict[int, int] = {}
        yield Quantity("steps", place, torch.tensor([float(len(step.optimizer_steps))]))
        for number, update in enumerate(step.optimizer_steps):
            for one in update.micro_batches:
                count = counts[one.rank] = counts.get(one.rank, -1) + 1
                yield Quantity("new_logprobs", f"{place}, rank {one.rank}, micro-batch {count}", one.logprobs, one.mask)
            where = f"{place}, step {number}"
            yield Quantity("learning_rate", where, torch.tensor([update.learning_rate], dtype=torch.float64))
            for name, tensors in (("gradients", update.clipped_gradients), ("weights", update.weights)):
                for key, values in tensors.items():
                    yield Quantity(f"{name}[{key.replace('.inner.', '.')}]", where, values)
        for name, value in step.logs.items():
            yield Quantity(f"logs[{name}]", place, torch.tensor([value], dtype=torch.float64))


def _recorded(recordings: Sequence[Recording]) -> dict[tuple[str, str], torch.Tensor]:
    """The same of a recording, as far as this release shows it, by stage and place."""
    import torch

    found: dict[tuple[str, str], torch.Tensor] = {}
    main = recordings[0]
    batches = len(main.logs)
    ends = [sum(number <= batch for number, _ in main.micro_batches) for batch in range(batches)]
    for batch in range(batches):
        place = f"batch {batch}"
        for name in ("mask", "logprobs", "reference_logprobs", "values", "scores", "rewards", "whitened_rewards"):
            _gather(found, name, place, [one.of_batch(name, batch) for one in recordings])
        for name in ("estimates", "advantages"):
            _gather(found, name, place, [one.of_batch(name, batch) for one in recordings])
        for rank, one in enumerate(recordings):
            own = [each for number, each in one.seen.get("new_logprobs", []) if number == batch]
            for count, values in enumerate(own):
                found["new_logprobs", f"{place}, rank {rank}, micro-batch {count}"] = values
        start = ends[batch - 1] if batch else 0
        steps = [each for each in main.steps if start < each.micro_batches <= ends[batch]]
        found["steps", place] = torch.tensor([float(len(steps))])
        for number, step in enumerate(steps):
            where = f"{place}, step {number}"
            found["learning_rate", where] = torch.tensor([step.learning_rate], dtype=torch.float64)
            for name, tensors in (("gradients", step.gradients), ("weights", step.weights)):
                for key, values in tensors.items():
                    found[f"{name}[{key}]", where] = values
        for name, value in main.logs[batch].items():
            found[f"logs[{name}]", place] = torch.tensor([value], dtype=torch.float64)
    return found


def _gather(
    found: dict[tuple[str, str], torch.Tensor], name: str, place: str, parts: Sequence[torch.Tensor | None]
) -> None:
    """The rows of all ranks, as wide as the widest."""
    import torch

    present = [each for each in parts if each is not None]
    if len(present) == len(parts):
        width = max(each.shape[-1] for each in present)
        if present[0].dim() > 1:
            present = [torch.nn.functional.pad(each.float(), (0, width - each.shape[-1])) for each in present]
        found[name, place] = torch.cat(present)


def differing(
    expected: Sequence[Quantity],
    found: Mapping[tuple[str, str], torch.Tensor],
    neighbour: Callable[[], Sequence[Quantity]],
) -> list[dict[str, Any]]:
    """Every quantity that differs by more than rounding leaves, the first one first.

    Args:
        neighbour: what is expected with weights changed by one unit in the last place: a quantity may differ 30 times
            as far as that changes it.
    """
    near: Sequence[Quantity] = []
    differences = []
    for number, quantity in enumerate(expected):
        seen = found.get((quantity.stage, quantity.where))
        if seen is None:
            continue
        wanted, values = _aligned(quantity, seen)
        if wanted.shape != values.shape:
            shapes = [[*map(float, each.shape)] for each in (wanted, values)]
            differences.append(_difference(quantity, shapes[0], shapes[1], math.inf, 0.0))
            continue
        off = _apart(wanted, values)
        largest = float(wanted.abs().nan_to_num(nan=0.0).max()) if wanted.numel() else 0.0
        allowed = _FLOOR * max(largest, _SMALLEST)
        if off > allowed:
            near = near or neighbour()
            allowed += _FACTOR * _apart(wanted, _aligned(near[number], seen)[0])
        if not off <= allowed:
            places = (wanted - values).abs().nan_to_num(nan=math.inf).flatten().topk(min(4, wanted.numel())).indices
            shown = wanted.flatten()[places].tolist(), values.flatten()[places].tolist()
            differences.append(_difference(quantity, *shown, off, allowed))
    return differences


def _difference(
    quantity: Quantity, expected: list[float], found: list[float], off: float, allowed: float
) -> dict[str, Any]:
    return {
        "stage": quantity.stage,
        "where": quantity.where,
        "expected": expected,
        "found": found,
        "off": off,
        "allowed": allowed,
    }


def _aligned(quantity: Quantity, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides in double precision; of tokens those that count, as wide as the wider one."""
    import torch

    wanted, values = quantity.values.double(), seen.double()
    if quantity.mask is None:
        return wanted, values
    mask = quantity.mask
    width = max(wanted.shape[1], values.shape[1])
    mask, wanted, values = (
        torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in (mask, wanted, values)
    )
    if values.shape != wanted.shape:
        return wanted, values
    return wanted.where(mask, 0.0), values.where(mask, 0.0)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    both = one.isnan() & other.isnan()
    return float((one - other).where(~both, 0.0).abs().nan_to_num(nan=math.inf).max()) if one.numel() else 0.0
