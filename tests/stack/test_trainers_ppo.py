"""The cures for PPO before the installed TRL: saving, its accelerator, FSDP; and a clear word where TRL has no PPO."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from pytest_trlcompat import stack, tiny, trainers
from pytest_trlcompat.equivalence import assert_equivalent
from pytest_trlcompat.launch import Launcher, LaunchError
from pytest_trlcompat.training.aliases import accepted

pytest.importorskip("trl")

INSTALLED = stack.installed()
HAS_PPO = stack.satisfied({"trl": ">=0.9.6,<1.13"}, INSTALLED)
needs_ppo = pytest.mark.skipif(not HAS_PPO, reason=f"trl {INSTALLED['trl']} has no PPO trainer")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.mistral(directory=tmp_path_factory.mktemp("models"), initializer_range=0.1)


# ---- what runs in the ranks


def build(subject: str, model: tiny.TinyModel, folder: Path, cls: type | None = None, **settings: Any) -> Any:
    """A PPO trainer for two batches of four rows over all ranks, which writes to ``folder``."""
    import os

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from pytest_trlcompat.trainers import PPOConfig, PPOTrainer
    from pytest_trlcompat.trainers.curing.trl_ppo import ppo_trainer_class

    def load(auto: Any, **more: Any) -> Any:
        torch.manual_seed(0)
        return auto.from_pretrained(model.path, attn_implementation="eager", **more)

    # Before the configuration: ZeRO-3 would otherwise partition them while they are loaded.
    models = {
        "model": load(AutoModelForCausalLM),
        "ref_model": load(AutoModelForCausalLM),
        "reward_model": load(AutoModelForSequenceClassification, num_labels=1),
        "value_model": load(AutoModelForSequenceClassification, num_labels=1),
    }
    rows = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "num_ppo_epochs": 2,
        "total_episodes": 8,
        "response_length": 5,
        "local_rollout_forward_batch_size": rows,
        "num_sample_generations": 0,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,  # TRL's trainer clips nothing
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "disable_tqdm": True,
        **settings,
    }
    chosen = cls or (PPOTrainer if subject == "corrected" else ppo_trainer_class())
    rows_of_ids = [[3 + (row * 7 + column) % 60 for column in range(6)] for row in range(8)]
    return chosen(
        args=PPOConfig(**accepted(PPOConfig, settings)),
        processing_class=model.tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": rows_of_ids}),
        eval_dataset=Dataset.from_dict({"input_ids": rows_of_ids}),
        **models,
    )


def gathered_policy(trainer: Any) -> dict[str, Any]:
    state = trainer.accelerator.get_state_dict(trainer.model) or {}
    return {name[7:]: tensor.cpu().clone() for name, tensor in state.items() if name.startswith("policy.")}


def compare(expected: dict[str, Any], folder: Path) -> dict[str, Any]:
    """How many tensors should be in the file, how many are, and how many of them are bitwise the expected ones."""
    import torch
    from safetensors.torch import load_file

    found = load_file(folder / "model.safetensors")
    equal = sum(name in found and torch.equal(found[name], tensor) for name, tensor in expected.items())
    return {"expected": len(expected), "found": len(found), "equal": equal}


def two_batches(subject: str, model: tiny.TinyModel, folder: Path, **settings: Any) -> dict[str, Any]:
    """Every logged number but the clock's, and a digest of the trained policy."""
    import hashlib

    trainer = build(subject, model, folder, **settings)
    trainer.train()
    policy = gathered_policy(trainer)
    digest = hashlib.sha256(b"".join(policy[name].float().numpy().tobytes() for name in sorted(policy)))
    return {
        "log": [
            {key: value for key, value in entry.items() if key != "eps"}
            for entry in trainer.state.log_history
            if "objective/kl" in entry
        ],
        "policy": digest.hexdigest(),
        "tensors": len(policy),
    }


