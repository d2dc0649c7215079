"""What of a setting a release knows."""

from __future__ import annotations

import dataclasses
import importlib.util
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.conformance import rows
from pytest_trlcompat.conformance.grpo import configs


@dataclasses.dataclass
class Config:
    beta: float = dataclasses.field(default=0.0, metadata={"help": "KL coefficient."})
    loss_type: str = dataclasses.field(default="grpo", metadata={"help": "One of `'grpo'` and `'bnpo'`."})
    max_prompt_length: int = dataclasses.field(default=0, metadata={"help": "Maximum length of the prompt."})


TRL: Any = SimpleNamespace(GRPOConfig=Config)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda version: monkeypatch.setattr(metadata, "version", lambda name: version)


def test_a_commit_between_releases_has_what_every_release_has(release: Any) -> None:
    release("0.16.0.dev0")
    assert configs.is_known(TRL, "data", "assistant_last")
    assert not configs.is_known(TRL, "rewards", "sometimes")
    release("0.17.0.dev0")
    assert configs.is_known(TRL, "rewards", "sometimes")


@pytest.mark.parametrize("version, known", [("0.27.2", False), ("0.28.0", True), ("1.16.0", True)])
def test_a_refusal_is_known_from_the_release_that_documents_it(version: str, known: bool, release: Any) -> None:
    release(version)
    assert configs.is_known(TRL, "refused", "0.28") is known
    assert configs.is_known(TRL, "refused", True)
    assert configs.is_known(TRL, "refused", "allowed")


def test_of_a_choice_the_documentation_must_name_the_value(release: Any) -> None:
    release("1.0.0")
    asked = {"beta": 0.1, "loss_type": "dapo", "num_iterations": 2, "data": "plain"}
    assert configs.known_part(TRL, asked) == {"beta": 0.1, "data": "plain"}


def test_only_rows_of_the_array_are_tried_in_part() -> None:
    of_array = [each.name for each in rows.load("grpo").values() if each.is_of_array]
    assert all(name.startswith(("pair_", "ranks_")) for name in of_array)
    assert len(of_array) == 34 + 18
    assert not rows.load("grpo")["ddp-ranks_kl"].is_of_array


@pytest.mark.parametrize("version, calls", [("0.15.2", 1), ("0.16.1", 3), ("0.17.0", 1), ("1.16.0", 1)])
def test_one_release_samples_for_each_micro_batch(version: str, calls: int, release: Any) -> None:
    release(version)
    fields = [("num_iterations", int, dataclasses.field(default=1, metadata={"help": ""}))]
    trl: Any = SimpleNamespace(GRPOConfig=dataclasses.make_dataclass("Iterating", fields))
    assert configs.calls_of_a_generation(trl if version != "0.15.2" else TRL, 3) == calls


@pytest.mark.parametrize(
    "versions, is_lacking",
    [
        ({"trl": "1.9.2", "transformers": "5.23.0"}, True),
        ({"trl": "1.10.0", "transformers": "5.12.0"}, True),
        ({"trl": "1.10.0", "transformers": "5.13.0"}, False),
    ],
)
def test_tools_need_jmespath_in_some_releases(
    versions: dict[str, str], is_lacking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = configs.lacking({"tools": "calls"})
    assert bool(said) is is_lacking
    assert not said or said == (
        f"TRL {versions['trl']} with Transformers {versions['transformers']} needs jmespath for tools, which is not "
        "installed here"
    )
    assert configs.lacking({"beta": 0.1}) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert configs.lacking({"tools": "calls"}) == ""


def test_tools_are_known_where_both_releases_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"trl": "0.26.0", "transformers": "4.57.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    assert not configs.is_known(TRL, "tools", "calls")
    versions["transformers"] = "5.0.0"
    assert configs.is_known(TRL, "tools", "calls")
