"""``trlcompat doctor --training`` as a program: its text, its JSON, its status, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .made_up import Run

NEWEST = [
    *("trl==1.16.0", "transformers==5.23.0", "torch==2.13.0", "accelerate==1.15.0"),
    *("deepspeed==0.19.7", "peft==0.21.2", "datasets==4.8.4"),
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: m\nuse_peft: true\nbeta: 0.1\neval_strategy: no\n")
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\nnum_processes: 2\n")
    return tmp_path


def _asking(files: Path, *more: str) -> list[str]:
    sources = ["--training", str(files / "grpo.yaml"), "--training", str(files / "fsdp.yaml")]
    return [*NEWEST, *sources, "--trainer", "grpo", *more]


def test_what_bites_in_four_lines_what_may_in_one_and_a_count(doctor: Run, files: Path) -> None:
    status, out, err = doctor(*_asking(files))
    assert (status, err) == (1, "")
    flat = " ".join(out.split())
    assert flat.startswith("GRPOTrainer under fsdp1 (")
    assert "1 known issue bites this training, " in flat
    biting = out[out.index("weights  lora-fsdp-save") : out.index("These may bite")].splitlines()
    labels = [line.split()[0] for line in biting if line and not line.startswith(" ")]
    assert labels == ["weights", "since", "do", "shown"]
    assert "since    peft >=0.20" in out
    assert "shown    suites/adapters/test_saving.py, measured in trl1.16.0-tf5.23.0" in out
    may = out[out.index("These may bite") : out.rindex("\n\n")]
    assert "weights  grpo-positions: model_type in the model's config.json (gpt2)" in may
    severities = [line.split()[0] for line in may.splitlines() if line.startswith("  ") and line[2] != " "]
    order = ["weights", "crash", "numbers", "cost", "message"]
    assert severities == sorted(severities, key=order.index)
    assert "other known issues of this trainer do not bite this training on this stack." in out


def test_the_json_document(doctor: Run, files: Path) -> None:
    status, out, _ = doctor(*_asking(files, "--json"))
    document = json.loads(out)
    assert status == 1
    assert set(document) == {"schema", "stack", "source", "training", "notes", "bites", "may_bite", "does_not"}
    assert document["schema"] == 1
    (biting,) = document["bites"]
    assert set(biting) == {
        *("id", "title", "severity", "answer", "because", "look", "wrong", "since", "remedy", "numbers", "verdicts"),
    }
    assert (biting["id"], biting["answer"], biting["severity"]) == ("lora-fsdp-save", "bites", "weights")
    assert set(biting["because"]) == {"parallel.strategy='fsdp1'", "adapter.type='lora'"}
    assert all(issue["answer"] == "cannot tell" and issue["look"] for issue in document["may_bite"])
    assert document["training"]["parallel"]["strategy"] == "fsdp1"
    named = [issue["id"] for issue in (*document["bites"], *document["may_bite"])]
    assert not set(named) & set(document["does_not"])
    assert "grpo-prompt-mask" in document["does_not"]  # only before trl 0.15


def test_the_status_by_severity(doctor: Run, files: Path) -> None:
    assert doctor(*_asking(files, "--fail-on", "weights"))[0] == 1
    whole = files / "whole.yaml"
    whole.write_text("model_name_or_path: m\nuse_peft: false\neval_strategy: no\n")
    asking = [*NEWEST, "--training", str(whole), "--trainer", "sft", "--strategy", "single"]
    assert doctor(*asking, "--fail-on", "message")[0] == 0
    assert doctor(*asking)[0] == 1  # some may bite


def test_versions_count(doctor: Run, files: Path) -> None:
    before = [pin if not pin.startswith("peft") else "peft==0.19.1" for pin in _asking(files, "--json")]
    assert "lora-fsdp-save" in json.loads(doctor(*before)[1])["does_not"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training", "none.yaml"], "none.yaml: a file of settings was expected, there is no such file"),
        (["--training", "make train"], "a command of accelerate, torchrun, deepspeed, trl"),
        (["--training", "FILE"], "FILE: a training with its trainer was expected, the trainer is not said there; name"),
    ],
)
def test_what_is_refused(doctor: Run, files: Path, words: list[str], message: str) -> None:
    named = [word.replace("FILE", str(files / "grpo.yaml")) for word in words]
    status, out, err = doctor(*NEWEST, *named)
    assert (status, out) == (2, "")
    assert " ".join(err.split()).startswith(f"trlcompat doctor: {message.replace('FILE', str(files / 'grpo.yaml'))}")


def test_a_command_says_its_trainer(doctor: Run) -> None:
    _, out, _ = doctor(*NEWEST, "--training", "trl dpo --model_name_or_path m --accelerate_config zero3", "--json")
    document = json.loads(out)
    assert (document["training"]["trainer"], document["training"]["parallel"]["strategy"]) == ("dpo", "zero3")


def test_a_trainer_with_which_no_suite_trains(doctor: Run) -> None:
    _, out, _ = doctor(*NEWEST, "--training", "python gold.py", "--json")
    assert json.loads(out)["notes"][-1] == (
        "no suite trains with GOLDTrainer: only what meets every trainer is known here, and an issue of its own is not"
    )


def test_what_the_stack_has_not_is_refused(doctor: Run) -> None:
    status, out, err = doctor(*NEWEST, "--training", "python ppo.py")
    assert (status, out) == (2, "")
    assert "trainer ppo is absent with trl 1.16.0" in " ".join(err.split())
    old = ["trl==0.17.0", "transformers==4.50.3", "accelerate==1.4.0"]
    status, out, err = doctor(*old, "--training", "trl sft --accelerate_config fsdp2")
    assert (status, out) == (2, "")
    assert "strategy fsdp2 is absent with accelerate 1.4.0" in " ".join(err.split())


def test_what_depends_on_versions_that_are_not_said_may_bite(doctor: Run) -> None:
    asking = ["trl==1.16.0", "--training", "trl sft --use_peft --accelerate_config fsdp1", "--json"]
    document = json.loads(doctor(*asking)[1])
    (saved,) = [issue for issue in document["may_bite"] if issue["id"] == "lora-fsdp-save"]
    assert saved["look"] == ["only with peft >=0.20"]
