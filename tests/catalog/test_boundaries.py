"""The module ``boundaries``: where verdicts change, and which cells measured either side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.boundaries import Boundary, Measured, boundaries, measure, unmeasured
from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Verdict


def predict(verdict: str, strategies: tuple[str, ...] = (), subject: str = "upstream", **when: str) -> Prediction:
    return Prediction(Verdict(verdict), subject, when, strategies, "because")


def issue(*predictions: Prediction, strategies: tuple[str, ...] = ("single",)) -> KnownIssue:
    return KnownIssue("one", "t", "w", (), "s", "", (), predictions, strategies)


def cell(verdict: str, strategy: str = "single", subject: str = "upstream", **versions: str) -> MeasuredCell:
    name = "-".join(f"{package}{version}" for package, version in versions.items())
    return MeasuredCell(name, versions, {("one", subject, strategy): Verdict(verdict)})


SIMPLE = issue(predict("broken", trl=">=0.14,<0.18"), predict("ok", trl=">=0.18"))
LOGITS = issue(
    predict("ok", trl="<0.15", transformers="<4.52"),
    predict("silent", trl="<0.15"),
    predict("wasteful", transformers="<4.49"),
    predict("ok"),
)


def only(entry: KnownIssue) -> Boundary:
    (boundary,) = boundaries(entry)
    return boundary


def test_a_boundary_is_between_two_predicted_verdicts() -> None:
    boundary = only(SIMPLE)
    assert (boundary.package, boundary.bound) == ("trl", ">=0.18")
    assert (boundary.below, boundary.above) == (Verdict.BROKEN, Verdict.OK)
    # Below 0.14 nothing is predicted, so nothing is claimed there.
    assert boundary.describe() == "one, upstream, single: broken becomes ok at trl >=0.18"


def test_the_other_packages_are_held() -> None:
    assert [boundary.describe() for boundary in boundaries(LOGITS)] == [
        "one, upstream, single: wasteful becomes ok at transformers >=4.49 with trl >=0.15",
        "one, upstream, single: ok becomes silent at transformers >=4.52 with trl <0.15",
        "one, upstream, single: ok becomes wasteful at trl >=0.15 with transformers <4.49",
        "one, upstream, single: silent becomes ok at trl >=0.15 with transformers >=4.52",
    ]


def test_strategies_that_change_alike_are_told_together() -> None:
    entry = issue(
        predict("ok", ("fsdp2",), trl=">=0.29"),
        predict("ok", ("fsdp1*",), trl=">=0.18"),
        predict("broken"),
        strategies=("fsdp1", "fsdp1-no_shard", "fsdp2"),
    )
    assert [boundary.describe() for boundary in boundaries(entry)] == [
        "one, upstream, fsdp1, fsdp1-no_shard: broken becomes ok at trl >=0.18",
        "one, upstream, fsdp2: broken becomes ok at trl >=0.29",
    ]


def test_the_corrected_trainer_is_ok_where_nothing_is_said() -> None:
    entry = issue(predict("absent", subject="corrected", accelerate="<1.6"))
    assert only(entry).describe() == "one, corrected, single: absent becomes ok at accelerate >=1.6"


def test_a_bound_may_lie_just_after_a_version() -> None:
    assert only(issue(predict("broken", trl="<=0.18.2"), predict("ok"))).bound == ">0.18.2"


@pytest.mark.parametrize(
    ("cells", "below", "above"),
    [
        ([], None, None),
        ([cell("broken", trl="0.17.0")], "0.17.0", None),
        ([cell("broken", trl="0.15.2"), cell("broken", trl="0.17.0"), cell("ok", trl="1.0")], "0.17.0", "1.0"),
        ([cell("ok", trl="0.18.2"), cell("ok", trl="0.18.0")], None, "0.18.0"),
        # The wrong verdict, subject or strategy measures nothing; nor does a cell without the package.
        ([cell("silent", trl="0.17.0"), cell("ok", "zero3", trl="0.18.0")], None, None),
        ([cell("ok", subject="corrected", trl="0.18.0"), cell("ok", transformers="4.49")], None, None),
        # Outside of what is predicted.
        ([cell("broken", trl="0.13.0")], None, None),
    ],
)
def test_a_side_is_measured_by_the_nearest_cell_that_gave_its_verdict(
    cells: list[MeasuredCell], below: str | None, above: str | None
) -> None:
    found = measure(only(SIMPLE), Evidence("", tuple(cells)))
    assert (found.below and found.below.version, found.above and found.above.version) == (below, above)
    assert found.both is (below is not None and above is not None)


def test_a_cell_measures_a_boundary_only_where_its_other_packages_are_held() -> None:
    inside = cell("wasteful", trl="0.15.2", transformers="4.48.3")
    outside = cell("ok", trl="0.14.0", transformers="4.49.0")
    boundary = boundaries(LOGITS)[0]
    found = measure(boundary, Evidence("", (inside, outside)))
    assert found.below is not None
    assert found.below.cells == ("trl0.15.2-transformers4.48.3",)
    assert found.above is None


def test_torch_has_boundaries_like_any_other_package() -> None:
    entry = issue(predict("broken", transformers="<4.47", torch=">=2.6"), predict("ok"))
    of_torch, of_transformers = boundaries(entry)
    assert of_torch.describe() == "one, upstream, single: ok becomes broken at torch >=2.6 with transformers <4.47"
    assert (
        of_transformers.describe() == "one, upstream, single: broken becomes ok at transformers >=4.47 with torch >=2.6"
    )
    cells = (
        cell("ok", transformers="4.46.3", torch="2.5.1"),
        cell("broken", transformers="4.46.3", torch="2.6.0"),
        cell("ok", transformers="4.48.3", torch="2.6.0"),
    )
    assert (
        measure(of_torch, Evidence("", cells))
        .describe()
        .endswith("measured below on transformers4.46.3-torch2.5.1, measured above on transformers4.46.3-torch2.6.0")
    )
    assert measure(of_transformers, Evidence("", cells)).both
    only_new = Evidence("", tuple(each for each in cells if each.versions["torch"] == "2.6.0"))
    assert [found.boundary.package for found in unmeasured(Catalog(one=entry), only_new)] == ["torch"]


def test_beyond_another_change_the_same_verdict_measures_nothing() -> None:
    again = issue(
        predict("broken", trl="<0.15"),
        predict("ok", trl="<0.18"),
        predict("broken", trl="<0.29"),
        predict("ok"),
    )
    last = boundaries(again)[-1]
    assert last.bound == ">=0.29"
    assert measure(last, Evidence("", (cell("broken", trl="0.14.0"),))).below is None
    assert measure(last, Evidence("", (cell("broken", trl="0.18.0"),))).below is not None


def blocked(by: str, **when: str) -> Prediction:
    return Prediction(Verdict.BLOCKED, "upstream", when, (), "because", by)


def blocked_cell(by: str, **versions: str) -> MeasuredCell:
    return replace(cell("blocked", **versions), blocked_by={("one", "upstream", "single"): by})


def test_what_another_issue_than_predicted_stopped_measures_nothing() -> None:
    boundary = only(issue(blocked("two", trl="<0.18"), predict("ok")))
    assert boundary.describe() == "one, upstream, single: blocked by two becomes ok at trl >=0.18"
    below = [measure(boundary, Evidence("", (blocked_cell(by, trl="0.17.0"),))).below for by in ("two", "three")]
    assert [side and side.version for side in below] == ["0.17.0", None]


def test_beyond_another_blocker_nothing_is_measured_either() -> None:
    boundary = only(issue(blocked("two", trl="<0.15"), blocked("three", trl="<0.18"), predict("ok")))
    assert boundary.bound == ">=0.18"
    old, new = blocked_cell("two", trl="0.14.0"), blocked_cell("three", trl="0.17.0")
    # What was measured before failures were attributed says of no blocker.
    unattributed = replace(cell("error", trl="0.14.0"), attributed=False)
    found = [measure(boundary, Evidence("", (each,))).below for each in (old, new, unattributed)]
    assert [side and side.version for side in found] == [None, "0.17.0", None]


def test_how_tight_is_told_where_the_releases_are_known() -> None:
    evidence = Evidence("", (cell("broken", trl="0.16.0"), cell("ok", trl="0.18.2")))
    releases = {"trl": ["0.15.2", "0.16.0", "0.16.1", "0.17.0", "0.18.0rc1", "0.18.0", "0.18.2", "0.19.0"]}
    assert measure(only(SIMPLE), evidence).between is None
    loose = measure(only(SIMPLE), evidence, releases)
    assert loose.between == ("0.16.1", "0.17.0", "0.18.0")
    assert loose.describe() == (
        "one, upstream, single: broken becomes ok at trl >=0.18: measured below on trl0.16.0, measured above on "
        "trl0.18.2; 3 releases between them"
    )
    tight = Evidence("", (cell("broken", trl="0.17.0"), cell("ok", trl="0.18.0")))
    assert measure(only(SIMPLE), tight, releases).describe().endswith("; no release between them")


def test_what_is_not_measured_says_so() -> None:
    (found,) = unmeasured(Catalog(one=SIMPLE), Evidence("", (cell("ok", trl="0.18.0"),)))
    assert isinstance(found, Measured)
    assert found.describe().endswith(": not measured below, measured above on trl0.18.0")
    both = Evidence("", (cell("ok", trl="0.18.0"), cell("broken", trl="0.17.0")))
    assert unmeasured(Catalog(one=SIMPLE), both) == []


def test_the_boundaries_of_the_catalogue_are_those_that_it_states() -> None:
    described = [boundary.describe() for boundary in boundaries(known_issues.load()["grpo-logits-to-keep"])]
    assert set(described) >= {
        "grpo-logits-to-keep, upstream, single: wasteful becomes ok at transformers >=4.49 "
        "with trl >=0.15,<1.15 or >=1.16",
        "grpo-logits-to-keep, upstream, single: ok becomes silent at transformers >=4.52 with trl >=0.14,<0.15",
        "grpo-logits-to-keep, upstream, single: ok becomes wasteful at trl >=0.15 with transformers <4.49",
        "grpo-logits-to-keep, upstream, single: ok becomes blocked by grpo-train-sampler at transformers >=4.52.1 "
        "with trl >=0.15,<0.17",
        "grpo-logits-to-keep, upstream, single-neither: broken becomes ok at trl >=0.20",
        "grpo-logits-to-keep, corrected, every strategy: absent becomes ok at trl >=0.14",
    }
