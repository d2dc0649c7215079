"""Training with vLLM, in the same process or as a server, inside a rank; see :mod:`.vllm_watch` for what is watched.

With GRPO, RLOO or distillation, which generate alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pytest_trlcompat import stack
from pytest_trlcompat.accelerator import artefacts
from pytest_trlcompat.inference import cpu_engine, recording_engine

from . import adapters, distillation, grpo, vllm_images, vllm_loss
from .vllm_watch import Watch, watch_training

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "MAX_LENGTH",
    "PROMPT_LENGTH",
    "RANK",
    "REFUSED",
    "SAVED_STEP",
    "SCALING",
    "TEMPERATURE",
    "VARIANTS",
    "has_server",
    "is_adapted",
    "is_deep",
    "is_late",
    "loses_server",
    "max_length",
    "model_of",
    "needs_own_engine",
    "serving_release",
    "sleeps",
    "train",
    "weights_alone",
]

# Not 1, at which it would not be seen whether log-probabilities are those at the temperature.
TEMPERATURE = 0.7
# An engine that keeps its cache completes a prompt that comes again from keys and values of earlier weights.
PROMPT_LENGTH = 37
"""Tokens of a prompt: two blocks of vLLM's prefix cache, which it keeps whole, and some."""
RANK, SCALING = 4, 2.0
REFUSED = "CureError: VLLMSyncMixin"
"""How a failure begins with which the cure has refused a training."""
SAVED_STEP = 2
# An evaluation hands over no weights, and the engine must have the policy's all the same.
_EVALUATED: Mapping[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
_MAX_LENGTH_WITH_IMAGES = 112
_IMAGES: Mapping[str, Any] = {
    "images": "image",
    "model": "vision",
    "max_prompt_length": None,
    "vllm_max_model_length": _MAX_LENGTH_WITH_IMAGES,
    "vllm_max_model_len": _MAX_LENGTH_WITH_IMAGES,
}
"""Which images prompts have, and the model, see ``conformance.images``; where prompts are cut, an image may be."""
_LORA: Mapping[str, Any] = {"adapter": "lora", "learning_rate": 5e-2}
SERVER_RELEASES = ("0.20.0", "0.26.2", "0.28.0", "1.0.0")
"""Of TRL, whose servers are asked by a trainer of another: each answers in another form, or with other numbers."""
_OF_RELEASE = "server_of_"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "": _EVALUATED,
    "tied": _EVALUATED,
    "lora": _LORA,
    # In bfloat16 frozen weights drift where an adapter is merged in place and taken out again.
    "lora_bf16": {**_LORA, "bf16": True, "dtype": "bfloat16"},
    "whole": {**_LORA, "adapter": "whole"},
    "rslora": {**_LORA, "adapter": "rslora"},
    "dora": {**_LORA, "adapter": "dora"},
    "tied_head": {**_LORA, "adapter": "whole"},
    "tied_embeddings": {**_LORA, "adapter": "whole_embeddings"},
    "tied_both": {**_LORA, "adapter": "whole_tied"},
    "tied_lora_embeddings": {**_LORA, "adapter": "lora_embeddings"},
    "tokens": {**_LORA, "adapter": "tokens"},
    "moe": _EVALUATED,
    "moe_lora": {**_LORA, "adapter": "attention"},
    "reuse": {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 8},
    "accumulated": {"gradient_accumulation_steps": 2, "max_steps": 3},
    "asleep": {**_EVALUATED, "vllm_enable_sleep_mode": True},
    "deep": {"max_steps": 2},
    "deep_lora": {**_LORA, "max_steps": 2},
    "resumed": {"save_strategy": "steps", "save_steps": SAVED_STEP, "max_steps": 4},
    "server": _EVALUATED,
    "server_lora": _LORA,
    "server_whole": {**_LORA, "adapter": "whole"},
    "server_ended": _EVALUATED,
    "server_restarted": _EVALUATED,
    "server_restarted_answering": {},
    "server_late": _EVALUATED,
    "server_late_start": _EVALUATED,
    **{f"{_OF_RELEASE}{release}": _EVALUATED for release in SERVER_RELEASES},
    "parallel": {**_EVALUATED, "vllm_tensor_parallel_size": 2},
    "vision": {**_EVALUATED, **_IMAGES},
    "vision_lora": {**_LORA, **_IMAGES},
    "vision_two": {**_EVALUATED, **_IMAGES, "images": "two"},
    "vision_token": {**_EVALUATED, **_IMAGES, "favours_image": True},
    "llava": {**_EVALUATED, **_IMAGES, "model": "llava"},
    "server_vision": {**_EVALUATED, **_IMAGES},
}
"""By name, settings of ``GRPOConfig``, and what :func:`_build` takes out of them."""
_TOKENS = tuple(range(3, 40))
"""Most words of the prompts, so that their rows learn."""
_ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "lora": {},
    "whole": {"modules_to_save": ["lm_head"]},
    "whole_embeddings": {"modules_to_save": ["embed_tokens"]},
    "rslora": {"use_rslora": True, "lora_alpha": int(SCALING * RANK**0.5)},
    "dora": {"use_dora": True},
    "whole_tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "lora_embeddings": {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [*_TOKENS]},
    "attention": {"target_modules": ["q_proj", "v_proj"]},
}
"""By name, settings of ``LoraConfig`` that differ from those of :func:`_build`; each scales by :data:`SCALING`."""
MAX_LENGTH = 64
"""Tokens of a prompt and its completion at most."""
_BESIDE: Mapping[str, Any] = {
    "vllm_mode": "colocate",
    "vllm_device": "cpu",
    "vllm_max_model_length": MAX_LENGTH,
    "vllm_max_model_len": MAX_LENGTH,
    "vllm_gpu_memory_utilization": 0.05,
}
"""Where the engine is in a rank's own process: in each from 0.18 on, in the first one alone before 0.16, on a device of
its own."""
_ENGINE: Mapping[str, Any] = {
    "use_vllm": True,
    "temperature": TEMPERATURE,
    "max_prompt_length": PROMPT_LENGTH,
    "max_steps": 3,
    "beta": 0.0,
}


