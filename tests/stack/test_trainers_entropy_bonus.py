"""The cure of ``grpo-entropy-normalizer`` and ``grpo-policy-loss-log``: gradients, what is logged, whose terms stay."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

torch = pytest.importorskip("torch")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
accelerate = pytest.importorskip("accelerate")

from pytest_trlcompat.trainers.loss.entropy_bonus import EntropyBonusMixin  # noqa: E402 - needs the stack

MASK = [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
COEFFICIENT, STEPS, TOKENS = 0.5, 2, 16.0


class Accelerator(accelerate.Accelerator):  # type: ignore[name-defined] # of whichever release
    """One that gathers from one process."""

    def __init__(self) -> None:
        pass

    def __del__(self) -> None:
        pass


class GRPOTrainer:
    """The part of TRL's trainer that matters.

    Args:
        own: the bonus is a mean over tokens of its own, as from 1.10 on.
        once: what is logged of the policy's loss is not divided by the accumulation steps twice.
    """

    def __init__(self, own: bool, once: bool, enabled: bool = True) -> None:
        self.own, self.once = own, once
        self.accelerator = Accelerator()
        self._entropy_bonus_enabled, self.entropy_coef = enabled, COEFFICIENT
        self.current_gradient_accumulation_steps = STEPS
        self._metrics: Any = {"train": defaultdict(list)}
        self.logits = torch.tensor([[0.1, -0.4, 0.7], [0.3, 0.2, 0.9]], requires_grad=True)

    def _get_per_token_logps_and_entropies(self) -> Any:
        return self.logits * 2.0, self.logits.sigmoid()

    def compute_loss(self, inputs: Any) -> Any:
        return self._compute_loss(inputs)

    def _compute_loss(self, inputs: Any) -> Any:
        logps, entropies = self._get_per_token_logps_and_entropies()
        mask = torch.tensor(MASK)
        loss = (logps * mask).sum() / TOKENS
        policy = loss.detach()
        if self._entropy_bonus_enabled:
            normalizer = mask.sum() * STEPS if self.own else TOKENS
            loss = loss - self.entropy_coef * (entropies * mask).sum() / normalizer
            gathered = self.accelerator.gather(policy * STEPS if self.once else policy)
            self._metrics["train"]["policy_loss"].append(gathered.item())
        return loss


Trl = GRPOTrainer


@pytest.fixture(autouse=True)
def _is_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trl, "__module__", grpo_trainer.__name__)
    monkeypatch.setattr(Trl, "_compute_loss", Trl._compute_loss)  # what the cure puts there goes when the test ends
    monkeypatch.setattr(grpo_trainer, "GRPOTrainer", Trl)
    monkeypatch.setattr(accelerate.Accelerator, "gather", lambda self, tensor: tensor)


def corrected(kind: type = Trl, **settings: Any) -> Any:
    return type("Corrected", (EntropyBonusMixin, kind), {})(**settings)


def gradient(trainer: Any) -> Any:
    loss = trainer.compute_loss({})
    loss.backward()
    return loss.item(), trainer.logits.grad


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_loss_gradients_and_what_is_logged_are_those_of_a_release_that_is_right(own: bool, once: bool) -> None:
    right = Trl(own=True, once=True)
    loss, expected = gradient(right)
    trainer = corrected(own=own, once=once)
    found, gradients = gradient(trainer)
    assert found == pytest.approx(loss)
    torch.testing.assert_close(gradients, expected)
    assert trainer._metrics["train"]["policy_loss"] == pytest.approx(right._metrics["train"]["policy_loss"])
    activity = EntropyBonusMixin._activity(type(trainer), trainer)
    assert activity.active is (None if own and once else True)
    if not own:
        assert gradient(Trl(own=False, once=once))[0] != pytest.approx(loss)
        assert activity.reason == "TRL weighs the bonus by the tokens of the whole accumulated batch"
    elif not once:
        assert activity.reason == "TRL divides the policy's logged loss by the accumulation steps twice"


def test_what_a_users_class_adds_stays() -> None:
    class Mine(Trl):
        __module__ = "mine"

        def _compute_loss(self, inputs: Any) -> Any:
            loss = super()._compute_loss(inputs)
            return loss - 3.0 * self.logits.sigmoid().sum()

    loss, expected = gradient(Mine(own=True, once=True))
    found, gradients = gradient(corrected(Mine, own=False, once=False))
    assert found == pytest.approx(loss)
    torch.testing.assert_close(gradients, expected)


def test_a_loss_of_zero_is_logged_by_what_was_seen_before() -> None:
    trainer = corrected(own=True, once=False)
    trainer.compute_loss({})
    trainer.logits = torch.zeros_like(trainer.logits, requires_grad=True)
    trainer.compute_loss({})
    first, second = trainer._metrics["train"]["policy_loss"]
    assert (first, second) == (pytest.approx(2.0 * (0.1 - 0.4 + 0.7 + 0.3) / TOKENS * STEPS), 0.0)
    assert trainer._divided_twice is True


def test_another_trainers_loss_and_gather_are_upstreams() -> None:
    other = Trl(own=False, once=False)
    expected = other.compute_loss({}).item()

    class Mine(Trl):
        __module__ = "mine"

        def _get_per_token_logps_and_entropies(self) -> Any:
            losses.append(other.compute_loss({}).item())
            return super()._get_per_token_logps_and_entropies()

    losses: list[float] = []
    corrected(Mine, own=False, once=False).compute_loss({})
    assert losses == [expected]
    assert len(set(other._metrics["train"]["policy_loss"])) == 1


@pytest.mark.parametrize("case", ["no bonus", "no coefficient", "evaluation"])
def test_without_a_bonus_or_derivatives_nothing_is_changed(case: str) -> None:
    def loss(trainer: Any) -> float:
        trainer.entropy_coef = 0.0 if case == "no coefficient" else COEFFICIENT
        with torch.set_grad_enabled(case != "evaluation"):
            return float(trainer.compute_loss({}))

    enabled = case != "no bonus"
    trainer = corrected(own=False, once=True, enabled=enabled)
    assert loss(trainer) == pytest.approx(loss(Trl(own=False, once=True, enabled=enabled)))
    assert trainer._reweighed == 0
    if not enabled:
        assert EntropyBonusMixin._activity(type(trainer), trainer).reason == "there is no entropy bonus"


def test_experts_part_of_the_loss_is_not_the_policys() -> None:
    trainer = corrected(own=True, once=False)
    assert trainer._aux((None, None, torch.tensor(4.0)), 2.0) == 0.0
    trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, 0.25
    assert trainer._aux((None, None, torch.tensor(4.0)), 2.0) == 0.5
