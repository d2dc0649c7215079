"""What to do about a known issue, made from the catalogue: which cure to train with, or which releases to take.

Nothing of it is written by hand except an entry's ``workaround``. Imports no package of the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.fixed_releases import Alternative, FixedReleases, fixed_releases
from pytest_trlcompat.catalog.issue import STRATEGIES, KnownIssue
from pytest_trlcompat.catalog.issue import TRAINERS as MEASURED
from pytest_trlcompat.catalog.ranges import Range, at
from pytest_trlcompat.catalog.regions import Domain
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.trainers.curing.kinds import TRAINERS
from pytest_trlcompat.trainers.curing.known import mixins_of
from pytest_trlcompat.trainers.curing.names import MODULES, names_of

__all__ = ["CORRECTED", "cured_in", "mixins", "own_trainer", "remedy"]

CORRECTED = "pytest_trlcompat.trainers"
"""The package of the corrected trainers and of the mixins that they are made of."""

_FAILING = " (most of what was measured there fails for another reason)"


def remedy(
    issue: KnownIssue,
    strategies: Sequence[str] = (),
    *,
    trainer: str = "",
    versions: Domain | None = None,
    cells: Sequence[MeasuredCell] = (),
) -> str:
    """One line: the corrected trainer, the releases that are right, and the entry's workaround.

    Args:
        strategies: under which somebody meets the issue; what holds only under others is left out.
        trainer: which they use, a key of ``TRAINERS``, if known.
        versions: of their stack; releases that it has already are left out.
        cells: measured ones, by which releases with which most suites fail for another reason are marked.
    """
    ways = [text] if issue.cure and (text := _training(issue, trainer)) else []
    fixed = [each for each in fixed_releases(issue) if not strategies or set(strategies) & set(each.strategies)]
    right = []
    for each in fixed:
        under = [label for label in each.strategies if not strategies or label in strategies]
        others = [one for one in each.alternatives if versions is None or not one.holds(versions)]
        if others:
            texts = [one.describe() + _failing(issue, under, one, cells) for one in others]
            right.append(f"{_under(each, len(fixed))}take {', or '.join(texts)}")
    if right:
        ways.append("; ".join(right))
    if issue.workaround:
        ways.append(issue.workaround)
    return ", or ".join(ways) or "nothing is known to help"


def _failing(
    issue: KnownIssue, strategies: Sequence[str], alternative: Alternative, cells: Sequence[MeasuredCell]
) -> str:
    """A remark on releases with which the suite failed for another reason in most of what was measured."""
    surplus = 0  # of other failures over what is right
    for cell in cells:
        found = [cell.verdicts.get((issue.id, "upstream", label)) for label in strategies]
        here = found.count(Verdict.ERROR) + found.count(Verdict.BLOCKED) - found.count(Verdict.OK)
        if here and alternative.holds(_ranges(cell.versions, alternative.ranges)):
            surplus += here
    return _FAILING if surplus > 0 else ""


def _ranges(versions: Mapping[str, str], packages: Iterable[str]) -> dict[str, Range]:
    return {package: at(versions[package]) for package in packages if package in versions}


def cured_in(issue: KnownIssue) -> str:
    """From which releases on its cure is not needed: ``trl 0.18 (fsdp1), trl 0.29 (fsdp2)``; empty where in none."""
    strategies: dict[str, list[str]] = {}
    for each in fixed_releases(issue):
        first = " or ".join(alternative.first() for alternative in each.alternatives if alternative.lasting)
        strategies.setdefault(first, []).extend(each.strategies)
    if len(strategies) == 1:
        return next(iter(strategies))
    texts = []
    for first, under in strategies.items():
        named = [name for name in issue.labels() if name in under]
        common = set(STRATEGIES) <= set(named)
        texts.append((first or "no release") + ("" if common else f" ({', '.join(named)})"))
    return ", ".join(texts)


def own_trainer(issues: Iterable[KnownIssue], trainer: str = "") -> str:
    """How a user's own trainer gets the cures of these issues; empty where none has a cure for it.

    Args:
        trainer: which they use, if known.
    """
    if not any(mixins(issue, trainer) for issue in issues):
        return ""
    return (
        f"A trainer of your own gets the cures of its kind by `{CORRECTED}.cured(MyTrainer)`, whichever subclass of "
        "transformers.Trainer it is; a mixin in parentheses above gives that cure alone, by "
        "`class My(TheMixin, MyTrainer)`."
    )


def mixins(issue: KnownIssue, trainer: str = "") -> tuple[str, ...]:
    """The mixins that are its cure; of a trainer that is known, those that its kind gets."""
    return mixins_of((issue.cure, *issue.cure_with), issue.kind or trainer)


def _training(issue: KnownIssue, trainer: str) -> str:
    """What to train with; empty where no cure fits the trainer."""
    configured = "".join(f" and its {name}" for name in names_of(issue.cure) if name.endswith("Config"))
    texts = []
    for known in _named(issue, trainer):
        own = ", ".join(mixins(issue, known))
        if own or configured:
            texts.append(_corrected_trainer(known) + configured + (f" ({own})" if own else ""))
    return f"train with {' or '.join(texts)}" if texts else ""


def _named(issue: KnownIssue, trainer: str) -> tuple[str, ...]:
    """The trainers to name: the one whose issue it is, the one that is used, or else the most general with a cure."""
    if known := issue.trainer or trainer:
        return (known,)
    return ("trainer",) if mixins(issue, "trainer") else MEASURED


def _corrected_trainer(trainer: str) -> str:
    name = TRAINERS[trainer]
    return f"{CORRECTED}.{name if name in MODULES else f'cured({name})'}"


def _under(fixed: FixedReleases, answers: int) -> str:
    """For which strategies an answer holds, where there is another one."""
    common = answers == 1 or set(STRATEGIES) <= set(fixed.strategies)
    return "" if common else f"under {', '.join(fixed.strategies)} "