def sleeps(variant: str) -> bool:
    """Whether its engine releases its memory between generations."""
    return variant == "asleep"


def is_adapted(variant: str) -> bool:
    """Whether an adapter is trained."""
    return "adapter" in VARIANTS[variant]


def weights_alone(variant: str) -> bool:
    """Whether its batches are not compared with a reference."""
    return variant.startswith(("tied_", "tokens", "moe", "parallel"))


def needs_own_engine(variant: str) -> bool:
    """Whether the recording engine has not been tried with it."""
    return weights_alone(variant) or variant in ("rslora", "dora") or model_of(variant) == "vision"


def model_of(variant: str) -> str:
    """``""`` for a plain tiny Qwen2, ``tied`` for one with tied embeddings, ``moe`` for a mixture of experts, and
    ``vision`` for a model that takes images."""
    first = variant.removeprefix("server_").partition("_")[0]
    return {"tied": "tied", "moe": "moe", "vision": "vision", "llava": "vision"}.get(first, "")


def is_deep(variant: str) -> bool:
    """Whether its model has many layers, each of which is a small part of it."""
    return variant.startswith("deep")


def has_server(variant: str) -> bool:
    """Whether the engine of one of :data:`VARIANTS` is a server."""
    return variant.startswith("server")


def max_length(variant: str) -> int:
    """Tokens of a prompt, with those of its images, and its completion at most."""
    return _MAX_LENGTH_WITH_IMAGES if model_of(variant) == "vision" else MAX_LENGTH


def loses_server(variant: str) -> bool:
    """Whether it is lost in the middle, see :mod:`.vllm_loss`."""
    return variant in ("server_ended", "server_restarted")


def is_late(variant: str) -> bool:
    """Whether its server is waited for."""
    return variant.startswith("server_late")


def serving_release(variant: str) -> str:
    """The release of TRL whose server it asks; ``""``: the installed one."""
    return variant.removeprefix(_OF_RELEASE) if variant.startswith(_OF_RELEASE) else ""


