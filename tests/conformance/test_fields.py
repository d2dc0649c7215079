"""The table of config fields: well-formed, complete in itself, and chosen to fit."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.conformance import fields
from pytest_trlcompat.conformance.fields import Choice, FieldsError, Tried, may_stand_together, unplaced
from pytest_trlcompat.conformance.fields_page import page

ROOT = Path(__file__).parents[2]
TABLE = fields.load()
TRAINED = ("grpo", "distillation", "ppo")
OLD = {"trl": "0.17.0", "transformers": "4.50.3"}
NEW = {"trl": "1.16.0", "transformers": "5.23.0"}


def tried(trainer: str, name: str) -> Tried:
    (one,) = [one for one in TABLE.tried(trainer) if one.name == name]
    return one


SETTINGS = {"grpo": "GRPOSettings", "distillation": "DistillationSettings", "ppo": "PPOSettings"}
"""The reference's settings of those trainers that it has."""


def reference_settings(name: str) -> tuple[set[str], dict[str, tuple[object, ...]]]:
    """Names of settings, and the values that the reference knows of some: by its sources, since it imports torch."""
    paths = (ROOT / "pytest_trlcompat" / "reference").glob("*.py")
    bodies = [ast.parse(path.read_text(encoding="utf-8")).body for path in paths]
    classes = {node.name: (node, body) for body in bodies for node in body if isinstance(node, ast.ClassDef)}
    names: set[str] = set()
    beside: list[ast.stmt] = []
    pending = [name]
    while pending:
        node, body = classes[pending.pop()]
        beside += body
        pending += [base.id for base in node.bases if isinstance(base, ast.Name)]
        annotated = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        names |= {target.id for target in annotated if isinstance(target, ast.Name)}
    choices: dict[str, tuple[object, ...]] = {}
    for each in beside:
        if (
            isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and each.target.id.endswith("_CHOICES")
        ):
            choices |= ast.literal_eval(each.value)  # type: ignore[arg-type]
    return names, choices


@pytest.mark.parametrize(("trainer", "settings"), SETTINGS.items())
def test_the_reference_knows_what_it_is_said_to_know(trainer: str, settings: str) -> None:
    names, choices = reference_settings(settings)
    assert len(choices) > 4
    for one in TABLE.tried(trainer):
        assert (one.effect == "reference") == bool(one.reference), one.name
        if one.effect == "reference":
            assert one.reference in names, one.name
            if one.reference in choices:
                assert {choice.given_as for choice in one.choices} <= set(choices[one.reference]), one.name


def test_every_loss_that_the_reference_computes_is_tried() -> None:
    _, choices = reference_settings("GRPOSettings")
    assert {choice.given_as for choice in tried("grpo", "loss_type").choices} == set(choices["loss_type"])


@pytest.mark.parametrize("trainer", TRAINED)
def test_no_value_is_that_of_the_base(trainer: str) -> None:
    base = TABLE.base(trainer)
    known = {one.name: one.values for one in TABLE.tried(trainer)}
    # What is sent the logs is named there, though it is not tried.
    assert set(base) - set(known) == {"report_to", *({"per_device_eval_batch_size"} if trainer == "ppo" else ())}
    for name, value in base.items():
        assert value not in known.get(name, ()), name


@dataclass(frozen=True)
class Sizes:
    """What documentation says of batches, for one rank."""

    settings: Mapping[str, Any]

    def refused(self, trainer: str) -> str:
        if trainer == "distillation":  # each prompt has one completion
            return ""
        get = self.settings.__getitem__
        local = get("per_device_train_batch_size") * get("gradient_accumulation_steps")
        if trainer == "ppo":
            if local % get("num_mini_batches"):
                return "batches are no whole mini-batches"
            few = local // get("num_mini_batches") < 8
            return "too few responses for whitening" if few and self.settings.get("whiten_rewards") else ""
        steps = self.settings.get("steps_per_generation") or get("gradient_accumulation_steps")
        generated = self.settings.get("generation_batch_size") or get("per_device_train_batch_size") * steps
        if generated % get("num_generations") or generated % get("per_device_train_batch_size"):
            return f"a generation has {generated} completions, no whole groups or batches"
        generations = self.settings.get("num_generations_eval") or get("num_generations")
        return "batches of evaluations are no whole groups" if get("per_device_eval_batch_size") % generations else ""


@pytest.mark.parametrize("trainer", TRAINED)
def test_any_two_values_that_may_stand_together_fit(trainer: str) -> None:
    base = TABLE.base(trainer)
    assert Sizes(base).refused(trainer) == ""
    found, pairs = [], 0
    for one, other in itertools.combinations(TABLE.tried(trainer), 2):
        for a, b in itertools.product(one.choices, other.choices):
            if may_stand_together(one.name, a, other.name, b):
                pairs += 1
                settings = {**base, **a.settings(one.name), **b.settings(other.name)}
                if reason := Sizes(settings).refused(trainer):
                    found.append(f"{one.name}={a.value!r}, {other.name}={b.value!r}: {reason}")
    assert found == []
    assert pairs > 6000


