"""Configuration files of Accelerate and DeepSpeed: taken as they are, or refused with the name of the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import CommandError, Launcher, StrategyError, accelerate_config, launchers, strategy
from pytest_trlcompat.launch.launchers import Read
from pytest_trlcompat.launch.strategy import AccelerateLaunch, Strategy, from_accelerate
from pytest_trlcompat.strategies.config_keys import problems_of_deepspeed

OWN_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "overlap_comm": False},
    "steps_per_print": 7,
}


def written(path: Path, content: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def accelerate(tmp_path: Path, **content: Any) -> Path:
    return written(tmp_path / "accelerate.json", {"distributed_type": "MULTI_GPU", "num_processes": 2, **content})


def test_a_deepspeed_file_gets_none_of_our_defaults(tmp_path: Path) -> None:
    path = written(tmp_path / "ds.json", OWN_DEEPSPEED)
    assert strategy("zero3", {"config": str(path)}).config == OWN_DEEPSPEED
    more = strategy("zero3", {"config": path, "gradient_clipping": 0.5, "zero_optimization": {"overlap_comm": True}})
    assert more.config == {
        **OWN_DEEPSPEED,
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "gradient_clipping": 0.5,
    }


def test_options_of_a_strategy_by_name_keep_our_defaults() -> None:
    config = strategy("zero3", {"config": {"steps_per_print": 7}}).config
    assert config is not None
    assert (config["steps_per_print"], config["gradient_clipping"]) == (7, "auto")
    assert config["zero_optimization"]["stage3_param_persistence_threshold"] == 0


def test_an_accelerate_file_is_passed_to_accelerate_and_gets_no_defaults(tmp_path: Path) -> None:
    path = written(tmp_path / "ds.json", OWN_DEEPSPEED)
    config = accelerate(
        tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": str(path)}, num_processes=4
    )
    chosen = accelerate_config(config)
    assert (chosen.name, chosen.world_size, chosen.config) == ("zero3", 4, OWN_DEEPSPEED)
    assert chosen.accelerate == AccelerateLaunch(
        ("--config_file", str(config)), str(Path.cwd()), config_file=str(config)
    )
    with pytest.raises(RuntimeError, match="were not read by Accelerate"):
        chosen.environment(tmp_path)
    assert list(tmp_path.glob("deepspeed_config.json")) == []


def test_what_accelerate_says_is_all_that_ranks_get(tmp_path: Path) -> None:
    launch = AccelerateLaunch((), str(tmp_path), variables={"ACCELERATE_USE_DEEPSPEED": "true"})
    chosen = Strategy("zero2", {"zero_optimization": {"stage": 2}}, accelerate=launch)
    assert chosen.environment(tmp_path) == {"ACCELERATE_USE_DEEPSPEED": "true"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"zero_stage": 1}, "zero1"),
        ({}, "zero2"),  # Accelerate's default
        ({"zero_stage": 3, "gradient_clipping": 0.5, "deepspeed_multinode_launcher": "standard"}, "zero3"),
    ],
)
def test_the_stage_of_accelerates_own_fields(tmp_path: Path, section: dict[str, Any], name: str) -> None:
    chosen = accelerate_config(accelerate(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=section))
    assert (chosen.name, chosen.zero_stage) == (name, int(name[-1]))


def test_a_stage_that_a_deepspeed_file_leaves_open(tmp_path: Path) -> None:
    path = str(written(tmp_path / "ds.json", {"zero_optimization": {"stage": "auto"}}))
    section = {"deepspeed_config_file": path, "zero_stage": 3}
    chosen = accelerate_config(accelerate(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=section))
    assert (chosen.name, chosen.zero_stage) == ("zero3", 3)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, ("fsdp1", "FULL_SHARD", True)),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, ("fsdp1", "SHARD_GRAD_OP", False)),
        # The prefix may be left out, and FSDP1 does not look at this setting.
        ({"version": 1, "reshard_after_forward": "NO_SHARD"}, ("fsdp1", "FULL_SHARD", True)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, ("fsdp2", "FULL_SHARD", True)),
    ],
)
def test_fsdp_of_a_file(tmp_path: Path, section: dict[str, Any], expected: tuple[str, str, bool]) -> None:
    chosen = accelerate_config(accelerate(tmp_path, distributed_type="FSDP", fsdp_config=section))
    assert chosen.fsdp is not None
    assert (chosen.name, chosen.fsdp["sharding_strategy"], chosen.shards_parameters) == expected


def test_a_relative_deepspeed_file_is_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = written(tmp_path / "configs" / "ds.json", {"zero_optimization": {"stage": 2}})
    config = written(
        tmp_path / "configs" / "accelerate.json",
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StrategyError) as caught:
        accelerate_config(config)
    assert str(caught.value) == (
        f"{config}: deepspeed_config_file: ds.json is not in the working directory {tmp_path}, where Accelerate looks "
        f"for it; there is {beside}; start in its folder (cwd=), or write its whole path"
    )
    assert accelerate_config(config, beside.parent).name == "zero2"
    written(tmp_path / "ds.json", {"zero_optimization": {"stage": 3}})
    assert accelerate_config("configs/accelerate.json").name == "zero3"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"num_machines": 2}, "num_machines: 2: a launch runs on this machine, as it is"),
        ({"machine_rank": 1}, "machine_rank: 1: a launch runs on this machine"),
        ({"gpu_ids": "0,1"}, r"gpu_ids: 0,1: which devices ranks see is said by env=\{'CUDA_VISIBLE_DEVICES'"),
        ({"mixed_precison": "bf16"}, "mixed_precison: bf16: nobody reads it; did you mean mixed_precision"),
        ({"tpu_name": "mine"}, "tpu_name: mine: a launch has no TPU"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "AMAZON_SAGEMAKER: a launch runs on this machine, not in SageM"),
        ({"ec2_instance_type": "ml.p3"}, "ec2_instance_type: ml.p3: a launch runs on this machine, not in SageMaker"),
        ({"megatron_lm_config": {"megatron_lm_tp_degree": 2}}, "Megatron-LM is no strategy of a launch"),
        ({"mpirun_config": {"mpirun_hostfile": "hosts"}}, "hosts in mpirun_config: a launch starts its ranks itself"),
        ({"tp_config": {"tp_size": 2}}, "tensor parallelism of Accelerate before 1.10 is no strategy"),
        (
            {"dynamo_config": {"dynamo_bakend": "INDUCTOR"}},
            "dynamo_bakend: INDUCTOR in dynamo_config: nobody reads it; did",
        ),
        (
            {"parallelism_config": {"parallelism_config_cp_size": 2}},
            "parallelism_config_cp_size: 2 in parallelism_config: a launch has no strategy with this dimension",
        ),
        (
            {"fsdp_config": {"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}},
            r"fsdp_backward_prefetch_policy: BACKWARD_PRE in fsdp_config: nobody reads it; did you mean fsdp_back",
        ),
        ({"deepspeed_config": "ds.json"}, "deepspeed_config: ds.json: it must be a mapping"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type MEGATRON_LM cannot be launched"),
    ],
)
def test_what_a_launch_cannot_honour_is_refused_by_name(tmp_path: Path, content: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        accelerate_config(accelerate(tmp_path, **content))


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(StrategyError) as caught:
        accelerate_config(accelerate(tmp_path, num_machines=2, tpu_zone="a"))
    assert str(caught.value) == (
        f"{tmp_path / 'accelerate.json'} cannot be honoured: num_machines: 2: a launch runs on this machine, as it is; "
        "tpu_zone: a: a launch has no TPU"
    )


@pytest.mark.parametrize(
    "content",
    [
        {"num_machines": 1, "machine_rank": 0, "gpu_ids": "all", "same_network": True, "rdzv_backend": "static"},
        {"downcast_bf16": "no", "tpu_env": [], "tpu_use_sudo": False, "tpu_name": None, "commands": None},
        {"main_process_port": 29501, "main_process_ip": "10.0.0.1", "main_training_function": "main"},
        {"dynamo_config": {"dynamo_backend": "NO"}, "fp8_config": {}, "mpirun_config": {"mpirun_ccl": "1"}},
        {"megatron_lm_config": {}, "deepspeed_config": {}, "fsdp_config": None, "ipex_config": {"ipex": False}},
        {"parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_tp_size": 1}},
    ],
)
def test_what_accelerate_config_writes_is_taken(tmp_path: Path, content: dict[str, Any]) -> None:
    assert accelerate_config(accelerate(tmp_path, **content)).name == "ddp"


def test_what_yaml_makes_of_no() -> None:
    launch = AccelerateLaunch((), "/")
    assert from_accelerate({"distributed_type": False}, Path("a.yaml"), launch).name == "single"


@pytest.mark.parametrize("content", [{"use_cpu": True}, {"distributed_type": "MULTI_CPU"}])
def test_a_file_that_asks_for_the_cpu_is_launched_there_alone(tmp_path: Path, content: dict[str, Any]) -> None:
    config = accelerate(tmp_path, **content)
    with Launcher(device="software") as launch, pytest.raises(StrategyError) as caught:
        launch(len, (), strategy=config)
    assert str(caught.value) == (
        f"{config} asks for the CPU (use_cpu, or distributed_type: MULTI_CPU), and the device of the launch is "
        "software; pass device='cpu'"
    )
    assert accelerate_config(config).needs_cpu


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping: nobody reads it; did you mean gradient_clipping?"),
        ({"fp16": {"enabeld": True}}, "fp16.enabeld: nobody reads it; did you mean enabled?"),
        (
            {"zero_optimization": {"stage": 2, "sages": 1}},
            "zero_optimization.sages: nobody reads it; did you mean stage?",
        ),
        (
            {"elasticity": {"enabled": True}},
            "elasticity: DeepSpeed's launcher would choose the number of ranks, and a launch has its own",
        ),
        (
            {"autotuning": {"enabled": True}},
            "autotuning: DeepSpeed's launcher would start other launches, and a launch has its own",
        ),
    ],
)
def test_what_deepspeed_passes_by_in_silence_is_refused(tmp_path: Path, content: dict[str, Any], problem: str) -> None:
    path = written(tmp_path / "ds.json", {"zero_optimization": {"stage": 2}, **content})
    with pytest.raises(StrategyError) as caught:
        strategy("zero2", {"config": str(path)})
    assert str(caught.value) == f"the DeepSpeed configuration {str(path)!r} cannot be honoured: {problem}"


def test_an_option_that_deepspeed_passes_by_in_silence_is_refused() -> None:
    with pytest.raises(StrategyError) as caught:
        strategy("zero3", {"zero_optimization": {"stage3_param_persistance_threshold": 0}})
    assert str(caught.value) == (
        "options of strategy 'zero3' cannot be honoured: zero_optimization.stage3_param_persistance_threshold: nobody "
        "reads it; did you mean stage3_param_persistence_threshold?"
    )


def test_what_deepspeed_reads_is_taken() -> None:
    config = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}, "aio": {"block_size": 1}}
    assert list(problems_of_deepspeed({**config, "autotuning": {"enabled": False}, "fp16": {"enabled": "auto"}})) == []


def options(**given: Any) -> Read:
    return Read("accelerate", ("train.py",), given, None, words=tuple(f"--{name}" for name in given), options={})


def test_the_options_of_accelerate_launch_are_passed_on_as_they_are(tmp_path: Path) -> None:
    chosen = launchers.strategy_of(options(dynamo_backend="aot_eager"), tmp_path)
    assert chosen is not None
    assert (chosen.name, chosen.accelerate) == (
        "ddp",
        AccelerateLaunch(("--dynamo_backend",), str(tmp_path), options={}),
    )


def test_options_take_precedence_over_the_file(tmp_path: Path) -> None:
    accelerate(tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 2})
    chosen = launchers.strategy_of(options(config_file="accelerate.json", zero_stage=3), tmp_path)
    assert chosen is not None
    assert chosen.zero_stage == 3
    assert chosen.accelerate is not None
    assert chosen.accelerate.words[-2:] == ("--config_file", str(tmp_path / "accelerate.json"))


def test_options_leave_the_rest_of_the_file_in_force(tmp_path: Path) -> None:
    accelerate(tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 3})
    chosen = launchers.strategy_of(options(config_file="accelerate.json", gradient_clipping=0.5), tmp_path)
    assert chosen is not None
    assert chosen.zero_stage == 3


def test_ranks_of_a_launcher_within_a_launch_keep_nothing_of_the_launchs_own(tmp_path: Path) -> None:
    launch = AccelerateLaunch((), str(tmp_path), variables={"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"})
    asked = Strategy("zero2", {"zero_optimization": {"stage": 2}}, accelerate=launch)
    own = strategy("zero2")
    environment = {"HOME": "/home/me", "ACCELERATE_USE_CPU": "true", **own.environment(tmp_path)}
    assert "ACCELERATE_DEEPSPEED_CONFIG_FILE" in environment
    launchers.enter(asked, own, environment, tmp_path)
    assert environment == {
        "HOME": "/home/me",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    }


@pytest.mark.parametrize(
    ("launcher", "given", "text"),
    [
        ("accelerate", {"tpu": True}, "accelerate launch --tpu cannot be honoured: a launch has no TPU. Leave it out"),
        ("accelerate", {"cpu": True}, "--cpu cannot be honoured: the device of a launch is said by device="),
        ("accelerate", {"machine_rank": 1}, "--machine_rank 1: a launch runs on this machine, as it is; leave mach"),
        ("accelerate", {"brand_new": 1}, "--brand_new cannot be honoured: nobody reads it"),
        ("torchrun", {"virtual_local_rank": True}, "--virtual_local_rank cannot be honoured: the ranks are the launch"),
        ("deepspeed", {"hostfile": "hosts"}, "--hostfile cannot be honoured: a launch runs on this machine, as it is"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(launcher: str, given: dict[str, Any], text: str) -> None:
    with pytest.raises(CommandError, match=text):
        launchers._check(launcher, given)
