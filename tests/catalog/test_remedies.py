"""What the catalogue advises: made from predictions and the modules of cures."""

from __future__ import annotations

import itertools
import re

import pytest

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.fixed_releases import fixed_releases
from pytest_trlcompat.catalog.ranges import at
from pytest_trlcompat.catalog.remedies import cured_in, mixins, own_trainer, remedy, ways_of
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.trainers.curing.kinds import KINDS, TRAINERS, kind_named

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
        ("lora-fsdp-save", f"{TRAIN}cured(YourTrainer) (FSDPAdapterSaveMixin), or take peft <0.20", ""),
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
    assert text.startswith(
        "A trainer of your own gets the cures of its kind by `pytest_trlcompat.trainers.cured(MyTrainer)`, "
    )
    assert text.endswith("a mixin in parentheses above gives that cure alone, by `class My(TheMixin, MyTrainer)`.")
    assert own_trainer([known["trl-import"]]) == ""


def test_every_cured_issue_names_a_mixin_or_a_configuration() -> None:
    for issue in known_issues.load().values():
        if issue.cure:
            assert mixins(issue) or remedy(issue).startswith(f"{TRAIN}PPOTrainer and its PPOConfig"), issue.id


def test_releases_that_the_stack_has_already_are_left_out() -> None:
    issue = known_issues.load()["lora-zero3-checkpointing"]
    start = f"{TRAIN}GRPOTrainer (ZeRO3LoraCheckpointingMixin), or take "
    old = remedy(issue, versions={"trl": at("0.28.0"), "transformers": at("4.56.2"), "deepspeed": at("0.18.0")})
    assert old.startswith(f"{start}trl >=0.16,<0.17 or >=1.9, or deepspeed >=0.19.3, or trl >=0.17,<0.27 with ")
    new = remedy(issue, versions={"trl": at("0.28.0"), "transformers": at("4.56.2"), "deepspeed": at("0.19.4")})
    assert new.startswith(f"{start}trl >=0.16,<0.17 or >=1.9, or trl >=0.17,<0.27 with ")
    unsettled = remedy(issue, versions={"trl": at("1.10.0"), "deepspeed": None})
    assert unsettled.startswith(f"{start}deepspeed >=0.19.3, or trl >=0.17,<0.27 with ")
    had = {"trl": at("1.0.0"), "transformers": at("4.57.1"), "peft": at("0.17.0")}
    assert remedy(known_issues.load()["trl-training-arguments"], versions=had) == "nothing is known to help"
    assert remedy(known_issues.load()["lora-fsdp-save"], versions=had) == (
        f"{TRAIN}cured(YourTrainer) (FSDPAdapterSaveMixin)"
    )


FAILS = " (most of what was measured there fails for another reason)"


def test_releases_with_which_most_fails_for_another_reason_are_marked() -> None:
    issue = known_issues.load()["grpo-eval-metrics"]
    key = ("grpo-eval-metrics", "upstream", "single")

    def measured(trl: str, *verdicts: str) -> list[MeasuredCell]:
        return [MeasuredCell(f"c{trl}-{n}", {"trl": trl}, {key: Verdict(v)}) for n, v in enumerate(verdicts)]

    for cells, mark in (
        (measured("0.18.0", "ok", "error"), ""),
        (measured("0.18.0", "ok", "error", "blocked"), FAILS),
        (measured("0.18.0", "ok", "silent", "absent"), ""),
        (measured("0.17.0", "error"), ""),  # not among these releases
        ([], ""),
    ):
        assert remedy(issue, ways=ways_of(issue, cells)).endswith(f"take trl >=0.18{mark}")
        assert remedy(issue, ["ddp"], ways=ways_of(issue, cells)).endswith("take trl >=0.18"), (
            "measured under another strategy"
        )


