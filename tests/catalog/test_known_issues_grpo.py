"""What the catalogue predicts for GRPO under DeepSpeed, in evaluation and with adapters, where it was measured."""

from __future__ import annotations

import pytest

from pytest_trlcompat.catalog import known_issues

OLDEST = {"trl": "0.14.0", "transformers": "4.48.3", "deepspeed": "0.16.3"}
OLD_TRL_NEW_DEEPSPEED = {"trl": "0.14.0", "transformers": "4.52.4", "deepspeed": "0.16.9"}
BARE_MODULE = {"trl": "0.15.2", "transformers": "4.49.0", "deepspeed": "0.16.4"}
SAMPLER = {"trl": "0.16.1", "transformers": "4.52.4", "deepspeed": "0.16.9"}
ACCUMULATION = {"trl": "0.22.2", "transformers": "4.56.2", "deepspeed": "0.17.5"}
NEWEST = {"trl": "1.16.0", "transformers": "5.23.0", "deepspeed": "0.19.8"}


@pytest.mark.parametrize(
    ("issue", "strategy", "expected"),
    [
        # OLDEST, OLD_TRL_NEW_DEEPSPEED, BARE_MODULE, SAMPLER, ACCUMULATION, NEWEST
        ("grpo-zero3-optimizer", "zero3", "blocked blocked wasteful blocked ok ok"),
        ("grpo-zero3-optimizer", "zero3-direct", "broken broken wasteful blocked wasteful wasteful"),
        ("grpo-zero3-optimizer", "zero3-resume", "ok blocked ok blocked ok ok"),
        ("deepspeed-hook-registration", "zero3", "ok broken ok blocked ok ok"),
        ("deepspeed-hook-registration", "zero3-direct", "ok broken broken ok ok ok"),
        ("deepspeed-evaluate-before-train", "zero3", "broken blocked broken blocked broken broken"),
        ("grpo-train-sampler", "single", "ok ok ok broken ok ok"),
        ("grpo-evaluate", "single", "broken broken ok blocked ok ok"),
        ("grpo-eval-metrics", "single", "blocked blocked silent blocked ok ok"),
        ("grpo-eval-accumulation", "single", "blocked blocked ok blocked silent ok"),
        ("grpo-eval-accumulation", "single-before_training", "blocked blocked ok ok broken ok"),
        ("grpo-eval-remainder", "ddp", "blocked blocked silent blocked silent silent"),
        ("grpo-lora-checkpointing", "single", "broken broken broken blocked ok ok"),
        ("grpo-lora-checkpointing", "single-not_reentrant", "ok ok ok blocked broken ok"),
        ("grpo-lora-checkpointing", "single-head", "silent silent silent blocked ok ok"),
        ("grpo-lora-checkpointing", "zero3", "broken blocked broken blocked blocked ok"),
        ("grpo-lora-stale-trace", "zero3", "broken blocked ok blocked broken ok"),
        ("lora-zero3-biases", "zero3", "broken blocked broken blocked ok ok"),
        ("deepspeed-empty-param-group", "zero2", "broken broken broken blocked broken ok"),
        ("grpo-token-normalizer", "single-truncated", "absent absent absent absent silent ok"),
        ("grpo-token-normalizer", "fsdp2", "absent absent absent absent silent ok"),  # as measured in one process
    ],
)
def test_predictions_are_what_was_measured(issue: str, strategy: str, expected: str) -> None:
    cells = (OLDEST, OLD_TRL_NEW_DEEPSPEED, BARE_MODULE, SAMPLER, ACCUMULATION, NEWEST)
    known = known_issues.load().get_issue(issue)
    found = [known.predict("upstream", strategy, {**cell, "torch": "2.13.0"}) for cell in cells]
    assert " ".join(str(one and one.verdict) for one in found) == expected


@pytest.mark.parametrize(
    "issue",
    [
        issue.id
        for issue in known_issues.load().values()
        if issue.id.startswith(("grpo-e", "deepspeed-"))
        and (issue.cure or issue.suite != "conformance/test_findings.py")
    ],
)
def test_the_corrected_trainer_is_predicted_to_be_right(issue: str) -> None:
    prediction = known_issues.load()[issue].predict("corrected", "zero3", OLDEST)
    assert prediction is not None
    assert str(prediction.verdict) == "ok"
