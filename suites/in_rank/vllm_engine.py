"""The engine of a GRPO training with vLLM, inside a rank: its tensors, and what they must be for a policy.

What they must be is computed from the policy's parameters alone, by vLLM's documented layout and PEFT's formula for
LoRA; neither library's code takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "Comparison",
    "Expected",
    "as_published",
    "compare",
    "engine_model",
    "merged",
    "packed",
    "published",
    "unpacked",
]

_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that vLLM has as one, with their parts in order, stacked by rows."""
_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""The same of a mixture's experts, one behind the other along a first axis."""
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""What tensor parallelism cuts along its inputs."""
_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
_ADAPTER = "default"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Expected:
    """What a tensor of the engine must be.

    Attributes:
        value: in float64.
        error: the most that its computation may be off, elementwise, beside the engine's rounding; ``None``: nothing.
        change: how much the adapter contributes, elementwise; ``None`` without one.
    """

    value: torch.Tensor
    error: torch.Tensor | None = None
    change: torch.Tensor | None = None


@dataclass(frozen=True)
class Comparison:
    """The engine's tensors against what they must be.

    Attributes:
        tensors: how many were compared.
        wrong: names of those that differ, and by how much at most.
        margin: by how many times its tolerance the adapter's contribution stands out, in the tensor where it does so
            most: merging it not at all or twice is seen if this is above one. ``None`` without an adapter.
    """

    tensors: int
    wrong: Mapping[str, float]
    margin: float | None


def engine_model(trainer: Any) -> Any:
    """The engine's own module in this process."""
    llm = getattr(getattr(trainer, "vllm_generation", None), "llm", None) or trainer.llm
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def merged(
    parameters: Mapping[str, torch.Tensor], scaling: float, dtype: torch.dtype, tokens: Sequence[int] = ()
) -> dict[str, Expected]:
    """The policy without its adapter's modules, under the names that it has without them.

    What an adapter makes of a weight: LoRA ``W + scaling * B A``, of embeddings its transpose; DoRA that, with each row
    at the length that it has learned; trained tokens, rows of their own.

    Args:
        parameters: of the policy, whole, in float32, by name.
        dtype: in which PEFT merges, that of the parameters.
        tokens: whose rows of the embeddings are trained by themselves, where any are.
    """
    import torch

    unit = torch.finfo(dtype).eps
    expected: dict[str, Expected] = {}
    for full_name, parameter in parameters.items():
        name = full_name.removeprefix(_PREFIX).replace(".token_adapter.", ".")
        if any(part in name for part in (".lora_", ".original_module.", ".trainable_tokens_")):
            continue
        value = parameter.double()
        place, layer, rest = name.partition(".base_layer.")
        if not layer:
            expected[name.replace(f".modules_to_save.{_ADAPTER}.", ".")] = Expected(value)
            continue
        rows = parameters.get(f"{_PREFIX}{place}.token_adapter.trainable_tokens_delta.{_ADAPTER}")
        if rows is not None:
            trained = value.clone()
            trained[list(tokens)] = rows.double()
            expected[f"{place}.{rest}"] = Expected(trained, torch.zeros_like(value), trained - value)
            continue
        factors = _factors(parameters, place) if rest == "weight" else None
        if factors is None:
            expected[f"{place}.{rest}"] = Expected(value)
            continue
        product, terms = factors
        sum_ = value + scaling * product
        # The product, its scaling and the sum are rounded once each; the product's terms by the rank's sum.
        error = 4 * unit * (value.abs() + scaling * terms)
        length = parameters.get(f"{_PREFIX}{place}.lora_magnitude_vector.{_ADAPTER}.weight")
        if length is not None:
            factor = (length.double() / sum_.norm(dim=1))[:, None]
            sum_, error = factor * sum_, 4 * factor.abs() * error  # its norm and quotient are rounded as well
        expected[f"{place}.{rest}"] = Expected(sum_, error, sum_ - value)
    return expected


