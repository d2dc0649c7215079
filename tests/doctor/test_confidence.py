"""How sure the doctor is: measured, between measurements, beyond them, with another torch."""

from __future__ import annotations

import io

import pytest

from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.doctor.text import show

from .made_up import ask, cell, effects, issue, only, predict


@pytest.mark.parametrize(
    ("pins", "cells", "text"),
    [
        (["trl==0.15.2"], [cell("0.15.2", single="broken", zero3="broken")], "measured on trl0.15.2-tf4.49.0"),
        (
            ["trl==0.16.0"],
            [cell("0.14.0", single="broken"), cell("0.15.2", single="broken"), cell("0.17.0", single="broken")],
            "between trl0.15.2-tf4.49.0 and trl0.17.0-tf4.49.0, which both gave this verdict under single",
        ),
        (
            ["trl==0.16.0"],
            [cell("0.14.0", single="broken"), cell("0.15.2", single="broken"), cell("0.17.0", single="ok")],
            "outside the measured range; the nearest cell with this verdict under single is trl0.15.2-tf4.49.0",
        ),
        (
            ["trl==0.12.2"],
            [cell("0.14.0", single="broken"), cell("0.15.2", single="broken")],
            "outside the measured range; the nearest cell with this verdict under single is trl0.14.0-tf4.49.0",
        ),
        (
            ["trl==0.16.0"],
            [cell("0.18.0", single="ok")],
            "not measured in the published sweep; predicted by the catalogue",
        ),
        (["trl<0.18"], [cell("0.15.2", single="broken", zero3="broken")], "measured on trl0.15.2-tf4.49.0"),
        (
            ["trl>=0.16,<0.18"],
            [cell("0.15.2", single="broken", zero3="broken")],
            "outside the measured range; the nearest cell with this verdict is trl0.15.2-tf4.49.0",
        ),
    ],
)
def test_confidence(pins: list[str], cells: list[MeasuredCell], text: str) -> None:
    (effect,) = only(ask(*pins, cells=cells)).effects
    assert effect.confidence.describe() == text


def test_between_means_in_every_package_that_decides() -> None:
    entry = issue(predict("broken", trl="<0.18", transformers=">=4.40"), predict("ok"), strategies=("single",))
    cells = [cell("0.15.2", "4.48.3", single="broken"), cell("0.17.0", "4.50.3", single="broken")]
    inside = ask("trl==0.16.0", "transformers==4.49.0", issues=[entry], cells=cells)
    outside = ask("trl==0.16.0", "transformers==4.52.4", issues=[entry], cells=cells)
    crossed = [cell("0.15.2", "4.50.3", single="broken"), cell("0.17.0", "4.48.3", single="broken")]
    levels = [only(found).effects[0].confidence.level.value for found in (inside, outside)]
    assert levels == ["between", "beyond"]
    across = only(ask("trl==0.16.0", "transformers==4.49.0", issues=[entry], cells=crossed)).effects[0].confidence
    assert across.cells == ("trl0.15.2-tf4.50.3", "trl0.17.0-tf4.48.3")


def test_cells_that_gave_the_verdict_for_another_reason_do_not_support_it() -> None:
    """As those of releases before and after one that has a fault of its own."""
    entry = issue(
        predict("silent", trl=">=0.16,<0.16.2"),
        predict("silent", transformers="<4.40"),
        predict("ok"),
        strategies=("single",),
    )
    around = [cell("0.15.2", "4.39.3", single="silent"), cell("0.17.0", "4.39.3", single="silent")]
    (effect,) = only(ask("trl==0.16.1", "transformers==4.39.3", issues=[entry], cells=around)).effects
    assert (
        effect.confidence.describe()
        == "outside the measured range; the nearest cell with this verdict is trl0.17.0-tf4.39.3"
    )
    itself = [*around, cell("0.16.1", "4.39.3", single="silent")]
    (effect,) = only(ask("trl==0.16.1", "transformers==4.39.3", issues=[entry], cells=itself)).effects
    assert effect.confidence.describe() == "measured on trl0.16.1-tf4.39.3"


