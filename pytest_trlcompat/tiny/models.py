"""Tiny random models: their descriptions, and how their weights are made."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.tiny.architectures import ARCHITECTURES, IMAGE_PATCH, VISION_TOKENS, Architecture, Sizes
from pytest_trlcompat.tiny.tokenizer import EOS_TOKEN_ID, PAD_TOKEN_ID, SPECIAL_TOKENS, new_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

_EXPERTS = "_experts_implementation"
"""The attribute by which Transformers 5 chooses how experts are computed."""

__all__ = ["TinyModel", "checkpoint_tensors", "gemma", "llama", "mistral", "moe", "qwen2", "vlm"]


@dataclass(frozen=True, kw_only=True)
class TinyModel(Sizes):
    """A tiny language model: its description, and the model itself, which is built on first use.

    Every parameter is random, norms and biases included, so that a tensor which a checkpoint, a gather or a broadcast
    lost cannot look right because it still has its initial value. Attention is eager: with sdpa and left padding, plain
    CPU kernels are off on fully masked rows. Experts are eager too, since the software accelerator has no kernel for
    their fused computation.

    Two equal descriptions give bitwise equal weights, whatever Transformers release builds them and whatever the
    state of the caller's random generators, which stay as they are.

    Attributes:
        architecture: ``"qwen2"``, ``"mistral"``, ``"llama"``, ``"gemma"``, ``"qwen3_moe"`` or ``"qwen2_vl"``.
        seed: of the weights.
        vocab_size: three special tokens (pad 0, eos 1, unk 2), then the words ``w0``, ``w1``, ..., and at the end those
            of a vision model for its images and videos.
        intermediate_size: in a mixture of experts, of all the experts together that a token is routed to, each of which
            has an equal part.
        num_experts: of a mixture of experts; other architectures have none.
        num_experts_per_tok: to how many of them each token is routed.
        tie_word_embeddings: whether input and output embeddings are one parameter; by default as in the architecture's
            published models: in Gemma they are, in the others not.
        initializer_range: standard deviation of the weights, as in Transformers.
        directory: where :attr:`path` saves to.

    Raises:
        ValueError: for sizes from which the layers cannot be built.
        ArchitectureAbsent: when something is built, and the installed release of Transformers has no such
            architecture.
    """

    architecture: str
    seed: int = 0
    tie_word_embeddings: bool | None = None
    initializer_range: float = 0.02
    directory: str | os.PathLike[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {self.architecture!r}; choose one of {', '.join(ARCHITECTURES)}")
        if self.tie_word_embeddings is None:
            object.__setattr__(self, "tie_word_embeddings", self._architecture.tied)
        if self.words <= 0:
            special = self.vocab_size - self.words
            raise ValueError(f"vocab_size={self.vocab_size} leaves no words besides {special} special tokens")
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
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is not between 1 and num_experts={self.num_experts}"
            )
        if self._architecture.vision and self.head_dim % 8:
            raise ValueError(
                f"hidden_size={self.hidden_size} gives {self.num_attention_heads} heads of {self.head_dim}, and a "
                "vision model needs a multiple of 8: for the frequencies of time, height and width"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The description alone. A model that was built already is built again where the description is unpickled."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def decoder_layer(self) -> str:
        """Name of the decoder layer's class, as FSDP's ``transformer_layer_cls_to_wrap`` wants it."""
        return self._architecture.decoder_layer

    @property
    def words(self) -> int:
        """How many words the tokenizer knows: ``w0`` to ``w<words - 1>``."""
        return self.vocab_size - len(SPECIAL_TOKENS) - len(self._last_tokens)

    def check_present(self) -> None:
        """As :meth:`pytest_trlcompat.tiny.architectures.Architecture.check_present`."""
        self._architecture.check_present()

    @property
    def _architecture(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def _last_tokens(self) -> tuple[str, ...]:
        return VISION_TOKENS if self._architecture.vision else ()

    @cached_property
    def config(self) -> PretrainedConfig:
        """The configuration of :attr:`model`; its ``_name_or_path`` is :attr:`path`, from which trainers load again."""
        return self._named(self._new_config())

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A word-level tokenizer with left padding and a chat template."""
        return new_tokenizer(self.words, self.architecture, self._last_tokens)

    @cached_property
    def processor(self) -> ProcessorMixin | PreTrainedTokenizerFast:
        """What a trainer takes as ``processing_class``: a vision model's processor, and the tokenizer of any other.

        The processor makes one token of 8 by 8 pixels, and leaves images of at most 32 by 32 pixels as they are where
        both sides are multiples of 8. From Transformers 4.52 on it takes videos only where torchvision is installed.

        Raises:
            ImportError: a vision model's processor needs Pillow, which is not installed.
        """
        return self.processor_with(self.tokenizer) if self._architecture.vision else self.tokenizer

    def processor_with(self, tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        """A vision model's processor with another tokenizer of the same words; see :attr:`processor`."""
        self.check_present()
        return _new_processor(tokenizer, videos=self._architecture.has_file("video_processing_qwen2_vl.py"))

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, in float32 on the CPU and in eval mode, as ``from_pretrained`` would return it."""
        return self._new_model(self.config)

    @cached_property
    def path(self) -> Path:
        """A folder from which ``from_pretrained`` loads the untrained model and its tokenizer.

        It is saved once for equal descriptions with the same :attr:`directory`, also by several processes at once.

        Raises:
            ValueError: the description has no directory.
        """
        if self.directory is None:
            raise ValueError("a tiny model without a directory has no path; give one: tiny.qwen2(directory=tmp_path)")
        self.check_present()
        target = Path(self.directory) / f"{self.architecture}-{self._digest()}"
        if not target.exists():
            _rename_into_place(self.save, target)
        return target

    def new_model(self) -> PreTrainedModel:
        """Another model with the same weights and a configuration of its own."""
        return self._new_model(self._named(self._new_config()))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the untrained model and its tokenizer into ``folder``, whatever happened to :attr:`model` since.

        A vision model's processor is saved as well where it can be built.
        """
        from safetensors.torch import save_file

        # Not model.save_pretrained: in a distributed process of Transformers 5, ranks other than 0 would write nothing.
        model = self._new_model(self._new_config())
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        _keep_eager(
            Path(folder) / "config.json",
            "_attn_implementation",
            *([_EXPERTS] if hasattr(model.config, _EXPERTS) else []),
        )
        model.generation_config.save_pretrained(folder)
        save_file(checkpoint_tensors(model), os.fspath(Path(folder) / "model.safetensors"), metadata={"format": "pt"})
        self.tokenizer.save_pretrained(folder)
        if self._architecture.vision:
            with contextlib.suppress(ImportError):
                self.processor.save_pretrained(folder)

    def _digest(self) -> str:
        description = {name: value for name, value in asdict(self).items() if name != "directory"}
        # Releases write configurations that older ones cannot read.
        description["transformers"] = metadata.version("transformers")
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]

    def _named(self, config: PretrainedConfig) -> PretrainedConfig:
        """Name a configuration as ``from_pretrained`` does, since TRL reads the model again from there."""
        config._name_or_path = str(self.path) if self.directory else f"tiny {self.architecture} without a directory"
        return config

    def _new_config(self) -> PretrainedConfig:
        import transformers

        self.check_present()
        config = getattr(transformers, self._architecture.config)(
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
            **self._architecture.settings(self),
        )
        if hasattr(config, _EXPERTS):
            setattr(config, _EXPERTS, "eager")
        return config

    def _new_model(self, config: PretrainedConfig) -> PreTrainedModel:
        import torch
        import transformers

        # The constructor draws from the global generator; the caller's random numbers must not depend on us.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = getattr(transformers, self._architecture.model)(config).float()
        for name, parameter in model.named_parameters():
            for published, part in _published(name, parameter.detach()):
                _fill(part, published, self.seed, self.initializer_range, self._architecture.norm_centre)
        return model.eval()


