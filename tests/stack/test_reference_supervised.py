"""The reference's training on batches that are given, by hand: the loss of a row is ``w * row``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.reference import Measured


class OneWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([2.0]))


def objective(model: OneWeight, batches: Sequence[Sequence[Sequence[float]]]) -> list[Measured]:
    """The mean over all rows of a step; of a batch alone, over its own."""
    count = sum(len(batch) for ranks in batches for batch in ranks)
    found = []
    for batch in (batch for ranks in batches for batch in ranks):
        total = (model.w * torch.tensor(batch)).sum()
        values = {"losses": model.w * torch.tensor(batch)}
        metrics = {"row": (torch.tensor(batch).sum(), float(len(batch)))}
        found.append(Measured(total / count, total / len(batch), values, {}, metrics, {"rows": float(len(batch))}))
    return found


def settings(**chosen: object) -> reference.SupervisedSettings:
    given = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    return reference.SupervisedSettings(**{**given, **chosen})  # type: ignore[arg-type]


def test_a_step_adds_the_shares_of_micro_batches_and_ranks_up() -> None:
    steps = reference.supervised_train(
        OneWeight(), [[[[1.0], [2.0, 3.0]], [[4.0], [5.0]]]], settings(world_size=2), objective
    )
    (step,) = steps
    assert step.loss == pytest.approx(2.0 * 15 / 5)
    assert step.gradients["w"].tolist() == [3.0]
    assert step.weights["w"].tolist() == [0.5]
    assert [one.values["losses"].tolist() for one in step.micro_batches] == [[2.0], [4.0, 6.0], [8.0], [10.0]]
    assert not step.micro_batches[0].loss.requires_grad


def test_the_second_step_begins_with_the_weights_of_the_first() -> None:
    steps = reference.supervised_train(OneWeight(), [[[[1.0]]], [[[2.0]]]], settings(), objective)
    assert [step.loss for step in steps] == [2.0, 3.0]  # w: 2, then 1.5
    assert steps[1].weights["w"].tolist() == [0.5]


def test_the_model_that_is_given_stays_as_it_is() -> None:
    model = OneWeight()
    reference.supervised_train(model, [[[[1.0]]]], settings(), objective)
    assert model.w.tolist() == [2.0]


def test_between_steps_the_policy_is_as_it_then_is_and_may_be_changed() -> None:
    steps = reference.supervised_steps(OneWeight(), [[[[1.0]]], [[[2.0]]]], settings(), objective)
    assert [(float(policy.w.detach()), step.loss) for policy, step in steps] == [(1.5, 2.0), (0.5, 3.0)]
    losses = []
    for policy, step in reference.supervised_steps(OneWeight(), [[[[1.0]]], [[[2.0]]]], settings(), objective):
        losses.append(step.loss)
        policy.w.data.fill_(4.0)
    assert losses == [2.0, 8.0]


@pytest.mark.parametrize(
    "way, mean",
    [
        ("tokens", (1 + 2 + 3 + 4 + 5) / 5),
        ("micro_batches", ((1 + 2 + 3) / 3 + (4 + 5) / 2) / 2),
        ("ranks", (1 + 2.5 + 4 + 5) / 4),
    ],
)
def test_what_a_mean_of_metrics_is(way: str, mean: float) -> None:
    chosen = settings(world_size=2, undecided=reference.SupervisedUndecided(metrics_mean=way))
    steps = reference.supervised_train(OneWeight(), [[[[1.0], [2.0, 3.0]], [[4.0], [5.0]]]], chosen, objective)
    assert reference.supervised_logs(steps, chosen)["row"] == pytest.approx(mean)


def test_a_line_of_two_steps_has_means_of_both_and_sums_since_the_start() -> None:
    chosen = settings(lr_scheduler_type="linear", max_steps=4)
    steps = reference.supervised_train(OneWeight(), [[[[1.0]]], [[[2.0]]], [[[3.0, 1.0]]]], chosen, objective)
    # w: 2, 2 - 0.5 * 1 = 1.5, 1.5 - 0.375 * 2 = 0.75
    assert reference.supervised_logs(steps[1:], chosen, steps[:1]) == {
        "loss": pytest.approx((1.5 * 2 + 0.75 * 2) / 2),
        "grad_norm": 2.0,
        "learning_rate": 0.25,
        "row": 2.0,
        "rows": 4.0,
    }


def test_the_learning_rate_of_the_next_step_is_logged_where_a_release_does_so() -> None:
    undecided = reference.SupervisedUndecided(learning_rate_logged="next")
    chosen = settings(lr_scheduler_type="linear", max_steps=2, undecided=undecided)
    steps = reference.supervised_train(OneWeight(), [[[[1.0]]]], chosen, objective)
    assert reference.supervised_logs(steps, chosen)["learning_rate"] == 0.25


@pytest.mark.parametrize("way, mean", [("rows", 2.0 * (1 + 2 + 3) / 3), ("batches", 2.0 * (1 + 2.5) / 2)])
def test_the_loss_of_an_evaluation(way: str, mean: float) -> None:
    chosen = settings(undecided=reference.SupervisedUndecided(evaluation_mean=way))
    found = reference.supervised_evaluate(OneWeight(), [[[1.0]], [[2.0, 3.0]]], chosen, objective)
    assert found.logs == {"eval_loss": pytest.approx(mean), "eval_row": pytest.approx(2.0)}


def test_a_batch_alone_has_an_equal_share_unless_it_says_so() -> None:
    def shares(model: OneWeight, batches: Sequence[Sequence[Sequence[float]]]) -> list[Measured]:
        return [Measured(each.loss) for each in objective(model, batches)]

    chosen = settings(world_size=2)
    found = reference.supervised_evaluate(OneWeight(), [[[1.0], [3.0]]], chosen, shares)
    assert found.logs == {"eval_loss": pytest.approx(4.0)}


def test_a_metric_that_nothing_was_counted_for_is_not_logged() -> None:
    def nothing(model: OneWeight, batches: Sequence[Sequence[Sequence[float]]]) -> list[Measured]:
        return [Measured(model.w.sum(), metrics={"none": (0.0, 0.0)})]

    steps = reference.supervised_train(OneWeight(), [[[[1.0]]]], settings(), nothing)
    assert "none" not in reference.supervised_logs(steps, settings())


def test_ranks_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"step 0 has \[1\] ranks, and world_size=2"):
        reference.supervised_train(OneWeight(), [[[[1.0]]]], settings(world_size=2), objective)


def test_an_objective_that_leaves_batches_out_is_refused() -> None:
    with pytest.raises(ValueError, match="gave 0 results for 1 batches"):
        reference.supervised_train(OneWeight(), [[[[1.0]]]], settings(), lambda model, batches: [])
