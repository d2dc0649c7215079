"""A training with vLLM watched inside a rank: what the engine gets, holds and returns, compared with what it must.

Of any trainer that generates with vLLM, in the same process or with a server.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import weights

from . import vllm_engine, vllm_images, vllm_sampling, vllm_server

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["Watch", "watch_training"]


@dataclass
class Watch:
    """What was seen of one trainer.

    Attributes:
        model: from which the policy was loaded.
        server: the URL of the engine; ``None``: it is in this process.
        temperature: at which completions are sampled.
        scaling: of an adapter, where there is one.
        tokens: whose rows of the embeddings are trained by themselves, where any are.
        compares_batches: whether batches are compared with a reference, too.
        looks_again: whether a server is read again after it has answered, since it may be another one by then.
        rows: for prompts with images, what each request must have; ``None`` if prompts are texts alone.
        generations, synchronisations, batches: see :func:`vllm_training.train`.
        loaded: by synchronisation, how often each name was handed over.
        unanswered: calls of a server that was gone.
        of_main: of calls of an engine that the main process alone asks, for all: what it held, and each completion that
            it returned, those of the first rank first, in plain values.
    """

    model: TinyModel
    server: str | None
    temperature: float
    scaling: float
    tokens: Sequence[int]
    compares_batches: bool
    looks_again: bool = False
    rows: vllm_images.Rows | None = None
    generations: list[dict[str, Any]] = field(default_factory=list)
    synchronisations: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)
    loaded: list[Counter[str]] = field(default_factory=list)
    unanswered: int = 0
    of_main: list[tuple[Mapping[str, torch.Tensor], list[Any]]] = field(default_factory=list)


def watch_training(trainer: Any, watch: Watch) -> None:
    """Keep in ``watch`` what passes by from now on."""
    server = watch.server
    # What the last call of the engine saw, until the batch that is made of it can be compared.
    last: dict[str, Any] = {}
    if _asks_on_main(trainer, server):
        if trainer.accelerator.is_main_process:
            _watch_main(trainer, watch)
    elif server is None:
        engine = vllm_engine.engine_model(trainer)
        _watch_loading(engine, watch)
        _watch_engine(trainer, engine, watch, last)
    else:
        if trainer.accelerator.is_main_process:
            vllm_server.watch_handing_over(trainer.vllm_generation.vllm_client, watch.loaded)
        _watch_server(trainer, server, watch, last)
    _watch_synchronisation(trainer, watch)
    _watch_scoring(trainer, watch, last)


def _asks_on_main(trainer: Any, server: str | None) -> bool:
    """Whether the other ranks have nothing that could be watched."""
    if server is None:
        return not hasattr(trainer.args, "vllm_mode")
    return not hasattr(trainer, "vllm_generation")


def _watch_main(trainer: Any, watch: Watch) -> None:
    server = watch.server
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
            # Copies, since the next synchronisation writes into them.
            tensors = {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}
            outputs = generate(prompts, *args, **kwargs)
            rows = vllm_server.rows_of(vllm_server.with_recorded(holder, outputs))
            watch.of_main.append((tensors, vllm_server.plain(rows)))
            return outputs
        # Before the server is asked for completions: what it generates with are the weights that it holds by now.
        server_weights = vllm_server.server_weights_here(server)
        if server_weights is None:
            watch.unanswered += 1
            return generate(prompts, *args, **kwargs)
        returned = generate(prompts, *args, **kwargs)
        if watch.looks_again:
            server_weights = vllm_server.server_weights_here(server) or server_weights
        rows = vllm_server.rows_returned(trainer.processing_class, prompts, kwargs.get("n", 1), returned)
        watch.of_main.append((server_weights, vllm_server.plain(rows)))
        return returned

    holder.generate = watched


def _share_of_main(trainer: Any, watch: Watch, last: dict[str, Any]) -> None:
    """After the completions came to all ranks: what the main process saw, and this rank's part. Collective."""
    from accelerate.utils import broadcast_object_list

    sent: list[Any] = [None]
    if trainer.accelerator.is_main_process:
        (sent[0],) = watch.of_main
        watch.of_main.clear()
    ((tensors, rows),) = broadcast_object_list(sent)
    seen = _seen(trainer, watch, vllm_server.Held(tensors), last)
    share = len(rows) // trainer.accelerator.num_processes
    first = trainer.accelerator.process_index * share
    _answered(watch, seen, vllm_server.of_plain(rows[first : first + share]), last)


def _watch_loading(engine: Any, watch: Watch) -> None:
    load = engine.load_weights

    @functools.wraps(load)
    def counted(weights: Any) -> Any:
        # They come as an iterator, which the engine has to read as well.
        tensors = list(weights)
        if watch.loaded:
            watch.loaded[-1].update(name for name, _ in tensors)
        return load(tensors)

    engine.load_weights = counted


