"""What the catalogue advises: made from predictions and the modules of cures."""

from __future__ import annotations

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.remedies import cured_in, mixins, own_trainer, remedy

TRAIN = "train with pytest_trlcompat.trainers."


@pytest.mark.parametrize(
    ("issue_id", "text", "needless"),
    [
        ("grpo-eval-metrics", f"{TRAIN}GRPOTrainer (EvaluationMixin), or take trl >=0.18", "trl 0.18"),
        (
            "grpo-fsdp-ref-model",
            f"{TRAIN}GRPOTrainer (FSDPReferenceModelMixin), or under fsdp1 take trl >=0.18,<1.15 or >=1.16; "
            "under fsdp1-no_shard take trl >=0.18; under fsdp2 take trl >=0.29,<1.15 or >=1.16",
            "trl 1.16 (fsdp1, fsdp2), trl 0.18 (fsdp1-no_shard)",
        ),
        (
            "grpo-zero3-optimizer",
            f"{TRAIN}GRPOTrainer (ZeRO3GenerationMixin), or under zero3 take trl >=0.16, or give "
            "unwrap_model_for_generation the engine, not the module",
            "trl 0.16 (zero3), no release (zero3-direct)",
        ),
        (
            "lora-zero3-checkpointing",
            f"{TRAIN}GRPOTrainer (ZeRO3LoraCheckpointingMixin), or take trl >=0.16,<0.17 or >=1.9, or deepspeed "
            ">=0.19.3, or trl >=0.17,<0.27 with transformers <5.0, or set use_reentrant=True",
            "trl 1.9 or deepspeed 0.19.3",
        ),
        ("lora-fsdp-save", f"{TRAIN}GRPOTrainer (FSDPAdapterSaveMixin), or take peft <0.20", ""),
        ("ppo-fsdp-rollout", f"{TRAIN}PPOTrainer (PPOFSDPMixin)", ""),
        (
            "ppo-config-after-grpo",
            f"{TRAIN}PPOTrainer and its PPOConfig, or take trl >=0.9.6,<0.17 or >=0.19,<1.13, or transformers >=4.51",
            "trl 0.19 or transformers 4.51",
        ),
        (
            "trl-training-arguments",
            "take trl >=0.14,<0.17 or >=0.19, or transformers >=4.51",
            "trl 0.19 or transformers 4.51",
        ),
    ],
)
def test_texts_of_the_catalogue(issue_id: str, text: str, needless: str) -> None:
    issue = known_issues.load()[issue_id]
    assert (remedy(issue), cured_in(issue)) == (text, needless)


def test_where_one_release_alone_is_enough_no_later_alternative_lasts() -> None:
    issue = known_issues.load()["grpo-sampling"]
    assert cured_in(issue) == "trl 0.27"
    assert remedy(issue, ["single-model_defaults"]) == (
        f"{TRAIN}GRPOTrainer (SamplingMixin), or take trl >=0.27, or trl >=0.16,<0.27 with transformers <4.50, or trl "
        ">=0.26.2,<0.27 with transformers >=4.50,<5, or trl >=0.17,<0.18 with transformers >=5"
    )


def test_releases_for_other_strategies_than_those_asked_for_are_left_out() -> None:
    issue = known_issues.load()["grpo-logits-to-keep"]
    cure = f"{TRAIN}GRPOTrainer (LogitsToKeepMixin), or take "
    assert remedy(issue, ["single-neither"]) == f"{cure}trl >=0.20"
    assert remedy(issue).removeprefix(cure) == (
        "trl >=0.15 with transformers >=4.49, or transformers >=4.49,<4.52, or trl >=0.14,<0.15 with transformers "
        "<4.49; under single-neither take trl >=0.20"
    )
    assert remedy(issue, ["ddp"]).startswith(f"{cure}trl >=0.15 with transformers >=4.49, or ")
    assert remedy(issue, ["ddp", "single-neither"]).endswith("; under single-neither take trl >=0.20")


@pytest.mark.parametrize(
    ("issue_id", "names"),
    [
        ("deepspeed-hook-registration", ("DeepSpeedHooksMixin", "PPODeepSpeedHooksMixin")),
        ("grpo-lora-stale-trace", ("DeepSpeedHooksMixin",)),
        ("ppo-stale-trace", ("PPODeepSpeedHooksMixin",)),
        ("ppo-lr-scheduler-zip", ("EmptyParamGroupsMixin",)),
        ("grpo-gradient-accumulation", ("GradientAccumulationMixin", "DeepSpeedAccumulationMixin")),
        ("trl-import", ()),
    ],
)
def test_mixins_of_a_cure(issue_id: str, names: tuple[str, ...]) -> None:
    assert mixins(known_issues.load()[issue_id]) == names


def test_how_a_trainer_of_ones_own_is_cured() -> None:
    known = known_issues.load()
    text = own_trainer([known["ppo-fsdp-rollout"], known["grpo-evaluate"], known["trl-import"]])
    assert "`class My(corrected.GRPOTrainer, MyTrainer)` or `class My(corrected.PPOTrainer, MyTrainer)`" in text
    assert "where corrected is pytest_trlcompat.trainers" in text
    assert own_trainer([known["trl-import"]]) == ""


def test_every_cured_issue_names_a_mixin_or_a_configuration() -> None:
    for issue in known_issues.load().values():
        if issue.cure:
            assert mixins(issue) or remedy(issue).startswith(f"{TRAIN}PPOTrainer and its PPOConfig"), issue.id
