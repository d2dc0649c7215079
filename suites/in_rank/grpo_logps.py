"""How long the logits are that a GRPO trainer materialises, and how far its log-probabilities are off.

Runs inside a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.accelerator import artefacts

from . import grpo

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["VARIANTS", "Variant", "log_probabilities"]

SHORTEST_PROMPT = 4
KEYWORDS = ("logits_to_keep", "num_logits_to_keep")


@dataclass(frozen=True)
class Variant:
    """One way to ask for log-probabilities.

    Attributes:
        padded: prompts of unequal lengths, padded on the left.
        batch_size: rows per forward, for releases that take one.
        dtype: of the policy.
        takes_keyword: whether the policy's forward takes a keyword that shortens its logits.
        train: whether to train afterwards.
    """

    padded: bool = False
    temperature: float = 1.0
    batch_size: int | None = None
    dtype: str = "float32"
    takes_keyword: bool = True
    train: bool = False


VARIANTS: Mapping[str, Variant] = {
    "plain": Variant(train=True),
    "split": Variant(batch_size=3),
    "bf16": Variant(dtype="bfloat16"),
    "neither": Variant(takes_keyword=False),
    "padded": Variant(padded=True),
    "temperature": Variant(temperature=0.7),
    "all": Variant(padded=True, temperature=0.7, batch_size=3),
}


def log_probabilities(subject: str, model: TinyModel) -> dict[str, dict[str, Any]]:
    """Of each variant the numbers of :func:`_measure`, or the ``failure`` with the exception's ``mro`` and text."""
    measured = {}
    for name, variant in VARIANTS.items():
        try:
            measured[name] = _measure(subject, model, variant)
        except Exception as error:
            mro = [base.__name__ for base in type(error).__mro__]
            measured[name] = {"failure": artefacts.error_text(error), "mro": mro}
    return measured


def _measure(subject: str, model: TinyModel, variant: Variant) -> dict[str, Any]:
    """One trainer: what it materialises, what it computes; and losses and KL of three steps, where it trains."""
    with _recorded_generation(model) as returned:
        arguments = {"model": _policy(model, variant), "train_dataset": _prompts(variant)}
        trainer = grpo.build_trainer(subject, model, arguments=arguments, temperature=variant.temperature)
        lengths: list[int] = []
        head = trainer.model.get_output_embeddings()
        handle = head.register_forward_hook(lambda _module, _inputs, output: lengths.append(output.shape[1]))
        logps, ids = _ask_trainer(trainer, returned, lengths, model, variant)
        # 0 where the head is never called as a module: trl 1.16 scores in chunks.
        materialised = max(lengths, default=0)
        handle.remove()
        expected = _expected_logps(trainer.model, ids, variant.temperature)
        measured = {
            "sequence": ids.shape[1],
            "kept": grpo.COMPLETION_LENGTH + 1,
            "logits_length": materialised,
            "padding": int((ids == 0).sum()),
            "max_abs_error": (logps.float() - expected).abs().max().item(),
            "spread": expected.std().item(),
        }
        if variant.train:
            trainer.train()
            measured |= {"losses": _logged(trainer, "loss"), "kl": _logged(trainer, "kl")}
        return measured


@contextmanager
def _recorded_generation(model: TinyModel) -> Iterator[list[Any]]:
    from transformers.generation import GenerationMixin

    generate = GenerationMixin.generate
    try:
        yield grpo.fix_completions(model.vocab_size)
    finally:
        GenerationMixin.generate = generate


def _policy(model: TinyModel, variant: Variant) -> Any:
    import torch

    policy = grpo.load_policy(model).to(getattr(torch, variant.dtype))
    return policy if variant.takes_keyword else _without_keywords(policy)


def _without_keywords(policy: Any) -> Any:
    """Make its forward refuse both keywords, as that of a model does which nobody has taught them."""
    import inspect

    original = type(policy).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        refused = sorted(set(kwargs) & set(KEYWORDS))
        if refused:
            raise TypeError(f"forward() got an unexpected keyword argument '{refused[0]}'")
        return original(self, *args, **kwargs)

    known = inspect.signature(original).parameters.values()
    parameters = [
        parameter
        for parameter in known
        if parameter.name not in KEYWORDS and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    policy.__class__ = type("Refusing", (type(policy),), {"forward": forward})
    return policy


def _prompts(variant: Variant) -> Any:
    from pytest_trlcompat import tiny

    return tiny.prompts(16, words=(SHORTEST_PROMPT, grpo.PROMPT_LENGTH)) if variant.padded else grpo.prompts()


def _ask_trainer(
    trainer: Any, returned: list[Any], lengths: list[int], model: TinyModel, variant: Variant
) -> tuple[Any, Any]:
    """Its log-probabilities ``(B, K)`` and the ids ``(B, S)`` they belong to; id 0 is padding and nothing else."""
    import inspect

    import torch

    name = grpo.logps_method()
    if name is None:
        return _listen_to_loss(trainer, returned, lengths)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.vocab_size, (grpo.ROWS, grpo.SEQUENCE_LENGTH), generator=generator)
    if variant.padded:
        for row, padding in enumerate((0, 3, 7, grpo.PROMPT_LENGTH - SHORTEST_PROMPT)):
            ids[row, :padding] = 0
    ids = ids.to(trainer.accelerator.device)
    method = getattr(trainer, name)
    split = {"batch_size": variant.batch_size} if "batch_size" in inspect.signature(method).parameters else {}
    answer = method(trainer.model, ids, (ids != 0).long(), grpo.COMPLETION_LENGTH, **split)
    if isinstance(answer, dict):
        answer = answer["logps"]
    return (answer[0] if isinstance(answer, tuple) else answer).detach(), ids


def _listen_to_loss(trainer: Any, returned: list[Any], lengths: list[int]) -> tuple[Any, Any]:
    """0.14 computes them in a function inside ``compute_loss``: each row is one call of ``torch.gather``."""
    import torch

    gather, rows = torch.gather, []

    def listening(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = gather(*args, **kwargs)
        rows.append(result.detach().squeeze(1))
        return result

    torch.gather = listening
    try:
        inputs = next(iter(trainer.get_train_dataloader()))
        generated = len(lengths)
        original = trainer.model.generate

        def generate(*args: Any, **kwargs: Any) -> torch.Tensor:
            ids = original(*args, **kwargs)
            rows.clear()
            del lengths[generated:]  # those of the generation itself
            return ids

        trainer.model.generate = generate
        trainer.compute_loss(trainer.model, inputs)
        del trainer.model.generate
    finally:
        torch.gather = gather
    ids = returned[-1]
    # The policy's rows come before the reference model's.
    return torch.stack(rows[: ids.shape[0]]), ids


def _expected_logps(model: Any, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """``(B, K)``, each row by a plain full forward pass of its own, without padding or any keyword."""
    import torch

    rows = []
    for row in ids:
        known = row[row != 0][None]
        with torch.no_grad():
            logits = model(input_ids=known).logits[:, :-1].float() / temperature
        chosen = logits.log_softmax(-1).gather(-1, known[:, 1:, None])[0, :, 0]
        rows.append(chosen[-grpo.COMPLETION_LENGTH :])
    return torch.stack(rows)


def _logged(trainer: Any, key: str) -> list[float]:
    return [float(entry[key]) for entry in trainer.state.log_history if entry.get(key) is not None and "loss" in entry]
