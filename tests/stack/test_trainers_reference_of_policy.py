"""The cure of ``grpo-reference-by-name`` and of the same with DPO, KTO and RLOO: which reference model there is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl.trainer.grpo_trainer")

from pytest_trlcompat.trainers import CureError  # noqa: E402
from pytest_trlcompat.trainers.reference_model.reference_of_policy import ReferenceOfPolicyMixin  # noqa: E402

READ = torch.nn.Linear(3, 2)


class Upstream:
    """The part of TRL's trainer that matters: it reads the reference model once more, and wraps it."""

    def __init__(self, model: Any, read: Any = READ) -> None:
        self.model = READ if isinstance(model, str) else model
        self.ref_model: Any = None
        self.ref_model = copy.deepcopy(read) if read is READ else read
        self.first = self.ref_model
        if read is not None:  # there is none where beta is 0
            self.ref_model = torch.nn.Sequential(self.ref_model)


class Corrected(ReferenceOfPolicyMixin, Upstream):
    pass


@pytest.fixture(autouse=True)
def _it_is_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.GRPOTrainer", Upstream)
    monkeypatch.setattr(Upstream, "__module__", "trl.trainer.grpo_trainer")


def changed(rows: int = 2) -> Any:
    policy = torch.nn.Linear(3, rows)
    with torch.no_grad():
        policy.weight.fill_(7.0)
    return policy


def test_the_reference_model_has_the_weights_of_the_policy_that_was_given() -> None:
    policy = changed()
    trainer = Corrected(policy)
    assert torch.equal(trainer.first.weight, policy.weight)
    assert trainer.ref_model[0] is trainer.first  # what it is wrapped in is upstream's
    assert trainer.first.weight is not policy.weight
    assert not torch.equal(Upstream(policy).first.weight, policy.weight)


def test_a_policy_by_name_is_left_to_upstream() -> None:
    assert torch.equal(Corrected("somewhere").first.weight, READ.weight)


def test_of_another_size_the_reference_model_is_a_copy_of_the_policy() -> None:
    policy = changed(rows=5)
    first = Corrected(policy).first
    assert first is not policy
    assert torch.equal(first.weight, policy.weight)


def test_partitioned_weights_are_copied_shard_by_shard_and_another_size_is_refused() -> None:
    policy, read = changed(), copy.deepcopy(READ)
    for model in (policy, read):
        for parameter in model.parameters():
            parameter.ds_tensor = parameter.detach().clone().flatten()
            parameter.data = torch.empty(0)
    trainer = Corrected(policy, read)
    assert torch.equal(trainer.first.weight.ds_tensor, policy.weight.ds_tensor)
    policy.weight.ds_tensor = torch.zeros(9)
    with pytest.raises(CureError, match="ZeRO-3 has partitioned both. Save the policy to a folder"):
        Corrected(policy, read)


class WithAdapter(Upstream):
    """As TRL does with an adapter under ZeRO-3: the policy's layers are replaced, and get other names."""

    def __init__(self, model: Any) -> None:
        weight = model.weight
        del model.weight
        model.base_layer = torch.nn.Module()
        model.base_layer.weight = weight
        super().__init__(model)


def test_weights_are_known_by_their_names_before_the_trainer_adds_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.GRPOTrainer", WithAdapter)
    policy = changed()
    trainer = type("Corrected", (ReferenceOfPolicyMixin, WithAdapter), {})(policy)
    assert torch.equal(trainer.first.weight, policy.base_layer.weight)
    assert isinstance(trainer.first, torch.nn.Linear)


def test_a_policy_that_comes_with_an_adapter_is_left_to_upstream() -> None:
    policy = changed()
    policy.peft_config = {}
    assert torch.equal(Corrected(policy).first.weight, READ.weight)


def test_a_reference_model_that_is_set_later_is_left_alone() -> None:
    trainer = Corrected(changed())
    trainer.ref_model = other = torch.nn.Linear(3, 2)
    assert trainer.ref_model is other
    assert not torch.equal(other.weight, trainer.model.weight)


class MakingItsPolicy(Upstream):
    """A user's class with arguments of its own."""

    def __init__(self, settings: dict[str, int]) -> None:
        super().__init__(changed(**settings))


def test_a_policy_that_a_users_class_makes_itself_is_seen() -> None:
    trainer: Any = type("Corrected", (ReferenceOfPolicyMixin, MakingItsPolicy), {})({"rows": 2})
    assert torch.equal(trainer.first.weight, trainer.model.weight)


class ChoosingItsReference(Upstream):
    """A user's class that trains with beta=0, for which TRL has no reference model, and compares with another model."""

    def __init__(self, model: Any, reference: Any) -> None:
        super().__init__(model, read=None)
        self.ref_model = reference


def test_the_reference_that_a_users_class_chooses_is_left_alone() -> None:
    chosen = torch.nn.Linear(3, 2)
    before = chosen.weight.detach().clone()
    trainer: Any = type("Corrected", (ReferenceOfPolicyMixin, ChoosingItsReference), {})(changed(), chosen)
    assert trainer.ref_model is chosen
    assert torch.equal(chosen.weight, before)


class TakingAReference(Upstream):
    """As TRL's DPO and KTO trainers."""

    def __init__(self, model: Any, ref_model: Any = None) -> None:
        super().__init__(model, READ if ref_model is None else ref_model)


@pytest.mark.parametrize("is_given", [False, True])
def test_a_reference_model_that_is_given_is_left_alone(is_given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.GRPOTrainer", TakingAReference)
    monkeypatch.setattr(TakingAReference, "__module__", "trl.trainer.grpo_trainer")
    policy, given = changed(), copy.deepcopy(READ)
    trainer: Any = type("Corrected", (ReferenceOfPolicyMixin, TakingAReference), {})(
        policy, given if is_given else None
    )
    assert torch.equal(trainer.first.weight, READ.weight if is_given else policy.weight)
    assert (trainer.first is given) is is_given


def test_another_trainer_has_no_such_reference_model() -> None:
    import transformers

    assert ReferenceOfPolicyMixin._activity(transformers.Trainer, None).active is False
    assert ReferenceOfPolicyMixin._activity(Corrected, None).active is None
