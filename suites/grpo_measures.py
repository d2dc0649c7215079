"""What the suites measure inside a rank, with the bodies of :mod:`grpo`: plain numbers for a verdict.

Imports the stack only inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import grpo

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["local_elements", "logged", "logits_to_keep", "placement", "save_model"]


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
        "losses": logged(trainer, "loss"),
        "kl": logged(trainer, "kl"),
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


def placement(trainer: Any) -> dict[str, Any]:
    """Where the reference model is, how much of it is here, and in which mode."""
    ref = trainer.ref_model
    return {
        "ref_class": type(ref).__name__,
        "ref_bases": [base.__name__ for base in type(ref).__mro__],
        "ref_devices": sorted({parameter.device.type for parameter in ref.parameters()}),
        "device": trainer.accelerator.device.type,
        "local": local_elements(ref),
        "training": ref.training,
        "requires_grad": any(parameter.requires_grad for parameter in ref.parameters()),
    }


def local_elements(module: Any) -> int:
    """Number of parameter elements that this rank holds."""
    shards = (shard.to_local() if hasattr(shard, "to_local") else shard for shard in module.parameters())
    return sum(shard.numel() for shard in shards)


def logged(trainer: Any, key: str) -> list[float]:
    """What was logged at each step of training."""
    return [float(entry[key]) for entry in trainer.state.log_history if entry.get(key) is not None and "loss" in entry]
