"""Every name that the libraries export for an axis of a training has its place in ``training/axes.py``.

DeepSpeed's and Accelerate's keys are compared in ``test_configs.py``, with the one table that has them.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_trlcompat.training import axes, trl_trainers
from pytest_trlcompat.training.aliases import names_of
from pytest_trlcompat.training.argument_names import ARGUMENTS
from pytest_trlcompat.training.trl_trainers import key_of


def _sources(package: str) -> Iterator[Path]:
    module = importlib.import_module(package)
    yield from sorted(Path(str(module.__file__)).parent.rglob("*.py"))


def _classes(package: str) -> Iterator[ast.ClassDef]:
    """Of the sources of a package: some of its modules need packages that are not installed."""
    for path in _sources(package):
        yield from (
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
        )


def _fields(cls: ast.ClassDef) -> set[str]:
    decorated = any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list)
    return {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
        if decorated and "ClassVar" not in ast.unparse(node.annotation)
    }


def _trainers() -> set[str]:
    return {
        cls.name
        for package in ("trl.trainer", "trl.experimental")
        if importlib.util.find_spec(package) is not None
        for cls in _classes(package)
        if cls.name.endswith("Trainer")
    }


def test_every_trainer_of_trl_is_placed() -> None:
    trainers = _trainers()
    assert len(trainers) > 10
    assert trainers - set(axes.CLASSES) - axes.NO_USERS_TRAINER == set()


def test_the_table_of_releases_is_right_about_the_installed_one() -> None:
    release = importlib.metadata.version("trl")
    has = {
        span.name
        for trainer in axes.TRAINERS
        for span in trl_trainers.spans_of(trainer)
        if key_of(span.since) <= key_of(release) and not (span.left and key_of(span.left) <= key_of(release))
    }
    assert has == _trainers() - axes.NO_USERS_TRAINER


def test_every_field_of_a_config_is_placed() -> None:
    """Of every trainer's config, of what the command line adds, and of what all configs derive from."""
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments) if not field.name.startswith("_")}
    stems = {name.removesuffix("Trainer") for name in _trainers()}
    for package in ("trl.trainer", "trl.experimental"):
        if importlib.util.find_spec(package) is not None:
            for cls in _classes(package):
                if cls.name.removesuffix("Config") in {*stems, "Model", "_Base", "OnPolicy"}:
                    names |= _fields(cls)
    assert len(names) > 150
    assert sorted(name for name in names if names_of(name)[0] not in ARGUMENTS) == []


def test_every_kind_of_adapter_is_placed() -> None:
    peft = pytest.importorskip("peft")
    assert {str(kind.value).casefold() for kind in peft.PeftType} - axes.ADAPTERS == set()


def test_every_optimizer_is_placed() -> None:
    from transformers.training_args import OptimizerNames

    assert {name.value for name in OptimizerNames} - axes.OPTIMIZERS == set()


def test_every_callback_is_placed() -> None:
    named = {
        cls.name
        for package in ("transformers.integrations", "trl")
        for cls in _classes(package)
        if cls.name.endswith("Callback") and not cls.name.startswith("_")
    }
    from transformers import trainer_callback

    named |= {name for name in vars(trainer_callback) if name.endswith("Callback")}
    assert named - set(axes.CALLBACKS) == set()


def test_every_dimension_of_parallelism_is_placed() -> None:
    accelerate = pytest.importorskip("accelerate")
    config = getattr(accelerate, "ParallelismConfig", None)
    if config is None:
        pytest.skip(f"Accelerate {importlib.metadata.version('accelerate')} has no ParallelismConfig")
    named = {field.name for field in dataclasses.fields(config) if not field.name.startswith("_")}
    assert named - set(axes.PARALLELISM) - {"device_mesh"} == set()
