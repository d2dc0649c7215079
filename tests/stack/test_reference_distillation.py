"""The reference's divergences of a student from its teacher, by numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.reference import DistillationSettings, DistillationUndecided

from .reference_models import Bigrams

HALVES, QUARTERS = [0.5, 0.5], [0.75, 0.25]
EOS = 1


def divergence(student: Sequence[float], teacher: Sequence[float], beta: float) -> float:
    one, other = (torch.tensor(each, dtype=torch.float64).log() for each in (student, teacher))
    return float(reference.generalized_divergences(one, other, beta))


def test_the_ends_are_the_forward_and_the_reverse_divergence() -> None:
    # sum of p_T log(p_T / p_S), and of p_S log(p_S / p_T), with the teacher at 3/4 and 1/4, the student at 1/2 each.
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence(HALVES, QUARTERS, 0.0) == pytest.approx(forward)
    assert divergence(HALVES, QUARTERS, 1.0) == pytest.approx(-0.5 * math.log(1.5) - 0.5 * math.log(0.5))


def test_in_the_middle_it_is_that_of_jensen_and_shannon() -> None:
    # The mixture is 5/8 and 3/8.
    teacher = 0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375)
    student = 0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375)
    assert divergence(HALVES, QUARTERS, 0.5) == pytest.approx((teacher + student) / 2)
    assert divergence(HALVES, QUARTERS, 0.5) == pytest.approx(divergence(QUARTERS, HALVES, 0.5))


def test_beta_is_the_teachers_part_of_the_mixture_and_the_weight_of_its_divergence() -> None:
    # A quarter of the teacher and three of the student: 9/16 and 7/16.
    teacher = 0.75 * math.log(0.75 / 0.5625) + 0.25 * math.log(0.25 / 0.4375)
    student = 0.5 * math.log(0.5 / 0.5625) + 0.5 * math.log(0.5 / 0.4375)
    assert divergence(HALVES, QUARTERS, 0.25) == pytest.approx(0.25 * teacher + 0.75 * student)


def test_near_its_ends_it_is_beta_times_the_divergence_of_the_end() -> None:
    near = 1e-6
    assert divergence(HALVES, QUARTERS, near) / near == pytest.approx(divergence(HALVES, QUARTERS, 0.0), rel=1e-4)
    assert divergence(HALVES, QUARTERS, 1 - near) / near == pytest.approx(divergence(HALVES, QUARTERS, 1.0), rel=1e-4)


@pytest.mark.parametrize("wrong", [{"beta": -0.1}, {"beta": 1.1}, {"temperature": 0.0}])
def test_what_is_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DistillationSettings(**wrong)  # type: ignore[arg-type]


def favouring(times: float) -> Bigrams:
    """After any token the last of four is so many times as likely as each of the others."""
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[:, 3] = math.log(times)
    return Bigrams(table)


def row(prompt: int, completion: Sequence[int], sampled: Sequence[int] | None = None) -> dict[str, tuple[float, ...]]:
    """A prompt of so many tokens, and a completion."""
    counted = sampled or [1] * len(completion)
    return {
        "ids": tuple(map(float, [2] * prompt + [*completion])),
        "mask": tuple(map(float, [0] * prompt + [*counted])),
    }


STUDENT, TEACHER = favouring(1.0), favouring(3.0)
"""The student has all four at 1/4; the teacher one at 1/2, and the others at 1/6."""
TOKEN = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
"""What each token has: sum of p_S log(p_S / p_T)."""
BATCHES = [[[row(2, [3, 2, EOS]), row(1, [EOS])], [row(3, [3, 3]), row(1, [3, EOS])]]]
"""One micro-batch on two ranks: completions of 3, 1, 2 and 2 tokens, of which the third has no end."""


def measured(student: Bigrams = STUDENT, batches: Any = BATCHES, **settings: Any) -> list[reference.Measured]:
    asked = DistillationSettings(**{"world_size": 2, **settings})
    return reference.DistillationObjective(TEACHER, asked)(student, batches)


def test_a_loss_is_the_mean_of_completions_or_of_tokens() -> None:
    assert [float(one.loss) for one in measured()] == pytest.approx([TOKEN * 2 / 4, TOKEN * 2 / 4])
    over_tokens = DistillationUndecided(loss_mean="tokens")
    found = measured(undecided=over_tokens)
    assert [float(one.loss) for one in found] == pytest.approx([TOKEN * 4 / 8, TOKEN * 4 / 8])
    # Of tokens that differ: a student that knows what follows the end of a prompt, and nothing else.
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[2] = TEACHER.table.detach()[2]
    by_completion = [float(one.loss) for one in measured(Bigrams(table))]
    assert by_completion == pytest.approx([TOKEN * (1 / 3) / 4, TOKEN * (1 / 2 + 1 / 2) / 4])
    by_token = [float(one.loss) for one in measured(Bigrams(table), undecided=over_tokens)]
    assert by_token == pytest.approx([TOKEN * 1 / 8, TOKEN * 2 / 8])


def test_alone_a_batch_is_its_own_mean() -> None:
    batches = [[[row(1, [3, 3])]], [[row(1, [EOS]), row(1, [EOS])]]]
    found = measured(batches=batches, world_size=1, undecided=DistillationUndecided(loss_mean="tokens"))
    assert [float(one.loss) for one in found] == pytest.approx([TOKEN * 2 / 4, TOKEN * 2 / 4])
    assert [float(one.alone) for one in found if one.alone is not None] == pytest.approx([TOKEN, TOKEN])


def test_both_distributions_have_the_temperature() -> None:
    # At temperature 2 the teacher's odds are the square root of 3.
    total = 3 + math.sqrt(3)
    token = 0.25 * math.log(0.25 * total / math.sqrt(3)) + 0.75 * math.log(0.25 * total)
    assert float(measured(temperature=2.0)[0].loss) == pytest.approx(token / 2)
    student = favouring(9.0)  # at temperature 2 as the teacher is at 1
    entropy = 0.5 * math.log(2) + 0.5 * math.log(6)
    sharp = -0.75 * math.log(0.75) - 0.25 * math.log(1 / 12)
    first = measured(student, temperature=2.0)[0].metrics["entropy"]
    assert [float(each) for each in first] == pytest.approx([4 * entropy, 4.0])
    chosen = DistillationUndecided(entropy_at_temperature=False)
    first = measured(student, temperature=2.0, undecided=chosen)[0].metrics["entropy"]
    assert float(first[0]) == pytest.approx(4 * sharp)


def test_what_is_logged() -> None:
    first, second = measured()
    assert first.counted == {"num_tokens": 7.0}
    assert second.counted == {"num_tokens": 8.0}
    assert first.together == second.together
    assert first.together == {
        "completions/mean_length": 2.0,
        "completions/min_length": 1.0,
        "completions/max_length": 3.0,
        "completions/mean_terminated_length": 2.0,
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 3.0,
        "completions/clipped_ratio": 0.25,
    }
    none = measured(batches=[[[row(1, [3])]]], world_size=1)[0].together
    assert (none["completions/clipped_ratio"], none["completions/max_terminated_length"]) == (1.0, 0.0)


def test_lengths_of_several_steps_are_averaged_and_tokens_counted_on() -> None:
    settings = DistillationSettings(optim="sgd", learning_rate=0.0)
    steps = [[[[row(1, [3, EOS])]]], [[[row(1, [3, 3, 3, EOS])]]]]
    trained = reference.supervised_train(STUDENT, steps, settings, reference.DistillationObjective(TEACHER, settings))
    logs = reference.supervised_logs(trained, settings)
    assert (logs["completions/max_length"], logs["num_tokens"]) == (3.0, 8.0)
    assert reference.supervised_logs(trained[1:], settings, trained[:1])["completions/max_length"] == 4.0
    evaluated = reference.supervised_evaluate(
        STUDENT, [each for step in steps for each in step], settings, reference.DistillationObjective(TEACHER, settings)
    )
    assert evaluated.logs["eval_completions/max_length"] == 3.0
    assert evaluated.logs["eval_loss"] == pytest.approx(TOKEN)


def test_results_of_tools_are_no_tokens_of_the_student() -> None:
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[0] = torch.tensor([5.0, 0.0, 0.0, 0.0])  # what would follow the tool's result
    turns = row(1, [3, 0, 0, EOS], [1, 0, 0, 1])
    (found,) = measured(Bigrams(table), [[[turns]]], world_size=1)
    assert found.metrics["entropy"][1] == 2.0
    assert found.together["completions/max_length"] == 2.0
    assert found.counted == {"num_tokens": 3.0}


def test_the_gradient_goes_to_the_student_alone() -> None:
    student, teacher = favouring(1.0), favouring(3.0)
    settings = DistillationSettings(world_size=1)
    (found,) = reference.DistillationObjective(teacher, settings)(student, [[[row(1, [EOS])]]])
    found.loss.backward()
    assert teacher.table.grad is None
    assert student.table.grad is not None
    # Of the reverse divergence by a logit: p (log p / q - KL).
    expected = [0.25 * (math.log(0.25 / each) - TOKEN) for each in (1 / 6, 1 / 6, 1 / 6, 1 / 2)]
    assert student.table.grad[2].tolist() == pytest.approx(expected)