def train(
    subject: str,
    model: TinyModel,
    variant: str,
    folder: str | None = None,
    resume: bool = False,
    server: str | None = None,
    trainer_name: str = "GRPO",
) -> dict[str, Any]:
    """Train with one variant of :data:`VARIANTS`.

    Args:
        server: the URL of a vLLM server of this model; ``None``: the engine is in this process.
        folder: where it saves, or asks for the loss of its server.
        resume: go on from the checkpoint of :data:`SAVED_STEP` there.
        trainer_name: see :func:`grpo.trainer_class`.

    Returns:
        ``generations``: of each call of the engine the step, whether it was an evaluation's, how the engine compares
        with the policy (:class:`vllm_engine.Comparison`), the prompts and the completions' lengths;
        ``synchronisations``: of each, the names that were not loaded exactly once, the policy's tensors that it
        changed, the bytes of the accelerator that it took beyond those that were taken, and those of the whole model;
        ``batches``: of each batch that was made of completions, how its numbers compare with a reference;
        ``unanswered``: calls of a server that was gone; ``seconds``: of building the trainer and of synchronisations;
        ``corrects``: whether the loss corrects for the sampler's log-probabilities; ``engine``: which one it is, and
        what is changed in it; ``failure``.
    """
    place = _BESIDE if server is None else _at(server)
    saved = {} if folder is None else {"output_dir": folder}
    settings = {**_ENGINE, **place, **VARIANTS[variant], **saved}
    watch = Watch(
        model,
        server,
        temperature=TEMPERATURE,
        scaling=SCALING,
        tokens=_TOKENS,
        compares_batches=not weights_alone(variant),
        looks_again=variant == "server_restarted_answering",
        rows=_rows(model, settings),
    )
    seconds: dict[str, float] = {}
    corrects = False
    try:
        trainer = _build(subject, model, settings, seconds, trainer_name)
        corrects = bool(getattr(trainer.args, "vllm_importance_sampling_correction", False))
        watch_training(trainer, watch)
        if folder is not None and loses_server(variant):
            vllm_loss.request_loss(trainer, folder)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_STEP}" if resume else None)
        failure = None
    except Exception as error:
        failure = artefacts.error_text(error)
    return {
        "generations": watch.generations,
        "synchronisations": watch.synchronisations,
        "batches": watch.batches,
        "unanswered": watch.unanswered,
        "seconds": seconds,
        "corrects": corrects,
        "engine": _engine(),
        "failure": failure,
    }


def _rows(model: TinyModel, settings: Mapping[str, Any]) -> vllm_images.Rows | None:
    if "images" not in settings:
        return None
    image_token = (vllm_images.image_token(model),)
    kept_from = image_token if "favours_image" in settings else vllm_images.suppressed(model)
    return vllm_images.rows(model, PROMPT_LENGTH, settings["model"], settings["images"], kept_from)


def _engine() -> dict[str, Any]:
    if recording_engine.is_recording(stack.installed()):
        return {"which": "this project's recording engine, in vLLM's place", "missing": [], "missing_experts": []}
    return cpu_engine.changes()


def _at(server: str) -> dict[str, Any]:
    """Arguments that name a server: by its URL, before 0.18 by its host and port."""
    address = urlsplit(server)
    return {
        "vllm_mode": "server",
        "vllm_server_base_url": server,
        "vllm_server_host": address.hostname,
        "vllm_server_port": address.port,
    }


def _build(subject: str, model: TinyModel, settings: Mapping[str, Any], seconds: dict[str, float], name: str) -> Any:
    import torch
    from peft import LoraConfig

    rest = dict(settings)
    taken = ("adapter", "dtype", "images", "model", "favours_image")
    kind, dtype, pictures, looks, favours = (rest.pop(setting, None) for setting in taken)
    policy = vllm_images.load_policy(model, looks) if pictures else grpo.load_policy(model)
    if dtype is not None:
        policy = policy.to(getattr(torch, dtype))
    prompts = vllm_images.prompts(PROMPT_LENGTH, looks, pictures) if pictures else grpo.prompts(PROMPT_LENGTH)
    arguments: dict[str, Any] = {"model": policy, "train_dataset": prompts, "eval_dataset": prompts.select(range(4))}
    if favours:
        vllm_images.favour_image(policy, model)
    elif pictures:
        rest["generation_kwargs"] = {"logit_bias": dict.fromkeys(vllm_images.suppressed(model), -100.0)}
    if pictures:
        arguments |= {"processing_class": vllm_images.words(model, looks), "reward_funcs": vllm_images.reward}
    if name == "Distillation":
        arguments["teacher_model"] = distillation.load_teacher(model)
    if kind is not None:
        settings = {
            "r": RANK,
            "lora_alpha": int(SCALING * RANK),
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "task_type": "CAUSAL_LM",
        }
        arguments["peft_config"] = LoraConfig(**{**settings, **_ADAPTERS[kind]})
    started = time.monotonic()
    trainer = grpo.build_trainer(subject, model, arguments=arguments, name=name, **rest)
    seconds["build"] = time.monotonic() - started
    if kind is not None:
        adapters.fill_adapter(dict(trainer.model.named_parameters()))
    return trainer
