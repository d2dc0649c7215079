"""``launcher.command``: real programs train in warm and in cold ranks, by their own commands and launchers."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import CommandError, Launcher, LaunchError, LaunchResult, StrategyError

INSTALLED = stack.installed()
pytestmark = pytest.mark.skipif(
    not stack.satisfied({"trl": ">=0.15", "transformers": ">=4.48"}, INSTALLED),
    reason="its scripts take other arguments",
)
HAS_FSDP2 = stack.satisfied({"accelerate": ">=1.6", "transformers": ">=4.52"}, INSTALLED)
STRATEGIES = ["ddp", "zero2", "zero3", "fsdp1", *(["fsdp2"] if HAS_FSDP2 else [])]
ENGINES = {"zero2": "deepspeed", "zero3": "deepspeed"}

TRAIN = """
    import argparse
    import json
    import os
    import sys
    from dataclasses import dataclass

    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    @dataclass
    class Row:
        number: int

        @property
        def tokens(self):
            return [(self.number * 7 + column) % 60 + 3 for column in range(8)]

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("model")
        parser.add_argument("--local_rank")
        parser.add_argument("--deepspeed")
        given = parser.parse_args()
        args = SFTConfig(
            output_dir=os.environ["OUT"], max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", report_to="none", bf16=False, dataloader_num_workers=1,
            gradient_checkpointing=False, deepspeed=given.deepspeed,
        )
        tokens = [Row(number).tokens for number in range(16)]
        trainer = SFTTrainer(given.model, args=args, train_dataset=Dataset.from_dict({"input_ids": tokens}))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print("RESULT", json.dumps({"losses": losses, "local_rank": given.local_rank, "more": sys.argv[2:]}))

    if __name__ == "__main__":
        main()
