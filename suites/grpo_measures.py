"""What the suites measure inside a rank, with the bodies of :mod:`grpo`: plain numbers for a verdict.

Imports the stack only inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import grpo

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["fsdp_reference", "logits_to_keep", "save_model"]


def save_model(model: TinyModel) -> str:
    """Save it once, in one process, for all launches: in several ranks some releases save on the first alone."""
    return str(model.path)


def logits_to_keep(subject: str, model: TinyModel, temperature: float = 1.0) -> dict[str, Any]:
    """How long the logits are that the trainer materialises, and how far its log-probabilities are off.

    Then three training steps, of which losses and KL are returned; KL must be 0 at the first, where policy and
    reference model are still equal.
    """
    returned = grpo.fix_completions(model.vocab_size)
    trainer = grpo.build_trainer(subject, model, temperature=temperature)
    lengths: list[int] = []
    head = trainer.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _module, _inputs, output: lengths.append(output.shape[1]))
    logps, ids = _ask_trainer(trainer, returned, lengths, model)
    materialised = max(lengths, default=0)  # 0: the head is never called as a module; 1.16 scores in chunks
    handle.remove()
    truth = grpo.reference_logps(trainer.model, ids, temperature)
    trainer.train()
    return {
        "sequence": ids.shape[1],
        "kept": grpo.COMPLETION_LENGTH + 1,
        "logits_length": materialised,
        "temperature": temperature,
        "max_abs_error": (logps.float() - truth).abs().max().item(),
        "mean_logp": truth.mean().item(),
        "losses": _logged(trainer, "loss"),
        "kl": _logged(trainer, "kl"),
    }


def _ask_trainer(trainer: Any, returned: list[Any], lengths: list[int], model: TinyModel) -> tuple[Any, Any]:
    """Its log-probabilities ``(B, K)`` and the ids ``(B, S)`` they belong to."""
    import torch

    method = grpo.logps_method()
    if method is None:
        return _listen_to_loss(trainer, returned, lengths)
    generator = torch.Generator().manual_seed(0)
    shape = (grpo.ROWS, grpo.SEQUENCE_LENGTH)
    ids = torch.randint(3, model.vocab_size, shape, generator=generator).to(trainer.accelerator.device)
    return grpo.per_token_logps(trainer, method, ids), ids


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
    return torch.stack(rows[: ids.shape[0]]), ids  # the policy's rows come before the reference model's


def fsdp_reference(subject: str, model: TinyModel) -> dict[str, Any]:
    """Where and how sharded the reference model is, and three training steps.

    A failure of the training is returned, not raised, so that the placement is known all the same.
    """
    grpo.fix_completions(model.vocab_size)
    losses: list[float] = []

    class Recording(grpo.trainer_class(subject)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach().float().item())
            return loss

    trainer = grpo.build_trainer(subject, model, cls=Recording)
    measured = _placement(trainer)
    measured["failure"] = None
    try:
        trainer.train()
    except Exception as error:
        measured["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
    return {
        **measured,
        "losses": losses,
        "kl": _logged(trainer, "kl"),
        "grad_norm": _logged(trainer, "grad_norm"),
        "local_after": _local_elements(trainer.ref_model),
    }


def _placement(trainer: Any) -> dict[str, Any]:
    ref = trainer.ref_model
    return {
        "ref_class": type(ref).__name__,
        "ref_bases": [base.__name__ for base in type(ref).__mro__],
        "ref_devices": sorted({parameter.device.type for parameter in ref.parameters()}),
        "device": trainer.accelerator.device.type,
        "local": _local_elements(ref),
        "training": ref.training,
        "requires_grad": any(parameter.requires_grad for parameter in ref.parameters()),
    }


def _local_elements(module: Any) -> int:
    """Number of parameter elements that this rank holds."""
    shards = (shard.to_local() if hasattr(shard, "to_local") else shard for shard in module.parameters())
    return sum(shard.numel() for shard in shards)


def _logged(trainer: Any, key: str) -> list[float]:
    return [float(entry[key]) for entry in trainer.state.log_history if entry.get(key) is not None and "loss" in entry]
