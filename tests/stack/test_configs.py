"""A user's configuration files in real launches: what Accelerate itself would hand to ranks, to the last key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.launch import Launcher, LaunchError, StrategyError, accelerate_config
from pytest_trlcompat.strategies import config_keys as keys

from .config_bodies import deepspeed_names, engine_settings, environment, launcher_names, plugin_names

INSTALLED = stack.installed()
HAS_PARALLELISM_CONFIG = stack.satisfied({"accelerate": ">=1.10"}, INSTALLED)
OWN_DEEPSPEED = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2, "reduce_bucket_size": 12345}}
DEEPSPEED_FILE = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
FSDP1 = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": True, "fsdp_version": 1}
FILES: dict[str, dict[str, Any]] = {
    "ddp": {"distributed_type": "MULTI_GPU", "debug": True, "dynamo_config": {"dynamo_backend": "AOT_EAGER"}},
    "file": DEEPSPEED_FILE,
    "fields": {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": False, "gradient_clipping": 0.25},
    },
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": FSDP1, "enable_cpu_affinity": True},
}
if HAS_PARALLELISM_CONFIG:
    FILES["hsdp"] = {
        "distributed_type": "FSDP",
        "fsdp_config": {"version": 2, "reshard_after_forward": False},
        "parallelism_config": {"parallelism_config_dp_replicate_size": 2},
    }
SHOW = """
    import json
    import os

    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    own = {key: value for key, value in os.environ.items() if key.startswith(prefixes) and "USE_CPU" not in key}
    if os.environ["RANK"] == "0":
        print("RESULT", json.dumps(own), flush=True)
"""
ENGINE = """
    import json
    from tests.stack.config_bodies import engine_settings

    print("RESULT", json.dumps(engine_settings()), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files of Accelerate's and one of DeepSpeed's."""
    (tmp_path / "configs").mkdir()
    for name, content in FILES.items():
        content = {"num_processes": 2, "num_machines": 1, **content}
        (tmp_path / "configs" / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "ds.json").write_text(json.dumps(OWN_DEEPSPEED))
    (tmp_path / "show.py").write_text(textwrap.dedent(SHOW))
    (tmp_path / "engine.py").write_text(textwrap.dedent(ENGINE))
    (tmp_path / "nested.py").write_text(
        "import subprocess, sys\nsys.exit(subprocess.run(['accelerate', 'launch', *sys.argv[1:]]).returncode)\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(text: str) -> dict[str, str]:
    (line,) = (line for line in text.splitlines() if line.startswith("RESULT "))
    result: dict[str, str] = json.loads(line.removeprefix("RESULT "))
    return result


@pytest.mark.parametrize("name", FILES)
def test_ranks_get_what_accelerate_launch_itself_gives(launch: Launcher, folder: Path, name: str) -> None:
    config = folder / "configs" / f"{name}.json"
    words = ["--config_file", str(config), "--main_process_port", "0", "show.py"]
    own = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    real = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *words],
        env={**own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    expected = printed(real.stdout)
    assert len(expected) >= 4
    assert launch(environment, strategy=config, sharded=False).values == [expected] * 2


def test_a_deepspeed_file_reaches_the_engine_to_the_last_key(launch: Launcher, folder: Path) -> None:
    """Through a file of Accelerate's, warm and by the real command, by options, and by a launcher within the launch."""
    config = str(folder / "configs" / "file.json")
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    warm, second = launch(engine_settings, strategy=config).values
    assert warm == second
    assert "gradient_clipping" not in warm
    assert (warm["train_micro_batch_size_per_gpu"], warm["zero_optimization"]) == (
        "3",
        str(OWN_DEEPSPEED["zero_optimization"]),
    )
    own = ["--config_file", "configs/file.json", "engine.py"]
    command = launch.command(["accelerate", "launch", *own], env=env)
    cold = launch.command(["accelerate", "launch", *own], mode="cold", env=env)
    nested = launch.command(["python", "nested.py", *own], strategy="zero2", env=env)
    for result in (command, cold, nested):
        for rank in result.ranks:
            assert printed(rank.stdout) == warm


def test_a_deepspeed_file_that_a_program_names_gets_no_defaults(launch: Launcher, folder: Path) -> None:
    """The path is meant from the working directory, and nothing of the strategy's own configuration is added."""
    settings = launch(engine_settings, "ds.json", strategy="zero2").values[0]
    assert "gradient_clipping" not in settings
    assert settings["zero_optimization"] == str(OWN_DEEPSPEED["zero_optimization"])
    by_option = launch(engine_settings, strategy="zero2", options={"config": "ds.json"}).values[0]
    assert (by_option["zero_optimization"], "gradient_clipping" in by_option) == (settings["zero_optimization"], False)


def test_a_file_for_the_cpu(launcher: Launcher, folder: Path) -> None:
    config = folder / "configs" / "cpu.json"
    config.write_text(json.dumps({"distributed_type": "MULTI_CPU", "num_processes": 2, "mixed_precision": "bf16"}))

    def precision() -> tuple[str, str, int]:
        from accelerate import Accelerator

        accelerator = Accelerator()
        return accelerator.device.type, accelerator.mixed_precision, accelerator.num_processes

    found = launcher(precision, strategy=config, sharded=False, device="cpu").values
    assert found == [("cpu", "bf16", 2)] * 2


def test_a_strategy_by_name_keeps_its_defaults(launch: Launcher) -> None:
    options = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.5}
    settings = launch(engine_settings, strategy="zero2", options=options).values[0]
    assert (settings["gradient_clipping"], settings["zero_optimization"]) == ("0.5", "{'stage': 2}")
    assert settings["zero_allow_untested_optimizer"] == "True"


