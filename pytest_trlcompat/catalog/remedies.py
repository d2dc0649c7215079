"""What to do about a known issue, made from the catalogue: which cure to train with, or which releases to take.

Nothing of it is written by hand but an entry's ``workaround``. Imports no package of the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_trlcompat.catalog.fixed_releases import FixedReleases, fixed_releases
from pytest_trlcompat.catalog.known_issues import STRATEGIES, KnownIssue
from pytest_trlcompat.trainers.names import names_of

__all__ = ["CORRECTED", "cured_in", "mixins", "own_trainer", "remedy"]

CORRECTED = "pytest_trlcompat.trainers"
"""The package of the corrected trainers and of the mixins that they are made of."""


def remedy(issue: KnownIssue, strategies: Sequence[str] = ()) -> str:
    """One line: the corrected trainer, the releases that are right, and the entry's workaround.

    Args:
        strategies: under which somebody meets the issue; what holds only under others is left out.
    """
    ways = [_training(issue)] if issue.cure else []
    fixed = [each for each in fixed_releases(issue) if not strategies or set(strategies) & set(each.strategies)]
    right = [f"{_under(each, len(fixed))}take {_releases(each)}" for each in fixed if each.alternatives]
    if right:
        ways.append("; ".join(right))
    if issue.workaround:
        ways.append(issue.workaround)
    return ", or ".join(ways) or "nothing is known to help"


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


def own_trainer(issues: Iterable[KnownIssue]) -> str:
    """How a user's subclass of TRL's trainer gets the cures of these issues; empty where none has a cure."""
    trainers = sorted({_corrected_trainer(issue) for issue in issues if issue.cure})
    if not trainers:
        return ""
    classes = " or ".join(f"`class My(corrected.{name}, MyTrainer)`" for name in trainers)
    return (
        f"MyTrainer, a subclass of TRL's trainer, gets all cures by {classes}, where corrected is {CORRECTED}; "
        "a mixin in parentheses above, in the corrected trainer's place, gives that cure alone."
    )


def mixins(issue: KnownIssue) -> tuple[str, ...]:
    """The mixins that are its cure, for a user's own trainer; those for PPO alone begin with its name."""
    names = [name for module in (issue.cure, *issue.cure_with) for name in names_of(module) if name.endswith("Mixin")]
    for_ppo = [name for name in names if name.startswith("PPO")]
    others = [name for name in names if name not in for_ppo]
    return tuple({"grpo": others, "ppo": for_ppo or others}.get(issue.trainer, names))


def _training(issue: KnownIssue) -> str:
    configured = "".join(f" and its {name}" for name in names_of(issue.cure) if name.endswith("Config"))
    own = mixins(issue)
    return f"train with {CORRECTED}.{_corrected_trainer(issue)}{configured}" + (f" ({', '.join(own)})" if own else "")


def _corrected_trainer(issue: KnownIssue) -> str:
    return "PPOTrainer" if issue.trainer == "ppo" else "GRPOTrainer"


def _releases(fixed: FixedReleases) -> str:
    return ", or ".join(alternative.describe() for alternative in fixed.alternatives)


def _under(fixed: FixedReleases, answers: int) -> str:
    """For which strategies an answer holds, where there is another one."""
    common = answers == 1 or set(STRATEGIES) <= set(fixed.strategies)
    return "" if common else f"under {', '.join(fixed.strategies)} "
