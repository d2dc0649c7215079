"""The arguments of a trainer other than its config, by the axes of a setting: model, tokenizer, adapter, data, rewards.

Runs inside a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import images
from pytest_trlcompat.conformance.architectures import ARCHITECTURES, architecture, saved
from pytest_trlcompat.conformance.grpo import environments, tools
from pytest_trlcompat.conformance.grpo.configs import AXES
from pytest_trlcompat.conformance.grpo.sampling import COMPLETION_LENGTH, Data, name_of, reward_functions, target_of

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "NEW_ADAPTERS",
    "adapter_config",
    "data_of",
    "fill_adapter",
    "inputs_asked",
    "policy",
    "prompts_asked",
    "rewards_of_reference",
    "rewards_of_trainer",
    "tokenizer",
    "untrained",
]

_MODELS = ("model", "compiled_model", "model_nan")
"""Rewards of a reward model: unchanged, compiled, or one that gives no number for some conversations."""
OTHER_END = 2
"""A token that ends completions in addition to, or instead of, the model's own: ``<unk>``, which is no word."""
_AUX_LOSS_COEF = 0.2
NEW_ADAPTERS = ("peft_config", "saved_head", "trained_tokens")
"""Adapters that the trainer makes from its ``peft_config``."""
_TRAINED_TOKENS = (1, *range(10, 20))
"""The end of sequence, and words."""
_TOOLS_TEMPLATE = (
    "{% if tools is not none %}{{ 'w60 w60 ' }}{% endif %}"
    "{% for message in messages %}{{ message['content'] + ' ' + eos_token + ' ' }}{% endfor %}"
)
"""Like Llama's: it writes instructions where it gets a list of tools, even an empty one."""


def data_of(model: TinyModel, setting: Mapping[str, Any], seed: int, length: int) -> Data:
    """Prompts and completions of a setting, with images where it has some."""
    conversational = bool(setting.get("images")) and setting.get("data") != "texts"
    conversational = conversational or setting.get("data") in ("conversational", "assistant_last")
    conversational = conversational or setting.get("tokenizer") == "tools_template" or bool(setting.get("tools"))
    conversational = conversational or setting.get("rewards") in _MODELS  # which read a prompt and its answer
    ends: tuple[int, ...] = (OTHER_END,) if setting.get("tokenizer") == "other_end" else (1,)
    if setting.get("model") == "two_ends":
        ends = (1, OTHER_END)
    return Data(
        seed,
        tools.WORDS if setting.get("tools") else model.words,
        conversational=conversational,
        assistant_last=setting.get("data") == "assistant_last",
        length=min(length, COMPLETION_LENGTH),
        ends=ends,
        tools=str(setting.get("tools") or ""),
        images={name: setting.get(name) for name in ("images", "model")} if setting.get("images") else None,
    )


def tokenizer(model: TinyModel, setting: Mapping[str, Any]) -> Any:
    """The processing class; with images it is a processor.

    ``other_end``: its end of sequence is not the one in the model's config.
    """
    if setting.get("images"):
        model = images.vision_model(model)
    processing_class = copy.deepcopy(model.tokenizer)
    kind = setting.get("tokenizer")
    if kind == "other_end":
        processing_class.eos_token = "<unk>"
    elif kind == "no_padding":
        processing_class.pad_token = None
    elif kind == "tools_template":
        processing_class.chat_template = _TOOLS_TEMPLATE
    if setting.get("tools"):
        processing_class.chat_template = tools.WITHOUT_CALLS if kind == "drops_calls" else tools.CHAT_TEMPLATE
        processing_class.response_template = tools.RESPONSE_TEMPLATE
        processing_class.response_schema = tools.RESPONSE_SCHEMA
    return images.processor(model, setting, processing_class) if setting.get("images") else processing_class


