"""The walk through the sources of releases, with made-up ones; ``nox -s fields`` walks through the real ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_trlcompat.conformance import fields, walk

TRAINING_ARGUMENTS = "class TrainingArguments:\n    seed: int = 42\n    _names = []\n    default: ClassVar[str] = ''\n"


def release(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """An unpacked release: texts by path, without ``.py``."""
    for module, text in files.items():
        path = folder / name / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / name


def table(folder: Path, grpo: str = "'beta'", ppo: str = "'lam'") -> fields.Fields:
    path = folder / "fields.toml"
    path.write_text(
        f"every.no_effect = [{{ fields = ['seed'], why = 'A test' }}]\n"
        f"grpo.no_effect = [{{ fields = [{grpo}], why = 'A test' }}]\n"
        f"ppo.no_effect = [{{ fields = [{ppo}], why = 'A test' }}]\n"
        f"first_rloo = {{ without = ['kl_coef'], no_effect = [{{ fields = ['rloo_k'], why = 'A test' }}] }}\n"
        f"first_ppo.untestable = [{{ fields = ['steps'], why = 'A test' }}]\n"
    )
    return fields.load(path)


@pytest.fixture
def made_up(tmp_path: Path) -> list[walk.ConfigClass]:
    """Two releases of TRL, whose classes derive through modules as real ones do, and one of Transformers."""
    old = {
        "trl/trainer/ppo_config": "class PPOConfig:\n    steps: int = 1\n",
        "trl/trainer/utils": "from transformers import TrainingArguments\n"
        "class Own(TrainingArguments):\n    lam: int = 1\n",
        "trl/trainer/ppov2_config": "from .utils import Own as Base\nclass PPOv2Config(Base):\n    lam: int = 2\n",
        "trl/trainer/rloo_config": "from .utils import Own\nclass RLOOConfig(Own):\n    rloo_k: int = 2\n",
    }
    new = {
        "trl/trainer/base": "import transformers\nclass _Base(transformers.TrainingArguments):\n    seed: int = 1\n",
        "trl/trainer/grpo_config": "from .base import _Base\nclass GRPOConfig(_Base):\n    beta: float = 0\n",
        "trl/trainer/ppo_config": "from ..experimental import PPOConfig as _PPO\nclass PPOConfig(_PPO): ...\n",
        "trl/trainer/rloo_config": "from .base import _Base\nclass RLOOConfig(_Base):\n    num_generations: int = 2\n",
        "trl/experimental/__init__": "from trl.experimental.own import PPOConfig\n",
        "trl/experimental/own": "from ..trainer.base import _Base\nclass PPOConfig(_Base):\n    lam: float = 0\n",
    }
    common = {"transformers/training_args": TRAINING_ARGUMENTS}
    paths = [
        release(tmp_path, name, files)
        for name, files in (("trl==0.9.6", old), ("trl==1.0.0", new), ("transformers==5.0.0", common))
    ]
    return [one for path in paths for one in walk.config_classes(path)]


def test_classes_are_read_with_their_bases(made_up: list[walk.ConfigClass]) -> None:
    assert [(one.release, one.where, one.trainers, one.fields) for one in made_up] == [
        ("trl==0.9.6", "trl.trainer.ppo_config:PPOConfig", ("first_ppo",), ("steps",)),
        ("trl==0.9.6", "trl.trainer.ppov2_config:PPOv2Config", ("ppo",), ("lam",)),
        ("trl==0.9.6", "trl.trainer.rloo_config:RLOOConfig", ("first_rloo",), ("lam", "rloo_k")),
        ("trl==1.0.0", "trl.experimental.own:PPOConfig", ("ppo",), ("seed", "lam")),
        ("trl==1.0.0", "trl.trainer.grpo_config:GRPOConfig", ("grpo",), ("seed", "beta")),
        ("trl==1.0.0", "trl.trainer.ppo_config:PPOConfig", ("ppo",), ("seed", "lam")),
        (
            "transformers==5.0.0",
            "transformers.training_args:TrainingArguments",
            ("grpo", "distillation", "ppo", "first_rloo"),
            ("seed",),
        ),
    ]


def test_a_table_that_places_all_has_no_problem(made_up: list[walk.ConfigClass], tmp_path: Path) -> None:
    found = table(tmp_path)
    assert walk.problems(made_up, found) == []
    assert walk.summary(made_up, found).splitlines() == [
        "2 releases of trl, 1 of transformers, 7 config classes, 11 fields in them",
        "grpo: 2 names of fields: 0 try, 2 no_effect, 0 untestable, 0 launch",
        "distillation: 1 names of fields: 0 try, 1 no_effect, 0 untestable, 0 launch",
        "ppo: 2 names of fields: 0 try, 2 no_effect, 0 untestable, 0 launch",
        "first_rloo: 3 names of fields: 0 try, 3 no_effect, 0 untestable, 0 launch",
        "first_ppo: 1 names of fields: 0 try, 0 no_effect, 1 untestable, 0 launch",
    ]


def test_a_field_without_a_place_is_named_with_its_releases(made_up: list[walk.ConfigClass], tmp_path: Path) -> None:
    assert walk.problems([*made_up, *made_up], table(tmp_path, ppo="'steps', 'kl_coef'")) == [
        "trl.experimental.own:PPOConfig: lam of ppo stands nowhere in fields.toml; in trl==1.0.0",
        "trl.trainer.ppo_config:PPOConfig: lam of ppo stands nowhere in fields.toml; in trl==1.0.0",
        "trl.trainer.ppov2_config:PPOv2Config: lam of ppo stands nowhere in fields.toml; in trl==0.9.6",
        "trl.trainer.rloo_config:RLOOConfig: lam of first_rloo stands nowhere in fields.toml; in trl==0.9.6",
        "fields.toml: kl_coef of ppo is a field in no release",
        "fields.toml: steps of ppo is a field in no release",
        "fields.toml: steps of first_rloo is a field in no release",
    ]


def test_many_releases_are_named_by_the_first_and_the_last(made_up: list[walk.ConfigClass], tmp_path: Path) -> None:
    text = {"trl/grpo_config": "class GRPOConfig:\n    gamma: int\n"}
    more = [release(tmp_path, f"trl==1.{minor}.0", text) for minor in (10, 9)]
    found = [*made_up, *(one for path in more for one in walk.config_classes(path))]
    assert walk.problems(found, table(tmp_path)) == [
        "trl.grpo_config:GRPOConfig: gamma of grpo stands nowhere in fields.toml; in 2 releases, from trl==1.9.0 to "
        "trl==1.10.0"
    ]


def test_an_experimental_distillation_is_another_trainer(tmp_path: Path) -> None:
    files = {
        "trl/trainer/distillation_config": "class DistillationConfig:\n    beta: float\n",
        "trl/experimental/distillation/distillation_config": "class DistillationConfig:\n    lmbda: float\n",
    }
    (found,) = walk.config_classes(release(tmp_path, "trl==1.10.0", files))
    assert (found.where, found.trainers) == ("trl.trainer.distillation_config:DistillationConfig", ("distillation",))


def test_a_base_that_is_not_found_ends_the_walk(tmp_path: Path) -> None:
    text = "from .gone import Base\nclass GRPOConfig(Base): ...\n"
    with pytest.raises(walk.WalkError) as caught:
        walk.config_classes(release(tmp_path, "trl==2.0.0", {"trl/trainer/grpo_config": text}))
    assert str(caught.value) == "trl==2.0.0: Base, a base of GRPOConfig in trl/trainer/grpo_config.py, is not found"


def test_a_release_without_configs_ends_the_walk(tmp_path: Path) -> None:
    other = {"trl/config": "class Other: ...\n", "transformers/training_args": "class Other: ...\n"}
    with pytest.raises(
        walk.WalkError,
        match="^trl==2.0.0 has no class GRPOConfig, DistillationConfig, PPOConfig, PPOv2Config, RLOOConfig$",
    ):
        walk.config_classes(release(tmp_path, "trl==2.0.0", other))
    with pytest.raises(walk.WalkError, match="^transformers==6.0.0 has no class TrainingArguments in "):
        walk.config_classes(release(tmp_path, "transformers==6.0.0", other))


def test_the_program_ends_with_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release(tmp_path, "trl==1.0.0", {"trl/config": "class GRPOConfig:\n    new: int\n"})
    monkeypatch.setattr("sys.argv", ["walk", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"^no release of transformers in {tmp_path}$"):
        walk.main()
    release(tmp_path, "transformers==5.0.0", {"transformers/training_args": TRAINING_ARGUMENTS})
    with pytest.raises(SystemExit) as caught:
        walk.main()
    lines = str(caught.value).splitlines()
    assert lines[0] == "trl.config:GRPOConfig: new of grpo stands nowhere in fields.toml; in trl==1.0.0"
    assert "fields.toml: beta of grpo is a field in no release" in lines
    assert lines[-1] == "place each in pytest_trlcompat/conformance/fields.toml, or take it away there"
