"""The pytest plugin with which TRL's tests run: their data, the trainers to test, the same seed, and the outcomes.

It imports the stack where TRL's tests do. ``-p benchmarks.upstream_tests.plugin``.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.upstream_tests import vllm
from benchmarks.upstream_tests.models import ORGANISATION, VOCABULARIES
from benchmarks.upstream_tests.sources import MODULES

_NOUNS = ("plan", "tool", "rule", "name", "test", "word", "list")
_PROMPTS = [f"{adjective} {noun} is" for adjective in ("A good", "No") for noun in _NOUNS]
"""Fewer than on the Hub, since most tests train for three epochs; a test counts two batches of six prompts."""

_HELD_OUT = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="file for a line of JSON per test")
    parser.addoption("--vocabulary", choices=[*VOCABULARIES], required=True, help="of the models in the Hub's cache")
    parser.addoption("--vllm", action="store_true", help="the tests that need vLLM, and no others")
    parser.addoption("--corrected", action="store_true", help="with the corrected trainers instead of TRL's")


def pytest_configure(config: pytest.Config) -> None:
    import datasets
    from transformers import TrainingArguments

    # Newer releases of TRL train in bfloat16, which without a GPU must be told. TRL's configurations, which are not
    # imported yet, take the default from here. With vLLM, tests train on the software accelerator.
    TrainingArguments.__dataclass_fields__["use_cpu"].default = not config.getoption("--vllm")
    original = datasets.load_dataset
    datasets.load_dataset = lambda path, *args, **kwargs: (
        _load(*args, **kwargs) if path == f"{ORGANISATION}/zen" else original(path, *args, **kwargs)
    )
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))
    if config.getoption("--corrected"):
        swap()


def _load(name: str, split: str | None = None, streaming: bool = False) -> Any:
    """The dataset with the columns that it has on the Hub."""
    from datasets import Dataset, DatasetDict

    form, _, kind = name.partition("_")
    if form not in ("standard", "conversational") or kind not in _COLUMNS:
        raise ValueError(f"the dataset {ORGANISATION}/zen is not made here as {name!r}")
    rows = [_row(prompt, place, kind, conversational=form == "conversational") for place, prompt in enumerate(_PROMPTS)]
    data = DatasetDict(train=Dataset.from_list(rows[:-_HELD_OUT]), test=Dataset.from_list(rows[-_HELD_OUT:]))
    chosen = data[split] if split else data
    return chosen.to_iterable_dataset() if streaming else chosen


_COLUMNS = {
    "language_modeling": (),
    "prompt_only": ("prompt",),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),
    "implicit_prompt_preference": ("chosen", "rejected"),
    "unpaired_preference": ("prompt", "completion", "label"),
}
"""Columns of a dataset by what its name says of it; that of language modeling is ``text`` or ``messages``."""


def _row(prompt: str, place: int, kind: str, *, conversational: bool) -> dict[str, Any]:
    better, worse = " what we make of it.", f" {'too ' * (place % 3 + 1)}late."
    if not conversational:
        texts = {"prompt": prompt, "completion": better, "chosen": better, "rejected": worse}
        if kind.startswith("implicit"):
            texts |= {"chosen": prompt + better, "rejected": prompt + worse}
        row: dict[str, Any] = {**texts, "text": prompt + better}
    else:
        asked = [{"role": "user", "content": prompt}]
        good, bad = ([{"role": "assistant", "content": text.strip()}] for text in (better, worse))
        row = {"prompt": asked, "completion": good, "chosen": good, "rejected": bad, "messages": asked + good}
        if kind.startswith("implicit"):
            row |= {"chosen": asked + good, "rejected": asked + bad}
    row["label"] = place % 2 == 0
    return {column: row[column] for column in _COLUMNS[kind] or ("messages" if conversational else "text",)}


def vocabulary_of(test: str) -> str:
    """The vocabulary that a test needs, by its source.

    Qwen's if it writes numbers that look like its tokens, or if no completion may end: among few tokens, some do.
    """
    return "qwen" if re.search(r"(?<![#/\w])\d{5,}\b|completions_all_masked", test) else "small"


def swap() -> None:
    """Put the corrected trainers in the place of TRL's, in every module that has them by name, as users do."""
    from pytest_trlcompat import trainers

    for name in _installed():
        corrected = getattr(trainers, name)
        upstream = next(base for base in corrected.__mro__ if base.__module__.startswith("trl."))
        for module in list(sys.modules.values()):
            if vars(module).get(name) is upstream:
                setattr(module, name, corrected)


def _installed() -> list[str]:
    """The trainers that are corrected and that this release has; of RLOO those alone that are Trainers."""
    import transformers
    import trl

    found = [name for name in MODULES if name in ("GRPOTrainer", "PPOTrainer") or hasattr(trl, name)]
    return [name for name in found if name != "RLOOTrainer" or issubclass(trl.RLOOTrainer, transformers.Trainer)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests for the vocabulary, and see that their modules have the trainers that are meant."""
    from pytest_trlcompat import trainers

    vocabulary, corrected = config.getoption("--vocabulary"), config.getoption("--corrected")
    functions = [item for item in items if isinstance(item, pytest.Function)]
    if config.getoption("--vllm"):
        functions = [item for item in functions if vllm.needs_vllm(item)]
        for item in functions:
            vllm.take_off_marks(item)
    items[:] = [item for item in functions if vocabulary_of(inspect.getsource(item.function)) == vocabulary]
    for module in {item.module for item in functions}:
        for name in _installed():
            found = vars(module).get(name)
            if found and (found is getattr(trainers, name)) != corrected:
                raise pytest.UsageError(f"{module.__name__} has {found}, which is not the trainer to test")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Both runs of a test start from the same random numbers, whatever tests ran before."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


class Outcomes:
    """Writes a line per test when it has ended, so that they are there also if a later one ends the process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcome, self._text = "", ""

    def pytest_runtest_logstart(self) -> None:
        self._outcome, self._text = "passed", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        expected = hasattr(report, "wasxfail")
        if report.failed:
            self._outcome, self._text = "failed", report.longreprtext
        elif report.skipped and self._outcome == "passed":
            self._outcome = "xfailed" if expected else "skipped"
            self._text = report.wasxfail if expected else _reason(report)
        if report.when == "teardown":
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps({"test": report.nodeid, "outcome": self._outcome, "text": self._text}) + "\n")


def _reason(report: pytest.TestReport) -> str:
    """Why a test is skipped."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")