def policy(model: TinyModel, setting: Mapping[str, Any], whole: bool = False) -> Any:
    """The model as a user passes it, before a trainer adds an adapter.

    ``changed``: its weights differ from those in the folder from which it was read. ``generation_settings``: its own
    generation config has a temperature and the like. ``two_ends``: that config names a second end of sequence.
    ``name``: the folder, from which the trainer loads it. ``peft_model`` and ``both``: it has an adapter that was
    trained before, with ``peft_parameters`` one of the stacked matrices of experts. ``experts``: a mixture of experts
    whose config asks for its auxiliary loss. ``vision`` and ``llava``: vision models. ``tied``: its output head is its
    embedding. The name of an architecture: see :mod:`pytest_trlcompat.conformance.architectures`.

    Args:
        whole: build the model instead of reading it from a folder: under ZeRO-3 a model that is read is partitioned.
    """
    import torch
    import transformers

    kind = str(setting.get("model"))
    if kind == "name" and not whole:
        return str(model.path)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    if kind == "llava" or (kind == "vision" and setting.get("images")):
        model = images.vision_model(model)
    elif kind in ("experts", "vision", "tied"):
        model = _beside(kind, model)
    if whole:
        policy_model = _made(kind, model) or model.new_model().to(dtype)
    else:
        in_memory = _made(kind, model)
        folder = model.path if in_memory is None else (images.saved if kind == "llava" else saved)(in_memory)
        is_vision = kind in images.MODELS
        auto = transformers.AutoModelForImageTextToText if is_vision else transformers.AutoModelForCausalLM
        policy_model = auto.from_pretrained(folder, attn_implementation="eager", torch_dtype=dtype)
    if kind == "changed":
        with torch.no_grad():
            for parameter in policy_model.parameters():
                getattr(parameter, "ds_tensor", parameter).mul_(1.25)  # ZeRO-3 has partitioned what it read
    elif kind == "generation_settings":
        policy_model.generation_config.update(
            temperature=0.3, top_k=7, top_p=0.8, repetition_penalty=1.3, do_sample=True
        )
    elif kind == "two_ends":
        policy_model.generation_config.eos_token_id = [1, OTHER_END]
    elif kind == "experts":
        policy_model.config.update({"output_router_logits": True, "router_aux_loss_coef": _AUX_LOSS_COEF})
        # A model has read its config when it was built.
        policy_model.router_aux_loss_coef = _AUX_LOSS_COEF
    if setting.get("adapter") in ("peft_model", "peft_parameters", "both"):
        from peft import get_peft_model

        policy_model = get_peft_model(
            policy_model, _lora_of_experts() if setting["adapter"] == "peft_parameters" else _lora()
        )
        fill_adapter(policy_model)
    return policy_model


def _made(kind: str, model: TinyModel) -> Any:
    """A model of a kind that :mod:`pytest_trlcompat.tiny` does not have; ``None`` for other kinds."""
    if kind == "llava":
        return images.llava(model)
    return architecture(kind, model) if kind in ARCHITECTURES else None


def _beside(kind: str, model: TinyModel) -> TinyModel:
    """A mixture of experts, a vision model, or one with tied embeddings, with the same vocabulary."""
    from pytest_trlcompat import tiny

    names = ("vocab_size", "initializer_range", "num_hidden_layers", "directory")
    sizes = {name: getattr(model, name) for name in names}
    if kind == "tied":
        return tiny.qwen2(**sizes, tie_word_embeddings=True)
    return tiny.vlm(**sizes) if kind == "vision" else tiny.moe(**sizes)


def reward_model(model: TinyModel) -> Any:
    """A model with one output for a conversation, at its last token."""
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    language_model = model.new_model()
    config = copy.deepcopy(language_model.config)
    config.num_labels = 1
    with _not_partitioned():
        scorer = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)](config)
    scorer.model.load_state_dict(language_model.model.state_dict())
    with torch.no_grad():
        scorer.score.weight.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
    return scorer.eval()


@contextlib.contextmanager
def _not_partitioned() -> Iterator[None]:
    """Within, Transformers does not partition models that ``from_config`` makes, also under ZeRO-3.

    Partitioning takes all ranks, and only one of them makes the reference's model.
    """
    from transformers.integrations import deepspeed

    deepspeed_config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = deepspeed_config


def rewards_of_trainer(model: TinyModel, setting: Mapping[str, Any]) -> list[Any]:
    """What a user passes as ``reward_funcs``."""
    import torch

    kind = setting.get("rewards", "letters")
    if kind not in _MODELS:
        return [*reward_functions(kind)]
    scorer = reward_model(model)
    if kind == "model_nan":
        scorer.register_forward_hook(_without_some, with_kwargs=True)
    return [torch.compile(scorer, backend="eager") if kind == "compiled_model" else scorer]


