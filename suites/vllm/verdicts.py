"""How trainings with vLLM are judged, by numbers alone; the benchmark of planted faults asks the same.

Runs in the test process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding

from ..in_rank import vllm_loss, vllm_training
from ..verdicts import failure_of
from .trainings import VLLMTraining

__all__ = [
    "MOST_OF_MODEL",
    "WEIGHTS",
    "answers",
    "batches",
    "image_token",
    "late",
    "loss",
    "memory",
    "policy",
    "released",
    "weights",
]

MOST_OF_MODEL = 0.5
"""Of the whole model's bytes: a unit of FSDP's or a parameter of ZeRO-3's is a twelfth of it at most, and a few may be
gathered at once."""
WEIGHTS = "grpo-vllm-weights"
STRAYS = ("missing", "unknown", "repeated")
GROUPS = {"GRPO": 2, "RLOO": 2, "Distillation": 1}
"""By trainer how many completions a prompt gets."""
NUMBERS = {
    "GRPO": ("sampler_error", "passed_on", "policy_error", "ratio_error"),
    "RLOO": ("policy_error",),
    "Distillation": (),
}
"""By trainer which numbers of :func:`vllm_sampling.compare` it asks for or computes."""
LOGP_TOLERANCE = 2e-4
"""Of the policy's log-probabilities, in float32, about 5; measured were 4e-6 at most."""
LOGP_TOLERANCE_BF16 = 0.5
"""The same where the policy trains in bfloat16; measured were 0.05, and stale weights are off by 1 and more."""


def weights(training: VLLMTraining, label: str, issue: str = WEIGHTS) -> Finding:
    """``ok`` where the engine had the policy's weights whenever it was asked, each handed over once.

    Raises:
        Absent: the cure refuses this training, since the engine cannot have its weights.
    """
    if training.failure:
        if training.failure.startswith(vllm_training.REFUSED):
            raise Absent(training.failure)
        failed = failure_of(issue, {"training": training.failure})
        return Finding(failed or Verdict.ERROR, training.evidence())
    generations = [generation for rank in training.ranks for generation in rank["generations"]]
    synchronisations = [synchronisation for rank in training.ranks for synchronisation in rank["synchronisations"]]
    steps = {generation["step"] for generation in generations}
    assert len(steps) > 1, "the policy was asked for once alone, before it had moved"
    assert synchronisations, "nothing was synchronised"
    assert all(generation["tensors"] > 0 for generation in generations)
    if vllm_training.is_adapted(label.partition("-")[2]):
        assert max(generation["margin"] for generation in generations) > 4, "the adapter is too small to be seen"
    off = [generation for generation in generations if generation["wrong"]]
    strays = {
        name: sorted({stray for synchronisation in synchronisations for stray in synchronisation[name]})
        for name in STRAYS
    }
    evidence = {
        **training.evidence(),
        "generations": len(generations),
        "steps": sorted(steps),
        "evaluations": sum(generation["evaluation"] for generation in generations),
        "tensors": generations[0]["tensors"],
        "generations_off": len(off),
        "tensors_off": sorted({name for generation in off for name in generation["wrong"]}),
        "most_off": max((amount for generation in off for amount in generation["wrong"].values()), default=0.0),
        **strays,
    }
    return Finding(Verdict.SILENT if off or any(strays.values()) else Verdict.OK, evidence)


def loss(training: VLLMTraining, label: str) -> Finding:
    """``ok`` where a training whose server was lost ended with an error in every rank, and never used other weights."""
    ranks = training.ranks
    generations = [generation for rank in ranks for generation in rank["generations"]]
    off = [generation for generation in generations if generation["wrong"]]
    assert any(generation["step"] < vllm_loss.LOST_AFTER for generation in generations), "the server was never asked"
    evidence = {
        **training.evidence(),
        "steps": sorted({generation["step"] for generation in generations}),
        "gone_when_asked": sum(rank["unanswered"] for rank in ranks),
        "generations_off": len(off),
        "most_off": max((amount for generation in off for amount in generation["wrong"].values()), default=0.0),
        "ranks_failed": sum(rank["failure"] is not None for rank in ranks),
    }
    loud = evidence["ranks_failed"] == len(ranks)
    return Finding(Verdict.OK if loud and not off else Verdict.SILENT, evidence)


