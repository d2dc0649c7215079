"""The four commands, from a checked question to the result's files.

Imports only the standard library and the rooms below.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_trlcompat.bisect import question
from pytest_trlcompat.bisect.candidates.commits import Commits, span
from pytest_trlcompat.bisect.candidates.git import Clone
from pytest_trlcompat.bisect.candidates.registry import Listing, list_releases
from pytest_trlcompat.bisect.candidates.releases import Releases, between
from pytest_trlcompat.bisect.candidates.stacks import Days
from pytest_trlcompat.bisect.culprit import Culprit, Finder
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.examine import examine
from pytest_trlcompat.bisect.hunt import Hunt
from pytest_trlcompat.bisect.journal import Journal
from pytest_trlcompat.bisect.layouts import state_folder
from pytest_trlcompat.bisect.predicate import Predicate
from pytest_trlcompat.bisect.progress import Progress
from pytest_trlcompat.bisect.result import Result, markdown
from pytest_trlcompat.bisect.search import Answer
from pytest_trlcompat.bisect.standard import judge, one_line
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.errors import Unreachable, Untestable
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, find_date, lock_for, resolve
from pytest_trlcompat.matrix.parsing import read_matrix

__all__ = ["Asked", "commits", "days", "releases", "test"]

_STATUS = {Answer.GOOD: 0, Answer.BAD: 1, Answer.UNKNOWN: 125}


@dataclass
class Asked:
    """One command.

    Attributes:
        folder: from which paths are meant.
        command: asks the same again.
        reproduce: asks the same anywhere else, without what concerns this machine's files alone.
    """

    options: argparse.Namespace
    layout: Layout
    folder: Path
    command: str
    reproduce: str
    say: Callable[[str], None]

    @cached_property
    def matrix(self) -> Matrix:
        return read_matrix(self.layout.matrix)

    @property
    def state(self) -> Path:
        """Journals, reports, listings of releases."""
        return self.folder / self.options.state if self.options.state else state_folder(self.layout)

    @property
    def work(self) -> Path:
        return self.state / "work"

    def predicate(self, *, in_place: bool = False) -> Predicate:
        return question.find_predicate(self.options, self.layout, self.folder, in_place=in_place)

    def journal(self, predicate: Predicate) -> Journal:
        journal = Journal(self.state / f"{predicate.slug}-{predicate.digest}")
        if self.options.fresh:
            journal.forget()
        return journal

    def hunt(self, predicate: Predicate) -> Hunt:
        options = self.options
        return Hunt(
            predicate,
            self.journal(predicate),
            question.policy(options),
            Progress(self.say),
            jobs=options.jobs,
            noise=options.noise,
            expected=options.expect,
            checks=options.strategy,
        )

    def listing(self, package: str) -> Listing:
        return list_releases(package, self.matrix.python, self.state / f"releases-{package}.json")

    def finder(self, hunt: Hunt, clones: Mapping[str, Clone]) -> Finder:
        return Finder(hunt, self.matrix, self.layout, self.folder, self.work, clones, self.listing)

    def clones(self) -> dict[str, Clone]:
        found = question.clones(self.options.clone)
        for clone in found.values():
            clone.check(may_be_dirty=self.options.allow_dirty)
        return found


def releases(asked: Asked) -> int:
    """Search the releases of one package."""
    options = asked.options
    package = question.package_of(options.package)
    good, bad = (question.version_of(getattr(options, end), f"--{end}") for end in ("good", "bad"))
    first, last = question.check_order(good, bad, options.find_fix)
    others = question.pins(options, free=[package])
    _born(asked, others)
    hunt, clones = asked.hunt(asked.predicate()), asked.clones()
    found = between(asked.listing(package), first, last, pre=options.pre, yanked=options.yanked)
    for line in found.left_out:
        asked.say(f"left out: {line}")
    if len(found.versions) == 2:
        asked.say(f"no release lies between {first} and {last}: only these two are tested")
    else:
        asked.say(f"{len(found.versions)} releases of {package} from {first} to {last}")
    source = Releases(asked.matrix, asked.layout, package, found.versions, others, asked.folder)
    if options.rest == "fixed":
        newest = lock_for(asked.matrix, Cell(source.pins(found.versions[-1])), asked.layout)
        source = Releases(asked.matrix, asked.layout, package, found.versions, others, asked.folder, newest)
    turn = hunt.search("releases", source)
    culprit = asked.finder(hunt, clones).of_releases(turn, package)
    return _finish(asked, hunt, culprit, package=package, rest=options.rest, held=others)


def days(asked: Asked) -> int:
    """Search the whole stack by days."""
    options = asked.options
    first, last = question.check_days(options.good, options.bad, options.find_fix)
    others = question.pins(options)
    hunt, clones = asked.hunt(asked.predicate()), asked.clones()
    born = _born(asked, others)
    if born is not None and first <= born:
        raise BisectError(
            f"{first} is too early: the versions of --with were all there on {born} only; "
            f"name {born + datetime.timedelta(days=1)} or a later day"
        )
    asked.say(f"{(last - first).days + 1} days from {first} to {last}")
    turn = hunt.search("days", Days(asked.matrix, asked.layout, first, last, others, asked.folder))
    culprit = asked.finder(hunt, clones).of_days(turn)
    return _finish(asked, hunt, culprit, held=others)


def commits(asked: Asked) -> int:
    """Search the commits of a clone."""
    options = asked.options
    package = question.package_of(options.package) if options.package else None
    hunt = asked.hunt(asked.predicate(in_place=package is None))
    clone = Clone(Path(options.clone).expanduser().resolve())
    clone.check(may_be_dirty=options.allow_dirty)
    first, last = (options.bad, options.good) if options.find_fix else (options.good, options.bad)
    if clone.commit(first) == clone.commit(last):
        raise BisectError(f"good and bad are both {clone.commit(first).short}; there is nothing to search")
    chosen, said = span(clone, first, last)
    asked.say(f"{len(chosen)} commits from {first} to {last}")
    if said:
        asked.say(said)
    lock = _lock_of_commits(asked, package, chosen[-1].day)
    source = Commits(clone, chosen, package, lock, asked.layout, asked.folder, asked.work)
    culprit = asked.finder(hunt, {}).of_commits(hunt.search("commits", source), package, clone, lock)
    return _finish(asked, hunt, culprit, package=package, clone=str(clone.path))


def test(asked: Asked) -> int:
    """Answer for one commit by the exit status."""
    options = asked.options
    package = question.package_of(options.package) if options.package else None
    predicate = asked.predicate(in_place=package is None)
    clone = Clone(Path(options.clone).expanduser().resolve())
    clone.check(may_be_dirty=options.allow_dirty)
    head = clone.commit("HEAD")
    source = Commits(
        clone, [head], package, _lock_of_commits(asked, package, head.day), asked.layout, asked.folder, asked.work
    )
    (candidate,) = source.candidates
    journal = asked.journal(predicate)
    done = examine(source, candidate, predicate, journal)
    if done.reused is None:
        journal.add(candidate.key, candidate.label, done.identity, done.observation)
    judgement = judge(done.observation.only(options.strategy), None)
    answer, why = judgement.answer, judgement.why
    if answer is Answer.BAD and options.expect and options.expect not in why:
        answer, why = Answer.UNKNOWN, f"another failure than --expect {options.expect!r}: {why}"
    asked.say(f"{candidate.label}: {answer} ({why})")
    return _STATUS[answer]


def _lock_of_commits(asked: Asked, package: str | None, day: str) -> Lock | None:
    """The versions that all commits are tested with: those held, the others as of the newest commit, or as of the day
    when all that is held was there.

    A release of the package itself that is held says whose requirements are installed.
    """
    if package is None:
        if asked.options.with_:
            raise BisectError("--with holds versions of an environment: say with --package which package the clone is")
        return None
    held = question.pins(asked.options)
    date = datetime.date.fromisoformat(day) + datetime.timedelta(days=asked.matrix.settle_days)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    born = _born(asked, held)
    if born is not None:
        date = max(date, born + datetime.timedelta(days=asked.matrix.settle_days))
    return resolve(asked.matrix, Cell(held, min(date, today)))


def _born(asked: Asked, held: dict[str, str]) -> datetime.date | None:
    """The day on which all that is held was there; ``None`` where nothing is.

    Raises:
        BisectError: for versions that the registry does not have, before anything is run with them.
    """
    if not held:
        return None
    named = " ".join(f"{name}={version}" for name, version in held.items())
    try:
        return find_date(asked.matrix, Cell(held)) - datetime.timedelta(days=asked.matrix.settle_days)
    except Unreachable as error:
        raise BisectError(
            f"--with {named}: the package registry cannot be reached, and the cache does not know these versions; run "
            f"the same command again with a network. {one_line(str(error))}"
        ) from error
    except Untestable as error:
        raise BisectError(f"--with {named}: {one_line(str(error))}") from error


def _finish(asked: Asked, hunt: Hunt, culprit: Culprit, **about: Any) -> int:
    """Say who it was, and write the report and the JSON."""
    options = asked.options
    about_what = hunt.predicate.describe() + (f" under {hunt.checks}" if hunt.checks != "*" else "")
    asked_for = {"kind": options.kind, "good": options.good, "bad": options.bad, "find_fix": options.find_fix}
    result = Result(
        question={**asked_for, **about, "predicate": about_what},
        about=about_what,
        command=asked.reproduce,
        culprit=culprit,
        steps=hunt.steps,
        seconds=hunt.progress.elapsed,
    )
    asked.say(f"\n{result.verdict}")
    if options.json is not None:
        write_whole(asked.folder / options.json, json.dumps(result.to_json(), indent=1) + "\n")
        asked.say(f"result: {options.json}")
    _write_report(asked, result, hunt.journal.folder / f"report-{options.kind}.md")
    return 0


def _write_report(asked: Asked, result: Result, path: Path) -> None:
    try:
        text = markdown(result)
    except ImportError:
        asked.say("no report: jinja2 is missing; install it with: pip install jinja2")
        return
    for target in [path, *([asked.folder / asked.options.report] if asked.options.report else [])]:
        write_whole(target, text)
        asked.say(f"report: {target}")
