"""From a change point to its culprit: the packages that changed there, the release, the commit.

Which of the packages is found by delta debugging: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing
Input" (2002), with its third outcome: incompatible versions are inconclusive.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from pytest_trlcompat.bisect.bisector import ChangePoint, bisect
from pytest_trlcompat.bisect.candidates.commits import Clone, Commit, Commits, commits_between
from pytest_trlcompat.bisect.candidates.releases import Listing, Releases, releases_between
from pytest_trlcompat.bisect.candidates.stacks import PartialUpdates
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.failure_signature import FailureSignature
from pytest_trlcompat.bisect.search import Answer
from pytest_trlcompat.bisect.session import BisectSession
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.stack import PACKAGES

__all__ = ["Attribution", "Culprit", "CulpritFinder", "LockChanges", "ddmin", "lock_changes"]


@dataclass(frozen=True)
class LockChanges:
    """The difference between two locks.

    Attributes:
        moved: package to its two versions.
        gone: only in the earlier lock.
        came: only in the later lock. A package that came is no change of its own: another one requires it.
    """

    moved: Mapping[str, tuple[str, str]]
    gone: Mapping[str, str]
    came: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.moved or self.gone or self.came)


@dataclass(frozen=True)
class Attribution:
    """Which changed packages change the answer by themselves.

    Attributes:
        packages: the smallest set that was found.
        alone: updating these alone was seen to change the answer; otherwise every package that changed is named, since
            nothing less was seen to.
        lock: the earlier lock with these packages updated.
    """

    packages: tuple[str, ...]
    alone: bool
    lock: Lock


@dataclass
class Culprit:
    """What is known in the end, piece by piece.

    Attributes:
        package: ``None`` for commits of no package of the stack.
        others: packages that must change with it to change the answer.
        days: where the answer changed, of the whole stack day by day.
        releases: the same of the package's releases.
        release_versions: the last release before the change and the first one after it.
        commits: the same of the clone's commits, where there was one.
        before_lock, after_lock: next to each other; their difference is what changed the answer.
    """

    find_fix: bool
    package: str | None = None
    others: tuple[str, ...] = ()
    days: ChangePoint | None = None
    releases: ChangePoint | None = None
    release_versions: tuple[str, str] | None = None
    commits: ChangePoint | None = None
    commit: Commit | None = None
    attribution: Attribution | None = None
    before_lock: Lock | None = None
    after_lock: Lock | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def change_points(self) -> list[tuple[str, ChangePoint]]:
        """By the name of the search, the most precise one last."""
        searches = (("days", self.days), ("releases", self.releases), ("commits", self.commits))
        return [(name, point) for name, point in searches if point is not None]

    @property
    def confidence(self) -> float:
        """All searches have to be right."""
        return math.prod(point.confidence for _, point in self.change_points)

    @property
    def changes(self) -> LockChanges | None:
        if self.before_lock is None or self.after_lock is None:
            return None
        return lock_changes(self.before_lock.packages, self.after_lock.packages)


@dataclass
class CulpritFinder:
    """Narrows a change point down within the same session.

    Attributes:
        clones: package to its local clone.
        listing: asks the registry for a package's releases.
        work: for the files of commits.
    """

    session: BisectSession
    matrix: Matrix
    layout: Layout
    folder: Path
    work: Path
    clones: Mapping[str, Clone]
    listing: Callable[[str], Listing]

    def of_releases(self, point: ChangePoint, package: str) -> Culprit:
        """After a search over one package's releases: was it this package, or what changed at the same time?"""
        culprit = self._culprit(package, releases=point)
        culprit.release_versions = (point.before.version, point.after.version)
        before, after = self._locks(point)
        culprit.before_lock, culprit.after_lock = before, after
        if set(lock_changes(before.packages, after.packages).moved) - {package}:
            culprit.attribution = attribution = self._attribute(before, after, point.signature, first=package)
            culprit.package = _primary(attribution.packages)
            culprit.others = tuple(name for name in attribution.packages if name != culprit.package)
            if package not in attribution.packages:
                names = " and ".join(attribution.packages)
                culprit.notes.append(
                    f"{package} is not the cause: {names} changed at the same time, and that alone changes the result"
                )
                self._by_release(culprit, point.signature)
        self._by_commit(culprit, after)
        return culprit

    def of_days(self, point: ChangePoint) -> Culprit:
        """After a search over days: the packages that changed on that day, then the release, then the commit."""
        before, after = self._locks(point)
        attribution = self._attribute(before, after, point.signature)
        package = _primary(attribution.packages)
        culprit = self._culprit(package, days=point, attribution=attribution, before_lock=before, after_lock=after)
        culprit.others = tuple(name for name in attribution.packages if name != package)
        self._by_release(culprit, point.signature)
        self._by_commit(culprit, culprit.after_lock or after)
        return culprit

    def of_commits(self, point: ChangePoint, package: str | None, clone: Clone, lock: Lock | None) -> Culprit:
        """After a search over commits."""
        commit = clone.commit(point.after.version)
        return self._culprit(package, commits=point, commit=commit, before_lock=lock, after_lock=lock)

    # Packages

    def _attribute(
        self, before: Lock, after: Lock, signature: FailureSignature, first: str | None = None
    ) -> Attribution:
        """Which of the packages that differ change the answer.

        Args:
            first: the package to try first; otherwise those of the stack.
        """
        moved = lock_changes(before.packages, after.packages).moved
        if not moved:
            raise BisectError(
                "the last candidate before the change and the first one after it have the same versions but different "
                "answers, so the outcome is random: name its probability of being wrong with --noise"
            )
        names = sorted(moved, key=_stack_first)
        self.session.progress.say(
            f"{len(names)} package{'s' if len(names) > 1 else ''} changed between them: {', '.join(names)}"
        )
        if len(names) == 1:
            return Attribution(tuple(names), True, after)
        target = self.session.policy.after
        exact = PartialUpdates(self.matrix, self.layout, before, after, self.folder)
        # Dependencies of a guessed package may move with it; delta debugging needs sets that are tested as they are.
        loose = dataclasses.replace(exact, strict=False)

        def answer(updates: PartialUpdates, chosen: frozenset[str]) -> Answer:
            candidate = updates.candidate(chosen)
            return self.session.judge_candidate("packages", updates, candidate, signature).answer

        for guess in [first] if first else [name for name in names if name in PACKAGES]:
            # Most changes are due to one package, with which its dependencies may move: one test instead of many.
            if answer(loose, frozenset({guess})) is target:
                return Attribution((guess,), True, self._lock(loose, guess))
        smallest = ddmin(names, lambda chosen: answer(exact, chosen), target)
        alone = len(smallest) < len(names)
        return Attribution(smallest, alone, self._lock(exact, *smallest) if alone else after)

    def _lock(self, updates: PartialUpdates, *updated: str) -> Lock:
        identity = self.session.journal.identity(updates.candidate(updated).key)
        lock = self.session.journal.lock(identity)
        assert lock is not None, "it was tested, so its lock was kept"
        return lock

    def _locks(self, point: ChangePoint) -> tuple[Lock, Lock]:
        before, after = (self.session.journal.lock(name) for name in (point.before_identity, point.after_identity))
        assert before is not None, "it was tested, so its lock was kept"
        assert after is not None, "it was tested, so its lock was kept"
        return before, after

    # Releases and commits

    def _by_release(self, culprit: Culprit, signature: FailureSignature) -> None:
        assert culprit.package is not None
        assert culprit.attribution is not None
        assert culprit.before_lock is not None
        package, base = culprit.package, culprit.attribution.lock
        first, last = culprit.before_lock.packages[package], base.packages[package]
        culprit.release_versions = (first, last)
        try:
            versions = releases_between(self.listing(package), *sorted((first, last), key=Version)).versions
        except BisectError as error:
            # What was found so far is not lost.
            culprit.notes.append(f"releases were not searched: {error}")
            return
        if Version(first) > Version(last):
            versions = versions[::-1]  # another package held it back
        if len(versions) <= 2:
            return
        source = Releases(self.matrix, self.layout, package, versions, {}, self.folder, base)
        culprit.releases = point = bisect(self.session, "releases", source, signature)
        culprit.release_versions = (point.before.version, point.after.version)
        culprit.before_lock, culprit.after_lock = self._locks(point)

    def _by_commit(self, culprit: Culprit, lock: Lock) -> None:
        """The commit, where there is a clone; when that fails, what was found so far is not lost."""
        clone = self.clones.get(culprit.package or "")
        if clone is None or culprit.release_versions is None or culprit.package is None:
            return
        try:
            before, after = (clone.tag_of(version) for version in culprit.release_versions)
            commits, note = commits_between(clone, before, after)
            if note:
                self.session.progress.say(note)
                culprit.notes.append(note)
            source = Commits(clone, commits, culprit.package, lock, self.layout, self.folder, self.work)
            # With the same signature the first commit must be as the earlier release was, the last as the later one.
            culprit.commits = bisect(self.session, "commits", source, culprit.change_points[-1][1].signature)
            culprit.commit = clone.commit(culprit.commits.after.version)
        except BisectError as error:
            self.session.progress.say(f"the commit was not found: {error}")
            culprit.notes.append(f"the commit was not found: {error}")

    def _culprit(self, package: str | None, **known: object) -> Culprit:
        return Culprit(self.session.policy.find_fix, package, **known)  # type: ignore[arg-type]


