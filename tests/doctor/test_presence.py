"""A trainer that the stack's TRL does not have: refused, with the releases that have it; and what releases call it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from pytest_trlcompat.doctor.presence import class_in
from pytest_trlcompat.doctor.requirements import of_pins
from pytest_trlcompat.doctor.stack_spec import of_mentions
from pytest_trlcompat.matrix.covering.trainers_of_wheels import classes_of, spans
from pytest_trlcompat.training.axes import TRAINERS
from pytest_trlcompat.training.trl_trainers import Span, spans_of, where

from .made_up import Run


@pytest.mark.parametrize(
    ("trl", "trainer", "message"),
    [
        (
            "1.16.0",
            "ppo",
            "PPO was removed in 1.13.0; trl 0.9.6 to 1.12.0 has it; name one of these, or another trainer",
        ),
        ("0.13.0", "grpo", "trl 0.14.0 and later has it; name one of these, or another trainer"),
        ("0.17.0", "sdft", "SDFTTrainer came later; trl "),
        ("1.16.0", "iterative-sft", "IterativeSFTTrainer left it with "),
    ],
)
def test_a_trainer_of_other_releases_is_refused_with_these(doctor: Run, trl: str, trainer: str, message: str) -> None:
    status, out, err = doctor(f"trl=={trl}", "--trainer", trainer)
    assert (status, out) == (2, "")
    flat = " ".join(err.split())
    assert flat.startswith(f"trlcompat doctor: trainer {trainer} is absent with trl {trl} (the command line): ")
    assert message in flat


@pytest.mark.parametrize("trainer", ["gold", "tpo", "sdft", "sdpo", "async-grpo", "a2po", "gmpo", "orpo"])
def test_every_trainer_of_the_newest_release_can_be_asked_about(doctor: Run, trainer: str) -> None:
    status, out, _ = doctor("trl==1.16.0", "transformers==5.23.0", "--trainer", trainer, "--json")
    document = json.loads(out)
    assert (status, document["trainer"]) == (1, trainer)
    if trainer != "orpo":
        assert f"no sweep trains with {TRAINERS[trainer]}: " in document["notes"][-1]


def test_versions_that_have_it_in_part_are_not_refused(doctor: Run) -> None:
    assert doctor("trl>=1.0", "--trainer", "ppo")[0] == 1
    assert doctor("transformers==4.50.0", "--trainer", "grpo")[0] == 1


def test_a_trainer_has_the_name_of_its_release() -> None:
    def name(pin: str, trainer: str) -> str:
        return class_in(trainer, of_mentions(of_pins([pin]), "the command line", complete=False))

    assert name("trl==0.11.0", "ppo") == "PPOv2Trainer"
    assert name("trl==0.15.2", "ppo") == "PPOTrainer"
    assert name("trl==0.15.2", "trainer") == "YourTrainer"


def test_the_table_has_every_trainer_of_trls_and_its_spans_end_before_the_next_begin() -> None:
    assert {trainer for trainer in TRAINERS if not spans_of(trainer)} == {"trainer"}
    assert where("trainer") == ""
    assert where("grpo") == "trl 0.14.0 and later"
    assert where("ppo") == "trl 0.9.6 to 1.12.0"
    assert spans_of("orpo")[-1].package == "trl.experimental"


def _wheel(folder: Path, release: str, **files: str) -> Path:
    path = folder / f"trl-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"trl/{name.replace('__', '/')}.py", text)
    return path


def test_the_table_is_read_from_sources(tmp_path: Path) -> None:
    both = {"trainer__dpo_trainer": "class DPOTrainer: pass", "trainer__x": "raise ImportError"}
    old = "class PPOv2Trainer(BaseTrainer):\n    pass\n\nclass BaseTrainer: pass"
    moved = {"experimental__ppo": "class PPOTrainer: pass", "trainer__ppo": "from ..experimental import PPOTrainer"}
    wheels = [
        _wheel(tmp_path, "0.9.6", **both, trainer__ppo=old),
        _wheel(tmp_path, "0.10.1", **both, trainer__ppo=old),
        _wheel(tmp_path, "1.0.0", **both, **moved),
        _wheel(tmp_path, "1.1.0", **both),
    ]
    found = dict(map(classes_of, wheels))
    assert found["1.0.0"] == {"DPOTrainer": "trl.trainer", "PPOTrainer": "trl.experimental"}
    assert spans(found) == {
        "dpo": [Span("DPOTrainer", "trl.trainer", "0.9.6", "", "")],
        "ppo": [
            Span("PPOv2Trainer", "trl.trainer", "0.9.6", "0.10.1", "1.0.0"),
            Span("PPOTrainer", "trl.experimental", "1.0.0", "1.0.0", "1.1.0"),
        ],
    }
