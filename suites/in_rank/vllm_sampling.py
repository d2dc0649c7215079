"""What a batch made of vLLM's completions must hold: ids in order, the sampler's log-probabilities, importance ratios.

The reference is a plain forward pass of Transformers in float32 on the CPU: of the sampler with the weights that the
engine holds, whatever they are, and of the policy with those that it has.
"""

from __future__ import annotations

import copy
import functools
import math
import unittest.mock
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..measured import largest
from . import vllm_engine

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

    from . import vllm_images

__all__ = ["CLIP_MAX", "compare"]

CLIP_MAX = 3.0
"""``vllm_importance_sampling_clip_max``: with its default mode "sequences with ratios outside [C_min, C_max] are masked
out", by a ratio of 0."""
_LEAST = 1e-30
"""Of a ratio that float32 has to all digits: what is smaller may be 0."""
CAP_OF_TOKENS = 2.0
"""``vllm_importance_sampling_cap`` where there is a ratio for each token: "an upper bound on the importance sampling
ratio"."""


def compare(
    model: TinyModel,
    policy: Mapping[str, torch.Tensor],
    engine: Mapping[str, torch.Tensor],
    outputs: Sequence[Any],
    batch: Mapping[str, Any],
    temperature: float,
    rows: vllm_images.Rows | None = None,
) -> dict[str, Any]:
    """Compare a batch with the engine's outputs and the reference.

    Args:
        policy, engine: weights under the names of a checkpoint, in float32.
        rows: of prompts with images, by which the reference gets these; the sampler is kept from some tokens then.

    Returns:
        ``same_ids``: whether the batch's completions are the engine's, in its order; ``sampler_error``: the largest
        difference of the sampler's log-probabilities to the reference's; ``sampler_tolerance``: the same difference of
        a reference in the engine's bfloat16, four times; ``passed_on``: of the sampler's to those in the batch;
        ``policy_error``: of the batch's log-probabilities of the policy, or of their sums over a completion, to the
        reference's; ``ratio_error``: of the importance ratios, relative, to ``exp(sum(policy - sampler))`` of the
        sequence, and 0 where that is above :data:`CLIP_MAX`, or of each token up to :data:`CAP_OF_TOKENS`;
        ``moved``: by how much policy and sampler differ at most; ``kept_from``: the largest probability of what the
        sampler is kept from, at any place; ``tokens``. ``None`` for what the trainer does not compute, or the engine
        was not asked for.
    """
    import torch

    completions = [list(completion.token_ids) for output in outputs for completion in output.outputs]
    prompts = [list(output.prompt_token_ids) for output in outputs for _ in output.outputs]
    if rows is not None:  # whatever the engine has made of them
        prompts = [list(rows.whole(prompt)) for prompt in prompts]
    mask = batch["completion_mask"].cpu().bool()
    trained_ids = [row[chosen].tolist() for row, chosen in zip(batch["completion_ids"].cpu(), mask, strict=True)]
    if trained_ids != completions:
        return {"same_ids": False, "tokens": sum(map(len, completions))}
    # A trainer that has no use for them does not ask for log-probabilities.
    sampler = None if None in (output.outputs[0].logprobs for output in outputs) else list(map(_of_tokens, outputs))

    def logps(
        weights: Mapping[str, torch.Tensor], dtype: torch.dtype, without: Sequence[int] = ()
    ) -> list[list[float]]:
        network = _with_weights(str(model.path) if rows is None else rows.path, weights, rows is not None).to(dtype)
        return _logps(network, prompts, completions, temperature, without, rows)

    kept_from = () if rows is None else rows.kept_from
    reference = logps(engine, torch.float32, kept_from)
    policys = logps(policy, torch.float32)
    old, sampling_logps, ratio, sums = (
        batch.get(name)
        for name in ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio", "old_logps")
    )
    error = None if old is None else _largest(_rows(old, mask), policys)
    if sums is not None:
        error = _largest(sums.cpu().double()[:, None].tolist(), [[sum(row)] for row in policys])
    of_tokens = ratio is not None and ratio.dim() > 1 and ratio.shape[1] == mask.shape[1] > 1
    ratios: Any = None
    if ratio is not None:
        ratios = _rows(ratio, mask) if of_tokens else ratio.cpu().double().flatten().tolist()
    ratio_error: Any = _token_ratio_error if of_tokens else _ratio_error
    return {
        "same_ids": True,
        "tokens": sum(map(len, completions)),
        "sampler_error": None if sampler is None else _largest(sampler, reference),
        "sampler_tolerance": 4 * _largest(logps(engine, torch.bfloat16, kept_from), reference),
        "passed_on": None
        if sampling_logps is None or sampler is None
        else _largest(_rows(sampling_logps, mask), sampler),
        "policy_error": error,
        "ratio_error": None if ratios is None or sampler is None else ratio_error(ratios, policys, sampler),
        "moved": _largest(policys, sampler or reference),
        # Where it is kept from them, the others have their probability besides.
        "kept_from": -math.expm1(-_largest(logps(engine, torch.float32), reference)) if kept_from else None,
    }