def late(training: VLLMTraining, label: str, issue: str) -> Finding:
    """As :func:`weights`, of a training whose server answered late: it has waited for the answers, and used them."""
    finding = weights(training, label, issue)
    if training.failure is None:
        assert training.passed_on["late_answers"] + training.passed_on["unanswered"] > 0, "the server was never late"
    return finding


def released(training: VLLMTraining, label: str, issue: str) -> Finding:
    """As :func:`weights` and :func:`batches` together, of a training whose server is of another release of TRL."""
    of_weights = weights(training, label, issue)
    if of_weights.verdict is not Verdict.OK:
        return of_weights
    trained_on = batches(training, label)
    return Finding(trained_on.verdict, {**of_weights.evidence, **trained_on.evidence})


def memory(training: VLLMTraining) -> Finding:
    """``ok`` where no rank took as much of its accelerator as :data:`MOST_OF_MODEL` to hand over weights."""
    if training.failure:
        return Finding(Verdict.ERROR, training.evidence())
    most = [
        max(rank["synchronisations"], key=lambda synchronisation: synchronisation["extra_bytes"])
        for rank in training.ranks
    ]
    parts = [synchronisation["extra_bytes"] / synchronisation["bytes"] for synchronisation in most]
    evidence = {
        **training.evidence(),
        "bytes_of_model": most[0]["bytes"],
        "extra_bytes": [synchronisation["extra_bytes"] for synchronisation in most],
        "most_of_model": round(max(parts), 3),
    }
    return Finding(Verdict.WASTEFUL if max(parts) > MOST_OF_MODEL else Verdict.OK, evidence)


def policy(training: VLLMTraining, label: str) -> Finding:
    """``ok`` where no synchronisation changed the policy."""
    if training.failure:
        return Finding(Verdict.ERROR, training.evidence())
    synchronisations = [synchronisation for rank in training.ranks for synchronisation in rank["synchronisations"]]
    assert len({synchronisation["step"] for synchronisation in synchronisations}) > 1, (
        "the adapter was zero when it was merged"
    )
    changed = [synchronisation["changed"] for synchronisation in synchronisations]
    evidence = {
        **training.evidence(),
        "synchronisations": len(synchronisations),
        "parameters_changed": sorted({name for changes in changed for name in changes}),
        "most_changed": max((amount for changes in changed for amount in changes.values()), default=0.0),
    }
    return Finding(Verdict.SILENT if any(changed) else Verdict.OK, evidence)