def save_early(model: tiny.TinyModel, folder: Path) -> dict[str, Any]:
    """Save before training; the model must be what it was afterwards."""
    trainer = build("corrected", model, folder)
    before = trainer.model
    expected = gathered_policy(trainer)
    trainer.save_model()
    kept = trainer.model is before and trainer.deepspeed is before
    return {"kept": kept, **(compare(expected, folder) if trainer.accelerator.is_main_process else {})}


def save_without_gathering(model: tiny.TinyModel, folder: Path) -> list[str]:
    trainer = build("corrected", model, folder)
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    return sorted(path.name for path in folder.iterdir())


def push(model: tiny.TinyModel, folder: Path) -> dict[str, Any]:
    """Saving pushes, and pushing saves again; the upload itself is left out. By the mixin alone, on a user's class."""
    from transformers import Trainer

    from pytest_trlcompat.trainers.curing.trl_ppo import ppo_trainer_class
    from pytest_trlcompat.trainers.ppo.ppo_save import PPOSaveMixin

    pushed: list[str] = []
    saved: list[str] = []

    class Mine(ppo_trainer_class()):  # type: ignore[misc]
        def save_model(self, *args: Any, **kwargs: Any) -> None:
            saved.append(type(self.model).__name__)
            super().save_model(*args, **kwargs)

        def push_to_hub(self, *_: Any, **__: Any) -> None:
            self.save_model(_internal_call=True)
            self.create_model_card(model_name="mine")
            pushed.append(type(self.model).__name__)

    class Saving(PPOSaveMixin, Mine):
        pass

    assert issubclass(Saving, Trainer)
    trainer = build("corrected", model, folder, cls=Saving)
    expected = gathered_policy(trainer)
    trainer.args.push_to_hub = True
    trainer.save_model()
    kept = {"pushed": pushed, "saved": saved, "card": (folder / "README.md").is_file()}
    return kept | (compare(expected, folder) if trainer.accelerator.is_main_process else {})


def construct(subject: str, model: tiny.TinyModel, folder: Path, **settings: Any) -> dict[str, Any]:
    trainer = build(subject, model, folder, **settings)
    plugin = trainer.accelerator.state.deepspeed_plugin
    return {"stage": None if plugin is None else plugin.zero_stage, "engine": type(trainer.model).__name__}


def root_unsharded(model: tiny.TinyModel, folder: Path) -> dict[str, Any]:
    """Numbers of elements of the embedding and of a layer on this rank: before, within and after."""
    from pytest_trlcompat.trainers.ppo.ppo_fsdp import root_parameters_unsharded

    trainer = build("corrected", model, folder)

    def elements() -> tuple[int, int]:
        policy = trainer.accelerator.unwrap_model(trainer.model).policy
        weights = (policy.get_input_embeddings().weight, next(policy.model.layers[0].parameters()))
        local = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
        return local[0].numel(), local[1].numel()

    before = elements()
    with root_parameters_unsharded(trainer.model):
        within = elements()
    return {"before": before, "within": within, "after": elements()}


