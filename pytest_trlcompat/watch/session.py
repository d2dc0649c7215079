"""A watch, step by step: what is new, which cells, their verdicts, what changed, since when, the page, the patch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pytest_trlcompat._due import Account
from pytest_trlcompat.catalog import evidence, known_issues, past
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.commit_wheels import drop_others
from pytest_trlcompat.matrix.covering.releases import Release
from pytest_trlcompat.matrix.environments import existing
from pytest_trlcompat.matrix.errors import MatrixError, Unreachable, Untestable
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.report.model import CellReport, gather
from pytest_trlcompat.matrix.results import TESTED, UNTESTABLE, Sidecar
from pytest_trlcompat.matrix.suite_run import code_digest
from pytest_trlcompat.stack import REQUIRED
from pytest_trlcompat.watch import index as indexes
from pytest_trlcompat.watch import sources
from pytest_trlcompat.watch.adjacent import measured_boundary
from pytest_trlcompat.watch.arguments import Options
from pytest_trlcompat.watch.budget import Budget, OutOfTime
from pytest_trlcompat.watch.changes import Change, Verdicts, changes_in, judged, known_wrong, verdicts_of
from pytest_trlcompat.watch.commits import WatchedCommit
from pytest_trlcompat.watch.index import Index
from pytest_trlcompat.watch.known import Known, known_before, known_now, new_releases
from pytest_trlcompat.watch.layout import WatchLayout
from pytest_trlcompat.watch.narrowing import Narrowed, command_for, narrow, read_narrowed
from pytest_trlcompat.watch.outcome import Cause, Outcome
from pytest_trlcompat.watch.patch import make_patch
from pytest_trlcompat.watch.plan import WatchedCell, as_measured, base_cell, cell_of_commit, make_plan
from pytest_trlcompat.watch.running import Runner, sidecar_of, why_not_current

__all__ = ["Watch"]


@dataclass
class Watch:
    """One command.

    Attributes:
        layout: with the folder of results of this scope.
    """

    matrix: Matrix
    layout: WatchLayout
    options: Options
    budget: Budget
    say: Callable[[str], None]
    ask: indexes.Ask = indexes.ask

    # What is new

    @cached_property
    def _all(self) -> Index:
        """What the index has, for every package: the catalogue is cut back in all of them."""
        return self.ask(REQUIRED, self.matrix.python, self.options.prereleases)

    @cached_property
    def known(self) -> Known:
        """What the matrix knows, or would have known."""
        if self.options.since is None:
            return known_now(self.matrix, self.layout)
        return as_measured(self.layout, known_before(self.matrix, self._all, self.options.since))

    @cached_property
    def new(self) -> list[Release]:
        """The releases that it does not know, of the packages that are watched."""
        seen = self._all.before(self.options.day)
        if self.options.since is None:
            releases = new_releases(seen, self.known.versions)
        else:
            versions = self._all.before(self.options.since).versions()
            releases = new_releases(seen, {package: frozenset(listed) for package, listed in versions.items()})
        return [release for release in releases if release.package in self.options.packages]

    @cached_property
    def _commits(self) -> tuple[list[WatchedCommit], list[str]]:
        """Those of local clones with their wheels, and a line for each that is left out."""
        commits, left_out = [], []
        for asked in self.options.commits:
            try:
                commit = asked.build(self.matrix.python, self.layout)
            except Untestable as error:
                left_out.append(str(error))
                continue
            if commit.is_released(self.known.versions.get(commit.package, ())):
                self.say(f"{commit.package} {commit.commit.short} is release {commit.wheel.public}, which is known")
            else:
                commits.append(commit)
        return commits, left_out

    @property
    def commits(self) -> list[WatchedCommit]:
        """Those that are no release that is known."""
        return self._commits[0]

    @property
    def not_built(self) -> list[str]:
        """Why commits could not be built."""
        return self._commits[1]

    @cached_property
    def catalog(self) -> Catalog:
        """The catalogue, of a watch on a past cut back to its day."""
        catalog = known_issues.load()
        since = self.options.since
        if since is None:
            return catalog
        return past.cut_back(catalog, self._all.before(since).versions(), self._all.since(since).versions())

    @property
    def nothing_asked(self) -> str:
        """Why of some watched package nothing can be called new or known; empty where of each it can."""
        account = Account("packages", self.options.packages)
        seen = self._all.before(self.options.day).releases
        for package in self.options.packages:
            if not seen.get(package):
                account.refuse(package, f"has no release on the index before {self.options.day}")
            elif self.options.since is None and not self.known.versions.get(package):
                account.refuse(package, "was measured by no published sweep")
            else:
                account.meet(package)
        return account.shortfall()

    # The cells

    @cached_property
    def plan(self) -> list[WatchedCell]:
        """The cells that follow from what is new."""
        return [*make_plan(self.matrix, self.layout, self.known, self.new), *self._of_commits[0]]

    @cached_property
    def _of_commits(self) -> tuple[list[WatchedCell], list[str]]:
        """A cell for each commit, and a line for each that nothing can be resolved with."""
        cells, left_out = [], list(self._commits[1])
        for commit in self.commits:
            try:
                cells.append(cell_of_commit(self.matrix, self.layout, self.known, commit))
            # Also an Untestable, but one that says nothing of the commit.
            except Unreachable:
                raise
            except Untestable as error:
                left_out.append(f"{commit.release} cannot be installed in the newest known stack: {error}")
        return cells, left_out

    @cached_property
    def base(self) -> WatchedCell | None:
        """The newest known stack as a cell, where no published sweep has measured it; else ``None``."""
        return None if self._published() else base_cell(self.matrix, self.layout, self.known)

    def _published(self) -> Verdicts:
        """What the published sweep says of the newest known stack."""
        if self.options.since is not None:
            return {}
        try:
            cells = evidence.load(self.layout.evidence).cells
        except evidence.EvidenceError:
            return {}
        newest = next((cell for cell in cells if cell.id == self.known.base.cell_id), None)
        if newest is None or any(
            newest.versions[name] != self.known.base.packages.get(name) for name in newest.versions
        ):
            return {}
        return {key: (verdict, newest.blocked_by.get(key, "")) for key, verdict in newest.verdicts.items()}

    def run(self) -> Outcome:
        """Do what is left to do, within the bounds.

        Raises:
            KeyboardInterrupt: at Ctrl-C; what is finished is kept.
            MatrixError: when the index cannot be asked, or a file is not usable.
        """
        runner = Runner(self.matrix, self.layout, self.options.scope, self.budget, self.say)
        cells = [*([self.base] if self.base else []), *self.plan]
        try:
            with self.budget.running():
                for watched in runner.run(cells, self._look_at_sources):
                    self.say(f"{watched.cell.id}: not run, since {self.options.gigabytes:g} GB are used")
                self._narrow(self.changes(self.reports()))
        except OutOfTime as over:
            self.say(f"{over}; the same command goes on")
        finally:
            if not self.options.keep:
                runner.remove_environments()
            for asked in self.options.commits:
                asked.clean_up(self.layout)
            # Wheels of these commits stay: the same command goes on with them.
            drop_others([commit.wheel for commit in self.commits], self.layout)
        return self.outcome()

    def _look_at_sources(self, watched: WatchedCell, lock: Lock) -> None:
        environment = existing(lock, self.layout)
        if watched.release is not None and environment is not None:
            (site_packages,) = (environment.root / "lib").glob("python*/site-packages")
            path = self.layout.results / f"{watched.cell.id}.remarks.json"
            sources.keep_remarks(watched.release, site_packages, path)

    # What changed

    def outcome(self) -> Outcome:
        """What is known by now, from the files; runs nothing."""
        reports = self.reports()
        causes = tuple(self._causes(self.changes(reports)))
        account = self._account(causes)
        left = [*self._of_commits[1], *(f"{name} {reason}" for name, reason in account.refused.items())]
        outcome = Outcome(
            day=self.options.day,
            since=self.options.since,
            new=tuple(self.new),
            commits=tuple(self.commits),
            plan=tuple(self._cells),
            cells=reports,
            base=self.base.cell.id if self.base else self.known.base.cell_id,
            known_wrong=tuple(known_wrong(reports.get(self.base.cell.id)) if self.base else ()),
            causes=causes,
            remarks=self._remarks(),
            left=tuple(left),
            due=len(account.due),
        )
        if self.options.since is not None:
            # A patch to the matrix of today does not follow from a past.
            return outcome
        changes = [(change, cause.narrowed) for cause in causes for change in cause.changes]
        tested = [watched for watched in self.plan if watched.cell.id in reports and watched.commit is None]
        patch = make_patch(self.matrix, self.layout, tested, changes)
        return replace(outcome, patch=patch.text, by_hand=patch.left_out)

    @property
    def _cells(self) -> list[WatchedCell]:
        return [*([self.base] if self.base else []), *self.plan]

    def reports(self) -> dict[str, CellReport]:
        """The cells that have left results, held against the catalogue."""
        try:
            reports = judged(gather(self.layout.results), self._cells, self.catalog)
        except MatrixError:  # nothing was run yet
            return {}
        # Verdicts of other code are those of no cell of this plan: they are measured again, or missing.
        return {name: cell for name, cell in reports.items() if not self._is_stale(cell.sidecar)}

    @cached_property
    def _code(self) -> str:
        return code_digest(self.layout)

    def _is_stale(self, sidecar: Sidecar) -> bool:
        return sidecar.state == TESTED and bool(why_not_current(sidecar, self._code))

    def changes(self, reports: Mapping[str, CellReport]) -> list[Change]:
        """What these cells show that nothing predicts, and the newest known stack does not show."""
        return changes_in(self.plan, reports, self._base_verdicts(reports))

    def _base_verdicts(self, reports: Mapping[str, CellReport]) -> Verdicts:
        """The verdicts of the newest known stack."""
        return verdicts_of(reports.get(self.base.cell.id)) if self.base else self._published()

    def _narrow(self, changes: Iterable[Change]) -> None:
        """Search for what each of them comes from, as far as that has not been done, or needs no search."""
        for alike in _by_cause(changes):
            arguments = self._arguments(alike[0])
            if not isinstance(arguments, str) and self._measured_boundary(alike[0]) is None:
                narrow(alike[0], arguments, self.layout, self.say)

    def _causes(self, changes: Iterable[Change]) -> Iterator[Cause]:
        """Changes with what is known of where they come from."""
        for alike in _by_cause(changes):
            arguments = self._arguments(alike[0])
            narrowed = self._measured_boundary(alike[0]) or read_narrowed(alike[0], self.layout.bisections, self._code)
            if narrowed is None and not isinstance(arguments, str):
                yield Cause(alike, not_narrowed=f"{_LEFT}{alike[0].sentence}")
            else:
                yield Cause(alike, narrowed, arguments if narrowed is None and isinstance(arguments, str) else "")

    def _measured_boundary(self, change: Change) -> Narrowed | None:
        if self.options.clones or change.cell.release is None or change.cell.commit is not None:
            # A search goes on to the commit, or there is more than one release.
            return None
        sidecar = sidecar_of(change.cell.cell, self.layout)
        releases = self._all.versions().get(change.cell.release.package, ())
        base_verdicts = self._base_verdicts(self.reports())
        return measured_boundary(change, self.known.base, base_verdicts, sidecar.lock if sidecar else {}, releases)

    def _arguments(self, change: Change) -> list[str] | str:
        if not self.options.narrow:
            return "bisecting was left out (--no-bisect)"
        return command_for(change, self.known, self.options.day, self.options.clones, self.layout.bisections)

    def _account(self, causes: Iterable[Cause]) -> Account[str]:
        """What the plan asks for, cells and bisections, met where it was measured with this code."""
        cells = {f"{watched.cell.id} ({watched.about})": self._why_not_measured(watched) for watched in self._cells}
        searches = {
            f"the bisection of {cause.first.sentence}": why
            for cause in causes
            if (why := _why_not_bisected(cause)) is not None
        }
        account = Account("cells and bisections", [*cells, *searches])
        for name, why in {**cells, **searches}.items():
            if why:
                account.refuse(name, why)
            else:
                account.meet(name)
        return account

    def _why_not_measured(self, watched: WatchedCell) -> str:
        """Empty where it was measured."""
        sidecar = sidecar_of(watched.cell, self.layout)
        if sidecar is None:
            return "was not run"
        if sidecar.state == UNTESTABLE:
            return f"is untestable: {sidecar.reason}"
        if sidecar.state != TESTED:
            return f"is not finished: {sidecar.reason or 'it was stopped'}"
        why = why_not_current(sidecar, self._code)
        return f"was measured {why}, and not again" if why else ""

    def _remarks(self) -> Mapping[str, list[str]]:
        remarks = {
            str(watched.release): sources.read_remarks(self.layout.results / f"{watched.cell.id}.remarks.json")
            for watched in self.plan
            if watched.release is not None
        }
        return {release: lines for release, lines in remarks.items() if lines}


_LEFT = "not bisected yet: "


def _why_not_bisected(cause: Cause) -> str | None:
    """Empty where a bisection found it, ``None`` where none was due."""
    if cause.not_narrowed.startswith(_LEFT):
        return "was not run"
    if cause.narrowed is None:
        return None
    return "" if cause.narrowed.found else f"found nothing, and is tried again: {cause.narrowed.reason}"


def _by_cause(changes: Iterable[Change]) -> Iterator[tuple[Change, ...]]:
    """Changes of one cell, kind and subject with the same cause: one bisection is enough for them."""

    def key(change: Change) -> tuple[str, ...]:
        return (change.cell.cell.id, change.subject, change.kind.value, change.cause)

    for _, group in itertools.groupby(sorted(changes, key=key), key):
        yield tuple(group)
