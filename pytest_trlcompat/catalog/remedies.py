"""What to do about a known issue, made from the catalogue: which cure to train with, or which releases to take.

Nothing of it is written by hand except an entry's ``workaround``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_trlcompat.catalog.fixed_releases import Alternative, FixedReleases, counted, fixed_releases
from pytest_trlcompat.catalog.issue import STRATEGIES, KnownIssue
from pytest_trlcompat.catalog.issue import TRAINERS as MEASURED
from pytest_trlcompat.catalog.regions import Domain
from pytest_trlcompat.trainers.curing.kinds import KINDS, TRAINERS
from pytest_trlcompat.trainers.curing.known import mixins_of
from pytest_trlcompat.trainers.curing.names import MODULES, names_of

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.evidence import MeasuredCell

__all__ = ["CORRECTED", "Ways", "cured_in", "mixins", "own_trainer", "remedy", "ways_of"]

CORRECTED = "pytest_trlcompat.trainers"
"""The package of the corrected trainers and of the mixins that they are made of."""

_FAILING = " (most of what was measured there fails for another reason)"


class Ways(NamedTuple):
    """What is known to help with an issue, on whatever stack somebody meets it.

    Attributes:
        fixed: the releases with which upstream is right.
        mixins: those that are its cure, for whichever kind of trainer.
        configs: the classes of the corrected trainers' configs that are its cure.
    """

    fixed: tuple[FixedReleases, ...]
    mixins: tuple[str, ...]
    configs: tuple[str, ...]


def ways_of(issue: KnownIssue, cells: Sequence[MeasuredCell] = ()) -> Ways:
    """
    Args:
        cells: measured ones, by which releases with which most suites fail for another reason are marked.
    """
    fixed = counted(issue, cells) if cells else fixed_releases(issue)
    configs = tuple(name for name in names_of(issue.cure) if name.endswith("Config"))
    return Ways(fixed, mixins_of((issue.cure, *issue.cure_with)), configs)


def remedy(
    issue: KnownIssue,
    strategies: Sequence[str] = (),
    *,
    trainer: str = "",
    versions: Domain | None = None,
    ways: Ways | None = None,
) -> str:
    """One line: the corrected trainer, the releases that are right, and the entry's workaround.

    Args:
        strategies: under which somebody meets the issue; what holds only under others is left out.
        trainer: which they use, a key of ``TRAINERS``, if known.
        versions: of their stack; releases that it has already are left out.
        ways: what is known to help, where somebody has it already, or has counted what cells measured.
    """
    ways = ways or ways_of(issue)
    texts = [text] if issue.cure and (text := _training(issue, trainer, ways)) else []
    relevant = [answer for answer in ways.fixed if not strategies or set(strategies) & set(answer.strategies)]
    right = []
    for answer in relevant:
        under = [label for label in answer.strategies if not strategies or label in strategies]
        others = [
            alternative for alternative in answer.alternatives if versions is None or not alternative.holds(versions)
        ]
        if others:
            releases = [alternative.describe() + _failing(alternative, under) for alternative in others]
            right.append(f"{_under(answer, len(relevant))}take {', or '.join(releases)}")
    if right:
        texts.append("; ".join(right))
    if issue.workaround:
        texts.append(issue.workaround)
    return ", or ".join(texts) or "nothing is known to help"


def _failing(alternative: Alternative, strategies: Sequence[str]) -> str:
    """A remark on releases with which the suite failed for another reason in most of what was measured."""
    return _FAILING if sum(alternative.surplus.get(label, 0) for label in strategies) > 0 else ""


def cured_in(issue: KnownIssue, ways: Ways | None = None) -> str:
    """From which releases on its cure is not needed: ``trl 0.18 (fsdp1), trl 0.29 (fsdp2)``; empty where in none.

    Args:
        ways: what is known to help, where somebody has it already.
    """
    strategies: dict[str, list[str]] = {}
    for answer in fixed_releases(issue) if ways is None else ways.fixed:
        first = " or ".join(alternative.first() for alternative in answer.alternatives if alternative.lasting)
        strategies.setdefault(first, []).extend(answer.strategies)
    if len(strategies) == 1:
        return next(iter(strategies))
    texts = []
    for first, under in strategies.items():
        named = [name for name in issue.labels() if name in under]
        common = set(STRATEGIES) <= set(named)
        texts.append((first or "no release") + ("" if common else f" ({', '.join(named)})"))
    return ", ".join(texts)


def own_trainer(
    issues: Iterable[KnownIssue], trainer: str = "", ways_of: Callable[[KnownIssue], Ways | None] = lambda _: None
) -> str:
    """How a user's own trainer gets the cures of these issues; empty where none has a cure for it.

    Args:
        trainer: which they use, if known.
        ways_of: what is known to help with an issue, where somebody has it already.
    """
    if not any(mixins(issue, trainer, ways_of(issue)) for issue in issues):
        return ""
    return (
        f"A trainer of your own gets the cures of its kind by `{CORRECTED}.cured(MyTrainer)`, whichever subclass of "
        "transformers.Trainer it is; a mixin in parentheses above gives that cure alone, by "
        "`class My(TheMixin, MyTrainer)`."
    )


def mixins(issue: KnownIssue, trainer: str = "", ways: Ways | None = None) -> tuple[str, ...]:
    """The mixins that are its cure; of a trainer that is known, those that its kind gets.

    Args:
        ways: what is known to help, where somebody has it already.
    """
    every = mixins_of((issue.cure, *issue.cure_with)) if ways is None else ways.mixins
    known = issue.kind or trainer
    return tuple(name for name in every if not known or name in KINDS.get(known, KINDS["trainer"]))


def _training(issue: KnownIssue, trainer: str, ways: Ways) -> str:
    """What to train with; empty where no cure fits the trainer."""
    configured = "".join(f" and its {name}" for name in ways.configs)
    texts = []
    for known in _named(issue, trainer, ways):
        classes = ", ".join(mixins(issue, known, ways))
        if classes or configured:
            texts.append(_corrected_trainer(known) + configured + (f" ({classes})" if classes else ""))
    return f"train with {' or '.join(texts)}" if texts else ""


def _named(issue: KnownIssue, trainer: str, ways: Ways) -> tuple[str, ...]:
    """The trainers to name: the one whose issue it is, the one that is used, or else the most general with a cure."""
    if known := issue.trainer or trainer:
        return (known,)
    return ("trainer",) if mixins(issue, "trainer", ways) else MEASURED


def _corrected_trainer(trainer: str) -> str:
    name = TRAINERS[trainer]
    return f"{CORRECTED}.{name if name in MODULES else f'cured({name})'}"


def _under(fixed: FixedReleases, answers: int) -> str:
    """For which strategies an answer holds, where there is another one."""
    common = answers == 1 or set(STRATEGIES) <= set(fixed.strategies)
    return "" if common else f"under {', '.join(fixed.strategies)} "
