"""From files, folders, commands and objects to a training. The files are written in the form of real projects'."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.facts import deepspeed_facts
from pytest_trlcompat.training.reading.sources import read_training
from pytest_trlcompat.training.training import DEFAULT, UNKNOWN, Training

OPEN_R1 = """
# Model arguments
model_name_or_path: some/Model-1.5B
torch_dtype: bfloat16
attn_implementation: flash_attention_2
# Data
dataset_name: some/maths
# GRPO
bf16: true
use_vllm: true
eval_strategy: no
gradient_accumulation_steps: 8
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
learning_rate: 1e-5
num_generations: 16
save_strategy: "epoch"
"""
HANDBOOK = """
model_name_or_path: some/sft-qlora
torch_dtype: float16
use_peft: true
load_in_4bit: true
lora_r: 8
lora_modules_to_save: [lm_head]
lora_target_modules:
- q_proj
beta: 0.05
evaluation_strategy: steps
optim: paged_adamw_32bit
"""
AXOLOTL = """
base_model: some/Model-8B
load_in_8bit: true
rl: ipo
adapter: qlora
lora_r: 16
sequence_len: 2048
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
wandb_project:
deepspeed:
fsdp_config:
  fsdp_version: 2
  offload_params: true
  state_dict_type: FULL_STATE_DICT
"""
LLAMAFACTORY = """
model_name_or_path: some/Model-8B
stage: dpo
do_train: true
finetuning_type: lora
lora_target: all
pissa_init: true
additional_target: embed_tokens,lm_head
pref_beta: 0.2
pref_loss: sigmoid
cutoff_len: 1024
deepspeed: ds_z3.json
"""
ZERO3 = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  offload_param_device: cpu
  zero3_init_flag: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: 'no'
num_processes: 8
"""
FSDP = """
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_offload_params: 'false'
  fsdp_activation_checkpointing: true
num_processes: 4
"""
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "train_micro_batch_size_per_gpu": "auto",
}
SCRIPT = "from trl import DPOConfig, DPOTrainer, get_peft_config\ntrainer = DPOTrainer(model='m')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "open_r1.yaml": OPEN_R1,
        "handbook.yaml": HANDBOOK,
        "axolotl.yml": AXOLOTL,
        "llamafactory.yaml": LLAMAFACTORY,
        "zero3.yaml": ZERO3,
        "fsdp.yaml": FSDP,
        "ds_z3.json": json.dumps(DEEPSPEED),
        "train.py": SCRIPT,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _read(folder: Path, *sources: str, trainer: str = "") -> Training:
    return read_training(sources, folder, trainer)


def _values(training: Training, *names: str) -> list[Any]:
    return [training.value(name) for name in names]


def test_a_file_of_trl(folder: Path) -> None:
    training = _read(folder, "open_r1.yaml", trainer="grpo")
    assert training.trainer == "grpo"
    names = ("gradient_checkpointing", "gradient_checkpointing_kwargs", "eval_strategy", "save_strategy")
    assert _values(training, *names) == [True, {"use_reentrant": False}, "no", "epoch"]
    assert _values(training, "learning_rate", "num_generations", "beta") == [1e-5, 16, DEFAULT]
    assert _values(training, "model.name", "model.dtype") == ["some/Model-1.5B", "bfloat16"]
    assert _values(training, "adapter.type", "parallel.strategy", "model.tied") == [UNKNOWN] * 3


def test_a_file_with_an_adapter(folder: Path) -> None:
    training = _read(folder, "handbook.yaml")
    assert training.part("adapter") == {
        "type": "lora",
        "made_by": "trainer",
        "modules_to_save": ["lm_head"],
        "saves_head": True,
        "target_parameters": False,
        "trains_tokens": False,
        "dora": False,
        "dropout": True,
        "init": True,
        "bias": "none",
        "task_type": "CAUSAL_LM",  # the default of ModelConfig
    }
    assert _values(training, "eval_strategy", "model.quantised", "optim") == ["steps", True, "paged_adamw_32bit"]


def test_a_file_of_axolotl(folder: Path) -> None:
    training = _read(folder, "axolotl.yml")
    assert training.trainer == "dpo"
    names = ("loss_type", "per_device_train_batch_size", "max_length", "optim", "adapter.type", "model.quantised")
    assert _values(training, *names) == ["ipo", 2, 2048, "adamw_bnb_8bit", "lora", True]
    engine = ("parallel.strategy", "engine.offload_parameters", "engine.state_dict")
    assert _values(training, *engine) == ["fsdp2", True, "full"]
    assert training.notes == (
        "axolotl.yml was read as axolotl's; what its own code adds to TRL's trainers is not known here",
    )