def test_what_accelerate_refuses_is_said_before_anything_runs(launch: Launcher, folder: Path) -> None:
    config = folder / "configs" / "half.json"
    config.write_text(json.dumps({"num_processes": 2, "mixed_precision": "half", "distributed_type": "MULTI_GPU"}))
    with pytest.raises(
        StrategyError, match=r"^Accelerate refuses .*half.json: ValueError: Unknown mixed_precision mode"
    ):
        launch(environment, strategy=config)


def test_a_file_that_accelerate_contradicts_fails_as_for_its_user(launch: Launcher, folder: Path) -> None:
    """Accelerate lets nobody say the precision in both files, and says so in the ranks."""
    config = folder / "configs" / "both.json"
    config.write_text(json.dumps({**DEEPSPEED_FILE, "num_processes": 2, "mixed_precision": "bf16"}))
    with pytest.raises(
        LaunchError, match="When using `deepspeed_config_file`, the following accelerate config variabl"
    ):
        launch(engine_settings, strategy=config)


@pytest.mark.parametrize(("backend", "expected"), [("AOT_EAGER", "OptimizedModule"), ("NO", "DistributedDataParallel")])
def test_a_model_is_compiled_where_the_file_says_so(
    launch: Launcher, folder: Path, backend: str, expected: str
) -> None:
    config = folder / "configs" / "compiled.json"
    dynamo = {"dynamo_backend": backend}
    config.write_text(json.dumps({"distributed_type": "MULTI_GPU", "num_processes": 2, "dynamo_config": dynamo}))

    def prepared() -> str:
        import torch
        from accelerate import Accelerator

        return type(Accelerator().prepare(torch.nn.Linear(8, 8))).__name__

    assert launch(prepared, strategy=config).values == [expected] * 2


