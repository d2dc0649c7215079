"""Training with vLLM, in the same process or as a server, watched inside a rank: what the engine holds and returns.

With GRPO, RLOO or distillation, which generate alike.

Imports the stack only inside functions.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pytest_trlcompat import stack
from pytest_trlcompat.accelerator import artefacts
from pytest_trlcompat.inference import cpu_engine, recording_engine

from . import adapters, distillation, grpo, models, vllm_engine, vllm_loss, vllm_server

if TYPE_CHECKING:
    import torch

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
    "loses_server",
    "model_of",
    "needs_own_engine",
    "sleeps",
    "train",
    "weights_alone",
]

TEMPERATURE = 0.7
PROMPT_LENGTH = 37
"""Tokens of a prompt: two blocks of vLLM's prefix cache, which it keeps whole, and some."""
RANK, SCALING = 4, 2.0
REFUSED = "CureError: VLLMSyncMixin"
"""How a failure begins with which the cure has refused a training."""
SAVED_STEP = 2
_EVALUATED: Mapping[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
_LORA: Mapping[str, Any] = {"adapter": "lora", "learning_rate": 5e-2}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "": _EVALUATED,
    "tied": _EVALUATED,
    "lora": _LORA,
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
    "resumed": {"save_strategy": "steps", "save_steps": SAVED_STEP, "max_steps": 4},
    "server": _EVALUATED,
    "server_lora": _LORA,
    "server_whole": {**_LORA, "adapter": "whole"},
    "server_ended": _EVALUATED,
    "server_restarted": _EVALUATED,
}
"""By name, settings of ``GRPOConfig``, and ``adapter`` and ``dtype``, see :func:`train`."""
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
    """Whether its batches are not held against a reference."""
    return variant.startswith(("tied_", "tokens", "moe"))


def needs_own_engine(variant: str) -> bool:
    """Whether the recording engine has not been tried with it."""
    return weights_alone(variant) or variant in ("rslora", "dora")


def model_of(variant: str) -> str:
    """``""`` for a plain tiny Qwen2, ``tied`` for one with tied embeddings, ``moe`` for a mixture of experts."""
    first = variant.partition("_")[0]
    return first if first in ("tied", "moe") else ""


def has_server(variant: str) -> bool:
    """Whether the engine of one of :data:`VARIANTS` is a server."""
    return variant.startswith("server")


def loses_server(variant: str) -> bool:
    """Whether it is lost in the middle, see :mod:`.vllm_loss`."""
    return variant in ("server_ended", "server_restarted")