def test_a_file_of_llama_factory(folder: Path) -> None:
    training = _read(folder, "llamafactory.yaml")
    assert training.trainer == "dpo"
    names = ("beta", "max_length", "adapter.init", "adapter.saves_head", "parallel.strategy", "engine.gradient_sums")
    assert _values(training, *names) == [0.2, 1024, "pissa", True, "zero3", "fp32"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "zero3.yaml",
            {
                "parallel.strategy": "zero3",
                "parallel.processes": 8,
                "engine.offload_parameters": True,
                "engine.mixed_precision": "no",
                "optimizer.deepspeed": None,
            },
        ),
        (
            "fsdp.yaml",
            {
                "parallel.strategy": "fsdp1",
                "parallel.processes": 4,
                "engine.fsdp_sharding": "full_shard",
                "engine.state_dict": "sharded",
                "engine.offload_parameters": False,
                "engine.wrapper_checkpointing": True,
            },
        ),
        ("ds_z3.json", {"parallel.strategy": "zero3", "optimizer.deepspeed": "AdamW", "engine.gradient_sums": "fp32"}),
    ],
)
def test_files_of_engines(folder: Path, name: str, values: dict[str, Any]) -> None:
    training = _read(folder, name)
    assert {axis: training.value(axis) for axis in values} == values
    assert not training.whole  # it says nothing of arguments


def test_a_command_of_accelerate(folder: Path) -> None:
    command = (
        "ACCELERATE_LOG_LEVEL=info accelerate launch --config_file zero3.yaml --num_processes=2 train.py \\\n"
        "  --config handbook.yaml --beta 0.3 --no_gradient_checkpointing --lora_target_modules a b && echo done"
    )
    training = _read(folder, command)
    assert training.trainer == "dpo"
    assert _values(training, "parallel.strategy", "parallel.processes") == ["zero3", 2]
    assert _values(training, "beta", "gradient_checkpointing", "lora_target_modules") == [0.3, False, ["a", "b"]]
    assert training.value("adapter.type") == "lora"


def test_a_command_of_trl(folder: Path) -> None:
    training = _read(folder, "trl sft --model_name_or_path m --packing --learning_rate 2e-5 --accelerate_config fsdp2")
    assert training.trainer == "sft"
    assert _values(training, "packing", "learning_rate", "parallel.strategy") == [True, 2e-5, "fsdp2"]
    assert _values(training, "adapter.type", "max_length") == [None, DEFAULT]
    assert "accelerate_config" not in training.arguments
    bare = _read(folder, "trl grpo --config open_r1.yaml --num_processes 1")
    assert _values(bare, "parallel.strategy", "bf16") == ["single", True]


@pytest.mark.parametrize(
    ("command", "strategy", "processes"),
    [
        ("python train.py", "single", 1),
        ("torchrun --nproc_per_node 4 train.py", "ddp", 4),
        ("torchrun --nproc-per-node=2 --nnodes=2 train.py --beta 0.1", "ddp", 4),
        ("accelerate launch --num_processes 1 train.py", "single", 1),
        ("accelerate launch --multi_gpu --num_processes 2 train.py", "ddp", 2),
        ("accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 train.py", "fsdp2", 2),
        ("accelerate launch --use_deepspeed --zero_stage 1 --num_processes 2 train.py", "zero1", 2),
        ("deepspeed --num_gpus 2 train.py --deepspeed ds_z3.json", "zero3", 2),
        ("accelerate launch train.py", UNKNOWN, UNKNOWN),
    ],
)
def test_how_commands_start_processes(folder: Path, command: str, strategy: Any, processes: Any) -> None:
    training = _read(folder, command)
    assert _values(training, "parallel.strategy", "parallel.processes") == [strategy, processes]
    assert training.trainer == "dpo"


def test_the_trainer_of_a_script_that_is_not_here(folder: Path) -> None:
    training = _read(folder, "python scripts/run_online_dpo.py --beta 0.1")
    assert training.trainer == "online-dpo"
    note = "scripts/run_online_dpo.py is not here: that it trains with OnlineDPOTrainer is taken from its name"
    assert note in training.notes


