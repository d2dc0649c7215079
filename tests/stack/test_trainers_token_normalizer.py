"""The cure of ``grpo-token-normalizer``: which tokens it counts, and when it keeps still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytest_trlcompat.trainers import CureError  # noqa: E402 - needs torch
from pytest_trlcompat.trainers.loss.token_normalizer import TokenNormalizerMixin  # noqa: E402 - needs torch

MASK = [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]]


class Trl022:
    """The part of trl 0.22 that matters: it divides by whatever number generation handed over."""

    def __init__(self, accumulated: int = 1, per_generation: int = 1, masks: bool = False, ranks: int = 1) -> None:
        self.args = SimpleNamespace(steps_per_generation=per_generation, mask_truncated_completions=masks)
        self.accelerator = SimpleNamespace(gather=lambda tokens: tokens.repeat(ranks))
        self.current_gradient_accumulation_steps = accumulated
        self.model = SimpleNamespace(training=True)

    def _generate_and_score_completions(self, mask: Any) -> dict[str, Any]:
        return {"completion_mask": mask, "num_items_in_batch": torch.tensor(12)}

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return self._compute_loss(inputs)

    def _compute_loss(self, inputs: Any) -> Any:
        return inputs.get("num_items_in_batch")


class Trl116(Trl022):
    """It takes the share itself."""

    def _compute_loss(self, inputs: Any) -> Any:
        return inputs["num_items_in_batch"] * self.current_gradient_accumulation_steps / self.args.steps_per_generation


class Trl021(Trl022):
    def _generate_and_score_completions(self, mask: Any) -> dict[str, Any]:
        return {"completion_mask": mask}


def corrected(kind: type[Trl022], **settings: Any) -> Any:
    return type("Corrected", (TokenNormalizerMixin, kind), {})(**settings)


@pytest.mark.parametrize("kind", [Trl022, Trl116])
@pytest.mark.parametrize(("accumulated", "per_generation", "tokens"), [(2, 4, 6.0), (8, 2, 48.0), (2, 2, 12.0)])
def test_a_step_divides_by_its_share(kind: Any, accumulated: int, per_generation: int, tokens: float) -> None:
    trainer = corrected(kind, accumulated=accumulated, per_generation=per_generation)
    inputs = {"num_items_in_batch": torch.tensor(12)}
    assert trainer.compute_loss(None, inputs).item() == tokens
    assert inputs["num_items_in_batch"].item() == 12  # it is there for the next step, too


@pytest.mark.parametrize("kind", [Trl022, Trl116])
def test_a_users_loss_between_does_not_take_the_share_twice(kind: Any) -> None:
    class Users(kind):
        def _compute_loss(self, inputs: Any) -> Any:
            return 1 * super()._compute_loss(inputs)

    trainer = corrected(Users, accumulated=2, per_generation=8)
    assert trainer.compute_loss(None, {"num_items_in_batch": torch.tensor(12)}).item() == 3.0


def test_a_users_loss_that_does_without_trls_is_given_the_share() -> None:
    class Users(Trl116):
        def _compute_loss(self, inputs: Any) -> Any:
            return inputs["num_items_in_batch"]

    trainer = corrected(Users, accumulated=2, per_generation=8)
    assert trainer.compute_loss(None, {"num_items_in_batch": torch.tensor(12)}).item() == 3.0


def test_evaluation_divides_by_all() -> None:
    trainer = corrected(Trl022, accumulated=2, per_generation=4)
    trainer.model.training = False
    del trainer.current_gradient_accumulation_steps  # Trainer sets it in training alone
    assert trainer.compute_loss(None, {"num_items_in_batch": torch.tensor(12)}).item() == 12


@pytest.mark.parametrize(
    ("ranks", "tool_mask", "tokens"), [(1, None, 5), (2, None, 10), (1, [[1, 0, 1, 1], [1] * 4, [1] * 4], 4)]
)
def test_tokens_that_are_masked_are_not_counted(ranks: int, tool_mask: Any, tokens: int) -> None:
    trainer = corrected(Trl022, masks=True, ranks=ranks)
    upstream = Trl022._generate_and_score_completions
    if tool_mask is not None:
        Trl022._generate_and_score_completions = lambda self, mask: {  # type: ignore[method-assign]
            **upstream(self, mask),
            "tool_mask": torch.tensor(tool_mask),
        }
    try:
        batch = trainer._generate_and_score_completions(torch.tensor(MASK))
    finally:
        Trl022._generate_and_score_completions = upstream  # type: ignore[method-assign]
    assert batch["num_items_in_batch"].item() == tokens


def test_no_token_at_all_divides_by_one() -> None:
    batch = corrected(Trl022, masks=True)._generate_and_score_completions(torch.zeros(2, 3, dtype=torch.long))
    assert batch["num_items_in_batch"].item() == 1


def test_without_masking_or_such_a_loss_nothing_changes() -> None:
    mask = torch.tensor(MASK)
    assert corrected(Trl022)._generate_and_score_completions(mask)["num_items_in_batch"].item() == 12
    trainer = corrected(Trl021, masks=True, accumulated=1, per_generation=2)
    batch = trainer._generate_and_score_completions(mask)
    assert set(batch) == {"completion_mask"}
    assert trainer.compute_loss(None, batch) is None


def test_a_users_loss_that_only_looks_does_not_switch_it_off() -> None:
    class Looks(Trl022):
        def _compute_loss(self, inputs: Any) -> Any:
            return super()._compute_loss(inputs) + 0 * self.args.steps_per_generation

    inputs = {"num_items_in_batch": torch.tensor(12)}
    with pytest.raises(CureError, match="a loss function around TRL's uses steps_per_generation"):
        corrected(Looks, accumulated=2, per_generation=8).compute_loss(None, inputs)
    assert corrected(Looks, accumulated=2, per_generation=2).compute_loss(None, inputs).item() == 12


def test_what_trl_masks_before_it_counts_is_not_counted_again() -> None:
    gathered = 0

    class Trl19(Trl116):
        """It masks before it counts."""

        def _generate_and_score_completions(self, mask: Any) -> dict[str, Any]:
            if self.args.mask_truncated_completions:
                mask = mask * 1
            num_items_in_batch = mask.sum()
            return {"completion_mask": mask, "num_items_in_batch": num_items_in_batch}

    class Trl027(Trl116):
        """It counts before it masks."""

        def _generate_and_score_completions(self, mask: Any) -> dict[str, Any]:
            mask, num_items_in_batch = mask, torch.tensor(12)
            if self.args.mask_truncated_completions:
                mask = mask * 1
            return {"completion_mask": mask, "num_items_in_batch": num_items_in_batch}

    def gather(tokens: Any) -> Any:
        nonlocal gathered
        gathered += 1
        return tokens

    for kind, gathers in ((Trl19, 0), (Trl027, 1)):
        trainer, gathered = corrected(kind, masks=True), 0
        trainer.accelerator.gather = gather
        batch = trainer._generate_and_score_completions(torch.tensor(MASK))
        assert (batch["num_items_in_batch"].item(), gathered) == (5, gathers)


def test_a_release_without_truncated_completions_is_left_alone() -> None:
    """Releases 0.16 have the method, and neither a number of tokens nor the argument."""
    trainer = corrected(Trl021)
    trainer.args = SimpleNamespace()
    assert list(trainer._generate_and_score_completions(torch.tensor(MASK))) == ["completion_mask"]