def test_what_excludes_each_other() -> None:
    def together(one: str, value: object, other: str, other_value: object, trainer: str = "grpo") -> bool:
        pair = [
            [choice for choice in tried(trainer, name).choices if choice.value == wanted]
            for name, wanted in ((one, value), (other, other_value))
        ]
        ((first,), (second,)) = pair
        assert may_stand_together(other, second, one, first) == may_stand_together(one, first, other, second)
        return may_stand_together(one, first, other, second)

    assert together("epsilon", 0.01, "beta", 0.04)
    assert not together("sync_ref_model", True, "beta", 0.0)  # with beta=0.04
    assert not together("sapo_temperature_neg", 2.0, "loss_type", "grpo")
    assert not together("sapo_temperature_neg", 2.0, "vespo_k_pos", 1.0)  # with different losses
    assert not together("generation_batch_size", 16, "steps_per_generation", 2)  # never with any
    assert not together("adam_beta1", 0.5, "optim", "sgd")
    assert together("adam_beta1", 0.5, "optim", "adamw_torch")
    assert not together("warmup_ratio", 0.5, "lr_scheduler_type", "constant_with_warmup")  # which is with warmup_steps
    assert not together("whiten_rewards", True, "num_mini_batches", 2, "ppo")


def test_one_is_not_true() -> None:
    choice = Choice(1, {"warmup_steps": 1}, {"adafactor": (True,)}, None, 1)
    assert choice.excludes("adafactor", True)
    assert not choice.excludes("adafactor", 1)
    assert choice.excludes("warmup_steps", True)
    assert not choice.excludes("warmup_steps", 1)


def test_releases_decide_about_values() -> None:
    losses = {
        versions["trl"]: next(one for one in TABLE.tried("grpo", versions) if one.name == "loss_type")
        for versions in (OLD, NEW)
    }
    assert losses["0.17.0"].values == ("grpo", "bnpo", "dr_grpo")
    assert losses["1.16.0"].values == ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    # GRPO refuses its only value from 1.9 on.
    assert "auto_find_batch_size" in {one.name for one in TABLE.tried("grpo", OLD)}
    assert "auto_find_batch_size" not in {one.name for one in TABLE.tried("grpo", NEW)}
    with pytest.raises(
        FieldsError, match="^whether 'eval_loss' is documented depends on transformers>=4.47, whose versi"
    ):
        TABLE.tried("grpo", {"trl": "1.16.0"})


def test_an_argument_has_its_name_of_the_release() -> None:
    one = tried("grpo", "activation_checkpointing")
    assert one.name_in({"gradient_checkpointing", "activation_checkpointing"}) == "activation_checkpointing"
    assert one.name_in({"gradient_checkpointing"}) == "gradient_checkpointing"
    assert one.name_in({"beta"}) is None


def test_none_stands_as_a_value_and_as_a_condition() -> None:
    assert tried("grpo", "max_prompt_length").values == (3, None)
    assert tried("ppo", "num_train_epochs").with_ == {"total_episodes": None}


def test_every_word_is_used() -> None:
    every = [one for trainer in TRAINED for one in TABLE.tried(trainer)]
    assert {one.effect for one in every} == set(fields.EFFECTS)
    assert {word for one in every for word in one.needs} == set(fields.NEEDS)
    kinds = {place.kind for trainer in fields.TRAINERS for place in TABLE.placed(trainer).values()}
    assert kinds == set(fields.KINDS)


def test_reasons_are_sentences() -> None:
    for trainer in fields.TRAINERS:
        for group in TABLE.groups(trainer):
            assert group.why[0].isupper() or group.why.startswith("vLLM"), group.why
            assert len(group.why) >= 8, group.why
            assert "\n" not in group.why, group.why
            assert not group.why.endswith("."), group.why  # the page adds it


def test_considered_places() -> None:
    grpo, ppo = TABLE.placed("grpo"), TABLE.placed("ppo")
    assert {name: grpo[name].kind for name in ("eval_on_start", "use_vllm", "hub_token", "deepspeed")} == {
        "eval_on_start": "try",
        "use_vllm": "untestable",
        "hub_token": "no_effect",
        "deepspeed": "launch",
    }
    assert ppo["eval_on_start"].kind == "no_effect"
    assert ppo["gradient_checkpointing"] == ppo["activation_checkpointing"]  # the older name of the same
    assert "beta" not in ppo
    assert "kl_coef" not in grpo
    assert TABLE.placed("first_ppo")["adap_kl_ctrl"].kind == "untestable"
    assert TABLE.tried("first_ppo") == []


@pytest.mark.parametrize("trainer", ["grpo", "distillation", "ppo", "first_rloo"])
def test_the_page_has_every_argument_of_a_trainer(trainer: str) -> None:
    text = page(TABLE)
    placed = TABLE.placed(trainer)
    assert len(placed) > 100
    assert [name for name in placed if f"`{name}`" not in text] == []
    assert [name for each in TABLE.tried(trainer) for name in each.names if f"`{name}`" not in text] == []


@dataclass
class TrainingArguments:
    """Stands for that of Transformers."""

    seed: int = 42
    new_of_transformers: int = 0