def _factors(parameters: Mapping[str, torch.Tensor], place: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``B A`` of a layer, in its weight's shape, and the same of absolute values; ``None`` without an adapter."""
    a, b = (parameters.get(f"{_PREFIX}{place}.lora_{letter}.{_ADAPTER}.weight") for letter in "AB")
    if a is not None and b is not None:
        return b.double() @ a.double(), b.double().abs() @ a.double().abs()
    a, b = (parameters.get(f"{_PREFIX}{place}.lora_embedding_{letter}.{_ADAPTER}") for letter in "AB")
    if a is not None and b is not None:
        return (b.double() @ a.double()).T, (b.double().abs() @ a.double().abs()).T
    return None


def published(name: str, shape: Sequence[int]) -> list[str]:
    """Under which names a published checkpoint has a parameter of the policy.

    Transformers 5 keeps all experts of a layer in one parameter, ``(E, 2 I, H)`` or ``(E, H, I)``; a vision model's
    parts have moved, and a CLIP's are no longer in a module of their own.
    """
    name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    name = name.replace("model.vision_tower.", "vision_tower.").replace("model.multi_modal_", "multi_modal_")
    name = name.replace("vision_tower.vision_model.", "vision_tower.")
    layer, experts, matrix = name.partition(".mlp.experts.")
    if not experts or len(shape) != 3:
        return [name]
    parts = matrix.removesuffix("_proj").split("_")
    return [f"{layer}.mlp.experts.{expert}.{part}_proj.weight" for expert in range(shape[0]) for part in parts]


def as_published(expected: Mapping[str, Expected]) -> dict[str, Expected]:
    """The same under the names of a published checkpoint, see :func:`published`."""
    by_name: dict[str, Expected] = {}
    for name, expected_tensor in expected.items():
        names = published(name, expected_tensor.value.shape)
        if len(names) == 1:
            by_name[names[0]] = expected_tensor
            continue
        parts = len(names) // expected_tensor.value.shape[0]
        by_name.update(
            zip(
                names, (Expected(part) for expert in expected_tensor.value for part in expert.chunk(parts)), strict=True
            )
        )
    return by_name


def packed(
    expected: Mapping[str, Expected], engine: Any, shard: tuple[int, int] = (0, 1)
) -> Iterator[tuple[str, torch.Tensor, Expected]]:
    """Each of the engine's parameters with what it must be; its output head too where that is its embeddings.

    Args:
        shard: the place of the engine's part among those of tensor parallelism, and how many there are.

    Raises:
        KeyError: the policy has no such parameter.
    """
    held = dict(engine.named_parameters())
    for name, parameter in held.items():
        yield name, parameter, _of_parts(expected, _parts_of(name, parameter), shard)
    head, embeddings = _HEAD, _EMBEDDINGS
    tied = [name for name in held if name.endswith(embeddings)]
    if head in expected and not any(name.endswith(head) for name in held):
        yield head, held[tied[0]], _of_parts(expected, [[head]], shard)


def _parts_of(name: str, parameter: torch.Tensor) -> list[list[str]]:
    """Which of a checkpoint's tensors are in one of the engine's, stacked by rows; for each expert its own."""
    name = _of_checkpoint(name)
    place, experts, matrix = name.partition(".mlp.experts.")
    if experts:
        projections = _EXPERTS[matrix.rpartition(".")[2]]
        return [
            [f"{place}.mlp.experts.{expert}.{projection}.weight" for projection in projections]
            for expert in range(parameter.shape[0])
        ]
    layer = next((layer for layer in _PACKED if f".{layer}." in name), None)
    return [[name] if layer is None else [name.replace(f".{layer}.", f".{part}.") for part in _PACKED[layer]]]


def _of_checkpoint(name: str) -> str:
    """A name of the engine's as a checkpoint has it: vLLM keeps a vision model's language model apart."""
    name = name.replace("language_model.model.", "model.").replace("language_model.lm_head.", "lm_head.")
    return name.replace("vision_tower.vision_model.", "vision_tower.")


def _of_parts(expected: Mapping[str, Expected], experts: Sequence[Sequence[str]], shard: tuple[int, int]) -> Expected:
    import torch

    rows = [[_shard(part, expected[part], shard) for part in parts] for parts in experts]
    adapted = any(part.change is not None for parts in rows for part in parts)

    def joined(read: Callable[[Expected], torch.Tensor | None]) -> torch.Tensor:
        stacked = []
        for parts in rows:
            values = [read(part) for part in parts]
            stacked.append(
                torch.cat([torch.zeros_like(p.value) if v is None else v for p, v in zip(parts, values, strict=True)])
            )
        return stacked[0] if len(stacked) == 1 else torch.stack(stacked)

    if not adapted:
        return Expected(joined(lambda part: part.value))
    return Expected(joined(lambda p: p.value), joined(lambda p: p.error), joined(lambda p: p.change))


def _shard(name: str, expected_tensor: Expected, shard: tuple[int, int]) -> Expected:
    """The part of one rank of tensor parallelism: rows, of what follows them columns; norms are whole."""
    place, count = shard
    if count == 1 or "norm" in name:
        return expected_tensor
    axis = 1 if name.endswith(_BY_COLUMNS) else 0
    cut = [
        None if tensor is None else tensor.chunk(count, axis)[place]
        for tensor in (expected_tensor.value, expected_tensor.error, expected_tensor.change)
    ]
    return Expected(*cut)


def unpacked(expected: Mapping[str, Expected], engine: Any) -> dict[str, torch.Tensor]:
    """What the engine holds, in float32, under the names of a checkpoint.

    Args:
        expected: of the policy, which says how many rows each part of a layer has.
    """
    tensors: dict[str, torch.Tensor] = {}
    for full_name, parameter in engine.named_parameters():
        name, held = _of_checkpoint(full_name), parameter.detach().float().cpu()
        layer = next((layer for layer in _PACKED if f".{layer}." in name), None)
        if layer is None:
            tensors[name] = held[: expected[name].value.shape[0]].clone()
            continue
        parts = [name.replace(f".{layer}.", f".{part}.") for part in _PACKED[layer]]
        rows = [expected[part].value.shape[0] for part in parts]
        tensors.update(zip(parts, (piece.clone() for piece in held.split(rows)), strict=True))
    return tensors


def compare(expected: Mapping[str, Expected], engine: Any, shard: tuple[int, int] = (0, 1)) -> Comparison:
    """Tensor by tensor: bitwise in the engine's dtype, and within rounding where an adapter was merged."""
    import torch

    wrong: dict[str, float] = {}
    margins: list[float] = []
    count = 0
    for name, parameter, expected_tensor in packed(expected, engine, shard):
        count += 1
        tensor = parameter.detach().cpu()[: expected_tensor.value.shape[0]]  # the vocabulary is padded
        off = (tensor.double() - expected_tensor.value).abs()
        if expected_tensor.error is None or expected_tensor.change is None:
            if not torch.equal(tensor, expected_tensor.value.float().to(tensor.dtype)):
                wrong[name] = float(off.max())
            continue
        tolerance = expected_tensor.error + torch.finfo(tensor.dtype).eps * expected_tensor.value.abs()
        if not bool((off <= tolerance).all()):
            wrong[name] = float(off.max())
        margins.append(float((expected_tensor.change.abs() / tolerance.clamp_min(1e-30)).max()))
    return Comparison(count, wrong, max(margins, default=None))
