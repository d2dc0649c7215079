"""What is said when a training begins: once for each trainer, by the main process alone, and never an error."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.doctor import train_begin
from pytest_trlcompat.training import begin

NEWEST = {
    **{"torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0", "accelerate": "1.15.0"},
    **{"deepspeed": "0.19.8", "peft": "0.21.2", "datasets": "5.2.0"},
}
DROPOUT = (
    "known issue dpo-attention-dropout (weights) bites this training: with attention_dropout above 0 in the model's "
    "config, log-probabilities of the policy are random though disable_dropout=True, the default: another loss and "
    "other gradients at each call, without an error (trlcompat issue dpo-attention-dropout)"
)


@dataclasses.dataclass
class DPOConfig:
    beta: float = 0.1
    disable_dropout: bool = True
    loss_type: str = "sigmoid"


class _Config:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


class DPOTrainer:
    """As far as a training is read."""

    def __init__(self, dropout: float = 0.1, rank: int = 0) -> None:
        self.args = DPOConfig()
        config = _Config(model_type="qwen2", attention_dropout=dropout, tie_word_embeddings=False)
        self.model = SimpleNamespace(config=config, named_parameters=lambda: iter(()))
        self.accelerator = SimpleNamespace(state=SimpleNamespace(distributed_type="NO"), num_processes=1)
        self.rank = rank

    def is_world_process_zero(self) -> bool:
        return self.rank == 0


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRLCOMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stack, "installed", lambda: NEWEST)
    train_begin._shown.cache_clear()


def test_what_bites_is_logged_in_one_line_and_once_for_a_trainer(caplog: pytest.LogCaptureFixture) -> None:
    trainer = DPOTrainer()
    assert [issue.id for issue in begin.tell(trainer)] == ["dpo-attention-dropout"]
    assert begin.tell(trainer) == ()
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == (begin.LOGGER, logging.WARNING, DROPOUT)
    assert vars(record)["known_issue"] == "dpo-attention-dropout"


def test_what_does_not_bite_is_not_told() -> None:
    assert begin.biting(DPOTrainer(dropout=0.0)) == ()


def test_the_other_processes_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert begin.tell(DPOTrainer(rank=1)) == ()
    assert caplog.records == []


def test_the_stack_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {**NEWEST, "trl": "0.9.6", "transformers": "4.42.4"})
    assert "dpo-attention-dropout" not in {issue.id for issue in begin.biting(DPOTrainer(dropout=0.0))}


def test_a_cure_that_is_at_work_silences_its_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    ((issue, about),) = [entry for entry in train_begin.shown("dpo", NEWEST) if entry[0].id == "dpo-attention-dropout"]
    cure = type("SomeCureMixin", (), {"__module__": "pytest_trlcompat.trainers.loss.some_cure"})
    cured = type("DPOTrainer", (cure, DPOTrainer), {})
    foreign = type("DPOTrainer", (type("SomeCureMixin", (), {}), DPOTrainer), {})
    for changed, expected in (
        ({"cures": ["SomeCureMixin"]}, (1, 0, 1)),
        ({"cures": ["SomeCureMixin", "AnotherMixin"]}, (1, 1, 1)),
        ({"cures": ["SomeCureMixin"], "uncured": "silent under single: not enough"}, (1, 1, 1)),
    ):
        monkeypatch.setattr(train_begin, "_shown", lambda *_, changed=changed: [(issue, {**about, **changed})])
        assert tuple(len(begin.biting(cls())) for cls in (DPOTrainer, cured, foreign)) == expected
    monkeypatch.setattr(train_begin, "_shown", lambda *_: [(issue, {**about, "cures": ["SomeCureMixin"]})])
    assert begin.biting(DPOTrainer())[0].text.endswith(
        "without an error (cured(DPOTrainer) cures it; trlcompat issue dpo-attention-dropout)"
    )


def test_nothing_that_goes_wrong_ends_a_training(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, begin.LOGGER)
    broken: Any = SimpleNamespace(is_world_process_zero=lambda: True)
    assert begin.biting(broken) == ()
    assert "not known, TrainingError: a trainer of Transformers' or TRL's was expected" in caplog.text
    begin.prepare(broken)
    begin.prepare(None)


def test_what_the_stack_shows_is_read_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = begin.biting(DPOTrainer())
    train_begin._shown.cache_clear()  # as in another process
    monkeypatch.setattr(train_begin, "_asked", None)
    assert begin.biting(DPOTrainer()) == first
    train_begin._shown.cache_clear()
    monkeypatch.setattr(stack, "installed", lambda: {**NEWEST, "peft": "0.20.0"})
    assert begin.biting(DPOTrainer()) == ()  # of another stack nothing was kept, and it cannot be asked here


def test_the_module_needs_nothing_of_the_harness() -> None:
    assert train_begin.__name__ == begin._ANSWERING
    assert begin.__name__ in sys.modules
