"""Where upstream is right, derived from predictions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest
from packaging.specifiers import SpecifierSet

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.fixed_releases import Alternative, FixedReleases, fixed_releases
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.ranges import at
from pytest_trlcompat.catalog.verdict import Verdict

PROBLEMS = (Verdict.BROKEN, Verdict.SILENT, Verdict.WASTEFUL)


def predict(verdict: str, *strategies: str, why: str = "because", **when: str) -> Prediction:
    return Prediction(Verdict(verdict), "upstream", when, strategies, why)


def issue(*predictions: Prediction, strategies: tuple[str, ...] = ("zero3",)) -> KnownIssue:
    return KnownIssue("grpo-one", "t", "w", (), "s", "", (), predictions, strategies)


def texts(*predictions: Prediction, strategies: tuple[str, ...] = ("zero3",)) -> dict[str, list[str]]:
    """By strategies the alternatives; a ``+`` marks those that last."""
    found = fixed_releases(issue(*predictions, strategies=strategies))
    return {
        " ".join(each.strategies): [_text(each, number) for number in range(len(each.alternatives))] for each in found
    }


def _text(fixed: FixedReleases, number: int) -> str:
    alternative = fixed.alternatives[number]
    return alternative.describe() + ("+" if alternative.lasting else "")


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        ([predict("broken", trl="<0.18"), predict("ok")], ["trl >=0.18+"]),
        ([predict("silent", trl=">=0.22,<0.26"), predict("ok")], ["trl >=0.9.6,<0.22 or >=0.26+"]),
        ([predict("wasteful", peft=">=0.20"), predict("ok")], ["peft <0.20"]),
        ([predict("broken")], []),
        # Either package alone is enough.
        ([predict("broken", trl="<0.17", torch=">=2.6"), predict("ok")], ["trl >=0.17+", "torch <2.6"]),
        # Neither alone is enough; what the first alternative has is no part of a second.
        (
            [predict("ok", trl=">=0.15", transformers=">=4.49"), predict("broken")],
            ["trl >=0.15 with transformers >=4.49+"],
        ),
        (
            [
                predict("ok", trl=">=1.5"),
                predict("broken", transformers=">=5.0"),
                predict("ok", trl=">=0.16"),
                predict("broken"),
            ],
            ["trl >=1.5+", "trl >=0.16,<1.5 with transformers <5.0"],
        ),
        # Nobody is sent to a release without the trainer, and a range that ends there lasts.
        ([predict("absent", trl=">=1.13"), predict("broken", trl="<0.12"), predict("ok")], ["trl >=0.12,<1.13+"]),
        ([predict("absent", trl=">=1.13"), predict("broken", trl=">=0.10"), predict("ok")], ["trl >=0.9.6,<0.10"]),
        # Where another issue stops the suite, this one neither forbids nor advises.
        ([predict("error", trl="<0.15"), predict("broken", trl="<0.18"), predict("ok")], ["trl >=0.18+"]),
        ([predict("blocked", trl=">=1.15,<1.16"), predict("broken", trl="<0.18"), predict("ok")], ["trl >=0.18+"]),
    ],
)
def test_alternatives(predictions: list[Prediction], expected: list[str]) -> None:
    assert texts(*predictions) == {"zero3": expected}


@pytest.mark.parametrize("why", ["it is its own doing", "other tokens are scored: grpo-logits-to-keep"])
def test_a_silent_verdict_forbids_whatever_its_reason_says(why: str) -> None:
    silent = predict("silent", trl="<0.15", why=why)
    assert texts(silent, predict("broken", torch="<2"), predict("ok")) == {"zero3": ["trl >=0.15 with torch >=2+"]}


def test_strategies_with_the_same_answer_are_together() -> None:
    assert texts(
        predict("broken", "fsdp1*", trl="<0.18"),
        predict("broken", "fsdp2", trl="<0.29"),
        predict("ok"),
        strategies=("ddp", "fsdp1", "fsdp2", "fsdp1-no_shard"),
    ) == {"fsdp1 fsdp1-no_shard": ["trl >=0.18+"], "fsdp2": ["trl >=0.29+"]}


def test_of_an_issue_that_others_alone_show_their_stacks_are_the_problem() -> None:
    assert texts(predict("blocked", trl="<0.18"), predict("ok")) == {"zero3": ["trl >=0.18+"]}


def test_no_alternative_of_the_catalogue_holds_a_problem_and_none_that_is_right_is_left_out() -> None:
    """By looking up stacks one by one: every release near a bound, at random beside each other."""
    draw = random.Random(0)
    looked = 0
    for known in known_issues.load().values():
        near = {package: _near(known, package) for package in known.packages}
        for each in fixed_releases(known):
            for strategy, _ in itertools.product(each.strategies, range(60)):
                versions = {package: draw.choice(releases) for package, releases in near.items()}
                found = known.predict("upstream", strategy, versions)
                advised = any(_is_in(versions, alternative) for alternative in each.alternatives)
                if found is None:
                    continue
                where = (known.id, strategy, versions, found.describe())
                if found.verdict is Verdict.OK:
                    assert advised, where
                    looked += 1
                elif found.verdict in PROBLEMS:
                    assert not advised, where
                    looked += 1
    assert looked > 2000


def test_the_catalogues_alternatives_agree_with_every_measured_cell() -> None:
    right, wrong = 0, 0
    for known in known_issues.load().values():
        for each, cell in itertools.product(fixed_releases(known), evidence.published().cells):
            advised = any(_is_in(cell.versions, alternative) for alternative in each.alternatives)
            for strategy in each.strategies:
                verdict = cell.verdicts.get((known.id, "upstream", strategy))
                if verdict is Verdict.OK:
                    assert advised, (known.id, strategy, cell.id)
                    right += 1
                elif verdict in PROBLEMS:
                    assert not advised, (known.id, strategy, cell.id)
                    wrong += 1
    assert right > 3000
    assert wrong > 2000


def _is_in(versions: Mapping[str, str], alternative: Alternative) -> bool:
    return all(
        package in versions and wanted.covers(at(versions[package])) for package, wanted in alternative.ranges.items()
    )


def _near(known: KnownIssue, package: str) -> list[str]:
    texts = {text for each in known.predictions if package in each.when for text in [each.when[package]]}
    bounds = {specifier.version.removesuffix(".*") for text in texts for specifier in SpecifierSet(text)}
    return ["0.9.6" if package == "trl" else "0.1", "9.9", *bounds, *(f"{bound}.0.1" for bound in bounds)]