def batches(training: VLLMTraining, label: str, trainer: str = "GRPO", issue: str = "") -> Finding:
    """``ok`` where the batches hold what the engine was asked for and returned.

    Args:
        issue: whose symptom a failure may be; the trainer's of batches where it is empty.
    """
    if training.failure:
        failed = failure_of(issue or f"{trainer.lower()}-vllm-batches", {"training": training.failure})
        return Finding(failed or Verdict.ERROR, training.evidence())
    comparisons = [comparison for rank in training.ranks for comparison in rank["batches"]]
    assert comparisons, "nothing was trained on"
    tolerance = LOGP_TOLERANCE_BF16 if label.endswith("bf16") else LOGP_TOLERANCE
    calls = list(zip(*(rank["generations"] for rank in training.ranks), strict=True))
    assert calls, "the engine was asked for nothing"
    wrong = {
        "prompts": sum(not _in_groups(call, GROUPS[trainer]) for call in calls),
        "completions": sum(not comparison["same_ids"] for comparison in comparisons),
        # Of requests with images: those that had others than their row, became other tokens than its, or whose
        # completion has a token that must not be sampled.
        **{
            name: sum(generation.get(name, 0) for call in calls for generation in call)
            for name in ("images", "tokens_of_images", "sampled")
        },
    }
    complete = [comparison for comparison in comparisons if comparison["same_ids"]]
    # The ratio of a sequence has the errors of its five tokens together.
    every = {"passed_on": 1e-6, "policy_error": tolerance, "ratio_error": 5 * tolerance}
    required = _required(training, label, trainer)
    for name in NUMBERS[trainer]:
        wrong[name] = sum(
            name in required
            if comparison[name] is None
            else not comparison[name] <= every.get(name, comparison["sampler_tolerance"])
            for comparison in complete
        )
    evidence = {
        **training.evidence(),
        "calls": len(calls),
        "batches": len(comparisons),
        "tokens": sum(comparison["tokens"] for comparison in comparisons),
        "wrong": {name: count for name, count in wrong.items() if count},
        **{f"most_{name}": _most(complete, name) for name in (*NUMBERS[trainer], "moved")},
    }
    return Finding(Verdict.SILENT if any(wrong.values()) else Verdict.OK, evidence)


def image_token(training: VLLMTraining, label: str, issue: str, trainer: str = "GRPO") -> Finding:
    """As :func:`batches`, of a model that favours the token that stands for an image: no completion has one."""
    finding = batches(training, label, trainer, issue)
    calls = [generation for rank in training.ranks for generation in rank["generations"]]
    evidence = {
        **finding.evidence,
        "completions": sum(len(generation["completions"]) for generation in calls),
        "completions_with_the_token": sum(generation["sampled"] for generation in calls),
    }
    if finding.verdict is Verdict.BROKEN:
        assert evidence["completions_with_the_token"], "no completion had the token, so that the failure is another"
    if not training.failure:
        complete = [comparison for rank in training.ranks for comparison in rank["batches"] if comparison["same_ids"]]
        likely = _most(complete, "kept_from") or 0.0
        assert likely > 0.5, f"nothing is shown: the model gives the token a probability of {likely} at most"
        evidence["most_likely"] = likely
    return Finding(finding.verdict, evidence)


def answers(training: VLLMTraining, label: str, issue: str) -> Finding:
    """``ok`` where TRL can read what the engine answers."""
    failed = failure_of(issue, {"training": training.failure} if training.failure else {})
    return Finding(failed or Verdict.OK, training.evidence())


def _required(training: VLLMTraining, label: str, trainer: str) -> tuple[str, ...]:
    """Which numbers there have to be: GRPO before it corrected for the sampler asked for no log-probabilities, and
    computed the policy's where a batch is used more than once alone."""
    if trainer != "GRPO":
        return NUMBERS[trainer]
    # Some releases pass on ratios alone, in which the sampler's numbers are seen.
    if training.ranks[0]["corrects"]:
        return tuple(name for name in NUMBERS[trainer] if name != "passed_on")
    return ("policy_error",) if label.endswith("reuse") else ()


def _most(batches: Sequence[dict[str, Any]], name: str) -> float | None:
    return max((comparison[name] for comparison in batches if comparison[name] is not None), default=None)


def _in_groups(call: Sequence[dict[str, Any]], size: int) -> bool:
    """Whether the ranks' prompts, one rank's behind another's, are groups of an equal prompt, in training each of its
    own, and every prompt got a completion."""
    prompts = [prompt for rank in call for prompt in rank["prompts"]]
    groups = [prompts[index : index + size] for index in range(0, len(prompts), size)]
    firsts = [tuple(group[0]) for group in groups]
    return (
        all(prompt == group[0] for group in groups for prompt in group)
        and (len(set(firsts)) == len(firsts) or call[0]["evaluation"])
        and all(len(rank["completions"]) == len(rank["prompts"]) and min(rank["completions"]) > 0 for rank in call)
    )
