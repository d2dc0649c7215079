"""One short GRPO training with a setting: a precision, a model, an adapter, checkpointing, compilation.

Runs inside the ranks. A training returns its losses, its logs and its weights
before and after, as plain numbers and bytes; a failure is returned, not raised, with all that was known before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.weights import bare_name, whole
from pytest_trlcompat.training.aliases import name_in

from . import grpo, models
from .adapters import fill_adapter
from .sharding import failure, to_bytes

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "BF16_ULP",
    "LEARNING_RATE",
    "LEARNING_RATE_OF_BF16",
    "LOGGED",
    "STEPS",
    "outputs_of_plain_training",
    "train",
    "trainings_of_neighbours",
]

STEPS = 2
LEARNING_RATE, LEARNING_RATE_OF_BF16 = 0.5, 2.0
"""The latter where weights are bfloat16: a smaller step is less than their distance to the next number."""
LOGGED = ("loss", "grad_norm", "kl", "reward", "learning_rate")
BF16_ULP = 2.0**-8
"""The distance of neighbouring bfloat16 numbers, relative to them: at most this, at least half."""


def train(
    subject: str, model: TinyModel, setting: Mapping[str, str], learning_rate: float, perturbed: int = 0
) -> dict[str, Any]:
    """Train two steps of SGD, with gradients that are clipped, on completions that depend on the row alone.

    Args:
        setting: the chosen value by axis, of those that are chosen in Python: ``precision`` ``bf16`` or
            ``bf16_weights``, ``adapter`` ``peft_config``, ``peft_model``, ``qlora`` (on a base in nf4) or
            ``dequantised`` (on that base, dequantised), ``checkpointing`` ``model``, ``compile`` ``compiled``.
        learning_rate: of SGD.
        perturbed: how the weights are changed before: each by -1, 0 or 1 unit in the last place of bfloat16, by a dice
            with this seed; 0: not at all.

    Returns:
        ``losses`` of this rank; ``logs``, by key a list of one number per step; ``initial`` and ``trained``, by name
        the bytes of whole float32 tensors, on rank 0 alone, and of a quantised base none;
        ``dtypes`` of the parameters; those of the trained model's outputs, by name, as it ``computed`` them and as it
        ``returned`` them when it was wrapped; ``rounded``, the share of its log-probabilities that bfloat16 can hold,
        ``None`` where this release has no method that computes them;
        who recomputes activations (``checkpointing``); whether it is ``compiled``, and has a ``quantised`` base;
        ``failure`` and ``gathering``, what training and the gathering of weights ended in.
    """
    grpo.fix_completions(len(_SPECIAL) + model.words)
    losses: list[float] = []
    seen: dict[str, Any] = {"computed": {}, "returned": {}, "rounded": None}
    with failure() as building:
        trainer = _build(subject, model, setting, learning_rate, perturbed, losses, seen)
    if building:
        return {"failure": building["text"], "gathering": None, "losses": [], "logs": {}}
    main = trainer.is_world_process_zero()
    compared = _compared(trainer.model, setting)
    initial, trained = compared(whole(trainer.model)), {}
    with failure() as training:
        trainer.train()
    with failure() as gathering:
        trained = compared(whole(trainer.model_wrapped))
        _round(initial, trainer.model_wrapped)
    return {
        "failure": training.get("text"),
        "gathering": gathering.get("text"),
        "losses": losses,
        "logs": {key: models.logged(trainer, key) for key in LOGGED},
        "dtypes": sorted({str(parameter.dtype) for parameter in trainer.model.parameters()}),
        **seen,
        "checkpointing": _checkpointing(trainer.model_wrapped),
        "compiled": _is_compiled(trainer.model_wrapped),
        "quantised": any(type(module).__name__ == "Linear4bit" for module in trainer.model.modules()),
        "initial": to_bytes(initial) if main else None,
        "trained": to_bytes(trained) if main and not gathering else None,
    }


_QUANTISED = ("qlora", "dequantised")


def _compared(model: Any, setting: Mapping[str, str]) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Which weights are: all, or of a quantised base those of the adapter, since it has others than its dequantised."""
    if setting.get("adapter") not in _QUANTISED:
        return lambda weights: weights
    adapter = {bare_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    return lambda weights: {name: weight for name, weight in weights.items() if name in adapter}


_SPECIAL = ("<pad>", "<eos>", "<unk>")


def _round(weights: dict[str, torch.Tensor], model: Any) -> None:
    """Round those that the model has in bfloat16 now: DeepSpeed casts the model, and trains from there."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.bfloat16:
            weights[bare_name(name)] = weights[bare_name(name)].bfloat16().float()


def outputs_of_plain_training(subject: str, model: TinyModel) -> dict[str, Any]:
    """A step of a ``transformers.Trainer`` with ``bf16=True``, whose model computes the loss.

    Returns:
        ``computed``, ``returned`` and ``failure`` as :func:`train` has them, and the ``loss`` that is logged.
    """
    import tempfile

    import transformers
    from datasets import Dataset

    from pytest_trlcompat.trainers import cured

    seen: dict[str, Any] = {"computed": {}, "returned": {}}

    class Looking(cured(transformers.Trainer) if subject == "corrected" else transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            hook = model.register_forward_hook(looking(seen["returned"]))
            try:
                return super().compute_loss(model, *args, **kwargs)
            finally:
                hook.remove()

    rows = [[3 + (7 * row + column) % model.words for column in range(12)] for row in range(8)]
    args = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        report_to="none",
        save_strategy="no",
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        bf16=True,
    )
    with failure() as ended:
        trainer = Looking(
            model=_policy(model, {}),
            args=args,
            train_dataset=Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in rows]),
        )
        trainer.model.register_forward_hook(looking(seen["computed"]))
        trainer.train()
    return {**seen, "failure": ended.get("text"), "loss": models.logged(trainer, "loss") if not ended else []}


def trainings_of_neighbours(
    subject: str, model: TinyModel, setting: Mapping[str, str], seeds: Sequence[int], learning_rate: float
) -> list[dict[str, Any]]:
    """:func:`train` once for each seed of a perturbation, in one process."""
    from transformers.generation import GenerationMixin

    generate = GenerationMixin.generate
    trainings = []
    for seed in seeds:
        GenerationMixin.generate = generate  # each training wraps it again
        trainings.append(train(subject, model, setting, learning_rate, seed))
    return trainings


def _build(
    subject: str,
    model: TinyModel,
    setting: Mapping[str, str],
    learning_rate: float,
    perturbed: int,
    losses: list[float],
    seen: dict[str, Any],
) -> Any:
    arguments: dict[str, Any] = {"model": _policy(model, setting)}
    if perturbed:
        _perturb(arguments["model"], perturbed)
    adapter = setting.get("adapter")
    if adapter is not None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        if adapter == "peft_model":
            arguments["model"] = get_peft_model(arguments["model"], config)
        else:
            arguments["peft_config"] = config
    more: dict[str, Any] = {}
    if setting.get("checkpointing") == "model":
        more["gradient_checkpointing"] = True
    if "compile" in setting:
        more.update(torch_compile=True, torch_compile_backend="aot_eager")
    trainer = grpo.build_trainer(
        subject,
        model,
        cls=_recording(subject, losses, seen),
        arguments=arguments,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=learning_rate,
        # Below every gradient norm here, so that clipping matters.
        max_grad_norm=0.5,
        # That loss is no mean over rows: it depends on how they are dealt to ranks.
        router_aux_loss_coef=0.0,
        bf16=setting.get("precision") == "bf16",
        **more,
    )
    trainer.model.register_forward_hook(looking(seen["computed"]))  # before a strategy has wrapped it
    if adapter is not None:
        fill_adapter(dict(trainer.model.named_parameters()))
    if adapter in _QUANTISED:
        _to_float32(trainer.model)
    return trainer


def _to_float32(model: torch.nn.Module) -> None:
    """TRL makes the adapter of a quantised base bfloat16, in which rounding is larger than what is looked for."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _policy(model: TinyModel, setting: Mapping[str, str]) -> Any:
    """The model, read from its folder as a user does."""
    import torch
    import transformers
    from accelerate import PartialState

    auto = transformers.AutoModelForCausalLM
    if model.architecture == "qwen2_vl":
        auto = transformers.AutoModelForImageTextToText
    dtype = torch.bfloat16 if setting.get("precision") == "bf16_weights" else torch.float32
    name = name_in(vars(transformers.PretrainedConfig()), "dtype") or "dtype"
    quantized = {}
    if setting.get("adapter") in _QUANTISED:
        # bitsandbytes compiles its operators, which takes minutes.
        torch.compiler.set_stance("force_eager")
        quantized["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,  # FSDP shards parameters of one dtype
        )
        # As PEFT asks for it, with the index that Accelerate 1.6 needs.
        device = PartialState().device
        quantized["device_map"] = {"": torch.device(device.type, device.index or 0)}
    policy = auto.from_pretrained(model.path, attn_implementation="eager", **{name: dtype}, **quantized)
    return policy.dequantize() if setting.get("adapter") == "dequantised" else policy


def _perturb(policy: torch.nn.Module, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            units = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.mul_((1 + units * BF16_ULP).to(parameter))


def looking(dtypes: dict[str, str]) -> Callable[..., None]:
    """A forward hook that notes the dtypes of outputs that have a gradient: neither of generation nor of a question."""
    import torch

    def look(module: Any, args: Any, output: Any) -> None:
        for name in ("loss", "logits", "log_probs"):
            value = getattr(output, name, None)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                dtypes[name] = str(value.dtype)

    return look


def _recording(subject: str, losses: list[float], seen: dict[str, Any]) -> type:
    cls = grpo.trainer_class(subject)
    # TRL 0.14 computes log-probabilities in a closure, beside the method that the corrected trainer brings along.
    methods = ("_get_per_token_logps", "_get_per_token_logps_and_entropies")
    method = next((name for name in methods if hasattr(grpo.trainer_class("upstream"), name)), "")

    class Recording(cls):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            hook = model.register_forward_hook(looking(seen["returned"]))  # behind the strategy's own
            try:
                loss = super().compute_loss(model, *args, **kwargs)
            finally:
                hook.remove()
            losses.append(loss.detach().float().item())
            return loss

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = getattr(super(Recording, self), method)(*args, **kwargs)
        logps = (output[0] if isinstance(output, tuple) else output).detach()
        real = logps[logps != 0]  # what is masked is zero
        seen["rounded"] = (real == real.bfloat16()).float().mean().item()
        return output

    if method:
        setattr(Recording, method, recorded)
    return Recording


def _checkpointing(model: Any) -> list[str]:
    """Who recomputes activations: ``model``, ``wrapper``, both or none."""
    modules = list(model.modules())
    recomputing = {"model"} if any(getattr(module, "gradient_checkpointing", False) for module in modules) else set()
    # FSDP2 makes a class of its own of each unit's, and Accelerate 1.15 shards wrappers.
    bases = {base.__name__ for module in modules for base in type(module).__mro__}
    return sorted(recomputing | ({"wrapper"} if "CheckpointWrapper" in bases else set()))


def _is_compiled(model: Any) -> bool:
    # FSDP2 makes a class of its own of each unit's.
    bases = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return "OptimizedModule" in bases or any(module._compiled_call_impl for module in model.modules())