def test_advice_of_the_catalogue_agrees_with_the_evidence() -> None:
    """Each alternative is marked if and only if fewer suites were ok there than failed for another reason."""
    cells = evidence.published().cells
    marked = 0
    for issue in known_issues.load().values():
        for fixed in fixed_releases(issue):
            text = remedy(issue, fixed.strategies, ways=ways_of(issue, cells))
            for each in fixed.alternatives:
                inside = [
                    cell
                    for cell in cells
                    if all(
                        p in cell.versions and wanted.covers(at(cell.versions[p])) for p, wanted in each.ranges.items()
                    )
                ]
                found = [
                    cell.verdicts.get((issue.id, "upstream", strategy))
                    for cell, strategy in itertools.product(inside, fixed.strategies)
                ]
                failed = found.count(Verdict.ERROR) + found.count(Verdict.BLOCKED)
                assert (f"{each.describe()}{FAILS}" in text) is (failed > found.count(Verdict.OK)), (issue.id, text)
                marked += failed > found.count(Verdict.OK)
    assert marked > 5
    lora = known_issues.load()["lora-zero3-checkpointing"]
    assert f"trl >=0.17,<0.27 with transformers <5.0{FAILS}, or set" in remedy(
        lora, ["zero3"], ways=ways_of(lora, cells)
    )
    grpo = known_issues.load()["grpo-lora-checkpointing"]
    assert remedy(grpo, ["single"], ways=ways_of(grpo, cells)).endswith("take trl >=0.16, or transformers >=5.0")


@pytest.mark.parametrize(
    ("issue_id", "start"),
    [
        ("deepspeed-hook-registration", f"{TRAIN}PPOTrainer (PPODeepSpeedHooksMixin), or "),
        ("lora-zero3-whole-modules", f"{TRAIN}PPOTrainer (ZeRO3WholeModulesMixin), or "),
        ("lora-fsdp-save", "take peft <0.20"),  # no cure that PPO's kind gets: none is promised
        ("ppo-fsdp-rollout", f"{TRAIN}PPOTrainer (PPOFSDPMixin)"),
    ],
)
def test_the_remedy_for_ppo_names_its_trainer_where_that_has_the_cure(issue_id: str, start: str) -> None:
    issue = known_issues.load()[issue_id]
    assert remedy(issue, trainer="ppo").startswith(start)
    assert remedy(issue, trainer="grpo").startswith(f"{TRAIN}{'PPO' if issue.trainer else 'GRPO'}Trainer (")


def test_how_a_trainer_of_ones_own_gets_ppos_cures() -> None:
    known = known_issues.load()
    assert own_trainer([known["ppo-fsdp-rollout"], known["deepspeed-hook-registration"]], "ppo")
    assert own_trainer([known["lora-fsdp-save"]], "ppo") == ""
    assert own_trainer([known["lora-fsdp-save"]], "dpo")
    assert own_trainer([known["deepspeed-hook-registration"]], "dpo") == ""


@pytest.mark.parametrize(
    ("issue_id", "trainer", "start"),
    [
        ("fsdp-sharded-save", "", f"{TRAIN}cured(YourTrainer) (FSDPSaveMixin), or "),
        ("fsdp-sharded-save", "trainer", f"{TRAIN}cured(YourTrainer) (FSDPSaveMixin), or "),
        ("fsdp-sharded-save", "orpo", f"{TRAIN}cured(ORPOTrainer) (FSDPSaveMixin), or "),
        ("fsdp-sharded-save", "nash-md", f"{TRAIN}cured(NashMDTrainer) (FSDPSaveMixin), or "),
        ("fsdp-sharded-save", "grpo", f"{TRAIN}GRPOTrainer (FSDPSaveMixin), or "),
        ("lora-zero3-checkpointing", "", f"{TRAIN}GRPOTrainer (ZeRO3LoraCheckpointingMixin), or "),
        ("lora-zero3-checkpointing", "dpo", "take trl "),
        (
            "deepspeed-hook-registration",
            "",
            f"{TRAIN}GRPOTrainer (DeepSpeedHooksMixin) or pytest_trlcompat.trainers.PPOTrainer "
            "(PPODeepSpeedHooksMixin) or pytest_trlcompat.trainers.RLOOTrainer (DeepSpeedHooksMixin), or ",
        ),
    ],
)
def test_the_remedy_names_what_fits_the_trainer(issue_id: str, trainer: str, start: str) -> None:
    assert remedy(known_issues.load()[issue_id], trainer=trainer).startswith(start)


def test_only_mixins_that_a_kind_gets_are_promised() -> None:
    for trainer in TRAINERS:
        for issue in known_issues.load().values():
            if issue.trainer in ("", trainer):
                assert set(mixins(issue, trainer)) <= set(KINDS[kind_named(issue.kind or trainer)])
                named = set(re.findall(r"\w+Mixin", remedy(issue, trainer=trainer)))
                assert named == set(mixins(issue, trainer)), (issue.id, trainer)