def lock_changes(before: Mapping[str, str], after: Mapping[str, str]) -> LockChanges:
    """What changed from one lock's packages to another's."""
    return LockChanges(
        {name: (before[name], after[name]) for name in sorted(before) if before[name] != after.get(name, before[name])},
        {name: version for name, version in before.items() if name not in after},
        {name: version for name, version in after.items() if name not in before},
    )


def ddmin(names: Sequence[str], test: Callable[[frozenset[str]], Answer], target: Answer) -> tuple[str, ...]:
    """The smallest set of ``names`` that answers ``target``: without any one of them, it does not.

    All of them together are assumed to answer it. No set is tested twice. Inconclusive sets do not answer it.

    Args:
        test: the answer of the stack in which these packages alone are updated.
    """
    known: dict[frozenset[str], bool] = {frozenset(names): True, frozenset(): False}

    def answers_target(chosen: Sequence[str]) -> bool:
        key = frozenset(chosen)
        if key not in known:
            known[key] = test(key) is target
        return known[key]

    current, parts = tuple(names), 2
    while len(current) > 1:
        pieces = _split(current, parts)
        smaller = next((piece for piece in pieces if answers_target(piece)), None)
        if smaller is not None:
            current, parts = smaller, 2
            continue
        complements = [tuple(name for name in current if name not in piece) for piece in pieces]
        complement = next((complement for complement in complements if answers_target(complement)), None)
        if complement is not None:
            # As in the paper: what is left has one part less, and each part stays as large as it was.
            current, parts = complement, max(parts - 1, 2)
        elif parts < len(current):
            # Neither a part nor what is left without one shows it: look at smaller parts.
            parts = min(len(current), 2 * parts)
        else:
            break
    return current


def _split(names: tuple[str, ...], parts: int) -> list[tuple[str, ...]]:
    cuts = [round(number * len(names) / parts) for number in range(parts + 1)]
    return [names[start:end] for start, end in itertools.pairwise(cuts) if start < end]


def _primary(packages: tuple[str, ...]) -> str:
    """The package to name first, of the stack where there is one."""
    return min(packages, key=_stack_first)


def _stack_first(name: str) -> tuple[int, str]:
    return (PACKAGES.index(name) if name in PACKAGES else len(PACKAGES), name)
