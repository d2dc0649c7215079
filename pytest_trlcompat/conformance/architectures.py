"""Tiny models of architectures that compute logits or positions in unusual ways.

A trainer that itself computes logits from the last hidden state, or calls a model on padded rows without positions,
gives wrong numbers with them. Runs inside a rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.tiny.models import checkpoint_tensors

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ARCHITECTURES", "SINCE", "architecture", "saved"]

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "cohere": ("CohereConfig", {"logit_scale": 0.5}),
        "gemma2": ("Gemma2Config", {"final_logit_softcapping": 1.5, "attn_logit_softcapping": None, "head_dim": 8}),
        "gpt2": ("GPT2Config", {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
        "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
        "granite": ("GraniteConfig", {"logits_scaling": 3.0}),
        "modernbert": ("ModernBertDecoderConfig", {"global_attn_every_n_layers": 1, "decoder_bias": True}),
        "phi": ("PhiConfig", {}),
        "recurrent_gemma": (
            "RecurrentGemmaConfig",
            # Three layers are one round of its pattern: two recurrent ones and one of attention.
            {"logits_soft_cap": 1.5, "lru_width": 32, "num_hidden_layers": 3},
        ),
    }
)
"""The config's class and its arguments, by name. The logits of these architectures are more than a matrix times the
last hidden state (a scale, a bound, a bias, a layer before the matrix), or their positions are absolute; the last
matrix of GPT-NeoX has an unusual name."""
SINCE: Mapping[tuple[str, Any], str] = MappingProxyType(
    {
        ("model", "gemma2"): "transformers>=4.42",
        ("model", "granite"): "transformers>=4.45",
        ("model", "modernbert"): "transformers>=5",
        ("model", "recurrent_gemma"): "transformers>=5",
    }
)
"""The releases with which a training of an architecture can be judged; the other architectures are in all releases that
are tried. Until 4.57 RecurrentGemma cannot be trained for a second step, and ModernBertDecoder averages over tokens by
itself."""
_SCALE = 0.3


def architecture(name: str, model: TinyModel) -> torch.nn.Module:
    """One of :data:`ARCHITECTURES` with this model's vocabulary, in float32 and in evaluation mode.

    Its weights depend on its name alone, and are so large that each of them changes the loss.
    """
    import torch
    import transformers

    config_class, arguments = ARCHITECTURES[name]
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
    config = getattr(transformers, config_class)(**{**sizes, **arguments})
    with torch.random.fork_rng(devices=[]):
        # Not by hash(), which gives each process another number.
        torch.manual_seed(sum(map(ord, config_class)))
        # By its class, not from_config, which partitions under ZeRO-3: it is the whole model.
        language_model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float()
        with torch.no_grad():
            for parameter_name, parameter in language_model.named_parameters():
                if parameter.dim() > 1 or "bias" in parameter_name:
                    parameter.normal_(0.0, _SCALE)
    return language_model.eval()


def saved(model: Any) -> str:
    """A folder of this rank with the whole model: trainers read the reference model from where the policy came from."""
    from safetensors.torch import save_file

    folder = Path(tempfile.mkdtemp(prefix="trlcompat-"))
    # Not model.save_pretrained: in a distributed process of Transformers 5, ranks other than 0 would write nothing.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    save_file(checkpoint_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
