"""How much memory a loss needs beyond the model: with logits as a whole, TRL's own fused head, and Liger's loss.

    nox -s bench -- loss_memory [--vocabulary 2048 8192 32768] [--rows 8] [--tokens 64]

One forward and backward pass of GRPO's loss on a Qwen2 of one narrow layer, on the software accelerator, which counts
what is allocated on it. Printed are the peak beyond what was there before, and the largest difference of the gradients
from those with whole logits. In each cell that has Liger; what a release of TRL lacks is left out.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trlcompat.launch import Launcher  # noqa: E402

__all__ = ["measured"]

HIDDEN = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    versions = {name: metadata.version(name) for name in ("trl", "liger-kernel", "torch")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{options.rows} rows of {options.tokens} tokens, hidden size {HIDDEN}, float32; MiB beyond the model")
    with Launcher(device="software", timeout=300) as launcher:
        for vocabulary in options.vocabulary:
            arguments = (vocabulary, options.rows, options.tokens)
            found = launcher(measured, *arguments, strategy="single", sharded=False).values[0]
            for name, (peak, off) in found.items():
                print(f"  vocabulary {vocabulary:>6}  {name:<22} {peak / 2**20:9.2f}  gradients off by {off:.1e}")
    return 0


def measured(vocabulary: int, rows: int, tokens: int) -> dict[str, tuple[int, float]]:
    """By way to compute the loss: bytes at the peak, and how far gradients are from those with whole logits."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    ids = torch.randint(0, vocabulary, (rows, tokens)).to("npu")
    advantages = torch.randn(rows).to("npu")
    state = Qwen2ForCausalLM(config).state_dict()
    ways: dict[str, Callable[[Any, Any, Any], Any]] = {
        "whole logits": _whole,
        "Liger": _liger,
        "TRL's fused head": _fused,
    }
    found: dict[str, tuple[int, float]] = {}
    truth: list[Any] = []
    for name, loss_of in ways.items():
        model = Qwen2ForCausalLM(config)
        model.load_state_dict(state)
        model.to("npu")
        for parameter in model.parameters():  # what an optimizer would have after the first step
            parameter.grad = torch.zeros_like(parameter)
        torch.npu.synchronize()
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        with torch.compiler.set_stance("force_eager"):
            loss = loss_of(model, ids, advantages)
        if loss is None:
            continue
        loss.backward()
        peak = torch.npu.max_memory_allocated() - before
        gradients = [parameter.grad.cpu() for parameter in model.parameters()]
        truth = truth or gradients
        off = max(float((one - other).abs().max()) for one, other in zip(gradients, truth, strict=True))
        found[name] = (peak, off)
    return found


def _whole(model: Any, ids: Any, advantages: Any) -> Any:
    logits = model(ids).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return _grpo(logprobs, advantages)


def _fused(model: Any, ids: Any, advantages: Any) -> Any:
    from trl.trainer import utils

    add = getattr(utils, "add_fused_lm_head", None)
    if add is None:
        return None
    add(model)
    found = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    logprobs = found[:, :-1] if found.shape[1] == ids.shape[1] else found
    return _grpo(logprobs, advantages)


def _liger(model: Any, ids: Any, advantages: Any) -> Any:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    choices = {"beta": 0.0, "use_ref_model": False, "loss_type": "bnpo", "temperature": 1.0}
    known = inspect.signature(LigerFusedLinearGRPOLoss.__init__).parameters
    loss_of = LigerFusedLinearGRPOLoss(**{name: value for name, value in choices.items() if name in known})
    hidden = model.model(ids).last_hidden_state[:, :-1]
    wanted = ids[:, 1:]
    mask = wanted.new_ones(wanted.shape)
    loss, _ = loss_of(hidden, model.lm_head.weight, wanted, mask, advantages)
    return loss


def _grpo(logprobs: Any, advantages: Any) -> Any:
    """The loss of the first iteration: a ratio of one, whose gradient is that of the log-probability."""
    ratios = (logprobs - logprobs.detach()).exp()
    return -(ratios * advantages[:, None]).mean()


if __name__ == "__main__":
    sys.exit(main())