def test_a_script_without_adapters(folder: Path) -> None:
    (folder / "plain.py").write_text("from trl import SFTTrainer\nSFTTrainer('m').train()\n")
    training = _read(folder, "python plain.py")
    assert (training.trainer, training.value("adapter.type")) == ("sft", None)
    (folder / "plain.py").write_text("raise SystemExit('it is run')\n")
    assert _read(folder, "python plain.py").notes == (
        "plain.py makes no trainer of TRL's by name: say the trainer by --trainer",
    )


def test_a_checkpoint_is_read_by_its_json_alone(folder: Path) -> None:
    checkpoint = folder / "checkpoint-10"
    checkpoint.mkdir()
    (checkpoint / "training_args.bin").write_bytes(b"cos\nsystem\n(S'touch was_run'\ntR.")
    (checkpoint / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "num_experts": 8, "tie_word_embeddings": True, "attention_dropout": 0.1})
    )
    (checkpoint / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "modules_to_save": ["score"], "init_lora_weights": "olora"})
    )
    (checkpoint / "trainer_state.json").write_text(json.dumps({"train_batch_size": 4, "logging_steps": 10}))
    training = _read(folder, "checkpoint-10")
    assert training.part("model") == {"family": "qwen3_moe", "experts": True, "tied": True, "vision": False} | {
        "attention_dropout": True
    }
    assert _values(training, "adapter.type", "adapter.saves_head", "adapter.init") == ["lora", True, "olora"]
    assert _values(training, "per_device_train_batch_size", "life.saved", "beta") == [4, True, UNKNOWN]
    assert training.notes == (
        f"{checkpoint / 'training_args.bin'} is a pickle and was not read: give the arguments as a file or a command",
    )


def test_a_model_that_lies_here(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "gpt2", "attn_pdrop": 0.1}')
    training = _read(folder, "trl sft --model_name_or_path model --num_processes 1")
    assert _values(training, "model.family", "model.attention_dropout") == ["gpt2", True]


def test_a_training_of_its_own_form(folder: Path) -> None:
    training = Training("dpo", {"beta": 0.1, "adapter.type": None}, whole=True)
    (folder / "mine.json").write_text(training.to_json())
    assert _read(folder, "mine.json") == training


@dataclasses.dataclass
class Config:
    beta: float = 0.1
    evaluation_strategy: str = "no"
    own: object = object  # what JSON has not


class DPOTrainer:
    def __init__(self) -> None:
        config = SimpleNamespace(to_dict=lambda: {"model_type": "llama", "tie_word_embeddings": False})
        adapter = SimpleNamespace(to_dict=lambda: {"peft_type": "PeftType.LORA", "init_lora_weights": "pissa"})
        self.args = Config()
        self.model = SimpleNamespace(config=config, dtype="torch.bfloat16", peft_config={"default": adapter})
        state = SimpleNamespace(distributed_type="DistributedType.MULTI_GPU")
        self.accelerator = SimpleNamespace(state=state, num_processes=2)
        callbacks = [type(name, (), {})() for name in ("DefaultFlowCallback", "MyCallback")]
        self.callback_handler = SimpleNamespace(callbacks=callbacks)
        self.train_dataset = SimpleNamespace(column_names=["prompt", "chosen"], __len__=1)


class Mine(DPOTrainer):
    """A user's own subclass."""


def test_a_live_trainer() -> None:
    modules = set(sys.modules)
    training = Training.of(Mine())
    assert not {name for name in set(sys.modules) - modules if "torch" in name or name == "trl"}
    assert (training.trainer, training.source) == ("dpo", "Mine")
    names = ("beta", "eval_strategy", "model.family", "model.dtype", "adapter.type", "adapter.init")
    assert _values(training, *names) == [0.1, "no", "llama", "bfloat16", "lora", "pissa"]
    assert _values(training, "parallel.strategy", "data.columns") == ["ddp", ["prompt", "chosen"]]
    assert training.value("life.callbacks") == ["DefaultFlowCallback", "MyCallback"]
    assert training.notes == ("callbacks whose effect is not known here: MyCallback",)
    assert Training.from_json(training.to_json()) == training


