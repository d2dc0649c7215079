"""The cure of ``transformers-decayed-norms``: which parameters decay, whose choice stands, and what is said of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pytest_trlcompat import stack, tiny  # noqa: E402 - needs the stack
from pytest_trlcompat.launch import Launcher  # noqa: E402
from pytest_trlcompat.strategies import DISTINCT  # noqa: E402
from pytest_trlcompat.trainers.setup.decayed_norms import DecayedNormsMixin  # noqa: E402

WEIGHTS = ("embed_tokens.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
WEIGHTS_OF_THE_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "lm_head.weight")


class ByClass:
    """A trainer that asks as Transformers did up to 4.50."""

    __module__ = "transformers.trainer"

    def __init__(self) -> None:
        self.args = SimpleNamespace(weight_decay=0.1)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        upstream = importlib.import_module("transformers.trainer")
        names: list[str] = upstream.get_parameter_names(model, [torch.nn.LayerNorm])
        return [name for name in names if "bias" not in name]


class Corrected(DecayedNormsMixin, ByClass):
    pass


def model() -> Any:
    return tiny.qwen2(num_hidden_layers=1).new_model()


def kinds(names: list[str]) -> set[str]:
    return {name.rpartition(".")[0].rpartition(".")[2] for name in names}


def test_norms_do_not_decay_and_nothing_else_is_left_out() -> None:
    upstream, corrected = ByClass().get_decay_parameter_names(model()), Corrected().get_decay_parameter_names(model())
    assert set(upstream) - set(corrected) == {
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    }
    assert corrected == [name for name in upstream if "norm" not in name]
    assert kinds(corrected) == {name.removesuffix(".weight") for name in (*WEIGHTS, *WEIGHTS_OF_THE_MLP)}


def test_without_weight_decay_groups_are_upstreams_so_that_checkpoints_are() -> None:
    trainer = Corrected()
    trainer.args.weight_decay = 0.0
    assert trainer.get_decay_parameter_names(model()) == ByClass().get_decay_parameter_names(model())


def test_another_trainer_decays_what_it_decayed() -> None:
    upstream = ByClass().get_decay_parameter_names(model())
    Corrected().get_decay_parameter_names(model())
    assert ByClass().get_decay_parameter_names(model()) == upstream


def test_names_that_miss_some_norms_are_completed_and_those_that_name_all_are_left_alone() -> None:
    asked: list[list[str]] = []

    class ByName(ByClass):
        """As Transformers did in 4.51 and 4.52, or does now."""

        __module__ = "transformers.trainer"

        def get_decay_parameter_names(self, model: Any) -> list[str]:
            upstream = importlib.import_module("transformers.trainer")
            names: list[str] = upstream.get_parameter_names(model, [torch.nn.LayerNorm], asked[-1])
            return names

    def get_parameter_names(model: Any, classes: Any, names: Any) -> list[str]:
        return ["layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight"]

    upstream: Any = importlib.import_module("transformers.trainer")
    before = upstream.get_parameter_names
    upstream.get_parameter_names = get_parameter_names
    try:
        corrected = type("Corrected", (DecayedNormsMixin, ByName), {})()
        asked.append(["bias", "layernorm", "rmsnorm"])
        assert corrected.get_decay_parameter_names(None) == ["lm_head.weight"]
        asked.append([r"bias", r"layernorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"])
        assert corrected.get_decay_parameter_names(None) == get_parameter_names(None, None, None)
    finally:
        upstream.get_parameter_names = before


class Mine(ByClass):
    """A user's trainer, which has the norm at the end decay and the head not."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        names = [name for name in super().get_decay_parameter_names(model) if "lm_head" not in name]
        return [*names, "model.norm.weight"]


def test_what_a_users_method_adds_or_leaves_out_stays() -> None:
    found = type("Corrected", (DecayedNormsMixin, Mine), {})().get_decay_parameter_names(model())
    assert {"model.norm.weight"} == {name for name in found if "norm" in name}
    assert not any("lm_head" in name for name in found)


def test_a_users_own_choice_is_not_looked_at() -> None:
    class Own(ByClass):
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name, _ in model.named_parameters()]

    corrected: Any = type("Corrected", (DecayedNormsMixin, Own), {})()
    assert corrected.get_decay_parameter_names(model()) == [name for name, _ in model().named_parameters()]
    assert DecayedNormsMixin._activity(Own, None).reason == "the trainer's own class says what decays"