def qwen2(**sizes: Any) -> TinyModel:
    """A tiny Qwen2; see :class:`TinyModel` for the sizes that can be chosen."""
    return TinyModel(architecture="qwen2", **sizes)


def mistral(**sizes: Any) -> TinyModel:
    """A tiny Mistral; see :class:`TinyModel` for the sizes that can be chosen."""
    return TinyModel(architecture="mistral", **sizes)


def llama(**sizes: Any) -> TinyModel:
    """A tiny Llama; see :class:`TinyModel` for the sizes that can be chosen."""
    return TinyModel(architecture="llama", **sizes)


def gemma(**sizes: Any) -> TinyModel:
    """A tiny Gemma, with tied embeddings as all Gemmas; see :class:`TinyModel` for the sizes that can be chosen."""
    return TinyModel(architecture="gemma", **sizes)


def moe(**sizes: Any) -> TinyModel:
    """A tiny mixture of experts, a Qwen3-MoE; see :class:`TinyModel` for the sizes that can be chosen."""
    return TinyModel(architecture="qwen3_moe", **sizes)


def vlm(**sizes: Any) -> TinyModel:
    """A tiny vision model, a Qwen2-VL; see :class:`TinyModel` for the sizes that can be chosen."""
    return TinyModel(architecture="qwen2_vl", **sizes)


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The parameters under the names and in the shapes of a published checkpoint, which every release loads.

    Releases name and stack the parameters of a built model differently: Transformers 5 keeps all experts of a layer in
    one tensor, and a vision model's parts have moved. A tied parameter is contained once.

    Returns:
        Published name to contiguous tensor, on the model's device and in its precision.
    """
    return {
        published: part.contiguous()
        for name, parameter in model.named_parameters()
        for published, part in _published(name, parameter.detach())
    }


def _published(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The names that a published checkpoint has for a parameter or for its parts, each with a view of the parameter."""
    name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    layer, experts, matrix = name.partition(".mlp.experts.")
    if not experts or parameter.dim() != 3:
        yield name, parameter
        return
    # gate_up_proj is (E, 2 I, H), down_proj (E, H, I).
    names = matrix.removesuffix("_proj").split("_")
    for expert, whole in enumerate(parameter):
        for part, tensor in zip(names, whole.chunk(len(names)), strict=True):
            yield f"{layer}.mlp.experts.{expert}.{part}_proj.weight", tensor