def test_each_configuration_of_trls_own_is_launched_as_it_is(launch: Launcher) -> None:
    from importlib import metadata

    files = [Path(str(file.locate())) for file in metadata.files("trl") or () if "accelerate_configs/" in str(file)]
    files = [file for file in files if file.suffix == ".yaml"]
    if not files:
        pytest.skip("this release of TRL has none")
    names = {}
    for file in files:
        chosen = accelerate_config(file)
        if chosen.name == "fsdp2" and not stack.satisfied({"accelerate": ">=1.6"}, INSTALLED):
            continue
        names[file.stem] = chosen.name
        world_size = None if chosen.name == "single" else 2
        settings = launch(environment, strategy=chosen, world_size=world_size, sharded=False).values[0]
        assert settings["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "single_gpu": "single"}.items() <= names.items()


@pytest.mark.skipif(not stack.satisfied({"trl": ">=0.18"}, INSTALLED), reason="its command takes no configuration")
@pytest.mark.parametrize("name", ["zero3", "fsdp1"])
def test_a_configuration_that_trls_command_names(launch: Launcher, tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    rows = [{"text": " ".join(f"w{(row * 7 + column) % 60}" for column in range(8))} for row in range(16)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model_name_or_path": str(tiny.qwen2(directory=tmp_path / "models").path),
        "dataset_name": str(tmp_path / "data"),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": True,
    }
    (tmp_path / "sft.yaml").write_text(json.dumps(settings))
    words = ["trl", "sft", "--config", "sft.yaml", "--accelerate_config", name, "--num_processes", "2"]
    result = launch.command(words, strategy=name, cwd=tmp_path)
    (engine,) = result.ranks[0].proof["engines"].values()
    assert engine["local"] * 2 == engine["total"] > 0


@pytest.fixture(scope="module")
def installed_names(launch: Launcher) -> dict[str, list[str]]:
    return dict(launch(launcher_names, strategy="single").values[0])


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("accelerate", keys.ACCELERATE_OPTIONS),
        ("torchrun", keys.TORCHRUN_OPTIONS),
        ("deepspeed", keys.DEEPSPEED_OPTIONS),
        ("file", keys.ACCELERATE),
        ("SageMaker", {**keys.ACCELERATE, **dict.fromkeys(keys.SAGEMAKER_KEYS)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_setting_of_launchers_has_its_place(
    installed_names: dict[str, list[str]], source: str, known: dict[str, Any]
) -> None:
    """One that is new in a release stands here: give it its place in config_keys.py."""
    assert len(installed_names[source]) > 15
    assert sorted(set(installed_names[source]) - set(known)) == []


def test_every_section_has_the_options_of_its_launcher(installed_names: dict[str, list[str]]) -> None:
    """A section of Accelerate's file holds options of ``accelerate launch``, which the parser knows by their prefix."""
    prefixes = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "fp8_config": "fp8_"}
    if HAS_PARALLELISM_CONFIG:
        prefixes["parallelism_config"] = "parallelism_config_"
    for section, prefix in prefixes.items():
        options = {name for name in installed_names["accelerate"] if name.startswith(prefix)}
        assert len(options) >= 4
        assert sorted(options - set(keys.ACCELERATE_SECTIONS[section])) == []


_OTHER_NAMES = {
    "deepspeed_config_file": "config_file",
    "deepspeed_moe_layer_cls_names": "moe_layer_cls_names",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_cls_to_wrap",
    "zero3_init_flag": "zero3_init",
}


def test_every_setting_that_ranks_read_has_its_place(launch: Launcher) -> None:
    """The fields of Accelerate's plugins that are read from variables, some of which no option of the launcher sets."""
    for section, names in launch(plugin_names, strategy="single").values[0].items():
        assert len(names) >= 4
        prefix = "" if section == "deepspeed_config" else f"{section.removesuffix('_config')}_"
        prefix = "parallelism_config_" if section == "parallelism_config" else prefix
        known = {_OTHER_NAMES.get(name, name.removeprefix(prefix)) for name in keys.ACCELERATE_SECTIONS[section]}
        assert sorted(set(names) - known) == []


def test_every_key_of_deepspeed_has_its_place(launch: Launcher) -> None:
    names = launch(deepspeed_names, strategy="single").values[0]
    top_level = names.pop("")
    assert len(top_level) > 50
    assert sorted(set(top_level) - set(keys.DEEPSPEED)) == []
    for section, fields in names.items():
        assert len(fields) >= 4
        assert sorted(set(fields) - set(keys.DEEPSPEED_SECTIONS[section])) == []
