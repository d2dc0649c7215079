"""What to do about a known issue, made from the catalogue: which cure to train with, or which releases to take.

Nothing of it is written by hand except an entry's ``workaround``. Imports no package of the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.fixed_releases import Alternative, FixedReleases, fixed_releases
from pytest_trlcompat.catalog.issue import STRATEGIES, KnownIssue
from pytest_trlcompat.catalog.ranges import Range, at
from pytest_trlcompat.catalog.regions import Domain
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.trainers.kinds import KINDS
from pytest_trlcompat.trainers.names import names_of

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
        trainer: which they use, if known.
        versions: of their stack; releases that it has already are left out.
        cells: measured ones, by which releases with which most suites fail for another reason are marked.
    """
    ways = [_training(issue, trainer)] if issue.cure else []
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
    """How a user's subclass of TRL's trainer gets the cures of these issues; empty where none has a cure.

    Args:
        trainer: which they use, if known.
    """
    trainers = sorted({_corrected_trainer(issue, trainer) for issue in issues if issue.cure})
    if not trainers:
        return ""
    classes = " or ".join(f"`class My(corrected.{name}, MyTrainer)`" for name in trainers)
    cures = f"the cures of {trainers[0]}" if trainer == "ppo" else "all cures"
    return (
        f"MyTrainer, a subclass of TRL's trainer, gets {cures} by {classes}, where corrected is {CORRECTED}; "
        "a mixin in parentheses above, in the corrected trainer's place, gives that cure alone."
    )


def mixins(issue: KnownIssue, trainer: str = "") -> tuple[str, ...]:
    """The mixins that are its cure, for a user's own trainer; those for PPO alone begin with its name."""
    names = [name for module in (issue.cure, *issue.cure_with) for name in names_of(module) if name.endswith("Mixin")]
    for_ppo = [name for name in names if name.startswith("PPO")]
    others = [name for name in names if name not in for_ppo]
    return tuple({"grpo": others, "ppo": for_ppo or others}.get(issue.trainer or trainer, names))


def _training(issue: KnownIssue, trainer: str) -> str:
    configured = "".join(f" and its {name}" for name in names_of(issue.cure) if name.endswith("Config"))
    own, corrected = mixins(issue, trainer), _corrected_trainer(issue, trainer)
    if own and corrected == "PPOTrainer" and not set(KINDS["ppo"]).intersection(own):
        return f"mix {' and '.join(f'{CORRECTED}.{name}' for name in own)}, measured with GRPO alone, into your trainer"
    return f"train with {CORRECTED}.{corrected}{configured}" + (f" ({', '.join(own)})" if own else "")


def _corrected_trainer(issue: KnownIssue, trainer: str) -> str:
    return "PPOTrainer" if (issue.trainer or trainer) == "ppo" else "GRPOTrainer"


def _under(fixed: FixedReleases, answers: int) -> str:
    """For which strategies an answer holds, where there is another one."""
    common = answers == 1 or set(STRATEGIES) <= set(fixed.strategies)
    return "" if common else f"under {', '.join(fixed.strategies)} "
