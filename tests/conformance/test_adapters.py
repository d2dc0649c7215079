"""A trainer's conformance is one folder: what belongs to it is there, and the driver finds its adapter by its name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_trlcompat import _issue_ids
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.conformance import conventions, driver, rows
from pytest_trlcompat.conformance.adapter import TrainerAdapter, exported

CONFORMANCE = Path(rows.__file__).parent
DATA = ("conventions.toml", "rows.toml", "space.toml")


def missing_of(conformance: Path) -> list[str]:
    """What the folders of trainers lack: those that have any of the data, or register an adapter."""
    missing = []
    for folder in sorted(path for path in conformance.iterdir() if path.is_dir()):
        adapter = folder / "adapter.py"
        registers = adapter.is_file() and "\nADAPTER = " in adapter.read_text(encoding="utf-8")
        present = [name for name in DATA if (folder / name).is_file()]
        if present or registers:
            missing += [f"{folder.name}/{name}" for name in DATA if name not in present]
            missing += [] if registers else [f"{folder.name}/adapter.py: ADAPTER"]
    return missing


def test_each_trainers_folder_is_whole() -> None:
    assert missing_of(CONFORMANCE) == []


def test_a_folder_that_is_not_whole_is_named(tmp_path: Path) -> None:
    for name, text in {"new/rows.toml": "", "other/adapter.py": '"""x"""\n\nADAPTER = 1\n', "shared/a.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert missing_of(tmp_path) == [
        *("new/conventions.toml", "new/space.toml", "new/adapter.py: ADAPTER"),
        *("other/conventions.toml", "other/rows.toml", "other/space.toml"),
    ]


@pytest.mark.parametrize("trainer", rows.TRAINERS)
def test_the_driver_finds_the_adapter_of_a_folder(trainer: str) -> None:
    adapter = driver.adapter_of(trainer)
    assert isinstance(adapter, TrainerAdapter)
    assert adapter.trainer == trainer
    assert conventions.of_release(trainer, "1.16.0", "5.23.0") is not None
    assert f"conformance-{trainer.replace('_', '-')}" in known_issues.load()


@pytest.mark.parametrize(
    "trainer, trl, reason",
    [
        ("grpo", "0.13.0", "GRPOTrainer samples and trains in this way from 0.14 on"),
        ("grpo", "0.14.0", ""),
        ("rloo", "0.21.0", "RLOOTrainer samples and trains in this way from 0.22 on"),
        ("rloo", "0.22.0", ""),
        ("first_rloo", "0.22.0", "the RLOO trainer that is made as PPO's is in TRL until 0.21"),
        ("first_rloo", "0.21.0", ""),
        ("ppo", "1.13.0", "PPO is in TRL from 0.9.6 (as PPOv2) to 1.12.0"),
        ("ppo", "1.12.0", ""),
        ("sft", "0.9.6", ""),
    ],
)
def test_a_release_without_a_trainer_says_which_have_it(
    trainer: str, trl: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_trlcompat.stack.installed", lambda: {"trl": trl})
    assert driver.adapter_of(trainer).absence() == reason


def test_a_trainer_is_found_where_trl_exports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trl, experimental = ModuleType("trl"), ModuleType("trl.experimental.orpo")
    experimental.ORPOTrainer, experimental.ORPOConfig = "a trainer", "a config"  # type: ignore[attr-defined]
    for module in (trl, ModuleType("trl.experimental"), experimental):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert [exported(trl, name) for name in ("ORPOTrainer", "ORPOConfig")] == ["a trainer", "a config"]
    trl.ORPOTrainer = "an older one"  # type: ignore[attr-defined]
    assert exported(trl, "ORPOTrainer") == "an older one"


def test_what_no_release_exports_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    with pytest.raises(ImportError, match="'trl' is not a package"):
        exported(sys.modules["trl"], "NewTrainer")


def test_a_trainer_with_a_folder_may_have_issues_of_its_own() -> None:
    folders = [path.parent.name for path in sorted(CONFORMANCE.glob("*/rows.toml"))]
    assert [*rows.TRAINERS] == folders
    assert [*_issue_ids.TRAINERS] == [name for name in folders if name != "first_rloo"]
    assert _issue_ids.trainer_of("orpo-gradient-accumulation") == "orpo"
    assert _issue_ids.trainer_of("conformance-first-rloo") == "rloo"
