"""``assert_equivalent``: trainings that are the same pass; of others the first difference is named, with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.equivalence import NotEquivalent, NothingCompared
from pytest_trlcompat.equivalence.comparing import compare
from pytest_trlcompat.equivalence.recording import Training
from pytest_trlcompat.launch import Launcher, LaunchError

from .checks_bodies import build_grpo

pytestmark = pytest.mark.skipif(
    stack.satisfied({"trl": ">=0.17,<0.19", "transformers": "<4.51"}, stack.installed()),
    reason="no plain TrainingArguments can be made once TRL's GRPOConfig is imported: trl-training-arguments",
)

Assert = Callable[..., None]
SHARDED = ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"]


@pytest.fixture(scope="module")
def model() -> tiny.TinyModel:
    return tiny.qwen2(initializer_range=0.1)


def train(model: tiny.TinyModel, folder: str, change: str = "", **settings: Any) -> None:
    """Three steps of a plain Trainer; ``change`` says what is different where there are two ranks."""
    import os

    import transformers

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))

    class Changed(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if change == "loss":
                loss = loss * (1 + 0.01 * (ranks - 1))
            if change == "gradients":  # the same number, of which half has no gradient
                loss = loss if ranks == 1 else 0.5 * loss + 0.5 * loss.detach()
            return loss

    class ChangeWeights(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if change == "weights" and ranks > 1 and state.global_step == state.max_steps:
                dict(model.named_parameters())["model.norm.weight"].data.add_(0.01)

    if change == "crash" and ranks > 1 and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        raise ValueError("not without DeepSpeed")
    shift = 7 * rank if change == "rows" else 0
    rows = [[(row * 7 + column * (1 + row % 5) + shift) % 50 + 3 for column in range(8)] for row in range(32)]
    values = {
        "output_dir": folder,
        "max_steps": 3 if change != "steps" else 2 + ranks,
        "save_strategy": "no",
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2 * (ranks if change == "rate" else 1),
        "optim": "sgd",
        "bf16": False,
        "disable_tqdm": True,
    }
    policy = model.new_model()
    if change == "dropout":
        policy.config.attention_dropout = 0.5
        for layer in policy.model.layers:
            layer.self_attn.attention_dropout = 0.5
    trainer = Changed(
        model=policy,
        args=transformers.TrainingArguments(**{**values, **settings}),
        train_dataset=[
            {"input_ids": each, "labels": [-100] * 8 if change == "masked" else each, "attention_mask": [1] * 8}
            for each in rows
        ],
    )
    trainer.add_callback(ChangeWeights())
    trainer.train()


def differing(assert_equivalent: Assert, *args: Any, **kwargs: Any) -> NotEquivalent:
    with pytest.raises(NotEquivalent) as caught:
        assert_equivalent(train, *args, **kwargs)
    return caught.value


@pytest.mark.parametrize("settings", [{}, {"optim": "adamw_torch", "max_grad_norm": 0.05}], ids=["sgd", "adamw"])
def test_a_training_is_the_same_under_each_strategy(
    assert_equivalent: Assert, model: tiny.TinyModel, tmp_path: Any, settings: dict[str, Any]
) -> None:
    assert_equivalent(train, model, str(tmp_path), strategies=SHARDED, kwargs=settings)


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ("loss", "loss (step 0)"),
        ("gradients", "gradient norm (step 0)"),
        ("rate", "loss (step 1)"),
        ("steps", "number of steps (all)"),
    ],
)
def test_the_first_difference_is_named(
    assert_equivalent: Assert, model: tiny.TinyModel, tmp_path: Any, change: str, stage: str
) -> None:
    error = differing(assert_equivalent, model, str(tmp_path), change, strategies=["ddp", "zero3"])
    for strategy in ("ddp", "zero3"):
        start = f"train under {strategy} with 2 rank(s) is not the training that it is in one process; the first "
        assert f"{start}difference: {stage}: [" in str(error)
        first = error.divergences[strategy].differences[0]
        assert f"{first.stage} ({first.where})" == stage
        if change == "loss":
            assert first.found[0] / first.expected[0] == pytest.approx(1.01, abs=1e-3)
        if change == "gradients":
            assert first.found[0] / first.expected[0] == pytest.approx(0.5, abs=1e-3)
    assert list(error.divergences) == ["ddp", "zero3"]


def test_weights_are_compared_too(assert_equivalent: Assert, model: tiny.TinyModel, tmp_path: Any) -> None:
    error = differing(assert_equivalent, model, str(tmp_path), "weights", strategies=["ddp"])
    (difference,) = error.divergences["ddp"].differences
    assert (difference.stage, difference.where) == ("weight model.norm.weight", "after step 2")
    assert difference.off == pytest.approx(0.01, abs=1e-5)
    assert difference.allowed < 1e-3


def test_what_is_compared_is_all_that_is_trained(launcher: Launcher, model: tiny.TinyModel, tmp_path: Any) -> None:
    from pytest_trlcompat.equivalence.recording import load, record
    from pytest_trlcompat.launch.payload import dump

    payload = dump(train, (model, str(tmp_path)), {})
    names = sorted(name for name, _ in model.model.named_parameters())
    for strategy in ("single", *SHARDED):
        path = str(tmp_path / strategy)
        launcher(record, payload, path, strategy=strategy)
        (training,) = launcher(load, path, strategy="single").values[0]
        assert sorted(training.weights) == names
        assert [sorted(logged) for logged in training.logs] == [["grad_norm", "loss"]] * 3
        assert [sorted(step) for step in training.inputs] == [["attention_mask", "input_ids", "labels"]] * 3


def test_a_tolerance_that_is_given_counts(assert_equivalent: Assert, model: tiny.TinyModel, tmp_path: Any) -> None:
    given: dict[str, Any] = {"strategies": ["ddp"]}
    assert_equivalent(train, model, str(tmp_path), "loss", **given, tolerance=0.02)
    assert "loss (step 0)" in str(differing(assert_equivalent, model, str(tmp_path), "loss", **given, tolerance=5e-3))


def test_other_rows_are_explained(assert_equivalent: Assert, model: tiny.TinyModel, tmp_path: Any) -> None:
    error = differing(assert_equivalent, model, str(tmp_path), "rows", strategies=["ddp"])
    assert re.search(r"rows trained on \(step 0\): .*input_ids: 2 of 4 rows", str(error))
    assert "reason: ranks were given other rows than one process is given" in str(error)


def test_dropout_is_explained(assert_equivalent: Assert, model: tiny.TinyModel, tmp_path: Any) -> None:
    error = differing(assert_equivalent, model, str(tmp_path), "dropout", strategies=["ddp"])
    assert "reason: the model has dropout, and every rank draws what to drop with a random state of its own" in str(
        error
    )


def sample(folder: str, constant: bool = False) -> None:
    build_grpo(folder, lambda text: 0.0 if constant else float(len(text))).train()


@pytest.mark.versions(trl=">=1.0", reason="a release whose GRPO trains under ZeRO-2 as it is")
def test_sampling_that_differs_by_rank_is_explained(assert_equivalent: Assert, tmp_path: Any) -> None:
    assert_equivalent(sample, str(tmp_path), strategies=["ddp", "zero2"], world_size=1)
    with pytest.raises(NotEquivalent, match=r"rows trained on \(step 0\): .*completion_ids: ") as caught:
        assert_equivalent(sample, str(tmp_path), strategies=["ddp"])
    assert "reason: each rank samples completions with a random state of its own" in str(caught.value)


def test_a_function_that_trains_nothing_is_refused(assert_equivalent: Assert) -> None:
    with pytest.raises(LaunchError, match="the function trained no transformers.Trainer: nothing can be compared"):
        assert_equivalent(len, (), strategies=["ddp"])


@pytest.mark.parametrize(
    ("change", "settings", "reason"),
    [
        ("", {"num_train_epochs": 0, "max_steps": -1}, "no step of the optimizer was made"),
        ("", {"learning_rate": 0.0}, "no trained weight changed: the learning rate is 0 in every step"),
        ("", {"learning_rate": 1e30}, "is not finite"),
        ("masked", {}, "every label is masked (-100)"),
    ],
    ids=["no step", "no rate", "not finite", "masked"],
)
def test_a_training_from_which_nothing_can_be_told_is_refused_with_the_reason(
    assert_equivalent: Assert, model: tiny.TinyModel, tmp_path: Any, change: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NothingCompared) as caught:
        assert_equivalent(train, model, str(tmp_path), change, strategies=["ddp"], kwargs=settings)
    assert str(caught.value).startswith("nothing can be told of train: in one process ")
    assert reason in str(caught.value)


@pytest.mark.versions(trl=">=1.0", reason="a release whose GRPO trains as it is")
def test_rewards_that_are_all_equal_are_refused(assert_equivalent: Assert, tmp_path: Any) -> None:
    with pytest.raises(NothingCompared, match="no trained weight changed: every advantage is 0"):
        assert_equivalent(sample, str(tmp_path), True, strategies=["ddp"], world_size=1)


def test_a_crash_under_one_strategy_hides_no_result_of_the_others(
    assert_equivalent: Assert, model: tiny.TinyModel, tmp_path: Any
) -> None:
    with pytest.raises(LaunchError) as caught:
        assert_equivalent(train, model, str(tmp_path), "crash", strategies=["ddp", "zero2"])
    assert "train under ddp failed: " in str(caught.value)
    assert "not without DeepSpeed" in str(caught.value)
    assert "train under zero2 is the training that it is in one process" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, r"strategies=\(\): name at least one"),
        ({"strategies": []}, r"strategies=\[\]: name at least one"),
        ({"strategies": "ddp"}, "strategies='ddp': name at least one"),
        ({"strategies": ["ddp"], "options": {"zero3": {}}}, "options name zero3, and strategies are ddp"),
        ({"strategies": ["ddp"], "tolerance": float("inf")}, "tolerance=inf tells nothing apart"),
    ],
)
def test_a_comparison_with_nothing_is_refused(assert_equivalent: Assert, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assert_equivalent(train, **asked)


def saved(folder: Any, name: str, **fields: Any) -> str:
    """One training of one step, as it is saved; returns its file."""
    import torch

    values: dict[str, Any] = {
        "inputs": [{"input_ids": ["a"]}],
        "logs": [{"loss": 1.0, "grad_norm": 2.0}],
        "weights": {"one": torch.ones(2), "two": torch.ones(2)},
        "moved": ["one"],
        "rate": 0.1,
    }
    torch.save([vars(Training(**{**values, **fields}))], folder / name)
    return str(folder / name)


def test_both_sides_must_have_the_same_names(tmp_path: Any) -> None:
    import torch

    ones = torch.ones(2)
    alone = saved(tmp_path, "alone")
    assert compare(alone, saved(tmp_path, "same"), [], None).differences == ()
    for fields, reason in (
        ({"weights": {"one": ones, "other": ones}}, "of 2 trained weights 1 is missing: two; other was not due"),
        ({"logs": [{"loss": 1.0}]}, "of 2 numbers logged in step 0 1 is missing: grad_norm"),
        ({"moved": []}, "under the strategy no trained weight changed: the reason cannot be told"),
    ):
        divergence = compare(alone, saved(tmp_path, "other", **fields), [], None)
        assert len(divergence.differences) == 1
        assert divergence.reason.startswith(reason)
    (difference,) = compare(
        alone, saved(tmp_path, "more", inputs=[{"input_ids": ["a"], "labels": ["b"]}]), [], None
    ).differences
    assert (difference.stage, difference.found) == ("rows trained on", ["labels: 0 of 0 rows"])


def test_what_is_not_finite_agrees_with_nothing_and_allows_nothing(tmp_path: Any) -> None:
    alone = saved(tmp_path, "alone")
    broken = saved(tmp_path, "broken", logs=[{"loss": float("nan"), "grad_norm": 2.0}])
    assert compare(broken, broken, [], None).reason == "in one process loss (step 0) is not finite"
    other = saved(tmp_path, "other", logs=[{"loss": 3.0, "grad_norm": 2.0}])
    with pytest.raises(AssertionError, match=r"with each weight changed .* loss \(step 0\) is not finite"):
        compare(alone, other, [alone, broken, alone], None)


@pytest.mark.parametrize(("probability", "has"), [(0.0, False), (0.1, True)])
def test_a_model_without_a_config_has_the_dropout_of_its_layers(probability: float, has: bool) -> None:
    """``transformers.Trainer`` takes any ``nn.Module``."""
    import torch

    from pytest_trlcompat.equivalence import recording

    assert recording._has_dropout(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(probability))) is has
