"""The page of cures: what the corrected trainers cure, made from the catalogue.

The build of the site makes it; so does::

    python -m pytest_trlcompat.catalog.cures_page docs/cures.md
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.fixed_releases import fixed_releases
from pytest_trlcompat.catalog.issue import STRATEGIES, KnownIssue
from pytest_trlcompat.catalog.remedies import cured_in, mixins, remedy
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.trainers.curing.kinds import kind_named
from pytest_trlcompat.trainers.curing.names import names_of

__all__ = ["main", "page", "short_link"]

_HEAD = """\
# Cures

<!-- Made by `python -m pytest_trlcompat.catalog.cures_page docs/cures.md`; do not edit. -->

```python
from pytest_trlcompat.trainers import GRPOTrainer  # takes what trl.GRPOTrainer takes
from pytest_trlcompat.trainers import PPOConfig, PPOTrainer  # TRL's, wherever it is: trl 0.9.6 (PPOv2Trainer) to 1.12.0
from pytest_trlcompat.trainers import cured  # any other: Trainer = cured(trl.DPOTrainer), or cured(MyTrainer)
```

Each is the trainer itself with the known issues below cured where the installed releases have them, and unchanged where
they have not. `cured` puts in front of any subclass of `transformers.Trainer` the cures of its kind, each of
which has a section below. One cure alone is a mixin:

```python
from pytest_trlcompat.trainers import ZeRO3BiasesMixin


class Mine(ZeRO3BiasesMixin, MyTrainer): ...
```

`Trainer.cures` of a cured trainer, and `trlcompat cures` on the command line, say which are at work on the installed
stack, and why.

Everything below follows from the predictions of the catalogue, which each sweep checks: under which strategies an issue
shows, and from which releases on its cure does nothing because nothing is wrong. `trlcompat doctor` says which of them
affect your stack, and which other releases are right.
"""

_SECTIONS = {
    "trainer": ("Any trainer", "In `cured(YourTrainer)` and in `GRPOTrainer`; measured with GRPO."),
    "grpo": ("GRPO", "In `GRPOTrainer`, beside those of any trainer."),
    "ppo": ("PPO", "In `PPOTrainer`; what `PPOConfig` cures, in that."),
    "rloo": ("RLOO", "In `RLOOTrainer` from TRL 0.22 on, beside those of any trainer."),
    "distillation": ("Distillation", "In `DistillationTrainer`, beside those of any trainer."),
    "first_rloo": ("RLOO until TRL 0.21", "In `RLOOTrainer`, beside those of any trainer."),
}
"""Kind of trainer to the title of its section, and what stands above the table."""
_LINK = re.compile(r"https://github\.com/[\w.-]+/([\w.-]+)/(?:issues|pull|discussions|commit)/(\w+)")


def page(issues: Iterable[KnownIssue]) -> str:
    """The tables as Markdown, in the order of the catalogue."""
    issues = list(issues)
    lines = [_HEAD]
    for kind, (title, text) in _SECTIONS.items():
        chosen = [issue for issue in issues if _is_of(issue, kind)]
        if chosen:
            lines += [f"## {title}", "", text, "", *_table(chosen, kind), ""]
    lines += ["## Not cured", "", *_not_cured(issues)]
    return "\n".join(lines) + "\n"


def _is_of(issue: KnownIssue, kind: str) -> bool:
    """Whether an issue stands in the section of a kind: its trainer's, or cured there and not for any trainer."""
    if not issue.cure or (issue.kind and kind_named(issue.kind) != kind):
        return False
    if kind not in ("trainer", "ppo") and not issue.trainer and mixins(issue, "trainer"):
        return False
    return bool(issue.trainer or mixins(issue, kind))


def _table(issues: Iterable[KnownIssue], kind: str) -> Iterator[str]:
    yield "| known issue | under | not needed from | by | upstream |"
    yield "| --- | --- | --- | --- | --- |"
    for issue in issues:
        by = mixins(issue, kind) or [name for name in names_of(issue.cure) if name.endswith("Config")]
        cells = (
            f"`{issue.id}`: {issue.title}",
            _strategies(issue),
            cured_in(issue) or "no release yet",
            ", ".join(f"`{name}`" for name in by),
            ", ".join(short_link(link) for link in issue.upstream) or "not reported",
        )
        yield f"| {' | '.join(_escape(cell) for cell in cells)} |"


def _strategies(issue: KnownIssue) -> str:
    """Under which it shows by itself."""
    under = {strategy for fixed in fixed_releases(issue) for strategy in fixed.strategies}
    if set(STRATEGIES) <= under:
        return "every strategy"
    return ", ".join(strategy for strategy in issue.labels() if strategy in under)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def short_link(link: str) -> str:
    return _LINK.sub(r"[\1 \2](\g<0>)", link)


def _not_cured(issues: Iterable[KnownIssue]) -> Iterator[str]:
    for issue in issues:
        if not issue.cure:
            yield f"- `{issue.id}`: {issue.title}. What helps: {remedy(issue)}."
            continue
        for prediction in issue.predictions:
            if prediction.subject == "corrected" and prediction.verdict not in (Verdict.OK, Verdict.ABSENT):
                ranges = ", ".join(f"{package} {text}" for package, text in prediction.when.items())
                yield f"- `{issue.id}` with {ranges}: {prediction.why}."


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_trlcompat.catalog.cures_page",
        description="Write the list of cures, in Markdown.",
    )
    parser.add_argument("page", type=Path, metavar="FILE", help="docs/cures.md of the checkout")
    issues = known_issues.load().values()
    parser.parse_args().page.write_text(page(issues), encoding="utf-8")


if __name__ == "__main__":
    main()