def test_a_strategy_that_was_not_measured_rests_on_one_that_was() -> None:
    (effect,) = only(ask("trl==0.15.2", cells=[cell("0.15.2", zero3="broken")])).effects
    assert effect.strategies == ("single", "zero3")
    assert effect.confidence.describe() == "measured on trl0.15.2-tf4.49.0 under zero3"


def test_a_measured_problem_counts_though_the_catalogue_predicts_none() -> None:
    found = ask("trl==0.18.0", cells=[cell("0.18.0", single="error", zero3="ok")])
    assert effects(found) == [(("single",), "error", "")]
    (effect,) = only(found).effects
    assert effect.why == "measured, though the catalogue predicts another verdict"
    assert effects(ask("trl==0.18.1", cells=[cell("0.18.0", single="error", zero3="ok")])) == []


def test_an_unpredicted_verdict_counts_only_if_all_deciding_versions_are_known() -> None:
    entry = issue(predict("ok", trl=">=0.18", transformers=">=4.40"), strategies=("single",))
    cells = [cell("0.18.0", "4.49.0", single="error")]
    assert effects(ask("trl==0.18.0", "transformers==4.49.0", issues=[entry], cells=cells)) == [
        (("single",), "error", "")
    ]
    assert effects(ask("trl==0.18.0", issues=[entry], cells=cells)) == []


def test_a_measured_variant_supports_its_strategy_if_the_catalogue_does_not_distinguish_them() -> None:
    entry = issue(predict("broken", trl="<0.18"), predict("ok"), strategies=())
    (effect,) = only(ask("trl==0.15.2", issues=[entry], cells=[cell("0.15.2", **{"zero3-swap": "broken"})])).effects
    assert effect.confidence.describe() == "measured on trl0.15.2-tf4.49.0 under zero3-swap"


def test_a_measured_variant_that_the_entry_does_not_list_is_named_with_its_reason() -> None:
    entry = issue(predict("broken", ("zero3-*",)), predict("ok"), strategies=())
    cells = [cell("0.15.2", **{"zero3": "ok", "zero3-swap": "broken"})]
    (effect,) = only(ask("trl==0.15.2", issues=[entry], cells=cells)).effects
    assert (effect.strategies, effect.why) == (("zero3-swap",), "broken because")
    assert effect.confidence.describe() == "measured on trl0.15.2-tf4.49.0"


def test_a_cell_outside_a_condition_does_not_support_it() -> None:
    entry = issue(predict("broken", trl="<0.18"), predict("broken", trl="<0.29"), predict("ok"), strategies=("single",))
    found = ask("transformers==4.49.0", issues=[entry], cells=[cell("0.18.2", single="broken")])
    assert [(effect.condition, effect.confidence.level.value) for effect in only(found).effects] == [
        ("trl <0.18", "beyond"),
        ("trl >=0.18,<0.29", "measured"),
    ]


# Torch


def confidence(*pins: str, cells: list[MeasuredCell]) -> tuple[str, str]:
    (effect,) = only(ask(*pins, cells=cells)).effects
    return effect.confidence.level.value, effect.confidence.describe()


NEW_TORCH = cell("0.15.2", torch="2.13.0", single="broken", zero3="broken")
OLD_TORCH = cell("0.15.2", torch="2.6.0", single="broken", zero3="broken")


@pytest.mark.parametrize(
    "torch", ["torch==2.13.0", "torch==2.13.0+cu130", "torch==2.13.1", "torch>=2.6", "trl==0.15.2"]
)
def test_a_cell_with_the_stacks_torch_measures_it(torch: str) -> None:
    expected = ("measured", "measured on trl0.15.2-tf4.49.0-torch2.13.0")
    assert confidence("trl==0.15.2", torch, cells=[NEW_TORCH]) == expected