def test_objects_before_there_is_a_trainer() -> None:
    adapter = SimpleNamespace(to_dict=lambda: {"peft_type": "LORA", "modules_to_save": None})
    training = Training.of_objects("dpo", Config(beta=0.2), "some/model", adapter)
    names = ("beta", "model.name", "model.given", "adapter.type", "adapter.made_by")
    assert _values(training, *names) == [0.2, "some/model", "name", "lora", "trainer"]


def test_objects_that_are_none() -> None:
    with pytest.raises(TrainingError, match=r"^a trainer of Transformers' or TRL's was expected, a str without args"):
        Training.of("trainer")
    with pytest.raises(TrainingError, match=r"^a config such as SFTConfig\(...\) was expected, a dict was found"):
        Training.of_objects("dpo", {})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "a: [", "a.yaml: YAML was expected: "),
        ("a.yaml", "- a\n- b\n", "a.yaml: names and values were expected, a list was found"),
        ("a.yaml", "", "a.yaml: names and values were expected, nothing was found"),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []", "a.yaml: YAML was expected: could not determine a constr"),
        ("a.yaml", "a: &x [1]\nb: [*x, *x]\n", "a.yaml: YAML with aliases (&name, *name) is not read; write"),
        ("a.json", "{", "a.json: JSON was expected: Expecting property name"),
        ("a.json", "[" * 100_000, "a.json: JSON was expected: "),
        ("a.yaml", "a: 1\n" * 300_000, "a.yaml: a file of settings was expected, this one has more than 1048576 bytes"),
        ("a.yaml", b"\xff\xfe\x00", "a.yaml: a file of settings was expected, it cannot be read: "),
        ("a.yaml", "distributed_type: TPU\n", "a.yaml: distributed_type NO, MULTI_GPU, DEEPSPEED or FSDP was expected"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "a.json: a stage of ZeRO from 0 to 3 was expected, 4 was"),
        ("a.json", '{"zero_optimization": [3]}', "a.json: zero_optimization must have names and values, [3] was"),
        (
            "a.yaml",
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}",
            "a.yaml: fsdp_version 1 or 2 was expected",
        ),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrainingError) as error:
        read_training([name], tmp_path)
    assert str(error.value).removeprefix(f"{tmp_path}/").startswith(message)
    assert "\n" not in str(error.value)


def test_tokens_are_neither_kept_nor_repeated(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("hub_token: hf_abc\nwandb_api_key: abc\npad_token: <pad>\n")
    training = read_training(["a.yaml"], tmp_path)
    assert "abc" not in training.to_json()
    assert training.arguments == {"hub_token": "hidden", "pad_token": "<pad>", "wandb_api_key": "hidden"}
    (tmp_path / "a.yaml").write_text("hub_token: hf_abc: [\n")
    with pytest.raises(TrainingError, match=r"YAML was expected: .*, line 1; correct it") as error:
        read_training(["a.yaml"], tmp_path)
    assert "abc" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.yaml", "none.yaml: a file of settings was expected, there is no such file; give its path"),
        ("make train", "a command of accelerate, torchrun, deepspeed, trl, python"),
        ("accelerate config", "accelerate launch was expected, accelerate config was found"),
        ("trl chat --model m", "trl with one of its trainers, such as trl sft, was expected, trl chat was found"),
        ("torchrun --nproc_per_node 2", "torchrun: a script to start was expected, there is none in the command"),
        ("python 'a", "a command was expected, its quotes do not match"),
        ("axolotl train", "axolotl: a file of settings was expected in the command, there is none"),
        (" ", "a file, a folder or a command was expected, an empty text was found"),
        (".", ".: config.json, adapter_config.json or trainer_state.json of a checkpoint was expected"),
    ],
)
def test_sources_that_are_none(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(TrainingError) as error:
        read_training([source], tmp_path)
    assert str(error.value).replace(f"{tmp_path}/", "").replace(str(tmp_path), ".").startswith(message)


def test_yaml_without_a_parser(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        TrainingError, match=r"PyYAML, which is not installed here; install it \(the project's extra training\)"
    ):
        _read(folder, "open_r1.yaml")
    assert _read(folder, "ds_z3.json").value("parallel.strategy") == "zero3"


def test_a_stage_may_be_written_with_a_point() -> None:
    """JSON has one kind of number."""
    assert deepspeed_facts({"zero_optimization": {"stage": 2.0}}, "ds.json")["parallel.strategy"] == "zero2"