def test_it_says_what_it_does() -> None:
    activity = DecayedNormsMixin._activity
    trainer = Corrected()
    assert activity(Corrected, None).active is None
    assert activity(Corrected, trainer).active is True
    trainer.get_decay_parameter_names(model())
    assert activity(Corrected, trainer).reason == "3 parameters of norms do not decay"
    trainer.args.weight_decay = 0.0
    assert (activity(Corrected, trainer).active, activity(Corrected, trainer).reason) == (False, "weight_decay is 0")


def test_of_the_installed_release_it_says_whether_norms_decay() -> None:
    from transformers import Trainer

    found = DecayedNormsMixin._activity(Trainer, None)
    if Version(stack.installed()["transformers"]) >= Version("4.53"):
        assert (found.active, found.reason) == (False, "Transformers leaves norms out by their names")
    else:
        assert found.active is None
        assert found.reason == "with weight_decay: Transformers knows norms by their class alone"


def test_flat_parameters_of_fsdp1_are_told(caplog: pytest.LogCaptureFixture) -> None:
    flat = torch.nn.Module()
    flat.register_parameter("_flat_param", torch.nn.Parameter(torch.ones(2)))
    assert Corrected().get_decay_parameter_names(flat) == ["_flat_param"]
    assert [record.getMessage() for record in caplog.records] == [
        "DecayedNormsMixin: FSDP1 with use_orig_params=False has made one parameter of norms and weights, "
        "which decays as a whole"
    ]
    caplog.clear()
    Corrected().get_decay_parameter_names(model())
    assert caplog.records == []


# ---- in ranks


def decayed(folder: str, adapter: bool) -> dict[str, Any]:
    """A step that only decays, by half: by how much each kind of parameter is shorter after it."""
    import inspect

    import torch
    import transformers.training_args
    from accelerate.utils import set_seed
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    from pytest_trlcompat.conformance.weights import whole
    from pytest_trlcompat.trainers import cured

    class ByClass(Trainer):
        def get_decay_parameter_names(self, model: Any) -> Any:
            if "forbidden_layer_names" in inspect.signature(upstream.get_parameter_names).parameters:
                return [
                    name for name in upstream.get_parameter_names(model, [torch.nn.LayerNorm]) if "bias" not in name
                ]
            return super().get_decay_parameter_names(model)

    ByClass.__module__ = "mine"
    upstream = importlib.import_module("transformers.trainer")
    fields = getattr(transformers.training_args, "_VALID_DICT_FIELDS", [])
    fields[:] = [name for name in fields if name in TrainingArguments.__dataclass_fields__]
    set_seed(0)
    tiny_model = tiny.qwen2(num_hidden_layers=1)
    policy = tiny_model.new_model()
    if adapter:
        import peft

        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM")
        policy = peft.get_peft_model(policy, config)
    rows = [{"input_ids": tiny_model.tokenizer(row["prompt"])["input_ids"]} for row in tiny.prompts(8, words=6)]
    trainer: Any = cured(ByClass)(
        model=policy,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=2,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            weight_decay=5.0,
            max_grad_norm=1e-6,
            optim="sgd",
            bf16=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tiny_model.tokenizer, mlm=False),
    )
    before = {name: value.norm().item() for name, value in whole(trainer.model_wrapped).items()}
    trainer.train()
    after = {name: value.norm().item() for name, value in whole(trainer.model_wrapped).items()}
    return {name: after[name] / before[name] for name in before if before[name]}


@pytest.mark.parametrize("strategy", DISTINCT)
@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
def test_only_weights_are_shorter_under_each_strategy(
    launch: Launcher, strategy: str, adapter: bool, tmp_path: Path
) -> None:
    """Norms keep their length, whatever wraps them; weights have half of theirs."""
    if strategy == "fsdp2" and Version(stack.installed()["transformers"]) < Version("4.52"):
        pytest.skip("Transformers cannot train under FSDP2")
    options = {"state_dict_type": "SHARDED_STATE_DICT"} if strategy == "fsdp2" else {}
    size = 1 if strategy == "single" else 2
    for kept in launch(
        decayed, str(tmp_path), adapter, strategy=strategy, options=options, world_size=size, sharded=not adapter
    ).values:
        parts = ("lora_A", "modules_to_save") if adapter else ("",)
        trained = {name: each for name, each in kept.items() if any(part in name for part in parts)}
        norms = {name for name in trained if "norm" in name}
        assert len(norms) == 3
        assert [trained[name] for name in norms] == [pytest.approx(1.0, abs=1e-4)] * 3
        weights = [each for name, each in trained.items() if name not in norms and "bias" not in name]
        assert len(weights) == (1 if adapter else 9)
        assert weights == [pytest.approx(0.5, abs=1e-4)] * len(weights)