def _without_some(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    """A hook that removes the number of conversations that :func:`_is_without` selects."""
    for row, ids in enumerate(kwargs["input_ids"] if "input_ids" in kwargs else args[0]):
        if _is_without(ids):
            output.logits[row] = float("nan")


def _is_without(ids: Any) -> bool:
    """Whether a conversation gets no number: about a third of them, however they are padded."""
    # The id of the pad token is 0, so that padding adds nothing.
    return int(ids.sum()) % 3 == 0


def rewards_of_reference(model: TinyModel, setting: Mapping[str, Any]) -> list[Callable[..., list[float | None]]]:
    """The same rewards as functions of the texts ``completions`` and ``prompts``, and of ``target``."""
    kind = setting.get("rewards", "letters")
    if kind not in _MODELS:
        owned = [environments.reward_of_environment] if setting.get("tools") == "environment_reward" else []
        return [*(_awaited(function) for function in reward_functions(kind)), *owned]
    import torch

    scorer, processing_class = reward_model(model), tokenizer(model, setting)

    def scored(completions: Sequence[str], prompts: Sequence[str], **_: Any) -> list[float | None]:
        scores: list[float | None] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            text = processing_class.apply_chat_template(messages, tokenize=False)
            ids = torch.tensor([processing_class(text, add_special_tokens=False)["input_ids"]])
            with torch.no_grad():
                number = scorer(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.item()
            scores.append(None if kind == "model_nan" and _is_without(ids) else number)
        return scores

    # TRL calls a reward model by the last part of the path that its config names.
    scored.__name__ = str(model.path).rpartition("/")[2]
    return [scored]


def _awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    # An object with an asynchronous __call__ is itself no coroutine function.
    if not inspect.iscoroutinefunction(vars(type(function)).get("__call__")):
        return function

    def awaited(**kwargs: Any) -> Any:
        return asyncio.run(function(**kwargs))

    awaited.__name__ = name_of(function)
    return awaited


def adapter_config(setting: Mapping[str, Any]) -> Any:
    """What is passed as ``peft_config``, or ``None``.

    ``saved_head``: it has its own output head in addition to LoRA's factors. ``trained_tokens``: it has its own rows of
    the embedding; where embeddings are tied, they are rows of the output head too.
    """
    kind = setting.get("adapter")
    if kind == "mapping":
        return {"r": 4}
    if kind == "saved_head":
        return _lora(modules_to_save=["lm_head"])
    if kind == "trained_tokens":
        return _lora(trainable_token_indices=list(_TRAINED_TOKENS))
    return _lora() if kind in ("peft_config", "both") else None


def _lora(**more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)


def _lora_of_experts() -> Any:
    from peft import LoraConfig

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=experts, task_type="CAUSAL_LM")


def fill_adapter(model: Any) -> None:
    """Fill LoRA's factors with numbers: the second one begins at zero, so that the adapter would do nothing."""
    import torch

    for name, parameter in model.named_parameters():
        if "lora_" in name:
            # By the name, so that the adapters of trainer and reference are equal; hash() differs between processes.
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            with torch.no_grad():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def untrained(model: TinyModel, setting: Mapping[str, Any]) -> tuple[Any, Any]:
    """The policy as a trainer has it before training, adapters included, and the reference model.

    The reference of a policy that comes with an adapter is a copy of it; that of a policy that gets a new adapter is
    the model without the adapter.
    """
    policy_model, adapter = policy(model, setting, whole=True), adapter_config(setting)
    if adapter is not None:
        from peft import get_peft_model

        policy_model = get_peft_model(policy_model, adapter)
        fill_adapter(policy_model)
    reference = (
        copy.deepcopy(policy_model) if adapter is None else policy(model, {**setting, "adapter": ""}, whole=True)
    )
    return policy_model.eval(), reference.eval()


def prompts_asked(
    model: TinyModel, data: Data, setting: Mapping[str, Any], part: str
) -> list[tuple[tuple[int, ...], int]]:
    """Token ids of the prompts of a dataset, and the number in the column ``target``.

    Messages are written by the chat template; a last message of an assistant is continued.
    """
    rows = prompt_count(setting, part)
    processing_class = tokenizer(model, setting)
    if data.images is not None and data.conversational:
        return [(ids, target) for ids, target, _ in _processed(processing_class, data, rows, part)]
    prompts, text_tokenizer = [], getattr(processing_class, "tokenizer", processing_class)
    for text, prompt in zip(data.texts(rows, part), data.prompts(rows, part), strict=True):
        written = text
        if data.tools in environments.KINDS:
            observed = environments.observation(data.tools, target_of(text))
            prompt = [{**prompt[0], "content": prompt[0]["content"] + observed}]
        if data.conversational:
            how: dict[str, Any] = {"add_generation_prompt": True}
            if data.assistant_last:
                how = {"continue_final_message": True}
            if data.tools:
                how["tools"] = [tools.w51]
            written = processing_class.apply_chat_template(prompt, tokenize=False, **how)
        prompts.append((tuple(text_tokenizer(written, add_special_tokens=False)["input_ids"]), target_of(text)))
    return prompts


def inputs_asked(
    model: TinyModel, data: Data, setting: Mapping[str, Any], part: str
) -> dict[tuple[int, ...], dict[str, Any]]:
    """The further inputs of a model by the token ids of a prompt, as the processor makes them from that prompt alone;
    empty without images."""
    if data.images is None:
        return {}
    processing_class = tokenizer(model, setting)
    return {ids: inputs for ids, _, inputs in _processed(processing_class, data, prompt_count(setting, part), part)}


def _processed(
    processing_class: Any, data: Data, rows: int, part: str
) -> Iterator[tuple[tuple[int, ...], int, dict[str, Any]]]:
    """Token ids, target and inputs of each prompt that may have images."""
    assert data.images is not None
    how = {"continue_final_message": True} if data.assistant_last else {"add_generation_prompt": True}
    for row, (text, prompt) in enumerate(zip(data.texts(rows, part), data.prompts(rows, part), strict=True)):
        pictures = images.images_of(data.images, data.seed, part, row)
        ids, inputs = images.processed(processing_class, prompt, pictures, **how)
        yield ids, target_of(text), inputs


def prompt_count(setting: Mapping[str, Any], part: str) -> int:
    name = "prompts" if part == "training" else "prompts_of_evaluation"
    if part == "evaluation" and not setting.get("evaluation"):
        return 0
    return int(setting.get(name, AXES[name][0]))
