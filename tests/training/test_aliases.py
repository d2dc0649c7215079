"""The arguments that releases have renamed: one table, and which name is taken."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from pathlib import Path

import pytest

from pytest_trlcompat.conformance import fields
from pytest_trlcompat.training import aliases
from pytest_trlcompat.training.aliases import RENAMED, accepted, name_in, names_of, names_taken, renamed, value_of

ROOT = Path(__file__).resolve().parents[2]
HELD_TOGETHER = {
    "tests/training/test_aliases.py",
    "tests/stack/test_aliases.py",
    "pytest_trlcompat/training/aliases.py",
    # What another library reads of a checkpoint that any release may have written.
    "pytest_trlcompat/inference/recording_engine/model.py",
}
"""Files that may hold both names of an argument."""
OF_MANY_MEANINGS = {"config", "policy", "tokenizer", "gradient_checkpointing", "gradient_checkpointing_kwargs"}
"""Older names that are also words for something else, or that releases take beside the new ones."""


@dataclasses.dataclass
class NewConfig:
    eval_strategy: str = "no"
    beta: float = 0.0
    computed: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass
class OldConfig:
    evaluation_strategy: str = "no"
    beta: float = 0.0


@dataclasses.dataclass
class BothConfig(NewConfig):
    evaluation_strategy: str = "no"


class OldTrainer:
    def __init__(self, policy: str, config: OldConfig, tokenizer: str) -> None:
        self.tokenizer = tokenizer


@pytest.mark.parametrize(
    ("config", "name"),
    [(NewConfig, "eval_strategy"), (OldConfig, "evaluation_strategy"), (BothConfig, "eval_strategy")],
)
def test_a_setting_reaches_the_config_by_the_name_that_it_takes(config: type, name: str) -> None:
    assert accepted(config, {"eval_strategy": "steps", "num_items": 3, "beta": 0.1}) == {name: "steps", "beta": 0.1}
    assert renamed(config, {"eval_strategy": "steps", "num_items": 3}) == {name: "steps", "num_items": 3}
    assert value_of(config(**{name: "epoch"}), "eval_strategy") == "epoch"


def test_a_name_that_is_taken_stays() -> None:
    assert accepted(BothConfig, {"evaluation_strategy": "steps"}) == {"evaluation_strategy": "steps"}
    assert accepted(NewConfig, {"evaluation_strategy": "steps"}) == {"eval_strategy": "steps"}
    assert name_in({"config", "args"}, "config") == "config"
    assert name_in({"beta"}, "eval_strategy") is None


def test_fields_that_nobody_may_give_are_none() -> None:
    assert names_taken(NewConfig) == {"eval_strategy", "beta"}


def test_a_trainers_arguments_are_its_constructors() -> None:
    given = {"model": "m", "args": OldConfig(), "processing_class": "words"}
    assert set(renamed(OldTrainer, given)) == {"policy", "config", "tokenizer"}
    assert value_of(OldTrainer(**renamed(OldTrainer, given)), "processing_class") == "words"
    assert value_of(object(), "processing_class", "none") == "none"


def test_no_name_is_of_two_arguments() -> None:
    names = [name for newest, older in RENAMED.items() for name in (newest, *older)]
    assert sorted(set(names)) == sorted(names)
    assert names_of("evaluation_strategy") == names_of("eval_strategy") == ("eval_strategy", "evaluation_strategy")
    assert names_of("beta") == ("beta",)


def test_the_table_of_config_fields_takes_its_names_from_here() -> None:
    """``nox -s fields`` then sees that some release has each of them."""
    table = fields.load()
    tried = {one.name: one.names for trainer in fields.TRAINERS for one in table.tried(trainer)}
    configs = [name for name in RENAMED if name in tried]
    assert {name: tried[name] for name in configs} == {name: names_of(name) for name in configs}
    assert len(configs) == 7
    assert all(names == (name,) for name, names in tried.items() if name not in RENAMED)


def test_no_other_file_holds_both_names_of_an_argument() -> None:
    """A new name is one line of the table: nothing else chooses between an argument's names."""
    distinctive = {old: new for new, older in RENAMED.items() for old in older if old not in OF_MANY_MEANINGS}
    found = []
    for folder in ("pytest_trlcompat", "suites", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            texts = set(_texts(path))
            pairs = [(old, new) for old, new in distinctive.items() if {old, new} <= texts]
            name = path.relative_to(ROOT).as_posix()
            found += [f"{name}: {old} and {new}" for old, new in pairs if name not in HELD_TOGETHER]
    assert found == []


def _texts(path: Path) -> list[str]:
    """The texts of a module, and the keywords of its calls."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    keywords = (node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg)
    return [*itertools.chain(texts, keywords)]


def test_another_renamed_argument_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "_EVERY", {"beta": ("kl_coef", "beta"), "kl_coef": ("kl_coef", "beta")})
    new = dataclasses.make_dataclass("New", ["kl_coef"])
    assert accepted(new, {"beta": 0.1}) == {"kl_coef": 0.1}