_NORM = re.compile(r"(norm[12]?|ln_q)\.weight$")


def _fill(parameter: torch.Tensor, name: str, seed: int, scale: float, norm_centre: float) -> None:
    """Fill with random numbers that depend only on seed and name, around ``norm_centre`` for norms and else around 0.

    A generator of its own for each parameter makes the weights independent of the order in which a release builds its
    modules. Uniform numbers, unlike normal ones, do not depend on the processor's vector instructions.

    Args:
        scale: the standard deviation of the numbers.
    """
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    centre = norm_centre if _NORM.search(name) else 0.0
    # A uniform distribution on [-a, a] has a standard deviation of a / sqrt(3).
    spread = scale * 3**0.5
    with torch.no_grad():
        parameter.uniform_(-spread, spread, generator=generator).add_(centre)


def _keep_eager(config_file: Path, *choices: str) -> None:
    """Make ``from_pretrained`` choose eager attention and experts, too.

    Transformers leaves the choice out of ``config.json``, but every release from 4.45 to 5.23 takes it from there. For
    vision models not all do: 4.57 does not.
    """
    config = json.loads(config_file.read_text())
    for part in (config, *(config[name] for name in ("text_config", "vision_config") if name in config)):
        part.update(dict.fromkeys(choices, "eager"))
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def _new_processor(tokenizer: PreTrainedTokenizerFast, *, videos: bool) -> ProcessorMixin:
    """Qwen2-VL's processor, with this tokenizer and for small images.

    Args:
        videos: whether this release's processor takes videos as well, as from Transformers 4.52 on, for which it needs
            torchvision. Where torchvision is missing, a processor for images only is made.

    Raises:
        ImportError: Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ImportError("the processor of Qwen2-VL needs Pillow, not installed here")
    import transformers

    # Sides are rounded to multiples of a token's; by default images are blown up to 56 by 56 pixels.
    pixels = {"min_pixels": 8 * 8, "max_pixels": 32 * 32, "merge_size": 2, **IMAGE_PATCH}
    has_torchvision = importlib.util.find_spec("torchvision") is not None
    # From Transformers 5 on the other one needs torchvision.
    images = getattr(transformers, "Qwen2VLImageProcessorPil", None)
    images = transformers.Qwen2VLImageProcessor if has_torchvision or images is None else images
    parts = {"image_processor": images(**pixels), "tokenizer": tokenizer}
    kind = transformers.Qwen2VLProcessor
    if videos and has_torchvision:
        parts["video_processor"] = transformers.Qwen2VLVideoProcessor(**pixels)
    elif videos:
        kind = _of_images_alone(kind)
    return kind(**parts, chat_template=tokenizer.chat_template)


def _of_images_alone(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """A processor's class without its part for videos."""

    class Processor(kind):
        attributes = ("image_processor", "tokenizer")

        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return list(cls.attributes)

    Processor.__name__ = Processor.__qualname__ = kind.__name__
    return Processor


def _rename_into_place(save: Any, target: Path) -> None:
    """Call ``save`` with a temporary folder, then rename it, so that ``target`` is never incomplete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, since a rename does not cross file systems.
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
