"""The architectures that tiny models can have: their classes in Transformers, and what their configurations need.

Whether the installed Transformers has an architecture is looked up among its files, without importing it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["ARCHITECTURES", "IMAGE_PATCH", "VISION_TOKENS", "Architecture", "ArchitectureAbsent", "Sizes"]

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""The special tokens of a vision model, by the names that Qwen2-VL's processor knows; the vocabulary ends with them."""
IMAGE_PATCH = {"patch_size": 4, "temporal_patch_size": 2}
"""Pixels of a patch's side, and images of one patch; two by two patches become one token."""


class ArchitectureAbsent(ImportError):
    """The installed release of Transformers has no such architecture."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a tiny model; see :class:`pytest_trlcompat.tiny.TinyModel`."""

    vocab_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    num_experts: int = 4
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 128

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class Architecture:
    """An architecture of Transformers.

    Attributes:
        title: the name for people.
        folder: of its modules in ``transformers/models``.
        since: the first release of Transformers that has the architecture.
        config: the name of the configuration's class.
        model: the name of the model's class.
        decoder_layer: the name of the decoder layer's class.
        norm_centre: where the weights of norms lie: 1, or 0 for norms that add 1 to their weight.
        tied: whether its published models tie input and output embeddings.
        vision: whether it takes images.
        settings: what its configuration takes besides the sizes that all have.
    """

    title: str
    folder: str
    since: str
    config: str
    model: str
    decoder_layer: str
    norm_centre: float = 1.0
    tied: bool = False
    vision: bool = False
    settings: Callable[[Sizes], dict[str, Any]] = lambda _: {}

    def check_present(self) -> None:
        """Check that the installed release of Transformers has this architecture.

        Raises:
            ArchitectureAbsent: it does not; the text names the first release that does.
        """
        if not self.has_file(f"modeling_{self.folder}.py"):
            raise ArchitectureAbsent(
                f"transformers {metadata.version('transformers')} has no {self.title}, which came with {self.since}"
            )

    def has_file(self, name: str) -> bool:
        """Whether the installed release of Transformers has such a file among the architecture's modules."""
        transformers = importlib.util.find_spec("transformers")
        folders = [] if transformers is None else list(transformers.submodule_search_locations or [])
        return any((Path(folder) / "models" / self.folder / name).is_file() for folder in folders)


def _mixture(model: Sizes) -> dict[str, Any]:
    return {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "moe_intermediate_size": model.intermediate_size // model.num_experts_per_tok,
        "head_dim": model.head_dim,
        "norm_topk_prob": True,
    }


def _vision(model: Sizes) -> dict[str, Any]:
    height = width = model.head_dim // 8
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {
        **{name: model.vocab_size - len(names) + place for place, name in enumerate(names)},
        # How many of a head's frequencies stand for time, height and width.
        "rope_scaling": {"type": "mrope", "mrope_section": [model.head_dim // 2 - height - width, height, width]},
        "vision_config": {
            "depth": 1,
            "embed_dim": model.hidden_size,
            "hidden_size": model.hidden_size,
            "num_heads": model.num_attention_heads,
            "mlp_ratio": 2,
            "in_channels": 3,
            "spatial_merge_size": 2,
            **IMAGE_PATCH,
        },
    }


ARCHITECTURES = {
    "qwen2": Architecture("Qwen2", "qwen2", "4.37.0", "Qwen2Config", "Qwen2ForCausalLM", "Qwen2DecoderLayer"),
    "mistral": Architecture(
        "Mistral", "mistral", "4.34.0", "MistralConfig", "MistralForCausalLM", "MistralDecoderLayer"
    ),
    "llama": Architecture("Llama", "llama", "4.28.0", "LlamaConfig", "LlamaForCausalLM", "LlamaDecoderLayer"),
    "gemma": Architecture(
        *("Gemma", "gemma", "4.38.0", "GemmaConfig", "GemmaForCausalLM", "GemmaDecoderLayer"),
        norm_centre=0.0,
        tied=True,
        settings=lambda model: {"head_dim": model.head_dim},
    ),
    "qwen3_moe": Architecture(
        *("Qwen3-MoE", "qwen3_moe", "4.51.0", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer"),
        settings=_mixture,
    ),
    "qwen2_vl": Architecture(
        *("Qwen2-VL", "qwen2_vl", "4.45.0", "Qwen2VLConfig", "Qwen2VLForConditionalGeneration", "Qwen2VLDecoderLayer"),
        vision=True,
        settings=_vision,
    ),
}
