"""From which distribution GRPO samples its completions, against the one that it scores them by: runs inside a rank.

Each token is drawn by ``torch.multinomial``; the probabilities that it is given are compared with
``softmax(logits / temperature)`` of a plain full forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..measured import largest
from . import grpo

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["MODEL_DEFAULTS", "sampling"]

TEMPERATURE = 1.0
MODEL_DEFAULTS: Mapping[str, float] = {"temperature": 0.5, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3}
"""What a model's ``generation_config.json`` may say; that of Qwen2.5 is much like it."""
_EOS = 1


def sampling(subject: str, model: TinyModel) -> dict[str, dict[str, Any]]:
    """Sample one batch: with a model that has no preferences, with one that has, and with gradient checkpointing."""
    return {
        "plain": _measure(subject, model, {}, {}),
        "model_defaults": _measure(subject, model, MODEL_DEFAULTS, {}),
        "checkpointing": _measure(subject, model, {}, {"gradient_checkpointing": True}),
    }


def _measure(
    subject: str, model: TinyModel, defaults: Mapping[str, float], settings: Mapping[str, Any]
) -> dict[str, Any]:
    policy = grpo.load_policy(model)
    for name, value in defaults.items():
        setattr(policy.generation_config, name, value)
    # Without learning, so that the policy which sampled is still there afterwards.
    settings = {"temperature": TEMPERATURE, "learning_rate": 0.0, "max_steps": 1, **_no_documented_filter(), **settings}
    trainer = grpo.build_trainer(subject, model, arguments={"model": policy}, **settings)
    with _listening(trainer.model.get_input_embeddings()) as heard:
        trainer.train()
    errors, least_allowed = _compare(trainer.model, heard.generated, heard.probabilities)
    return {
        "tokens": len(errors),
        "max_abs_error": largest(errors),
        "least_tokens_allowed": least_allowed,
        "vocabulary": model.vocab_size,
        "positions": heard.positions,
        # The prompt, and each token but the last, once.
        "positions_needed": heard.generated.shape[1] - 1,
        # A model that has no preferences has none to lose.
        "model_generation_config_kept": all(
            getattr(policy.generation_config, name) == value for name, value in defaults.items()
        ),
    }


def _no_documented_filter() -> dict[str, Any]:
    """0.16 and 0.17 say in their ``GRPOConfig`` that they sample from the 50 most likely tokens; turn that off."""
    import trl

    field = trl.GRPOConfig.__dataclass_fields__.get("top_k")
    return {"top_k": 0} if field is not None and field.default == 50 else {}


@dataclass
class _Heard:
    """Of the first generation.

    Attributes:
        probabilities: ``(B, V)`` of each drawing.
        positions: how many of a row's tokens went through the model, the same one again counted again.
    """

    probabilities: list[torch.Tensor] = field(default_factory=list)
    positions: int = 0
    _generated: list[torch.Tensor] = field(default_factory=list)

    @property
    def generated(self) -> torch.Tensor:
        """The ids ``(B, S)``."""
        return self._generated[0]

    @property
    def over(self) -> bool:
        return bool(self._generated)

    def end(self, ids: torch.Tensor) -> None:
        self._generated.append(ids)

    def begin(self) -> None:
        """Forget what was drawn before, as the data loader does."""
        if not self.over:
            self.probabilities, self.positions = [], 0


@contextmanager
def _listening(embeddings: Any) -> Iterator[_Heard]:
    import torch
    from transformers.generation import GenerationMixin

    multinomial, generate = torch.multinomial, GenerationMixin.generate
    heard = _Heard()

    def count(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if not heard.over:
            heard.positions += inputs[0].shape[1]

    def drawing(probabilities: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not heard.over:
            heard.probabilities.append(probabilities.detach().clone())
        return multinomial(probabilities, *args, **kwargs)

    def generating(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        heard.begin()
        ids: torch.Tensor = generate(self, *args, **kwargs)
        heard.end(ids)
        return ids

    handle = embeddings.register_forward_pre_hook(count)
    torch.multinomial, GenerationMixin.generate = drawing, generating
    try:
        yield heard
    finally:
        torch.multinomial, GenerationMixin.generate = multinomial, generate
        handle.remove()


def _compare(model: Any, ids: torch.Tensor, probabilities: list[torch.Tensor]) -> tuple[list[float], int]:
    """Of each sampled token the largest deviation in probability; and how few tokens could be drawn at the least."""
    import torch

    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float() / TEMPERATURE
    errors = []
    allowed = ids.shape[1] * 10**6
    start = ids.shape[1] - len(probabilities)
    for position, sampled in enumerate(probabilities):
        right = logits[:, start + position - 1].softmax(-1)
        for row in range(ids.shape[0]):
            # What a row draws after its end is padding, whatever was drawn.
            if _EOS not in ids[row, start : start + position].tolist():
                errors.append((sampled[row] - right[row]).abs().max().item())
                allowed = min(allowed, int((sampled[row] > 0).sum()))
    return errors, allowed