@dataclass
class GRPOConfig(TrainingArguments):
    beta: float = 0.0
    new_of_trl: float = 0.0


@dataclass
class PPOConfig:
    """Stands for that of the first PPOTrainer."""

    adap_kl_ctrl: bool = True
    kl_coef: float = 0.05


def test_an_installed_class_tells_what_has_no_place() -> None:
    assert unplaced([GRPOConfig]) == ["GRPOConfig.new_of_transformers", "GRPOConfig.new_of_trl"]
    assert unplaced([PPOConfig]) == ["PPOConfig.kl_coef"]  # of the second
    with pytest.raises(FieldsError, match="^TrainingArguments is the config of no trainer"):
        unplaced([TrainingArguments])


GROUP = """
[[grpo.try]]
title = "Loss"
effect = "none"
[grpo.try.fields]
beta = [0.04]
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epsilon = []", "grpo: the group 'Loss': epsilon has no value"),
        ("epsilon.effect = 'logs'", "epsilon needs either values or choices"),
        ("epsilon = { values = [1], efect = 'logs' }", "epsilon: missing or unknown: efect"),
        ("epsilon = { values = [1], effect = 'all' }", "epsilon: unknown effect 'all'; known are ref"),
        ("epsilon = { values = [1], needs = ['gpu'] }", "epsilon: unknown needs gpu; known are adapter"),
        ("epsilon = { values = [1], reference = 'eps' }", "'reference' and 'as' are for the effect"),
        ("epsilon.choices = [{ value = 1, releases = 'trl' }]", "'trl' are to be those of trl or of"),
        ("epsilon.choices = [{ value = 1, releases = 'torch>2' }]", "'torch>2' are to be those of trl"),
        ("epsilon.choices = [{ value = 1, releases = 'trl>x' }]", "epsilon: releases 'trl>x': "),
        ("epsilon = { values = [1], with = { bata = 1 } }", "epsilon=1: its conditions name bata, which"),
        ("epsilon = { values = [1], with = { epsilon = 2 } }", "epsilon=1 is a condition of itself"),
        ("epsilon = { values = [1], never_with = { beta = 2 } }", 'beta needs a list of values, or "any"'),
        (
            "epsilon = { values = [1], with = { beta = 2 }, never_with = { beta = 'any' } }",
            "epsilon=1: beta=2 is with it and never with it",
        ),
        ("[[every.no_effect]]\nfields = ['beta']\nwhy = 'So.'", "grpo: beta stand in two places"),
        (
            "eval_strategy = ['steps']\n[[grpo.no_effect]]\nfields = ['evaluation_strategy']\nwhy = 'So.'",
            "grpo: evaluation_strategy stand in two places",
        ),
        ("[[grpo.no_effect]]\nfields = ['other']", "a group of no_effect (other): missing or unknown: why"),
        ("[[grpo.launch]]\nfields = ['other']\nwhy = ' '", "a group of launch (other) has no field or no reason"),
        ("[[grpo.tries]]\nfields = ['beta']", "[grpo]: missing or unknown: tries"),
        ("[every.base]\nbeta = 1", "[every]: missing or unknown: base; known are launch, no_effect, try, untestable"),
        ("epsilon = 1", "epsilon is to be a table, not 1"),
        (
            "[[grpo.try]]\ntitle = 'More'\nfields.epsilon = [1]",
            "'More': epsilon: missing or unknown: effect; known are",
        ),
        ("[[sft.try]]\nfields = ['beta']", "the table: missing or unknown: sft"),
        ("[[grpo.try]", "cannot be read"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fields.toml"
    path.write_text(GROUP + text)
    with pytest.raises(FieldsError) as caught:
        fields.load(path)
    assert message in str(caught.value)


def test_a_group_gives_what_its_fields_do_not_say(tmp_path: Path) -> None:
    path = tmp_path / "fields.toml"
    path.write_text(
        """
[[every.try]]
title = "Loss"
effect = "reference"
needs = ["moe"]
with = { beta = 0.04 }
[every.try.fields]
beta = { values = [0.04], with = {}, needs = [] }
epsilon.choices = [{ value = true, as = 1 }, { value = 2, releases = "trl>=1", with = { delta = 3 } }]
epsilon.reference = "clip"
delta = [3]
"""
    )
    table = fields.load(path)
    beta, epsilon, delta = table.tried("ppo")
    assert table.tried("grpo") == table.tried("ppo")
    assert (beta.with_, beta.needs, beta.reference) == ({}, (), "beta")
    assert (epsilon.effect, epsilon.needs, epsilon.reference) == ("reference", ("moe",), "clip")
    assert delta.choices == (Choice(3, {"beta": 0.04}, {}, None, 3),)
    assert [choice.settings("epsilon") for choice in epsilon.choices] == [
        {"beta": 0.04, "epsilon": True},
        {"beta": 0.04, "delta": 3, "epsilon": 2},
    ]
    assert [choice.given_as for choice in epsilon.choices] == [1, 2]
    assert [one.values for one in table.tried("grpo", {"trl": "0.9"})] == [(0.04,), (True,), (3,)]
