"""The four commands, from checked arguments to the result's files."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_trlcompat._secrets import redacted, redacted_values
from pytest_trlcompat.bisect import arguments
from pytest_trlcompat.bisect.attribution import Culprit, CulpritFinder
from pytest_trlcompat.bisect.bisector import bisect
from pytest_trlcompat.bisect.candidates.commits import Clone, Commits, commits_between
from pytest_trlcompat.bisect.candidates.releases import Listing, Releases, list_releases, releases_between
from pytest_trlcompat.bisect.candidates.stacks import Days
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.failure_signature import judge, one_line
from pytest_trlcompat.bisect.journal import Journal
from pytest_trlcompat.bisect.layouts import state_folder
from pytest_trlcompat.bisect.node_workers import workers_on_ray
from pytest_trlcompat.bisect.predicate import Predicate
from pytest_trlcompat.bisect.progress import Progress
from pytest_trlcompat.bisect.result import Result, markdown
from pytest_trlcompat.bisect.search import Answer
from pytest_trlcompat.bisect.session import BisectSession, CandidateTest, Workers
from pytest_trlcompat.bisect.workers import ForkedWorkers, SerialWorker
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.errors import Unreachable, Untestable
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, find_date, lock_for, resolve
from pytest_trlcompat.matrix.parsing import read_matrix

__all__ = ["Request", "commits", "days", "releases", "test"]

_EXIT_STATUS = {Answer.GOOD: 0, Answer.BAD: 1, Answer.INCONCLUSIVE: 125}


@dataclass
class Request:
    """One command.

    Attributes:
        folder: to which paths are relative.
        command: repeats the request.
        reproduce: repeats it anywhere else, without options that concern this machine or its files alone.
        resources: what is open until the command ends.
    """

    options: argparse.Namespace
    layout: Layout
    folder: Path
    command: str
    reproduce: str
    say: Callable[[str], None]
    resources: contextlib.ExitStack

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

    def predicate(self, *, in_worktree: bool = False) -> Predicate:
        return arguments.parse_predicate(self.options, self.layout, self.folder, in_worktree=in_worktree)

    def journal(self, predicate: Predicate) -> Journal:
        return Journal(self.state / f"{predicate.slug}-{predicate.digest}", fresh=self.options.fresh)

    def session(self, predicate: Predicate) -> BisectSession:
        options = self.options
        return BisectSession(
            predicate,
            self.journal(predicate),
            arguments.parse_policy(options),
            Progress(self.say),
            self._workers(),
            jobs=options.jobs,
            noise=options.noise,
            expected=options.expect,
            checks=options.strategy,
        )

    def _workers(self) -> Callable[[], Workers]:
        """What tests the candidates: this process, forks of it, or the nodes of a cluster."""
        ray = arguments.parse_engine(self.options)
        if ray is None:
            return SerialWorker if self.options.jobs == 1 else ForkedWorkers
        workers = self.resources.enter_context(workers_on_ray(ray, self.layout, self.say))
        return lambda: workers

    def listing(self, package: str) -> Listing:
        return list_releases(package, self.matrix.python, self.state / f"releases-{package}.json")

    def finder(self, session: BisectSession, clones: Mapping[str, Clone]) -> CulpritFinder:
        return CulpritFinder(session, self.matrix, self.layout, self.folder, self.work, clones, self.listing)

    def clones(self) -> dict[str, Clone]:
        """Of ``--clone PACKAGE=FOLDER``."""
        clones = arguments.parse_clones(self.options.clone)
        for clone in clones.values():
            clone.check(may_be_dirty=self.options.allow_dirty)
        return clones

    def named_clones(self) -> list[Clone]:
        """Those that exist of ``--clone``, in either form, before anything about them is checked."""
        named = getattr(self.options, "clone", [])
        paths = [named] if isinstance(named, str) else [text.partition("=")[2] for text in named]
        clones = [Clone((self.folder / Path(path).expanduser()).resolve()) for path in paths if path]
        return [clone for clone in clones if clone.path.is_dir()]

    def clone(self) -> Clone:
        """Of ``--clone FOLDER``."""
        clone = Clone(Path(self.options.clone).expanduser().resolve())
        clone.check(may_be_dirty=self.options.allow_dirty)
        return clone

    def package(self) -> str | None:
        return arguments.check_package(self.options.package) if self.options.package else None


def releases(request: Request) -> int:
    """Search the releases of one package."""
    options = request.options
    package = arguments.check_package(options.package)
    good, bad = (arguments.parse_version(getattr(options, end), f"--{end}") for end in ("good", "bad"))
    first, last = arguments.sort_versions(good, bad, options.find_fix)
    held = arguments.parse_held(options, searched=package)
    # For its error alone, before anything is run.
    _find_release_day(request, held)
    session, clones = request.session(request.predicate()), request.clones()
    searched = releases_between(request.listing(package), first, last, pre=options.pre, yanked=options.yanked)
    for line in searched.left_out:
        request.say(f"left out: {line}")
    if len(searched.versions) == 2:
        request.say(f"no release between {first} and {last}: only these two are tested")
    else:
        request.say(f"{len(searched.versions)} releases of {package} from {first} to {last}")
    source = Releases(request.matrix, request.layout, package, searched.versions, held, request.folder)
    if options.rest == "fixed":
        newest = lock_for(request.matrix, Cell(source.pins(searched.versions[-1])), request.layout)
        source = Releases(request.matrix, request.layout, package, searched.versions, held, request.folder, newest)
    culprit = request.finder(session, clones).of_releases(bisect(session, "releases", source), package)
    return _finish(request, session, culprit, package=package, rest=options.rest, held=held)


def days(request: Request) -> int:
    """Search the whole stack by days."""
    options = request.options
    first, last = arguments.parse_days(options.good, options.bad, options.find_fix)
    held = arguments.parse_held(options)
    session, clones = request.session(request.predicate()), request.clones()
    released = _find_release_day(request, held)
    # The resolver leaves out what came on the day itself.
    if released is not None and first <= released:
        raise BisectError(
            f"{first} is too early: the versions of --with were not all released before {released}; "
            f"name {released + datetime.timedelta(days=1)} or a later day"
        )
    request.say(f"{(last - first).days + 1} days from {first} to {last}")
    point = bisect(session, "days", Days(request.matrix, request.layout, first, last, held, request.folder))
    culprit = request.finder(session, clones).of_days(point)
    return _finish(request, session, culprit, held=held)


def commits(request: Request) -> int:
    """Search the commits of a clone."""
    options = request.options
    package = request.package()
    session = request.session(request.predicate(in_worktree=package is None))
    clone = request.clone()
    first, last = (options.bad, options.good) if options.find_fix else (options.good, options.bad)
    if clone.commit(first) == clone.commit(last):
        raise BisectError(
            f"--good and --bad are both {clone.commit(first).short}, so there is nothing to search; name two commits"
        )
    chosen, note = commits_between(clone, first, last)
    request.say(f"{len(chosen)} commits from {first} to {last}")
    if note:
        request.say(note)
    lock = _lock_of_commits(request, package, chosen[-1].day)
    source = Commits(clone, chosen, package, lock, request.layout, request.folder, request.work)
    point = bisect(session, "commits", source)
    culprit = request.finder(session, {}).of_commits(point, package, clone, lock)
    return _finish(request, session, culprit, package=package, clone=str(clone.path))


def test(request: Request) -> int:
    """Judge one commit, by the exit status."""
    options = request.options
    package = request.package()
    predicate = request.predicate(in_worktree=package is None)
    clone = request.clone()
    head = clone.commit("HEAD")
    lock = _lock_of_commits(request, package, head.day)
    source = Commits(clone, [head], package, lock, request.layout, request.folder, request.work)
    (candidate,) = source.candidates
    journal = request.journal(predicate)
    done = CandidateTest(source, candidate, predicate, journal)()
    if done.reused is None:
        journal.add(candidate.key, candidate.label, done.identity, done.observation)
    judgement = judge(done.observation.only(options.strategy), None)
    answer, why = judgement.answer, judgement.why
    if answer is Answer.BAD and options.expect and options.expect not in why:
        answer, why = Answer.INCONCLUSIVE, f"another failure than --expect {options.expect!r}: {why}"
    request.say(f"{candidate.label}: {answer} ({why})")
    return _EXIT_STATUS[answer]


def _lock_of_commits(request: Request, package: str | None, day: str) -> Lock | None:
    """The versions that all commits are tested with.

    Those held, the others as of the newest commit, or as of the day when all held versions had been released. If a
    release of the package itself is held, its requirements are installed.
    """
    if package is None:
        if request.options.with_:
            raise BisectError("--with needs an environment: name with --package which package the clone is")
        return None
    held = arguments.parse_held(request.options)
    settle = datetime.timedelta(days=request.matrix.settle_days)
    date = datetime.date.fromisoformat(day) + settle
    today = datetime.datetime.now(datetime.timezone.utc).date()
    released = _find_release_day(request, held)
    if released is not None:
        date = max(date, released + settle)
    # Not in the future, since later releases would then change the result.
    return resolve(request.matrix, Cell(held, min(date, today)))


def _find_release_day(request: Request, held: dict[str, str]) -> datetime.date | None:
    """The day on which the last of the held versions was released; ``None`` where nothing is held.

    Raises:
        BisectError: for versions that the registry does not have, before anything is run with them.
    """
    if not held:
        return None
    names = " ".join(f"{name}={version}" for name, version in held.items())
    try:
        return find_date(request.matrix, Cell(held)) - datetime.timedelta(days=request.matrix.settle_days)
    except Unreachable as error:
        raise BisectError(
            f"--with {names}: the package registry cannot be reached, and the cache does not have these versions; run "
            f"the same command again when there is a network. {one_line(str(error))}"
        ) from error
    except Untestable as error:
        raise BisectError(f"--with {names}: {one_line(str(error))}") from error


def _finish(request: Request, session: BisectSession, culprit: Culprit, **searched: Any) -> int:
    """Name the culprit, and write the report and the JSON."""
    options = request.options
    about = session.predicate.describe() + (f" under {session.checks}" if session.checks != "*" else "")
    question = {"kind": options.kind, "good": options.good, "bad": options.bad, "find_fix": options.find_fix}
    result = Result(
        question={**question, **searched, "predicate": about},
        about=about,
        command=request.reproduce,
        culprit=culprit,
        steps=session.steps,
        seconds=session.progress.elapsed,
    )
    request.say(f"\n{result.verdict}")
    if options.json is not None:
        write_whole(request.folder / options.json, json.dumps(redacted_values(result.to_json()), indent=1) + "\n")
        request.say(f"result: {options.json}")
    _write_report(request, result, session.journal.folder / f"report-{options.kind}.md")
    return 0


def _write_report(request: Request, result: Result, path: Path) -> None:
    try:
        text = redacted(markdown(result))
    except ImportError:
        request.say("no report: jinja2 is missing; install it with: pip install jinja2")
        return
    for target in [path, *([request.folder / request.options.report] if request.options.report else [])]:
        write_whole(target, text)
        request.say(f"report: {target}")
