"""The table of config fields before the config classes of the installed releases."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.version import Version

from pytest_trlcompat import stack
from pytest_trlcompat.conformance import fields

NO_DISTILLATION = Version(stack.installed()["trl"]) < Version("1.10")
NO_PPO = Version(stack.installed()["trl"]) >= Version("1.13")
EACH = pytest.mark.parametrize(
    "trainer",
    [
        "grpo",
        pytest.param(
            "distillation", marks=pytest.mark.skipif(NO_DISTILLATION, reason="trl's is experimental until 1.9")
        ),
        pytest.param("ppo", marks=pytest.mark.skipif(NO_PPO, reason="trl has no PPO from 1.13 on")),
    ],
)


def config_class(trainer: str, *, cured: bool = False) -> type[Any]:
    """Upstream's, wherever it is, or for PPO the one in which its known issues are cured."""
    import trl

    from pytest_trlcompat import trainers

    if trainer == "grpo":
        return trl.GRPOConfig
    if trainer == "distillation":
        return trl.DistillationConfig
    return trainers.PPOConfig if cured else trainers.PPOConfig.__mro__[1]


@EACH
def test_every_field_of_the_installed_config_has_a_place(trainer: str) -> None:
    chosen = config_class(trainer)
    assert len(dataclasses.fields(chosen)) > 100
    assert fields.trainer_of(chosen.__name__, is_training_arguments=True) == trainer
    assert fields.unplaced([chosen]) == []


def test_a_field_without_a_place_is_named() -> None:
    @dataclasses.dataclass
    class GRPOConfig(config_class("grpo")):  # type: ignore[misc]
        new_argument: int = 0

    assert fields.unplaced([GRPOConfig]) == ["GRPOConfig.new_argument"]


@EACH
def test_the_installed_config_takes_every_value(trainer: str, tmp_path: Path) -> None:
    """What the config itself refuses was not documented so; what the trainer refuses is for the suites."""
    chosen = config_class(trainer, cured=True)
    installed = {field.name for field in dataclasses.fields(chosen)}
    table, variables = fields.load(), dict(os.environ)
    names = {one.name: one.name_in(installed) or "" for one in table.tried(trainer)}
    taken, refused = 0, []
    for one in table.tried(trainer, stack.installed()):
        for choice in one.choices:
            settings = {**table.base(trainer), **choice.settings(one.name)}
            own = {names.get(name, name): value for name, value in settings.items()}
            if "" not in own:  # an argument that this release does not have
                taken += 1
                try:
                    with mock.patch.dict(os.environ):  # a config tells Accelerate by variables what to do, for good
                        chosen(output_dir=str(tmp_path), use_cpu=True, **own)
                except (AttributeError, TypeError, ValueError) as error:
                    refused.append(f"{one.name}={choice.value!r}: {error}")
    assert refused == []
    assert taken > 80
    assert dict(os.environ) == variables  # launches of later tests inherit them
