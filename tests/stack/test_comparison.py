"""What counts as a difference between a recording and the reference."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch

from pytest_trlcompat.conformance.comparison import (
    Difference,
    NotFinite,
    Quantity,
    ToleranceUnknown,
    compare_with_reference,
    differing,
    exceeds_floor,
    neighbours,
    stated,
)

PLACE = ("values", "batch 0")
NAN = math.nan


def quantity(
    values: Sequence[float] | torch.Tensor, mask: torch.Tensor | None = None, rounding: float = 0.0
) -> Quantity:
    return Quantity(*PLACE, torch.as_tensor(values, dtype=torch.float64), mask, rounding)


def compare(expected: Quantity, found: torch.Tensor, *near: Quantity) -> list[Difference]:
    return differing([expected], {PLACE: found}, [[each] for each in near or [expected]])


def test_what_summing_in_another_order_leaves_is_no_difference() -> None:
    expected = quantity([100.0, 1.0])
    assert compare(expected, torch.tensor([100.0, 1.0 + 0.9 * 100 * 2e-5], dtype=torch.float64)) == []
    (found,) = compare(expected, torch.tensor([100.0, 1.0 + 1.1 * 100 * 2e-5], dtype=torch.float64))
    assert (found.stage, found.where, found.expected, found.allowed) == (*PLACE, [1.0, 100.0], 100 * 2e-5)
    assert found.off == pytest.approx(1.1 * 100 * 2e-5)


def test_as_much_is_allowed_as_one_unit_in_the_last_place_of_the_weights_changes_times_30() -> None:
    expected, near = quantity([1.0]), quantity([1.001])
    assert compare(expected, torch.tensor([1.0 + 0.99 * 30 * 0.001], dtype=torch.float64), near) == []
    assert len(compare(expected, torch.tensor([1.0 + 1.01 * 30 * 0.001], dtype=torch.float64), near)) == 1


def test_a_first_step_that_rounding_changes_much_tells_nothing() -> None:
    expected, near = quantity([1.0]), quantity([1.01])
    with pytest.raises(ToleranceUnknown, match=r"values \(batch 0\) is off by 0.2, and may be by 0.3"):
        compare(expected, torch.tensor([1.2], dtype=torch.float64), near)
    later = Quantity("values", "batch 1", torch.tensor([1.0]))
    found = {("values", "batch 1"): torch.tensor([1.2])}
    assert differing([later], found, [[Quantity("values", "batch 1", torch.tensor([1.01]))]]) == []


def test_of_several_changes_the_largest_counts() -> None:
    expected, near, nearer = quantity([1.0]), quantity([1.001]), quantity([1.0001])
    assert compare(expected, torch.tensor([1.0 + 0.99 * 30 * 0.001], dtype=torch.float64), nearer, near, nearer) == []
    assert len(compare(expected, torch.tensor([1.0 + 0.99 * 30 * 0.001], dtype=torch.float64), nearer, nearer)) == 1


def test_what_is_near_must_be_known_where_the_floor_is_not_enough() -> None:
    expected = [Quantity("a", "", torch.tensor([1.0])), Quantity("b", "", torch.tensor([100.0, 0.0]))]
    equal = {("a", ""): torch.tensor([1.0]), ("b", ""): torch.tensor([100.0, 0.9 * 100 * 2e-5])}
    assert (exceeds_floor(expected, equal), differing(expected, equal)) == (False, [])
    for off in ({("b", ""): torch.tensor([100.0, 1.1 * 100 * 2e-5])}, {("a", ""): torch.tensor([NAN])}):
        assert exceeds_floor(expected, equal | off)
        (found,) = differing(expected, equal | off)
        assert (found.stage, "") in off
    # What was not recorded, or has another shape, differs whatever is near.
    assert not exceeds_floor(expected, {("b", ""): torch.tensor([1.0])})
    rounded = [Quantity("a", "", torch.tensor([1.0]), rounding=0.1)]
    assert [exceeds_floor(rounded, {("a", ""): torch.tensor([value])}) for value in (1.09, 1.11)] == [False, True]


def test_what_was_recorded_elsewhere_and_not_here_differs() -> None:
    (found,) = differing([quantity([1.0, 2.0])], {("values", "batch 1"): torch.tensor([1.0, 2.0])})
    assert found == Difference(*PLACE, [1.0, 2.0], [], math.inf, 0.0)
    assert found.describe() == "values (batch 0): nothing recorded instead of [1.0, 2.0]"


@pytest.mark.parametrize("stage", ["logs[loss]", "evaluation[eval_loss]", "evaluate()[eval_loss]"])
def test_what_a_trainer_does_not_log_differs_also_where_it_logs_it_nowhere(stage: str) -> None:
    (found,) = differing([Quantity(stage, "step 0", torch.tensor([1.0]))], {})
    assert (found.stage, found.found) == (stage, [])


def test_what_a_recording_sees_nowhere_is_no_difference_of_the_trainer_and_no_success() -> None:
    expected = [quantity([1.0]), Quantity("logps[chosen]", "batch 0", torch.tensor([3.0]))]
    found = compare_with_reference(expected, {PLACE: torch.tensor([1.0])}, [expected])
    assert (found.differences, found.unseen, found.compared) == ([], ["logps[chosen]"], 1)
    assert found.shortfall().startswith("the recording sees nothing of logps[chosen], which are to be compared: ")
    other = compare_with_reference(expected, {PLACE: torch.tensor([2.0])}, [expected])
    assert ([each.stage for each in other.differences], other.unseen) == (["values"], ["logps[chosen]"])
    assert compare_with_reference(expected, {}).unseen == ["values", "logps[chosen]"]
    whole = compare_with_reference(expected[:1], {PLACE: torch.tensor([1.0])})
    assert (whole.unseen, whole.shortfall()) == ([], "")


def test_a_parameter_that_is_not_trained_is_the_trainers_fault() -> None:
    expected = [Quantity(f"weights[{name}]", "step 0", torch.tensor([1.0])) for name in ("a", "b")]
    found = compare_with_reference(expected, {("weights[a]", "step 0"): torch.tensor([1.0])})
    assert ([each.stage for each in found.differences], found.unseen) == (["weights[b]"], [])
    assert compare_with_reference(expected, {}).unseen == ["weights[a]", "weights[b]"]


def test_what_need_not_be_recorded_says_why_and_is_compared_where_it_is() -> None:
    names = {"logps[*": "it has no such numbers", "values": "it keeps them"}
    expected = [quantity([1.0]), Quantity("logps[chosen]", "batch 0", torch.tensor([3.0])), quantity([1.0])]
    excused = stated(expected, names)
    assert [each.unrecorded for each in excused] == ["it keeps them", "it has no such numbers", "it keeps them"]
    assert differing(excused, {}) == []
    assert [compare_with_reference(excused, seen).compared for seen in ({}, {PLACE: torch.tensor([1.0])})] == [
        0,
        2,
    ]
    assert len(differing(excused, {PLACE: torch.tensor([2.0])}, [excused])) == 2
    assert [each.unrecorded for each in stated(expected, {"logps": "another one"})] == ["", "", ""]


def test_a_statement_stands_for_the_stages_that_begin_as_it_says_and_for_no_other() -> None:
    expected = [Quantity(stage, "batch 0", torch.zeros(1)) for stage in ("logps[chosen]", "logps", "loss")]
    assert [quantity.unrecorded for quantity in stated(expected, {"logps[*": "nowhere"})] == ["nowhere", "", ""]


def test_a_parameter_that_only_the_trainer_trains_differs_and_what_it_logs_beside_is_named() -> None:
    seen = {
        PLACE: torch.tensor([1.0]),
        ("weights[extra]", "step 0"): torch.tensor([3.0]),
        **{(f"logs[{name}]", "step 0"): torch.tensor([3.0]) for name in ("phi", "epoch", "step", "step_time")},
        ("evaluation[eval_runtime]", "evaluation 0"): torch.tensor([3.0]),
        ("evaluation[eval_samples_per_second]", "evaluation 0"): torch.tensor([3.0]),
    }
    late = Difference("weights[extra]", "step 1", [], [1.0], 1.0, 0.0)
    found = compare_with_reference([quantity([1.0])], seen, [], [late], [late])
    assert found.differences == [late, Difference("weights[extra]", "step 0", [], [3.0], math.inf, 0.0), late]
    assert (found.compared, found.without_reference) == (1, ["logs[phi]"])
    again = Difference("logs[x]", "step 0", ["x"], [], math.inf, 0.0)
    missing = [quantity([1.0]), Quantity("logs[x]", "step 0", torch.tensor([1.0]))]
    assert [
        each.expected
        for each in compare_with_reference(missing, {PLACE: torch.tensor([1.0])}, after=[again]).differences
    ] == [[1.0]]


def test_of_tokens_those_count_that_the_mask_has_and_the_wider_side_decides_the_width() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    expected = quantity(torch.tensor([[1.0, 5.0], [2.0, 3.0]]), mask)
    assert compare(expected, torch.tensor([[1.0, 7.0, 9.0], [2.0, 3.0, 9.0]])) == []
    (found,) = compare(expected, torch.tensor([[1.0], [2.0]]))
    assert (found.expected[0], found.found[0], found.off) == (3.0, 0.0, 3.0)
    narrow = quantity(torch.tensor([[1.0], [2.0]]), mask[:, :1])
    assert compare(narrow, torch.tensor([[1.0, 8.0], [2.0, 8.0]])) == []


def test_another_number_of_rows_is_a_difference_of_shapes() -> None:
    (found,) = compare(quantity([1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert (found.expected, found.found, found.off, found.allowed) == ([2.0], [3.0], math.inf, 0.0)


def test_what_is_no_number_on_both_sides_does_not_differ_and_on_one_side_does() -> None:
    assert compare(quantity([NAN, 1.0]), torch.tensor([NAN, 1.0])) == []
    (found,) = compare(quantity([NAN, 1.0]), torch.tensor([2.0, 1.0]))
    assert (found.off, found.found[0]) == (math.inf, 2.0)


def test_rounding_where_a_number_is_shown_is_allowed_beside() -> None:
    shown = torch.tensor([1.0001], dtype=torch.float64)
    assert len(compare(quantity([1.0]), shown)) == 1
    assert compare(quantity([1.0], rounding=1e-4), shown) == []


def test_neighbours_have_each_weight_at_most_one_unit_in_the_last_place_off() -> None:
    model = torch.nn.Linear(50, 50)
    twin = copy.deepcopy(model)
    (changed, changed_twin), *others = neighbours(model, twin)
    moved = ((changed.weight - model.weight) / model.weight).detach().abs()
    assert changed is not model
    assert 0 < float(moved.max()) <= 2**-22
    assert 0.2 < float((moved == 0).double().mean()) < 0.5
    assert torch.equal(changed.weight, changed_twin.weight)
    assert [torch.equal(other.weight, changed.weight) for other, _ in others] == [False, False]
    ((again, _), *_) = neighbours(model, twin)
    assert torch.equal(again.weight, changed.weight)
    ((rounded,), *_) = neighbours(torch.nn.Linear(50, 50).bfloat16())
    assert rounded.weight.dtype is torch.bfloat16


def test_an_infinite_number_allows_nothing_to_the_others_and_agrees_with_itself_alone() -> None:
    assert compare(quantity([math.inf, 1.0]), torch.tensor([math.inf, 1.0])) == []
    (found,) = compare(quantity([math.inf, 1.0]), torch.tensor([math.inf, 2.0]))
    assert (found.off, found.allowed) == (1.0, 2e-5)
    (found,) = compare(quantity([math.inf]), torch.tensor([-math.inf]))
    assert found.off == math.inf


@pytest.mark.parametrize("neighbour", [NAN, math.inf])
def test_a_neighbour_that_is_not_finite_allows_nothing(neighbour: float) -> None:
    with pytest.raises(NotFinite, match=r"values \(batch 0\) is not finite"):
        compare(quantity([1.0]), torch.tensor([2.0]), quantity([1.0]), quantity([neighbour]))
