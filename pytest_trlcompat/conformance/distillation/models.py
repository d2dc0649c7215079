"""Students and teachers of a distillation, and adapters, by the axes of a setting.

Runs inside a rank; imports the stack only inside functions.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.grpo import objects
from pytest_trlcompat.conformance.supervised.compared import with_dropout

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTERS", "KINDS", "TEACHERS", "adapter_config", "student", "teacher", "untrained"]

KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "gemma2": ("Gemma2Config", {"final_logit_softcapping": 1.5, "head_dim": 8}),
    "gpt2": ("GPT2Config", {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0}),
    "modernbert": ("ModernBertDecoderConfig", {"global_attn_every_n_layers": 1, "decoder_bias": True}),
    "phi": ("PhiConfig", {}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"logits_soft_cap": 1.5, "lru_width": 32, "num_hidden_layers": 3}),
}
"""Architectures whose logits are more than a matrix times the last hidden state, or whose positions are absolute, by
name the config's class and what it takes: a scale, a bound, a bias, a layer before the matrix."""
TEACHERS = (
    *("", "bfloat16", "name", "name_in_config", "dropout", "experts", "other_vocabulary", "none"),
    *(name for name in KINDS),
)
"""``""``: a model of other sizes than the student's. ``name``: its folder; ``name_in_config``: that stands in
``teacher_model_name_or_path`` alone; ``dropout``: its config asks for some, and it is in training mode."""
ADAPTERS = ("", "peft_config", "peft_model", "both", "mapping", "head", "saved_head", "prompt")
"""Beside those that others have: ``head``: of the matrix of logits; ``saved_head``: that is trained as it is;
``prompt``: tokens before the prompt."""
_SCALE = 0.3


def student(model: TinyModel, setting: Mapping[str, Any], whole: bool = False) -> Any:
    """The model as a user passes it.

    Args:
        whole: see :func:`pytest_trlcompat.conformance.grpo.objects.policy`.
    """
    kind = setting.get("model")
    return _of_kind(kind, model) if kind in KINDS else objects.policy(model, setting, whole)


def teacher(model: TinyModel, setting: Mapping[str, Any], whole: bool = False) -> Any:
    """What is passed as ``teacher_model``: a model, or its folder; ``None`` where nothing is."""
    kind = setting.get("teacher", "")
    other = teacher_of(model)
    if kind in ("none", "name_in_config") and not whole:
        return None
    if kind in KINDS:
        return _of_kind(kind, model)
    if kind == "other_vocabulary":
        other = dataclasses.replace(other, vocab_size=model.vocab_size + 8)
    chosen = {"name_in_config": "name"}.get(kind, kind)
    found = objects.policy(other, {"model": chosen}, whole)
    if kind == "dropout" and not whole:
        found = with_dropout(found, None, {"dropout": "attention"}).train()
    return found


def teacher_of(model: TinyModel) -> TinyModel:
    """Of half the student's width, and other weights."""
    return dataclasses.replace(model, hidden_size=model.hidden_size // 2, seed=model.seed + 1)


def untrained(model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Student and teacher as a trainer has them before training, adapters included; in evaluation mode."""
    found, adapter = student(model, setting, whole=True), adapter_config(setting)
    if adapter is not None:
        from peft import get_peft_model

        found = get_peft_model(found, adapter)
        objects.fill_adapter(found)
    taught = teacher(model, setting, whole=True)
    if setting.get("teacher_model_init_kwargs", {}).get("dtype"):
        import torch

        taught = taught.to(getattr(torch, setting["teacher_model_init_kwargs"]["dtype"]))
    return found.eval(), taught.eval()


def adapter_config(setting: Mapping[str, Any]) -> Any:
    """What is passed as ``peft_config``, or ``None``."""
    wanted = setting.get("adapter")
    if wanted not in ("head", "saved_head", "prompt"):
        return objects.adapter_config(setting)
    import peft

    if wanted == "prompt":
        return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    found = copy.deepcopy(objects.adapter_config({"adapter": "peft_config"}))
    if wanted == "head":
        found.target_modules = {"q_proj", "lm_head"}
    else:
        found.modules_to_save = ["lm_head"]
    return found


def _of_kind(kind: Any, model: TinyModel) -> Any:
    """A model of another architecture with the student's vocabulary, in float32."""
    import torch
    import transformers

    name, own = KINDS[str(kind)]
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        **{f"{token}_token_id": number for token, number in (("pad", 0), ("bos", 1), ("eos", 1))},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, name)))
        found = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**sizes, **own})).float()
        with torch.no_grad():
            for each, parameter in found.named_parameters():
                if parameter.dim() > 1 or "bias" in each:
                    parameter.normal_(0.0, _SCALE)
    return found.eval()
