"""The page of findings: the known issues that conformance found, made from the catalogue.

The build of the site makes it; so does::

    python -m pytest_trlcompat.catalog.findings_page docs/explanation/findings.md fixtures/releases.toml
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pytest_trlcompat.catalog import known_issues, ranges
from pytest_trlcompat.catalog.cures_page import short_link
from pytest_trlcompat.catalog.issue import FINDINGS, KnownIssue, Prediction, measured_with
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.conformance import rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["main", "page", "releases_in"]

# The first release that has GRPO.
_FIRST = Version("0.14")
_HEAD = """\
# What conformance found

<!-- Made by `python -m pytest_trlcompat.catalog.findings_page docs/explanation/findings.md fixtures/releases.toml`;
do not edit. -->

Every known issue that [the conformance suite](conformance.md) has found, newest releases first. It is `silent` where a
training differs from [the reference](../reference/reference.md), and `broken` where it ends in an error. "Reported" are
upstream's threads and notes about it; where there are none, no report was found. Releases are those of TRL, for GRPO
from {oldest} on, the first that has it, to {newest}.

"""
_COLUMNS = ("finding", "shows", "in releases", "only with", "setting", "reported", "cured")


def page(issues: Iterable[KnownIssue], releases: Mapping[str, Sequence[str]]) -> str:
    """The table as Markdown.

    Args:
        releases: all versions of TRL, with what each requires.
    """
    findings = [issue for issue in issues if issue.suite == FINDINGS]
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    in_order = {release: releases[release] for release in sorted(releases, key=Version)}
    of_grpo = {release: required for release, required in in_order.items() if Version(release) >= _FIRST}
    oldest, *_, newest = of_grpo
    known = {issue.id: of_grpo if measured_with(issue.id) == "grpo" else in_order for issue in findings}
    newest_with = {issue.id: releases_in(issue, known[issue.id])[-1] for issue in findings}
    for issue in sorted(findings, key=lambda finding: (Version(newest_with[finding.id]), finding.id), reverse=True):
        lines.append(f"| {' | '.join(_cells(issue, known[issue.id]))} |")
    reported = sum(bool(issue.upstream) for issue in findings)
    open_still = sum(release == newest for release in newest_with.values())
    total = f"{len(findings)} findings: {reported} that upstream knows, {len(findings) - reported} without a report; "
    total += f"{open_still} in the newest release.\n"
    return _HEAD.format(oldest=oldest, newest=newest) + total + "\n" + "\n".join(lines) + "\n"


def _cells(issue: KnownIssue, releases: Mapping[str, Sequence[str]]) -> Iterator[str]:
    shown = list(_problems(issue))
    yield f"[{issue.id}](../issues/{issue.id}.md): {issue.title}".replace("|", "\\|")
    yield ", ".join(dict.fromkeys(str(prediction.verdict) for prediction in shown))
    yield _runs(releases_in(issue, releases), list(releases))
    others = (
        ", ".join(f"{package} {text}" for package, text in prediction.when.items() if package != "trl")
        for prediction in shown
    )
    yield " or ".join(dict.fromkeys(others))
    settings = (_setting(rows.load(measured_with(issue.id))[strategy]) for strategy in issue.strategies)
    yield "<br>".join(dict.fromkeys(settings)).replace("|", "\\|")
    yield ", ".join(short_link(link) for link in issue.upstream) or "no"
    yield "yes" if issue.cure else "no"


def _setting(row: rows.Row) -> str:
    strategy = "" if row.strategy == "single" else f"{row.strategy}: "
    shown = ", ".join(f"{name}={value!r}" for name, value in row.setting.items() if name != "refused")
    return strategy + (f"`{shown}`" if shown else "none")


def _problems(issue: KnownIssue) -> Iterator[Prediction]:
    """Predictions for TRL's own trainer of a problem that is this issue's own."""
    yield from (
        prediction
        for prediction in issue.predictions
        if prediction.subject == "upstream" and prediction.verdict.is_own_problem
    )


def _runs(chosen: Sequence[str], releases: Sequence[str]) -> str:
    """``0.14.0, 0.25.0 to 1.16.0``."""
    runs: list[list[str]] = []
    for number, release in enumerate(releases):
        if release in chosen:
            if number and releases[number - 1] in chosen:
                runs[-1].append(release)
            else:
                runs.append([release])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def releases_in(issue: KnownIssue, releases: Mapping[str, Sequence[str]]) -> list[str]:
    """The releases with which the issue shows, together with what they require, the oldest first.

    Args:
        releases: all versions of TRL, with what each requires.
    """
    return sorted((release for release, required in releases.items() if _shows(issue, release, required)), key=Version)


def _shows(issue: KnownIssue, release: str, required: Sequence[str]) -> bool:
    """Whether a problem is predicted for a release with some other packages, before ``ok`` or ``absent`` with any."""
    for prediction in issue.predictions:
        if prediction.subject == "upstream" and _may_hold(prediction, release, required):
            if prediction.verdict.is_own_problem:
                return True
            decides = prediction.verdict in (Verdict.OK, Verdict.ABSENT) and not prediction.strategies
            if decides and set(prediction.when) <= {"trl"}:
                return False
    return False


def _may_hold(prediction: Prediction, release: str, required: Iterable[str]) -> bool:
    """Whether a release of TRL can be installed with the versions that a prediction is about."""
    if not _holds(prediction.when.get("trl", ""), release):
        return False
    for name, allowed in filter(None, map(_always_required, required)):
        named = prediction.when.get(name)
        if named and not ranges.parse(named) & allowed:
            return False
    return True


@functools.cache
def _holds(specifiers: str, release: str) -> bool:
    return SpecifierSet(specifiers).contains(release)


@functools.cache
def _always_required(text: str) -> tuple[str, ranges.Range] | None:
    """The package that a requirement names and its versions; ``None`` where a marker says when it is required."""
    requirement = Requirement(text)
    return None if requirement.marker is not None else (requirement.name, ranges.parse(str(requirement.specifier)))


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_trlcompat.catalog.findings_page",
        description="Write the table of what conformance found, in Markdown.",
    )
    parser.add_argument("page", type=Path, metavar="FILE", help="docs/explanation/findings.md of the checkout")
    parser.add_argument("releases", type=Path, metavar="RELEASES", help="its fixtures/releases.toml")
    arguments = parser.parse_args()
    listed = tomllib.loads(arguments.releases.read_text(encoding="utf-8"))["trl"]
    releases = {version: entry["requires"] for version, entry in listed.items()}
    arguments.page.write_text(page(known_issues.load().values(), releases), encoding="utf-8")


if __name__ == "__main__":
    main()