def _watch_synchronisation(trainer: Any, watch: Watch) -> None:
    import torch

    holder, name = (
        (trainer.vllm_generation, "sync_weights")
        if hasattr(trainer, "vllm_generation")
        else (trainer, "_move_model_to_vllm")
    )
    synchronise = getattr(holder, name)
    # To a server the main process alone hands the weights over, for all ranks.
    hands_over = getattr(trainer.args, "vllm_mode", "") == "colocate" or trainer.accelerator.is_main_process
    tied = _tied(trainer.model)

    @functools.wraps(synchronise)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before = weights.whole(trainer.model)
        watch.loaded.append(Counter())
        device = getattr(torch, trainer.accelerator.device.type)
        allocated_before = device.memory_allocated()
        device.reset_peak_memory_stats()
        started = time.monotonic()
        returned = synchronise(*args, **kwargs)
        spent = time.monotonic() - started
        # Before the weights are gathered below, which takes as much again.
        extra = device.max_memory_allocated() - allocated_before
        after = weights.whole(trainer.model)
        shapes = {
            name: tuple(expected.value.shape)
            for name, expected in vllm_engine.merged(before, watch.scaling, torch.float32, watch.tokens).items()
        }
        names = {part for name, shape in shapes.items() for part in vllm_engine.published(name, shape)}
        loaded: Counter[str] = Counter()
        for name, count in watch.loaded[-1].items():
            for part in vllm_engine.published(name, shapes.get(name, ())):
                loaded[part] += count
        # What a rank does not hand over, it does not miss either.
        if not hands_over:
            loaded.update(names)
        watch.synchronisations.append(
            {
                "step": trainer.state.global_step,
                "seconds": spent,
                "extra_bytes": extra,
                "bytes": sum(tensor.numel() * tensor.element_size() for tensor in before.values()),
                "parameters": len(names),
                "missing": sorted(names - set(loaded)),
                "unknown": sorted(set(loaded) - names - tied),
                "repeated": sorted(loaded_name for loaded_name, count in loaded.items() if count > 1),
                "changed": {
                    parameter_name: float((after[parameter_name] - before[parameter_name]).abs().max())
                    for parameter_name in before
                    if not torch.equal(before[parameter_name], after[parameter_name])
                },
            }
        )
        return returned

    setattr(holder, name, watched)


def _tied(model: Any) -> set[str]:
    """Other names of parameters, which a state dict has besides."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    # In some releases the whole configuration of a vision model alone says it.
    config = config if hasattr(config, "tie_word_embeddings") else model.config
    return {"lm_head.weight"} if config.tie_word_embeddings else set()


def _watch_engine(trainer: Any, engine: Any, watch: Watch, last: dict[str, Any]) -> None:
    llm = getattr(getattr(trainer, "vllm_generation", None), "llm", None) or trainer.llm
    generate = llm.generate

    @functools.wraps(generate)
    def watched(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        seen = _seen(trainer, watch, engine, last)
        outputs = generate(prompts, *args, **kwargs)
        if watch.rows is not None:
            asked = [vllm_images.pictures(request) for request in prompts]
            completions = [completion.token_ids for output in outputs for completion in output.outputs]
            seen |= watch.rows.problems(asked, [output.prompt_token_ids for output in outputs], completions)
        _answered(watch, seen, vllm_server.with_recorded(llm, outputs), last)
        return outputs

    llm.generate = watched


def _watch_server(trainer: Any, server: str, watch: Watch, last: dict[str, Any]) -> None:
    generation = trainer.vllm_generation
    generate = generation.generate

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        server_weights = vllm_server.server_weights(server, trainer)
        if server_weights is None:
            watch.unanswered += 1
            return generate(*args, **kwargs)
        seen = _seen(trainer, watch, server_weights, last)
        returned = generate(*args, **kwargs)
        if watch.rows is not None:
            asked = [vllm_images.digests(images) for images in kwargs["images"]]
            seen |= watch.rows.problems(asked, *returned[:2])
        if watch.looks_again and (weights_now := vllm_server.server_weights(server, trainer)) is not None:
            seen = _seen(trainer, watch, weights_now, last)
        _answered(watch, seen, vllm_server.outputs_of(returned), last)
        return returned

    generation.generate = watched


def _seen(trainer: Any, watch: Watch, engine: Any, last: dict[str, Any]) -> dict[str, Any]:
    """How the engine compares with the policy, before it is asked."""
    parameters = weights.whole(trainer.model)
    # Tied parameters are named once; an adapter may change what one of them is used for.
    parameters.update((alias, parameters[name]) for alias, name in _aliases(trainer.model).items())
    expected = vllm_engine.as_published(vllm_engine.merged(parameters, watch.scaling, _dtype(trainer), watch.tokens))
    if watch.compares_batches:
        last["policy"] = {name: expected_tensor.value.float() for name, expected_tensor in expected.items()}
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
    aliases = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        name = weights.bare_name(full_name)
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


def _answered(watch: Watch, seen: dict[str, Any], outputs: Sequence[Any], last: dict[str, Any]) -> None:
    last["outputs"] = outputs
    watch.generations.append(
        {
            **seen,
            "prompts": [list(output.prompt_token_ids) for output in outputs],
            "completions": [len(completion.token_ids) for output in outputs for completion in output.outputs],
        }
    )


def _watch_scoring(trainer: Any, watch: Watch, last: dict[str, Any]) -> None:
    name = "_generate_and_score_completions"  # from 0.16 on
    # Of TRL's own classes: a cure may have it as well.
    if not any(name in vars(base) for base in type(trainer).__mro__ if base.__module__.startswith("trl.")):
        name = "_prepare_inputs"
    score = getattr(trainer, name)
    of_main = _asks_on_main(trainer, watch.server)

    @functools.wraps(score)
    def scored(inputs: Any) -> Any:
        batch = score(inputs)
        if of_main:
            _share_of_main(trainer, watch, last)
        if watch.compares_batches:
            seen = {name: last[name] for name in ("policy", "engine", "outputs")}
            how: dict[str, Any] = {"temperature": watch.temperature, "rows": watch.rows}
            watch.batches.append(vllm_sampling.compare(watch.model, batch=batch, **how, **seen))
        return batch

    setattr(trainer, name, scored)


def _dtype(trainer: Any) -> torch.dtype:
    """In which PEFT merges; without an adapter nothing depends on it."""
    dtypes = {name: parameter.dtype for name, parameter in trainer.model.named_parameters()}
    return next((dtype for name, dtype in dtypes.items() if ".base_layer." in name), next(iter(dtypes.values())))
