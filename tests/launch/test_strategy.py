"""Strategies: the environment variables of ``accelerate launch``, and what the ranks must prove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.launch import NAMES, Launcher, StrategyAbsent, StrategyError, strategy
from pytest_trlcompat.launch.proof import NotProved, check, disagreement, expectation
from pytest_trlcompat.launch.strategy import check_present


def test_every_name_makes_a_strategy() -> None:
    assert [strategy(name).name for name in NAMES] == list(NAMES)
    assert [strategy(name).zero_stage for name in NAMES] == [None, None, 1, 2, 3, None, None]
    assert [strategy(name).fsdp_version for name in NAMES] == [None, None, None, None, None, 1, 2]
    assert [strategy(name).shards_parameters for name in NAMES] == [False, False, False, False, True, True, True]


def test_zero3_partitions_tiny_parameters_and_saves_whole(tmp_path: Path) -> None:
    variables = strategy("zero3", {"gradient_clipping": 1.0, "zero_optimization": {"overlap_comm": False}}).environment(
        tmp_path
    )
    assert variables["ACCELERATE_USE_DEEPSPEED"] == "true"
    config = json.loads(Path(variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
    assert config["zero_optimization"] == {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        "overlap_comm": False,
    }
    assert config["gradient_clipping"] == 1.0
    assert config["train_batch_size"] == "auto"


def test_a_configuration_file_is_merged(tmp_path: Path) -> None:
    written = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(written))
    config = strategy("zero2", {"config": str(tmp_path / "ds.json")}).config
    assert config is not None
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 5}
    assert config["bf16"] == {"enabled": True}


def test_fsdp_variables(tmp_path: Path) -> None:
    variables = strategy("fsdp1", {"sharding_strategy": "NO_SHARD"}).environment(tmp_path)
    assert variables["ACCELERATE_USE_FSDP"] == "true"
    assert variables["FSDP_VERSION"] == "1"
    assert variables["FSDP_SHARDING_STRATEGY"] == "NO_SHARD"
    assert variables["FSDP_USE_ORIG_PARAMS"] == "true"
    assert not strategy("fsdp1", {"sharding_strategy": "NO_SHARD"}).shards_parameters
    assert strategy("fsdp2").environment(tmp_path)["FSDP_RESHARD_AFTER_FORWARD"] == "true"


def test_plain_strategies_set_nothing(tmp_path: Path) -> None:
    assert strategy("single").environment(tmp_path) == {}
    assert strategy("ddp").environment(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("fsdp3", {}, "unknown strategy 'fsdp3'; known are single, ddp"),
        ("my.yaml", {}, r"; accelerate_config\('my\.yaml'\) reads a configuration file"),
        ("ddp", {"bucket": 1}, "strategy 'ddp' has no options, but got bucket"),
        ("fsdp2", {"sharding_strategy": "NO_SHARD"}, "unknown option of fsdp2: sharding_strategy; known are"),
        ("zero3", {"zero_optimization": {"stage": 2}}, "'zero3' got a DeepSpeed configuration of ZeRO stage 2"),
        ("zero3", {"config": "/nowhere/ds.json"}, "the DeepSpeed configuration '/nowhere/ds.json' cannot be read"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        strategy(name, options)


WANTED = expectation(strategy("zero3"), 2, "software", True)
SEEN: dict[str, Any] = {
    "initialized": True,
    "world_size": 2,
    "distributed_type": "DEEPSPEED",
    "device_type": "npu",
    "built": [
        {
            "kind": "deepspeed",
            "model": "Qwen2ForCausalLM",
            "trainable": True,
            "local": 50,
            "total": 100,
            "zero_stage": 3,
            "device_type": "npu",
        }
    ],
}


def engine(**changes: Any) -> dict[str, Any]:
    return {"built": [{**SEEN["built"][0], **changes}]}


def test_what_was_requested_is_proved() -> None:
    check(WANTED, SEEN, rank=0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"world_size": 1}, "world size 2 was requested, 1 was found"),
        ({"initialized": False}, "no process group was initialised"),
        ({"distributed_type": "MULTI_NPU"}, "distributed type DEEPSPEED was requested, MULTI_NPU was found"),
        ({"device_type": "cpu"}, "device type npu was requested, cpu was found"),
        (engine(kind="ddp"), "no deepspeed engine was built \\(built: ddp\\)"),
        (engine(zero_stage=2), "ZeRO stage 3 was requested, 2 was found"),
        (engine(local=100), "parameters are not sharded: 100 of 100 elements are on this rank"),
        (engine(total=0, local=0), "the deepspeed engine holds no parameters"),
        (engine(device_type="cpu"), "the deepspeed engine is on cpu, not on npu"),
    ],
)
def test_each_downgrade_is_caught(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(NotProved, match=f"rank 1 did not run under strategy 'zero3' as requested: .*{text}"):
        check(WANTED, {**SEEN, **changes}, rank=1)


REFERENCE = {**SEEN["built"][0], "trainable": False}
REWARD_MODEL = {**REFERENCE, "model": "Qwen2ForSequenceClassification"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"zero_stage": 0},
            "the deepspeed engine of the reference model Qwen2ForCausalLM (engine 2 of 3) differs: ZeRO stage 3 was "
            "requested, 0 was found",
        ),
        (
            {"local": 100},
            "the deepspeed engine of the reference model Qwen2ForCausalLM (engine 2 of 3) differs: parameters are not "
            "sharded: 100 of 100 elements are on this rank",
        ),
        (
            {"kind": "ddp"},
            "the ddp engine of the reference model Qwen2ForCausalLM (engine 2 of 3) is there, and deepspeed was "
            "requested",
        ),
        (
            {"total": 0, "local": 0},
            "the deepspeed engine of the reference model Qwen2ForCausalLM (engine 2 of 3) holds no parameters",
        ),
    ],
)
def test_each_engine_is_judged_by_itself(changes: dict[str, Any], text: str) -> None:
    policy = SEEN["built"][0]
    check(WANTED, {**SEEN, "built": [policy, REFERENCE, REWARD_MODEL]}, rank=0)
    with pytest.raises(NotProved) as raised:
        check(WANTED, {**SEEN, "built": [policy, {**REFERENCE, **changes}, REWARD_MODEL]}, rank=0)
    assert str(raised.value) == f"rank 0 did not run under strategy 'zero3' as requested: {text}"
    whole = {**policy, "local": 100}
    with pytest.raises(NotProved, match=r"engine of the trainable Qwen2ForCausalLM \(engine 1 of 3\) differs"):
        check(WANTED, {**SEEN, "built": [whole, REFERENCE, REWARD_MODEL]}, rank=0)
    with pytest.raises(
        NotProved, match=r"of the reward model Qwen2ForSequenceClassification \(engine 3 of 3\) differs"
    ):
        check(WANTED, {**SEEN, "built": [policy, REFERENCE, {**REWARD_MODEL, "local": 100}]}, rank=0)


def test_a_reference_model_does_not_prove_a_policy_that_no_engine_holds() -> None:
    check(WANTED, {**SEEN, "built": [REFERENCE]}, rank=0)
    text = "no engine holds a model that can be trained, and an optimizer has 4 parameters"
    with pytest.raises(NotProved, match=text):
        check(WANTED, {**SEEN, "built": [REFERENCE], "optimized": 4}, rank=0)


@pytest.mark.parametrize(
    ("name", "trainable", "fine"),
    [
        ("zero1", False, True),
        ("zero2", False, True),
        ("zero1", True, False),
        ("zero2", True, False),
        ("zero3", False, False),
    ],
)
def test_stage_0_is_for_what_has_no_optimizer_under_zero_1_and_2(name: str, trainable: bool, fine: bool) -> None:
    policy = {**SEEN["built"][0], "zero_stage": int(name[-1])}
    seen = {**SEEN, "built": [policy, {**REFERENCE, "trainable": trainable, "zero_stage": 0}]}
    if fine:
        check(expectation(strategy(name), 2, "software", True), seen, rank=0)
        return
    with pytest.raises(NotProved, match=f"ZeRO stage {name[-1]} was requested, 0 was found"):
        check(expectation(strategy(name), 2, "software", True), seen, rank=0)


@pytest.mark.parametrize(
    ("setting", "found", "fine"),
    [
        ("FULL_SHARD", ["FULL_SHARD"], True),
        ("1", ["FULL_SHARD"], True),
        ("SHARD_GRAD_OP", ["SHARD_GRAD_OP"], True),
        ("2", ["FULL_SHARD"], False),
        ("NO_SHARD", ["NO_SHARD"], True),
        ("HYBRID_SHARD_ZERO2", ["_HYBRID_SHARD_ZERO2"], True),
        ("FULL_SHARD", ["FULL_SHARD", "NO_SHARD"], False),
        ("SHARD_GRAD_OP", ["NO_SHARD"], False),
        ("FULL_SHARD", [], False),
    ],
)
def test_the_sharding_strategy_of_fsdp1(setting: str, found: list[str], fine: bool) -> None:
    wanted = expectation(strategy("fsdp1", {"sharding_strategy": setting}), 2, "software", True)
    built = [{**SEEN["built"][0], "kind": "fsdp1", "sharding_strategies": found}]
    seen = {**SEEN, "distributed_type": "FSDP", "built": built}
    if fine:
        check(wanted, seen, rank=0)
        return
    with pytest.raises(NotProved, match="the sharding strategy .* was requested"):
        check(wanted, seen, rank=0)


def test_ranks_that_built_different_engines() -> None:
    policy = SEEN["built"][0]
    both, alone = {"built": [policy, REFERENCE]}, {"built": [policy]}
    assert disagreement({0: both, 1: {"built": [{**policy, "local": 49}, REFERENCE]}}) is None
    texts = (
        "deepspeed of the trainable Qwen2ForCausalLM with 100 elements at stage 3",
        "deepspeed of the reference model Qwen2ForCausalLM with 100 elements at stage 3",
    )
    assert disagreement({0: both, 1: both, 2: alone}) == (
        2,
        f"ranks built different engines: rank 0 built {texts[0]}, {texts[1]}; rank 2 built {texts[0]}",
    )
    assert disagreement({0: alone, 1: both}) == (
        0,
        f"ranks built different engines: rank 0 built {texts[0]}; rank 1 built {texts[0]}, {texts[1]}",
    )
    assert disagreement({0: alone, 1: {"built": []}}) == (
        1,
        f"ranks built different engines: rank 0 built {texts[0]}; rank 1 built none",
    )


FSDP_SEEN = {"initialized": True, "world_size": 2, "device_type": "npu", "built": []}


def test_fsdp_cannot_be_distinguished_from_ddp_before_an_accelerator_exists() -> None:
    wanted = expectation(strategy("fsdp1"), 2, "software", False)
    check(wanted, {**FSDP_SEEN, "distributed_type_at_first": "MULTI_NPU"}, rank=0)
    check(wanted, {**FSDP_SEEN, "distributed_type": "FSDP"}, rank=0)
    with pytest.raises(NotProved, match="distributed type FSDP was requested, MULTI_NPU was found"):
        check(wanted, {**FSDP_SEEN, "distributed_type": "MULTI_NPU"}, rank=0)
    with pytest.raises(NotProved, match="distributed type MULTI_NPU was requested, NO was found"):
        check(wanted, {**FSDP_SEEN, "distributed_type_at_first": "NO"}, rank=0)
    zero = expectation(strategy("zero3"), 2, "software", False)
    with pytest.raises(NotProved, match="distributed type DEEPSPEED was requested, MULTI_NPU was found"):
        check(zero, {**FSDP_SEEN, "distributed_type_at_first": "MULTI_NPU"}, rank=0)


def test_with_sharded_false_only_the_processes_are_checked() -> None:
    check(expectation(strategy("zero3"), 2, "software", False), {**SEEN, "built": []}, rank=0)


@pytest.mark.parametrize("torch", ["2.4.1", "2.5.1+cu124"])
def test_fsdp2_before_torch_has_it(torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"torch": torch})
    with Launcher() as launch, pytest.raises(StrategyAbsent) as raised:
        launch(len, (), strategy="fsdp2")
    assert str(raised.value) == (
        f"strategy 'fsdp2' was requested, but this stack has torch {torch}: torch.distributed.fsdp.fully_shard came "
        "with torch 2.6; Accelerate uses no other. Use torch>=2.6, or another strategy (single, ddp, zero1, zero2, "
        "zero3, fsdp1, fsdp2)."
    )


def test_fsdp2_before_accelerate_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"torch": "2.6.0", "accelerate": "1.5.2"})
    with Launcher() as launch, pytest.raises(StrategyAbsent) as raised:
        launch(len, (), strategy="fsdp2")
    assert not launch._servers
    assert str(raised.value) == (
        "strategy 'fsdp2' was requested, but this stack has accelerate 1.5.2: Accelerate knows FSDP2 from 1.6.0 on, "
        "and takes FSDP1 before without a word. Use accelerate>=1.6, or another strategy (single, ddp, zero1, zero2, "
        "zero3, fsdp1, fsdp2)."
    )


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("fsdp2", {"torch": "2.6.0", "accelerate": "1.6.0"}),
        ("fsdp2", {}),
        ("fsdp1", {"torch": "2.4.1", "accelerate": "1.5.2"}),
    ],
)
def test_a_strategy_that_the_stack_has(name: str, versions: dict[str, str]) -> None:
    check_present(strategy(name), versions)
