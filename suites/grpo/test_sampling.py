"""What GRPO samples: which prompts a step draws, and from which distribution the tokens of completions are drawn."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo, grpo_sampling
from ..verdicts import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.launch import LaunchResult
    from pytest_trlcompat.tiny import TinyModel

COMPLETIONS_PER_PROMPT = 2
TOLERANCE = 1e-5
"""Of a probability: two orders above rounding; the tokens that a limit of 50 leaves out have about 1e-2 together."""
NOISE = 1e-2
"""Of a probability, over the error without checkpointing, which is the matter of ``grpo-sampling``; noise has 0.1."""


@pytest.mark.known_issue("grpo-train-sampler")
def test_sampled_prompts(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    """Transformers passes the data set to a method that takes none.

    Right is: training runs, and each step draws prompts that no step before has drawn, each as often as it is
    completed.
    """

    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["undisturbed"]
        failed = failure_of(judge.issue.id, run["failures"])
        if failed:
            return Finding(failed, {"failures": run["failures"]})
        drawn = Counter(prompt for step in run["prompts"] for prompt in step)
        evidence = {"losses": run["losses"], "drawn": len(drawn), "times": sorted(set(drawn.values()))}
        rows = grpo.ROWS * grpo.STEPS * run["accumulated"]
        right = set(drawn.values()) == {COMPLETIONS_PER_PROMPT} and sum(drawn.values()) == rows
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-sampling")
@pytest.mark.parametrize("variant", ["plain", "model_defaults"])
def test_distribution_of_tokens(
    variant: str, subject: str, judge: Judge, launch_once: Callable[..., list[Any]], sharp_qwen2: TinyModel
) -> None:
    """Completions are sampled from another distribution than they are scored by (trl 5783).

    Right is: each token is drawn with the probabilities ``softmax(logits / temperature)``, whatever the model's own
    ``generation_config`` prefers, which stays as it is.
    """

    def measure() -> Finding:
        (measured,) = launch_once(grpo_sampling.sampling, subject, sharp_qwen2, strategy="single")
        run = measured[variant]
        assert run["tokens"] > 0, "nothing was sampled"
        assert run["model_generation_config_kept"], "the model's own preferences were lost"
        return Finding(Verdict.OK if run["max_abs_error"] <= TOLERANCE else Verdict.SILENT, run)

    judge(measure, subject=subject, strategy="single" if variant == "plain" else f"single-{variant}")


@pytest.mark.known_issue("grpo-checkpointed-generation")
def test_gradient_checkpointing(
    subject: str, judge: Judge, launch_once: Callable[..., list[Any]], sharp_qwen2: TinyModel
) -> None:
    """Completions sampled with gradient checkpointing on are noise.

    Right is: each token is drawn with the probabilities of a plain full forward pass, as without gradient
    checkpointing, and each token of the sequence goes through the model once.
    """

    def measure() -> Finding:
        (measured,) = launch_once(grpo_sampling.sampling, subject, sharp_qwen2, strategy="single")
        run = measured["checkpointing"]
        if not run["max_abs_error"] - measured["plain"]["max_abs_error"] <= NOISE:  # also NaN
            return Finding(Verdict.SILENT, run)
        return Finding(Verdict.WASTEFUL if run["positions"] > run["positions_needed"] else Verdict.OK, run)

    judge(measure, subject=subject, strategy="single")
