"""Tiny random models: what they are, and how their weights are made.

Imports torch and transformers only when something is built.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.tiny.tokenizer import EOS_TOKEN_ID, PAD_TOKEN_ID, SPECIAL_TOKENS, new_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["TinyModel", "mistral", "qwen2"]

# Architecture -> (configuration, model, decoder layer) in transformers.
_CLASSES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", "Qwen2DecoderLayer"),
    "mistral": ("MistralConfig", "MistralForCausalLM", "MistralDecoderLayer"),
}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A tiny causal language model: its description, and the model itself, which is built on first use.

    Every parameter is random, norms and biases included, so that a tensor which a checkpoint, a gather or a broadcast
    lost cannot look right by being still at its initial value. Attention is eager: with sdpa and left padding, plain
    CPU kernels are off on fully masked rows.

    Two equal descriptions give bitwise equal weights, whatever Transformers release builds them and whatever the
    state of the caller's random generators, which stay as they are.

    Attributes:
        architecture: ``"qwen2"`` or ``"mistral"``.
        seed: of the weights.
        vocab_size: three special tokens (pad 0, eos 1, unk 2), then the words ``w0``, ``w1``, ...
        initializer_range: standard deviation of the weights, as in Transformers.
        directory: where :attr:`path` saves to.

    Raises:
        ValueError: for sizes from which the layers cannot be built.
    """

    architecture: str
    seed: int = 0
    vocab_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 128
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    directory: str | os.PathLike[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.architecture not in _CLASSES:
            raise ValueError(f"unknown architecture {self.architecture!r}; choose one of {', '.join(_CLASSES)}")
        if self.vocab_size <= len(SPECIAL_TOKENS):
            raise ValueError(
                f"vocab_size={self.vocab_size} leaves no words besides {len(SPECIAL_TOKENS)} special tokens"
            )
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} does not split into {self.num_attention_heads} heads of an even size, "
                "which rotary embeddings need"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The description alone: a model that was built already is built again where this is unpickled."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def decoder_layer(self) -> str:
        """Name of the decoder layer's class, as FSDP's ``transformer_layer_cls_to_wrap`` wants it."""
        return _CLASSES[self.architecture][2]

    @property
    def words(self) -> int:
        """How many words the tokenizer knows: ``w0`` to ``w<words - 1>``."""
        return self.vocab_size - len(SPECIAL_TOKENS)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The configuration of :attr:`model`."""
        return self._new_config()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A word-level tokenizer with left padding and a chat template."""
        return new_tokenizer(self.words, self.architecture)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, in float32 on the CPU and in eval mode, as ``from_pretrained`` would return it."""
        return self._new_model(self.config)

    @cached_property
    def path(self) -> Path:
        """A folder from which ``from_pretrained`` loads the untrained model and its tokenizer.

        It is saved once for equal descriptions with the same :attr:`directory`, also by several processes at once.
        """
        if self.directory is None:
            raise ValueError("a tiny model without a directory has no path; give one: tiny.qwen2(directory=tmp_path)")
        target = Path(self.directory) / f"{self.architecture}-{self._digest()}"
        if not target.exists():
            _rename_into_place(self.save, target)
        return target

    def new_model(self) -> PreTrainedModel:
        """Another model with the same weights and a configuration of its own."""
        return self._new_model(self._new_config())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the untrained model and its tokenizer into ``folder``, whatever happened to :attr:`model` since."""
        from safetensors.torch import save_model

        # Not model.save_pretrained: in a distributed process of Transformers 5, ranks other than 0 would write nothing.
        model = self.new_model()
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        _keep_attention_eager(Path(folder) / "config.json")
        model.generation_config.save_pretrained(folder)
        save_model(model, os.fspath(Path(folder) / "model.safetensors"), metadata={"format": "pt"})
        self.tokenizer.save_pretrained(folder)

    def _digest(self) -> str:
        description = {name: value for name, value in asdict(self).items() if name != "directory"}
        # Releases write configurations that older ones cannot read.
        description["transformers"] = metadata.version("transformers")
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]

    def _new_config(self) -> PretrainedConfig:
        import transformers

        return getattr(transformers, _CLASSES[self.architecture][0])(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=self.tie_word_embeddings,
            initializer_range=self.initializer_range,
            sliding_window=None,
            pad_token_id=PAD_TOKEN_ID,
            bos_token_id=EOS_TOKEN_ID,
            eos_token_id=EOS_TOKEN_ID,
            attn_implementation="eager",
        )

    def _new_model(self, config: PretrainedConfig) -> PreTrainedModel:
        import torch
        import transformers

        # The constructor draws from the global generator; the caller's random numbers must not depend on us.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = getattr(transformers, _CLASSES[self.architecture][1])(config).float()
        for name, parameter in model.named_parameters():
            _fill(parameter, name, self.seed, self.initializer_range)
        return model.eval()


def qwen2(**sizes: Any) -> TinyModel:
    """A tiny Qwen2; see :class:`TinyModel` for the sizes that can be chosen."""
    return TinyModel(architecture="qwen2", **sizes)


def mistral(**sizes: Any) -> TinyModel:
    """A tiny Mistral; see :class:`TinyModel` for the sizes that can be chosen."""
    return TinyModel(architecture="mistral", **sizes)


def _fill(parameter: torch.Tensor, name: str, seed: int, scale: float) -> None:
    """Fill with random numbers that depend on the seed and the name alone, around 1 for norms and around 0 for others.

    A generator of its own for each parameter makes the weights independent of the order in which a release builds its
    modules; uniform numbers, unlike normal ones, do not depend on the processor's vector instructions.
    """
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    centre = 1.0 if name.endswith("norm.weight") else 0.0
    spread = scale * 3**0.5
    with torch.no_grad():
        parameter.uniform_(-spread, spread, generator=generator).add_(centre)


def _keep_attention_eager(config_file: Path) -> None:
    """Make ``from_pretrained`` choose eager attention, too.

    Transformers leaves the choice out of ``config.json``, but every release from 4.45 to 5.23 takes it from there.
    """
    config = json.loads(config_file.read_text())
    config["_attn_implementation"] = "eager"
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def _rename_into_place(save: Any, target: Path) -> None:
    """Call ``save`` with a temporary folder next to ``target``, then rename it, so that it is never incomplete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        save(temporary)
        try:
            temporary.rename(target)
        except OSError:
            # Another process was quicker; what it saved is the same.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