"""
SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a script, an Accelerate configuration for ZeRO-2, data, and a configuration of TRL's own scripts."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    (folder / "nested.py").write_text(
        "import os, subprocess, sys\nprint('outer', flush=True)\n"
        "command = [*os.environ['NESTED'].split(), *sys.argv[1:]]\n"
        "sys.exit(subprocess.run(command, env={**os.environ, 'INNER': '1'}).returncode)\n"
    )
    zero2 = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    (folder / "zero2.json").write_text(json.dumps(zero2))
    config = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 2}}
    (folder / "accelerate.json").write_text(json.dumps(config))
    rows = [{"text": " ".join(f"w{(row * 7 + column) % 60}" for column in range(8))} for row in range(16)]
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.qwen2(directory=tmp_path_factory.mktemp("models"), initializer_range=0.1).path)


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> dict[str, Any]:
    return {"cwd": folder, "env": {"OUT": str(tmp_path)}}


def found(result: LaunchResult) -> list[dict[str, Any]]:
    lines = [[line for line in rank.stdout.splitlines() if line.startswith("RESULT ")] for rank in result.ranks]
    return [json.loads(line.removeprefix("RESULT ")) for (line,) in lines]


def engine(result: LaunchResult) -> Any:
    """The kind of engine that was built, and the ZeRO stage."""
    (only,) = result.ranks[0].proof["engines"].items()
    return only[0], only[1].get("zero_stage")


@pytest.fixture(scope="module")
def losses(launch: Launcher, folder: Path, model: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of the script with two ranks; under every strategy the same."""
    env = {"OUT": str(tmp_path_factory.mktemp("out"))}
    first, second = found(launch.command(["python", "train.py", model], strategy="ddp", cwd=folder, env=env))
    assert first["losses"] == second["losses"]
    assert first["losses"][1] != first["losses"][0] > 0
    return list(first["losses"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_script_trains_under_each_strategy(
    launch: Launcher, options: dict[str, Any], model: str, losses: list[float], strategy: str
) -> None:
    result = launch.command(["python", "train.py", model], strategy=strategy, **options)
    assert result.values == [0, 0]
    assert engine(result)[0] == ENGINES.get(strategy, strategy)
    for each in found(result):
        assert each["losses"] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "more", "expected"),
    [
        (["torchrun", "--nproc_per_node", "2"], {"strategy": "zero2"}, ("deepspeed", 2)),
        (["python", "-m", "torch.distributed.run", "--nproc-per-node=2"], {}, ("ddp", None)),
        (["accelerate", "launch", "--num_processes", "2"], {"strategy": "fsdp1"}, ("fsdp1", None)),
        (["accelerate", "launch", "--config_file", "accelerate.json"], {}, ("deepspeed", 2)),
        (["accelerate", "launch", "--config_file", "accelerate.json", "--zero_stage", "3"], {}, ("deepspeed", 3)),
        (["accelerate-launch", "--use_deepspeed", "--zero_stage", "3", "--num_processes", "2"], {}, ("deepspeed", 3)),
        (["accelerate", "launch", "--use_fsdp", "--num_processes", "2"], {}, ("fsdp1", None)),
        (["deepspeed", "--num_gpus", "2"], {"strategy": "zero3"}, ("deepspeed", 3)),
        (["deepspeed", "--num_gpus=2", "--no_local_rank"], {"strategy": "zero2"}, ("deepspeed", 2)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_the_words_of_a_launcher_say_strategy_and_ranks(
    launch: Launcher,
    options: dict[str, Any],
    model: str,
    losses: list[float],
    words: list[str],
    more: dict[str, Any],
    expected: tuple[str, int | None],
) -> None:
    result = launch.command([*words, "train.py", model], **more, **options)
    assert engine(result) == expected
    passed = words[0] == "deepspeed" and "--no_local_rank" not in words
    for rank, each in enumerate(found(result)):
        assert each["losses"] == pytest.approx(losses, rel=1e-4)
        assert each["local_rank"] == (str(rank) if passed else None)


def test_accelerates_own_defaults_of_fsdp_are_kept(launch: Launcher, options: dict[str, Any], model: str) -> None:
    """Without a wrapping policy Accelerate makes one unit of the model; a strategy by name wraps its two layers."""
    words = ["accelerate", "launch", "--use_fsdp", "--num_processes", "2"]
    units = []
    for more in ([], ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]):
        result = launch.command([*words, *more, "train.py", model], **options)
        units.append(result.ranks[0].proof["engines"]["fsdp1"]["count"])
    assert units == [1, 3]


@pytest.mark.parametrize(
    ("words", "more", "error", "text"),
    [
        (
            ["accelerate", "launch", "--num_machines", "2"],
            {},
            CommandError,
            "--num_machines 2: a launch runs on this mach",
        ),
        (
            ["accelerate", "launch", "--gpu_ids", "1"],
            {},
            CommandError,
            "accelerate launch --gpu_ids cannot be honoured",
        ),
        (["accelerate", "launch", "--nonsense"], {}, CommandError, "accelerate launch refuses .*: error: unrecognized"),
        (["accelerate", "launch", "--zero_stage", "3"], {}, CommandError, "no effect without --use_deepspeed; add it"),
        (["torchrun", "--nproc_per_node", "4"], {"world_size": 2}, CommandError, "world_size=2 .* torchrun .* 4 ranks"),
        (["torchrun", "--nnodes", "2"], {}, CommandError, "torchrun --nnodes 2: a launch runs on this machine"),
        (["torchrun", "--no-python"], {}, CommandError, "torchrun --no_python cannot be honoured"),
        (["deepspeed"], {}, CommandError, "deepspeed says no stage; pass strategy='zero3'"),
        (
            ["deepspeed", "--include", "localhost:0"],
            {"strategy": "zero3"},
            CommandError,
            "--include cannot be honoured",
        ),
        (
            ["accelerate", "launch", "--config_file", "accelerate.json"],
            {"strategy": "zero3"},
            CommandError,
            "asks for zero2, and strategy= for zero3; say it once",
        ),
        (["accelerate", "launch", "--config_file", "no.yaml"], {}, StrategyError, "no.yaml cannot be read"),
    ],
)
def test_what_a_launcher_is_asked_for_and_a_launch_is_not_is_refused(
    launch: Launcher, options: dict[str, Any], words: list[str], more: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        launch.command([*words, "train.py", "model"], **more, **options)


@pytest.mark.parametrize(
    ("nested", "strategy"),
    [
        ("torchrun --nproc_per_node 2", "zero3"),
        (f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2", "ddp"),
        ("accelerate launch --config_file accelerate.json", "zero2"),
        ("deepspeed --num_gpus 2", "zero2"),
    ],
)
def test_the_ranks_of_a_launcher_that_a_command_starts_are_ours(
    launch: Launcher, options: dict[str, Any], model: str, losses: list[float], nested: str, strategy: str
) -> None:
    more = {**options, "env": {**options["env"], "NESTED": nested}}
    result = launch.command(["python", "nested.py", "train.py", model], strategy=strategy, **more)
    assert [rank.stdout.splitlines()[0] for rank in result.ranks] == ["outer"] * 2
    assert engine(result)[0] == ENGINES.get(strategy, strategy)
    for each in found(result):
        assert each["losses"] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(
    ("nested", "text"),
    [
        ("torchrun --nproc_per_node 4", r"starts torchrun --nproc_per_node 4 train.py .*world_size=2 .* 4 ranks"),
        (
            "accelerate launch --use_deepspeed --zero_stage 2",
            r"asks for zero2, while .* zero3; pass strategy='zero2'",
        ),
        ("torchrun --nnodes 2", r"whose ranks these cannot become: torchrun --nnodes 2"),
    ],
)
def test_a_launcher_of_other_ranks_is_refused(
    launch: Launcher, options: dict[str, Any], model: str, nested: str, text: str
) -> None:
    more = {**options, "env": {**options["env"], "NESTED": nested}}
    with pytest.raises(LaunchError, match=text) as caught:
        launch.command(["python", "nested.py", "train.py", model], strategy="zero3", **more)
    assert caught.value.failure is not None
    assert caught.value.failure.type_name == "NestedLauncherError"


def test_a_configuration_of_its_own_that_is_another_strategys_fails(
    launch: Launcher, options: dict[str, Any], model: str
) -> None:
    own = ["python", "train.py", model, "--deepspeed", "zero2.json"]
    assert engine(launch.command(own, strategy="zero2", **options)) == ("deepspeed", 2)
    with pytest.raises(LaunchError, match="ZeRO stage 3 was requested, 2 was found"):
        launch.command(own, strategy="zero3", **options)
    with pytest.raises(LaunchError, match="no ddp engine was built"):
        launch.command(own, strategy="ddp", **options)


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero3", "fsdp1"])
@pytest.mark.parametrize("words", [["trl", "sft"], ["python", "-m", "trl.scripts.sft"]], ids=["trl", "module"])
def test_trls_own_command(
    launch: Launcher, folder: Path, model: str, tmp_path: Path, strategy: str, words: list[str]
) -> None:
    """``trl`` calls Accelerate's launcher in its own process."""
    data, output = str(folder / "data"), str(tmp_path / "out")
    settings = {**SETTINGS, "model_name_or_path": model, "dataset_name": data, "output_dir": output}
    (tmp_path / "sft.yaml").write_text(json.dumps(settings))
    arguments = ["--config", "sft.yaml"]
    if words[0] == "trl" and stack.satisfied({"trl": "<0.18"}, INSTALLED):  # which takes no configuration there
        arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    result = launch.command([*words, *arguments], strategy=strategy, cwd=tmp_path)
    assert set(result.values) == {0}
    assert (tmp_path / "out" / "config.json").exists()


def test_cold_ranks_are_started_by_the_real_launcher(
    launch: Launcher, options: dict[str, Any], model: str, losses: list[float]
) -> None:
    words = ["torchrun", "--nproc_per_node", "2", "train.py", model]
    result = launch.command(words, strategy="zero3", mode="cold", **options)
    assert engine(result) == ("deepspeed", 3)
    for each in found(result):
        assert each["losses"] == pytest.approx(losses, rel=1e-4)


def test_two_trainings_that_a_command_starts_are_both_proved(
    launch: Launcher, folder: Path, options: dict[str, Any], model: str, losses: list[float]
) -> None:
    (folder / "two.py").write_text(
        "import subprocess, sys\nwords = ['accelerate', 'launch', '--num_processes', '2', *sys.argv[1:]]\n"
        "for step in range(2):\n    print('STATUS', subprocess.run(words, check=True).returncode)\n"
    )
    result = launch.command(["python", "two.py", "train.py", model], strategy="ddp", **options)
    for rank in result.ranks:
        lines = [line for line in rank.stdout.splitlines() if line.startswith(("RESULT", "STATUS"))]
        assert [line.split()[0] for line in lines] == ["RESULT", "STATUS"] * 2
        assert lines[1] == "STATUS 0"
        for line in (lines[0], lines[2]):
            assert json.loads(line.removeprefix("RESULT "))["losses"] == pytest.approx(losses, rel=1e-4)
        assert rank.proof["engines"]["ddp"]["count"] == 2
