"""The engine's model: the network of a checkpoint, built by Transformers, with the weights that it is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ReceivedWeight", "RecordingModel"]


@dataclass(frozen=True)
class ReceivedWeight:
    """A weight as it was handed over."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class RecordingModel:
    """What stands for the model of vLLM's runner.

    Attributes:
        network: Transformers' module. Its parameters' names are those of a checkpoint, where vLLM has some layers as
            one.
        received: every weight that it was handed, in order, those of the checkpoint not among them.
        version: goes up with every weight.
    """

    def __init__(self, path: str, dtype: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._folder = Path(path)
        if not self._folder.is_dir():
            raise NotImplementedError(f"the recording engine loads a model from a folder, and {path!r} is none")
        config = AutoConfig.from_pretrained(path)
        config._attn_implementation = "eager"
        self.dtype = _dtype(config, dtype)
        # By its class: what from_pretrained and from_config build, DeepSpeed partitions under ZeRO-3.
        self.network = AutoModelForCausalLM._model_mapping[type(config)](config).to(self.dtype).eval()
        self.config = config
        self.received: list[ReceivedWeight] = []
        self.version = 0
        self._asleep = False
        self._discarded: set[str] = set()
        self.load_checkpoint()

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self.network.named_parameters())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take new weights, under the names of a checkpoint.

        Returns:
            Their names, without that of an output head that is the embeddings'.

        Raises:
            KeyError: the model has no such weight.
            ValueError: it has another shape.
            RuntimeError: the weights' memory was released by :meth:`sleep`.
        """
        loaded = set()
        for name, weight in weights:
            self.received.append(ReceivedWeight(name, str(weight.dtype), tuple(weight.shape)))
            if self._load(name, weight):
                loaded.add(name)
        return loaded

    def load_checkpoint(self) -> None:
        """Take the weights of the checkpoint."""
        from safetensors.torch import load_file

        files = sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise NotImplementedError(f"the recording engine reads safetensors, and {self._folder} has none")
        for file in files:
            for name, weight in load_file(file).items():
                self._load(name, weight)

    def sleep(self, *, discard: bool) -> None:
        """Release the weights' memory; they come back when it wakes up, unless they are discarded."""
        import torch

        self._asleep = True
        if discard:
            self._discarded = {name for name, _ in self.named_parameters()}
            with torch.no_grad():
                for _, parameter in self.named_parameters():
                    # So that whoever computes with discarded weights sees it.
                    parameter.fill_(torch.nan)

    def wake_up(self) -> None:
        self._asleep = False

    def check_awake(self) -> None:
        """
        Raises:
            RuntimeError: it sleeps, or lacks weights; vLLM would compute with whatever is in memory.
        """
        if self._asleep:
            raise RuntimeError("the recording engine sleeps: its weights' memory is released")
        if self._discarded:
            raise RuntimeError(
                f"the recording engine slept and discarded its weights; {len(self._discarded)} of them were not given "
                f"again: {', '.join(sorted(self._discarded)[:3])}"
            )

    def _load(self, name: str, weight: torch.Tensor) -> bool:
        import torch

        if self._asleep:
            raise RuntimeError(f"{name} was given to a recording engine that sleeps: its weights' memory is released")
        # The embeddings are the output head, and come under their own name.
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            return False
        parameter = dict(self.named_parameters())[name]
        if parameter.shape != weight.shape:
            raise ValueError(f"{name} has the shape {tuple(parameter.shape)}, and was given {tuple(weight.shape)}")
        with torch.no_grad():
            parameter.copy_(weight.detach().to("cpu"))
        self._discarded.discard(name)
        self.version += 1
        return True


def _dtype(config: Any, requested: str) -> torch.dtype:
    """As vLLM on a CPU chooses it: bfloat16 for a checkpoint in float32, unless told otherwise."""
    import torch

    if requested != "auto":
        return getattr(torch, str(requested).removeprefix("torch."))
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return torch.bfloat16 if dtype is torch.float32 else dtype
