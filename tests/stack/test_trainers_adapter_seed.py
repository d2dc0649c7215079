"""The cure of ``grpo-adapter-seed``: when the seed is set, to what, and for whom."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pytest_trlcompat import tiny  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers import cured  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.adapters.adapter_seed import AdapterSeedMixin  # noqa: E402 - needs the stack

MODULE = "trl.trainer.of_this_test"
CONFIG: Any = object()
DRAWN = {seed: torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() for seed in (7, 42)}


def get_peft_model() -> float:
    drawn: float = torch.rand(1).item()
    return drawn


class AdapterFirst:
    """A trainer of TRL's, up to 1.14."""

    def __init__(self, model: Any, args: Any = None, peft_config: Any = None) -> None:
        self.model = SimpleNamespace(peft_config=peft_config, get_base_model=None)
        self.adapter = get_peft_model()
        transformers.set_seed(args.seed if args else 42)


class SeedFirst:
    """One of trl 1.15."""

    def __init__(self, model: Any, args: Any = None, peft_config: Any = None) -> None:
        from transformers import set_seed

        set_seed(args.seed if args else 42)
        self.adapter = get_peft_model()


@pytest.fixture(autouse=True)
def _classes_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(MODULE)
    for cls in (AdapterFirst, SeedFirst):
        monkeypatch.setattr(cls, "__module__", MODULE)
        monkeypatch.setattr(cls, "__init__", cls.__init__)  # what the cure puts there goes when the test ends
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, MODULE, module)


def corrected(kind: type) -> Any:
    return type("Corrected", (AdapterSeedMixin, kind), {})


@pytest.mark.parametrize("seed", [7, 42])
def test_the_adapter_follows_from_the_seed_of_the_arguments(seed: int) -> None:
    args = SimpleNamespace(seed=seed)
    torch.manual_seed(1)
    assert corrected(AdapterFirst)("model", args, CONFIG).adapter == pytest.approx(DRAWN[seed])
    assert corrected(AdapterFirst)(model="model", args=args, peft_config=CONFIG).adapter == pytest.approx(DRAWN[seed])
    torch.manual_seed(1)
    assert AdapterFirst("model", args, CONFIG).adapter != pytest.approx(DRAWN[seed])


def test_without_arguments_it_is_the_seed_that_transformers_takes() -> None:
    torch.manual_seed(1)
    assert corrected(AdapterFirst)("model", peft_config=CONFIG).adapter == pytest.approx(DRAWN[42])


def test_without_an_adapter_of_trls_nothing_is_set() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1).item()
    torch.manual_seed(1)
    assert corrected(AdapterFirst)("model").adapter == pytest.approx(expected)


def test_the_arguments_are_those_of_the_call_that_a_users_class_makes() -> None:
    class Mine(AdapterFirst):
        __module__ = "mine"

        def __init__(self, seed: int) -> None:
            self.noise = torch.rand(1).item()
            super().__init__("model", SimpleNamespace(seed=seed), CONFIG)

    torch.manual_seed(7)
    trainer = corrected(Mine)(42)
    assert (trainer.noise, trainer.adapter) == (pytest.approx(DRAWN[7]), pytest.approx(DRAWN[42]))


def test_a_trainer_that_is_built_meanwhile_is_not_seeded() -> None:
    inner: list[AdapterFirst] = []

    class Mine(AdapterFirst):
        __module__ = "mine"

        def __init__(self, args: Any) -> None:
            torch.manual_seed(7)
            inner.append(AdapterFirst("model", SimpleNamespace(seed=1), CONFIG))
            super().__init__("model", args, CONFIG)

    assert corrected(Mine)(SimpleNamespace(seed=42)).adapter == pytest.approx(DRAWN[42])
    assert inner[0].adapter == pytest.approx(DRAWN[7])


def test_where_the_seed_is_set_first_it_does_nothing() -> None:
    before = SeedFirst.__init__
    assert corrected(SeedFirst)("model", SimpleNamespace(seed=7), CONFIG).adapter == pytest.approx(DRAWN[7])
    assert SeedFirst.__init__ is before
    found = AdapterSeedMixin._activity(SeedFirst, None)
    assert (found.active, found.reason) == (False, "no adapter is made before the seed is set")


def test_it_says_what_it_does() -> None:
    of_the_class = AdapterSeedMixin._activity(AdapterFirst, None)
    assert of_the_class.active is None
    assert of_the_class.reason == "with an adapter: TRL makes adapters before it sets the seed"
    assert AdapterSeedMixin._activity(AdapterFirst, corrected(AdapterFirst)("model", None, CONFIG)).active is True
    plain = corrected(AdapterFirst)("model")
    assert AdapterSeedMixin._activity(AdapterFirst, plain).reason == "no adapter was made of a peft_config"


@pytest.mark.parametrize("name", ["SFT", "GRPO"])
def test_adapters_of_trls_trainers_are_equal_whatever_was_drawn_before(tmp_path: Path, name: str) -> None:
    trl: Any = pytest.importorskip("trl")
    peft: Any = pytest.importorskip("peft")
    from datasets import Dataset

    model = tiny.qwen2(num_hidden_layers=1)
    column = {"SFT": "text", "GRPO": "prompt"}[name]

    def weights(before: int) -> Any:
        torch.manual_seed(before)
        more = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if name == "GRPO" else {}
        trainer = cured(getattr(trl, f"{name}Trainer"))(
            model=model.new_model(),
            args=getattr(trl, f"{name}Config")(output_dir=str(tmp_path), report_to="none", bf16=False, seed=3),
            train_dataset=Dataset.from_dict({column: [row["prompt"] for row in tiny.prompts(8, words=6)]}),
            processing_class=model.tokenizer,
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
            **more,
        )
        return next(value for key, value in trainer.model.named_parameters() if "lora_A" in key).detach().clone()

    first = weights(1)
    assert torch.equal(first, weights(2))
    assert first.abs().sum().item() > 0