@dataclass
class _Watch:
    """What was seen of one trainer."""

    generations: list[dict[str, Any]] = field(default_factory=list)
    synchronisations: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)
    loaded: list[Counter[str]] = field(default_factory=list)
    unanswered: int = 0
    of_main: list[tuple[Mapping[str, torch.Tensor], list[Any]]] = field(default_factory=list)
    """Of calls of an engine that the main process alone asks, for all: what it held, and each completion that it
    returned, those of the first rank first, in plain values."""


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
        ``synchronisations``: of each, the names that were not loaded exactly once, and the policy's tensors that it
        changed; ``batches``: of each batch that was made of completions, how its numbers compare with a reference;
        ``unanswered``: calls of a server that was gone; ``seconds``: of building the trainer and of synchronisations;
        ``corrects``: whether the loss corrects for the sampler's log-probabilities; ``engine``: which one it is, and
        what is changed in it; ``failure``.
    """
    place = _BESIDE if server is None else _at(server)
    saved = {} if folder is None else {"output_dir": folder}
    settings = {**_ENGINE, **place, **VARIANTS[variant], **saved}
    watch = _Watch()
    seconds: dict[str, float] = {}
    corrects = False
    try:
        trainer = _build(subject, model, settings, seconds, trainer_name)
        corrects = bool(getattr(trainer.args, "vllm_importance_sampling_correction", False))
        _watch(trainer, watch, model, server, variant)
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
    kind, dtype = rest.pop("adapter", None), rest.pop("dtype", None)
    policy = grpo.load_policy(model)
    if dtype is not None:
        policy = policy.to(getattr(torch, dtype))
    prompts = grpo.prompts(PROMPT_LENGTH)
    arguments: dict[str, Any] = {"model": policy, "train_dataset": prompts, "eval_dataset": prompts.select(range(4))}
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


def _watch(trainer: Any, watch: _Watch, model: TinyModel, server: str | None, variant: str) -> None:
    last: dict[str, Any] = {"batches": not weights_alone(variant)}
    if _asks_on_main(trainer, server):
        if trainer.accelerator.is_main_process:
            _watch_main(trainer, server, watch)
    elif server is None:
        engine = vllm_engine.engine_model(trainer)
        _watch_loading(engine, watch)
        _watch_engine(trainer, engine, watch, last)
    else:
        if trainer.accelerator.is_main_process:
            vllm_server.watch_handing_over(trainer.vllm_generation.vllm_client, watch.loaded)
        _watch_server(trainer, server, watch, last)
    _watch_synchronisation(trainer, watch)
    _watch_scoring(trainer, watch, last, model, server)


def _asks_on_main(trainer: Any, server: str | None) -> bool:
    """Whether the other ranks have nothing that could be watched."""
    if server is None:
        return not hasattr(trainer.args, "vllm_mode")
    return not hasattr(trainer, "vllm_generation")


def _watch_main(trainer: Any, server: str | None, watch: _Watch) -> None:
    if server is None:
        engine = vllm_engine.engine_model(trainer)
        _watch_loading(engine, watch)
        holder = trainer.llm
    else:
        vllm_server.watch_handing_over(trainer.vllm_client, watch.loaded)
        holder = trainer.vllm_client
    generate = holder.generate

    @functools.wraps(generate)
    def watched(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if server is None:
            tensors = {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}
            outputs = generate(prompts, *args, **kwargs)
            rows = vllm_server.rows_of(vllm_server.with_recorded(holder, outputs))
            watch.of_main.append((tensors, vllm_server.plain(rows)))
            return outputs
        held = vllm_server.held_now(server)
        if held is None:
            watch.unanswered += 1
            return generate(prompts, *args, **kwargs)
        returned = generate(prompts, *args, **kwargs)
        rows = vllm_server.rows_returned(trainer.processing_class, prompts, kwargs.get("n", 1), returned)
        watch.of_main.append((held, vllm_server.plain(rows)))
        return returned

    holder.generate = watched


def _share_of_main(trainer: Any, watch: _Watch, last: dict[str, Any]) -> None:
    """After the completions came to all ranks: what the main process saw, and this rank's part. Collective."""
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [None]
    if trainer.accelerator.is_main_process:
        (found[0],) = watch.of_main
        watch.of_main.clear()
    ((tensors, rows),) = broadcast_object_list(found)
    seen = _seen(trainer, vllm_server.Held(tensors), last)
    share = len(rows) // trainer.accelerator.num_processes
    first = trainer.accelerator.process_index * share
    _answered(watch, seen, vllm_server.of_plain(rows[first : first + share]), last)


def _watch_loading(engine: Any, watch: _Watch) -> None:
    load = engine.load_weights

    @functools.wraps(load)
    def counted(weights: Any) -> Any:
        given = list(weights)
        if watch.loaded:
            watch.loaded[-1].update(name for name, _ in given)
        return load(given)

    engine.load_weights = counted


def _watch_synchronisation(trainer: Any, watch: _Watch) -> None:
    import torch

    holder, name = (
        (trainer.vllm_generation, "sync_weights")
        if hasattr(trainer, "vllm_generation")
        else (trainer, "_move_model_to_vllm")
    )
    synchronise = getattr(holder, name)
    hands_over = getattr(trainer.args, "vllm_mode", "") == "colocate" or trainer.accelerator.is_main_process
    tied = _tied(trainer.model)

    @functools.wraps(synchronise)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before = models.whole(trainer.model)
        watch.loaded.append(Counter())
        started = time.monotonic()
        returned = synchronise(*args, **kwargs)
        spent = time.monotonic() - started
        after = models.whole(trainer.model)
        shapes = {
            name: tuple(each.value.shape)
            for name, each in vllm_engine.merged(before, SCALING, torch.float32, _TOKENS).items()
        }
        names = {part for name, shape in shapes.items() for part in vllm_engine.published(name, shape)}
        loaded: Counter[str] = Counter()
        for name, count in watch.loaded[-1].items():
            for part in vllm_engine.published(name, shapes.get(name, ())):
                loaded[part] += count
        if not hands_over:
            loaded.update(names)
        watch.synchronisations.append(
            {
                "step": trainer.state.global_step,
                "seconds": spent,
                "parameters": len(names),
                "missing": sorted(names - set(loaded)),
                "unknown": sorted(set(loaded) - names - tied),
                "repeated": sorted(each for each, count in loaded.items() if count > 1),
                "changed": {
                    each: float((after[each] - before[each]).abs().max())
                    for each in before
                    if not torch.equal(before[each], after[each])
                },
            }
        )
        return returned

    setattr(holder, name, watched)