def _ratio_error(
    ratios: Sequence[float], policy: Sequence[Sequence[float]], sampler: Sequence[Sequence[float]]
) -> float:
    errors = []
    for ratio, ours, theirs in zip(ratios, policy, sampler, strict=True):
        exact = math.exp(sum(ours) - sum(theirs))
        masked = exact > CLIP_MAX
        errors.append(abs(ratio) if masked else abs(ratio - exact) / max(exact, _LEAST))
    return largest(errors)


def _token_ratio_error(
    ratios: Sequence[Sequence[float]], policy: Sequence[Sequence[float]], sampler: Sequence[Sequence[float]]
) -> float:
    rows = zip(ratios, policy, sampler, strict=True)
    return largest(
        abs(ratio / min(math.exp(ours - theirs), CAP_OF_TOKENS) - 1)
        for row in rows
        for ratio, ours, theirs in zip(*row, strict=True)
    )


def _of_tokens(output: Any) -> list[float]:
    (completion,) = output.outputs
    return [
        float(choices[token].logprob) for token, choices in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def _rows(values: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    return [row[chosen].tolist() for row, chosen in zip(values.cpu().double(), mask, strict=True)]


def _largest(numbers: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    return largest(
        abs(a - b) for left, right in zip(numbers, expected, strict=True) for a, b in zip(left, right, strict=True)
    )


def _logps(
    network: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float,
    without: Sequence[int],
    rows: vllm_images.Rows | None,
) -> list[list[float]]:
    import torch

    logps = []
    with torch.no_grad():
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = [*prompt, *completion]
            beside = {} if rows is None else rows.inputs_of(prompt, ids)
            logits = network(input_ids=torch.tensor([ids]), **beside).logits[0, len(prompt) - 1 : -1].float()
            logits[:, list(without)] = -torch.inf
            chosen = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])
            logps.append(chosen[:, 0].tolist())
    return logps


def _with_weights(path: str, weights: Mapping[str, torch.Tensor], takes_images: bool) -> Any:
    network = copy.deepcopy(_network(path, takes_images))
    # A network of experts is not compared with a reference, so that each parameter is one of a checkpoint.
    names = {name: vllm_engine.published(name, parameter.shape)[0] for name, parameter in network.named_parameters()}
    lacking = {name for name, part in names.items() if part not in weights}
    unused = {name for name in lacking if name.endswith("lm_head.weight") or ".post_layernorm." in name}
    assert lacking == unused, f"the reference has no weights for {', '.join(sorted(lacking - unused))}"
    network.load_state_dict({name: weights[part] for name, part in names.items() if part in weights}, strict=False)
    return network


@functools.cache
def _network(path: str, takes_images: bool) -> Any:
    """A model of the folder's configuration, with weights that are to be replaced, and whole under ZeRO-3 too."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    config._attn_implementation = "eager"
    kind = transformers.AutoModelForImageTextToText if takes_images else transformers.AutoModelForCausalLM
    # ZeRO-3 partitions what from_pretrained and from_config build. So the model is built by its class, and ZeRO-3 is
    # hidden from the parts of a vision model, which are built by from_config all the same.
    with unittest.mock.patch("transformers.modeling_utils.is_deepspeed_zero3_enabled", return_value=False):
        return kind._model_mapping[type(config)](config).float().eval()