@pytest.mark.parametrize("torch", ["torch==2.6.0", "torch==2.12.1", "torch==2.14.0", "torch<2.13", "torch==2.130.0"])
def test_a_cell_with_another_torch_does_not_and_says_so(torch: str) -> None:
    assert confidence("trl==0.15.2", torch, cells=[NEW_TORCH]) == (
        "other torch",
        "measured on trl0.15.2-tf4.49.0-torch2.13.0, with torch 2.13.0",
    )


def test_the_cell_with_the_stacks_torch_is_taken_where_there_is_one() -> None:
    cells = [NEW_TORCH, OLD_TORCH]
    for torch in ("2.6.0", "2.13.0"):
        expected = ("measured", f"measured on trl0.15.2-tf4.49.0-torch{torch}")
        assert confidence("trl==0.15.2", f"torch=={torch}", cells=cells) == expected


def test_a_prediction_may_have_a_range_of_torch() -> None:
    entry = issue(predict("broken", trl="<0.18", torch=">=2.6"), predict("ok"), strategies=("single",))
    assert effects(ask("trl==0.15.2", "torch==2.5.1", issues=[entry])) == []
    assert effects(ask("trl==0.15.2", "torch==2.6.0", issues=[entry])) == [(("single",), "broken", "")]
    assert effects(ask("trl==0.15.2", issues=[entry])) == [(("single",), "broken", "torch >=2.6")]
    cells = [cell("0.15.2", torch="2.6.0", single="broken"), cell("0.15.2", torch="2.13.0", single="broken")]
    (effect,) = only(ask("trl==0.15.2", "torch==2.9.1", issues=[entry], cells=cells)).effects
    assert (
        effect.confidence.describe()
        == "between trl0.15.2-tf4.49.0-torch2.6.0 and trl0.15.2-tf4.49.0-torch2.13.0, which both gave this verdict"
    )
    below = cell("0.15.2", torch="2.5.1", single="ok")
    (effect,) = only(ask("trl==0.15.2", "torch==2.6.0", issues=[entry], cells=[below, *cells])).effects
    assert (effect.confidence.level.value, effect.confidence.cells) == ("measured", ("trl0.15.2-tf4.49.0-torch2.6.0",))


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        (["trl==0.15.2", "torch==2.6.0+cu124"], "measured with torch 2.12.1 and 2.13.0, yours is 2.6.0+cu124"),
        (["trl==0.15.2", "torch<2.7"], "measured with torch 2.12.1 and 2.13.0, yours is <2.7"),
        (["trl==0.15.2", "torch==2.12.0"], ""),
        (
            ["trl==0.15.2", "torch==2.14.0", "transformers==4.49.0"],
            "measured with torch 2.12.1 and 2.13.0, yours is 2.14.0",
        ),
        (
            ["trl==0.15.2", "torch==2.12.1", "transformers==4.49.0"],
            "trl 0.15.2 with transformers 4.49.0: measured with torch 2.13.0, yours is 2.12.1",
        ),
        (["trl==0.15.2", "torch==2.12.1"], ""),  # of which transformers is not known
        (["trl==1.0.0", "torch==2.12.1", "transformers==4.49.0"], ""),
        (["trl==0.15.2", "transformers==4.49.0"], ""),
    ],
)
def test_a_torch_that_was_not_measured_is_named(pins: list[str], text: str) -> None:
    found = ask(*pins, cells=[NEW_TORCH, cell("1.0.0", torch="2.12.1", single="ok"), cell("1.1.0", torch="2.12.1")])
    assert found.torch == found.to_dict()["torch"] == text
    file = io.StringIO()
    show(found, file)
    assert (f"\ntorch: {text}\n" in file.getvalue()) is bool(text)
    assert ("torch:" in file.getvalue()) is bool(text)


def test_json_names_the_torch_that_was_measured() -> None:
    found = ask("trl==0.15.2", "torch==2.6.0", cells=[NEW_TORCH])
    (when,) = found.to_dict()["issues"][0]["when"]
    assert (when["confidence"], when["measured_with_torch"]) == ("other torch", "2.13.0")