def _tied(model: Any) -> set[str]:
    """Other names of parameters, which a state dict has besides."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return {"lm_head.weight"} if config.tie_word_embeddings else set()


def _watch_engine(trainer: Any, engine: Any, watch: _Watch, last: dict[str, Any]) -> None:
    llm = getattr(getattr(trainer, "vllm_generation", None), "llm", None) or trainer.llm
    generate = llm.generate

    @functools.wraps(generate)
    def watched(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        seen = _seen(trainer, engine, last)
        outputs = generate(prompts, *args, **kwargs)
        _answered(watch, seen, vllm_server.with_recorded(llm, outputs), last)
        return outputs

    llm.generate = watched


def _watch_server(trainer: Any, server: str, watch: _Watch, last: dict[str, Any]) -> None:
    generation = trainer.vllm_generation
    generate = generation.generate

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        held = vllm_server.held(server, trainer)
        if held is None:
            watch.unanswered += 1
            return generate(*args, **kwargs)
        seen = _seen(trainer, held, last)
        returned = generate(*args, **kwargs)
        _answered(watch, seen, vllm_server.outputs_of(returned), last)
        return returned

    generation.generate = watched


def _seen(trainer: Any, engine: Any, last: dict[str, Any]) -> dict[str, Any]:
    """How the engine compares with the policy, before it is asked."""
    parameters = models.whole(trainer.model)
    # Tied parameters are named once; an adapter may change what one of them is used for.
    parameters.update((alias, parameters[name]) for alias, name in _aliases(trainer.model).items())
    expected = vllm_engine.as_published(vllm_engine.merged(parameters, SCALING, _dtype(trainer), _TOKENS))
    if last["batches"]:
        last["policy"] = {name: truth.value.float() for name, truth in expected.items()}
        last["engine"] = vllm_engine.unpacked(expected, engine)
    return {
        "step": trainer.state.global_step,
        "evaluation": not trainer.model.training,
        **asdict(vllm_engine.compare(expected, engine, _shard(trainer))),
    }


def _shard(trainer: Any) -> tuple[int, int]:
    """Which part of the engine is in this rank, of how many."""
    count = getattr(trainer.args, "vllm_tensor_parallel_size", 1)
    if getattr(trainer.args, "vllm_mode", "") != "colocate" or count == 1:
        return 0, 1
    return trainer.accelerator.process_index % count, count


def _aliases(model: Any) -> dict[str, str]:
    """Other names of parameters that have more than one, each with the first."""
    first: dict[int, str] = {}
    found = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        name = models.bare_name(full_name)
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found


def _answered(watch: _Watch, seen: dict[str, Any], outputs: Sequence[Any], last: dict[str, Any]) -> None:
    last["outputs"] = outputs
    watch.generations.append(
        {
            **seen,
            "prompts": [list(output.prompt_token_ids) for output in outputs],
            "completions": [len(each.token_ids) for output in outputs for each in output.outputs],
        }
    )


def _watch_scoring(trainer: Any, watch: _Watch, last: dict[str, Any], model: TinyModel, server: str | None) -> None:
    from . import vllm_sampling

    name = "_generate_and_score_completions"  # from 0.16 on
    # Of TRL's own classes: a cure may have it as well.
    if not any(name in vars(each) for each in type(trainer).__mro__ if each.__module__.startswith("trl.")):
        name = "_prepare_inputs"
    score = getattr(trainer, name)
    of_main = _asks_on_main(trainer, server)

    @functools.wraps(score)
    def scored(inputs: Any) -> Any:
        batch = score(inputs)
        if of_main:
            _share_of_main(trainer, watch, last)
        if last["batches"]:
            seen = {name: last[name] for name in ("policy", "engine", "outputs")}
            watch.batches.append(vllm_sampling.compare(model, batch=batch, temperature=TEMPERATURE, **seen))
        return batch

    setattr(trainer, name, scored)


def _dtype(trainer: Any) -> torch.dtype:
    """In which PEFT merges; without an adapter nothing depends on it."""
    dtypes = {name: parameter.dtype for name, parameter in trainer.model.named_parameters()}
    return next((dtype for name, dtype in dtypes.items() if ".base_layer." in name), next(iter(dtypes.values())))
