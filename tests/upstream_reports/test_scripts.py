"""The scripts to paste upstream show, without this package, what the catalogue says of the newest releases."""

from __future__ import annotations

import re

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.upstream_reports import commands, folder, output_of

INSTALLED = stack.installed()
pytestmark = pytest.mark.skipif(
    not stack.satisfied({"trl": ">=1.16", "transformers": ">=5.23"}, INSTALLED),
    reason="the scripts are written against the newest releases",
)

NUMBERS = {
    "deepspeed-evaluate-before-train": (
        "0 steps, AttributeError: 'NoneType' object has no attribute 'backward'",
        "2 steps",
    ),
    "distillation-logits": ("0.0793", "0.0068"),
    "distillation-positions": ("5.0114", "5.2315"),
    "dpo-changed-base": ("4.7538", "0.6931"),
    "fsdp-sharded-save": ("[]", "['model.safetensors']"),
    "fsdp2-rounded-outputs": ("0.0069", "0.0013"),
    "grpo-assistant-prefix": ("'w5 w6 w7 w1 w8 w9 w1'", "'w5 w6 w7 w1 w8 w9'"),
    "grpo-eval-remainder": ("1.2727", "1.3333"),
    "grpo-fsdp-compiled-generation": ("'weight' must be 2-D", "torch.Size([1, 7])"),
    "grpo-fsdp-no-shard-gradients": ("12.2398", "13.6768"),
    "grpo-fsdp-sync-ref-model": ("4.1424", "0.0000"),
    "grpo-one-token-metrics": ("1.0380", "4.1522"),
    "grpo-positions": ("-60.4268", "-30.6921"),
    "grpo-policy-loss-log": ("-0.1936", "-0.3873"),
    "grpo-reference-by-name": ("1.0344", "0.0000"),
    "grpo-resumed-epoch": ("['w5', 'w8', 'w7', 'w9', 'w6', 'w10']", "['w10', 'w6', 'w7', 'w9', 'w5', 'w8']"),
    "grpo-vllm-server-weights": ("0.1883", "0.0000"),
    "grpo-zero-std-log": ("0.0000", "1.0000"),
    "kto-evaluation-mismatch": ("3.5005", "3.8183"),
    "lora-fsdp-bf16-generation": (
        "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        "torch.Size([1, 7])",
    ),
    "lora-fsdp-save": ("0", "8"),
    "reward-adapter-head": ("0", "1"),
    "rloo-resumed-epoch": ("['w5', 'w8', 'w7', 'w9', 'w6', 'w10']", "['w10', 'w6', 'w7', 'w9', 'w5', 'w8']"),
    "sft-logits": ("4.5623", "4.4930"),
    "sft-padding-counted": ("32", "16"),
    "sft-saved-head": ("1.7193", "1.0341"),
    "sft-shifted-count": ("5.2350", "6.9800"),
    "sft-resumed-tokens": ("8 after resuming from the first", "16"),
    "sft-tied-tokens": ("'TrainableTokensWrapper' object has no attribute 'bias'", "8.8243"),
    "sft-virtual-tokens-count": ("10.2136", "7.6602"),
    "transformers-resumed-names": ("0.1000", "0.0000"),
}
TOLERANCE = 1e-3
"""Relative, of the two that are computed: sums in another order differ by 1e-6, the bugs by a tenth and more."""
FOUND = re.compile(r": wrong (?P<wrong>.*?)[,;] right (?P<right>.*)$")


def test_each_script_has_its_numbers() -> None:
    assert {path.stem for path in folder().glob("*.py")} == set(NUMBERS)


@pytest.mark.parametrize("issue", NUMBERS)
def test_a_script_prints_the_wrong_and_the_right_number(issue: str) -> None:
    script = folder() / f"{issue}.py"
    written = commands(script)
    assert written
    for command in written:
        found = FOUND.search(output_of(command, script))
        assert found is not None, command
        assert [same(*pair) for pair in zip(found.groups(), NUMBERS[issue], strict=True)] == [True, True], found[0]


def same(found: str, expected: str) -> bool:
    if re.fullmatch(r"\d+\.\d{4}", expected):
        return float(found) == pytest.approx(float(expected), rel=TOLERANCE)
    return found == expected