def mixed_precision(model: tiny.TinyModel, folder: Path) -> dict[str, Any]:
    """Two batches under FSDP with bf16; then logits by the gathered root, held against a policy that is bf16 itself."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import AutoModelForCausalLM

    from pytest_trlcompat.trainers.ppo.ppo_fsdp import root_parameters_unsharded

    trainer = build("corrected", model, folder, bf16=True)
    policy = trainer.accelerator.unwrap_model(trainer.model).policy
    ids = torch.randint(3, model.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    whole = AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager").to(torch.bfloat16)
    with torch.no_grad():
        with root_parameters_unsharded(trainer.model):
            computed_in = policy.get_input_embeddings().weight.dtype
            found = policy(input_ids=ids.to(trainer.accelerator.device)).logits.float().cpu()
        expected = whole(input_ids=ids).logits.float()
    stored = {parameter.dtype for parameter in trainer.model.parameters() if parameter.numel()}
    trainer.train()
    return {
        "error": (found - expected).abs().max().item(),
        "scale": expected.abs().max().item(),
        "computed_in": str(computed_in),
        "stored": [str(dtype) for dtype in stored],
        "wrapped": isinstance(trainer.model, FullyShardedDataParallel),
        "kl": [entry["objective/kl"] for entry in trainer.state.log_history if "objective/kl" in entry],
    }


# ---- where TRL has no PPO


@pytest.mark.skipif(HAS_PPO, reason="this release of TRL has PPO")
@pytest.mark.parametrize("name", ["PPOTrainer", "PPOConfig"])
def test_a_release_without_ppo_says_since_when_and_what_to_install(name: str) -> None:
    with pytest.raises(ImportError) as raised:
        getattr(trainers, name)
    assert str(raised.value) == (
        f"trl {INSTALLED['trl']} has no PPO trainer: it was removed in trl 1.13.0; install trl>=0.9.6,<1.13 (1.12.0 is "
        "the last release that has it), or train with GRPOTrainer or RLOOTrainer"
    )


def test_importing_everything_does_not_ask_for_ppo() -> None:
    assert {"PPOTrainer", "PPOConfig"} <= set(dir(trainers)) - set(trainers.__all__)


# ---- where it has


@needs_ppo
def test_the_corrected_trainer_takes_what_trl_takes() -> None:
    from pytest_trlcompat.trainers.curing.trl_ppo import ppo_config_class, ppo_trainer_class

    assert issubclass(trainers.PPOTrainer, ppo_trainer_class())
    assert issubclass(trainers.PPOConfig, ppo_config_class())
    assert inspect.signature(trainers.PPOTrainer) == inspect.signature(ppo_trainer_class())
    assert inspect.signature(trainers.PPOConfig) == inspect.signature(ppo_config_class())


@needs_ppo
def test_numbers_equal_trls_bitwise_in_one_process(launch: Launcher, model: tiny.TinyModel, tmp_path: Path) -> None:
    upstream, corrected = (
        launch(two_batches, subject, model, tmp_path / subject, strategy="single").values[0]
        for subject in ("upstream", "corrected")
    )
    assert len(corrected["log"]) == 2
    assert corrected["tensors"] == 21
    if Version(INSTALLED["trl"]) < Version("1.10"):  # ppo-objective-entropy
        pairs = zip(upstream["log"], corrected["log"], strict=True)
        entropies = [[each.pop("objective/entropy") for each in pair] for pair in pairs]
        assert [ours - theirs for theirs, ours in entropies] == pytest.approx([0.0, 1.0])  # mean tokens of padding
    assert corrected == upstream


@needs_ppo
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"optim": "sgd", "learning_rate": 5.0, "max_grad_norm": 0.02}], ids=len)
def test_fsdp_numbers_equal_those_of_ddp(
    settings: dict[str, Any], version: int, launch: Launcher, model: tiny.TinyModel, tmp_path: Path
) -> None:
    """Also those of gradients that are clipped, by the norm of all of them."""
    options = {"transformer_cls_to_wrap": model.decoder_layer} if version == 1 else {}  # once named, once found
    asked: dict[str, Any] = {"stop_token": "eos", **settings}
    sharded = launch(
        two_batches, "corrected", model, tmp_path / "fsdp", **asked, strategy=f"fsdp{version}", options=options
    )
    alike = launch(two_batches, "corrected", model, tmp_path / "ddp", **asked, strategy="ddp")
    assert len(alike.values[0]["log"]) == 2
    expected = [pytest.approx(entry, rel=1e-5, abs=1e-6) for entry in alike.values[0]["log"]]
    assert sharded.values[0]["log"] == expected
    if settings:
        unclipped = {**asked, "max_grad_norm": 1.0}
        other = launch(two_batches, "corrected", model, tmp_path / "ddp", **unclipped, strategy="ddp").values[0]
        assert other["policy"] != alike.values[0]["policy"], "the bound is reached"


@needs_ppo
@pytest.mark.parametrize("original", [True, False], ids=["original-parameters", "flat-parameters"])
def test_under_mixed_precision_the_root_is_gathered_as_it_computes(
    original: bool, launch: Launcher, model: tiny.TinyModel, tmp_path: Path
) -> None:
    options = {"transformer_cls_to_wrap": model.decoder_layer, "use_orig_params": original}
    for rank in launch(mixed_precision, model, tmp_path, strategy="fsdp1", options=options).values:
        assert rank["wrapped"]
        assert rank["computed_in"] == "torch.bfloat16"
        assert rank["stored"] == ["torch.float32"]
        assert rank["error"] <= 0.02 * rank["scale"]
        assert len(rank["kl"]) == 2
        assert all(abs(kl) < 1 for kl in rank["kl"])


@needs_ppo
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_only_the_root_is_gathered(strategy: str, launch: Launcher, model: tiny.TinyModel, tmp_path: Path) -> None:
    whole = model.vocab_size * model.hidden_size
    ranks = launch(root_unsharded, model, tmp_path, strategy=strategy).values
    assert sum(rank["before"][0] for rank in ranks) == whole
    for rank in ranks:
        assert rank["within"] == (whole, rank["before"][1])  # a layer stays sharded
        assert rank["after"] == rank["before"]


@needs_ppo
def test_zero3_saves_before_training_and_leaves_the_engine_in_place(
    launch: Launcher, model: tiny.TinyModel, tmp_path: Path
) -> None:
    first, second = launch(save_early, model, tmp_path, strategy="zero3").values
    assert first == {"kept": True, "expected": 21, "found": 21, "equal": 21}
    assert second == {"kept": True}


@needs_ppo
def test_zero3_without_gathering_leaves_deepspeeds_checkpoint_as_upstream_does(
    launch: Launcher, model: tiny.TinyModel, tmp_path: Path
) -> None:
    options = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}}
    names = launch(save_without_gathering, model, tmp_path, strategy="zero3", options=options).values[0]
    assert "zero_to_fp32.py" in names
    assert "model.safetensors" not in names


@needs_ppo
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_pushing_saves_the_policy_once_more(
    strategy: str, launch: Launcher, model: tiny.TinyModel, tmp_path: Path
) -> None:
    first = launch(push, model, tmp_path, strategy=strategy).values[0]
    wrapper = "PolicyAndValueWrapper" if strategy == "single" else "DistributedDataParallel"
    assert first == {
        "pushed": [wrapper],
        "saved": [wrapper] * 2,
        "card": True,
        "expected": 21,
        "found": 21,
        "equal": 21,
    }


@needs_ppo
@pytest.mark.skipif(
    not stack.satisfied({"accelerate": ">=1.0,<1.9"}, INSTALLED), reason="this Accelerate knows its state"
)
def test_upstream_still_needs_the_accelerators_cure(launch: Launcher, model: tiny.TinyModel, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        launch(construct, "upstream", model, tmp_path, strategy="zero2")
    assert raised.value.failure is not None
    assert "Please make sure to properly initialize your accelerator" in raised.value.failure.message


@needs_ppo
def test_deepspeed_by_argument_is_the_one_in_use(launch: Launcher, model: tiny.TinyModel, tmp_path: Path) -> None:
    settings = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "zero_allow_untested_optimizer": True,
    }
    result = launch(
        construct,
        "corrected",
        model,
        tmp_path,
        strategy="zero3",
        env={"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"},  # not by the launcher
        deepspeed=settings,
    )
    assert result.values == [{"stage": 3, "engine": "DeepSpeedEngine"}] * 2


@needs_ppo
def test_strategies_of_its_own_loop_are_not_compared(launcher: Launcher, model: tiny.TinyModel, tmp_path: Path) -> None:
    def train() -> None:
        build("corrected", model, tmp_path).train()

    with pytest.raises(LaunchError, match=r"nothing can be compared of a loop of one's own, which TRL's PPOTrainer"):
        assert_equivalent(launcher, train, strategies=["ddp"])
