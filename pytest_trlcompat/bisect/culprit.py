"""From a turn to its culprit: the packages that changed there, the release, the commit.

Imports only the standard library, ``packaging`` and this room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from pytest_trlcompat.bisect.attribution import Changes, changes, ddmin
from pytest_trlcompat.bisect.candidates.commits import Commits, span
from pytest_trlcompat.bisect.candidates.git import Clone, Commit
from pytest_trlcompat.bisect.candidates.registry import Listing
from pytest_trlcompat.bisect.candidates.releases import Releases, between
from pytest_trlcompat.bisect.candidates.stacks import Subsets
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.hunt import Hunt, Turn
from pytest_trlcompat.bisect.search import Answer
from pytest_trlcompat.bisect.standard import Standard
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.stack import PACKAGES

__all__ = ["Attributed", "Culprit", "Finder"]


@dataclass(frozen=True)
class Attributed:
    """Which changed packages turn the answer by themselves.

    Attributes:
        packages: the smallest set that was found.
        alone: it was seen that these alone turn it; otherwise all that changed is named, for nothing less was seen to.
        untold: sets that could not tell, mostly since their versions do not go together.
        lock: the earlier lock with these packages moved.
    """

    packages: tuple[str, ...]
    alone: bool
    asked: int
    untold: int
    lock: Lock


@dataclass
class Culprit:
    """What is known in the end, piece by piece.

    Attributes:
        days: of the whole stack.
        package: ``None`` for commits of no package of the stack.
        others: packages that are needed beside it to turn the answer.
        releases: the last release before and the first after the turn.
        commits: of the clone, where there was one.
        before_lock, after_lock: next to each other; the difference is what turned the answer.
    """

    find_fix: bool
    package: str | None = None
    others: tuple[str, ...] = ()
    days: Turn | None = None
    releases: Turn | None = None
    release_versions: tuple[str, str] | None = None
    commits: Turn | None = None
    commit: Commit | None = None
    attributed: Attributed | None = None
    before_lock: Lock | None = None
    after_lock: Lock | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def turns(self) -> list[tuple[str, Turn]]:
        named = (("days", self.days), ("releases", self.releases), ("commits", self.commits))
        return [(name, turn) for name, turn in named if turn is not None]

    @property
    def confidence(self) -> float:
        """All searches have to be right."""
        result = 1.0
        for _, turn in self.turns:
            result *= turn.confidence
        return result

    @property
    def changes(self) -> Changes | None:
        if self.before_lock is None or self.after_lock is None:
            return None
        return changes(self.before_lock.packages, self.after_lock.packages)


@dataclass
class Finder:
    """Narrows a turn down with the same hunt.

    Attributes:
        clones: package to its local clone.
        listing: asks the registry for a package's releases.
        work: for the files of commits.
    """

    hunt: Hunt
    matrix: Matrix
    layout: Layout
    folder: Path
    work: Path
    clones: Mapping[str, Clone]
    listing: Callable[[str], Listing]

    def of_releases(self, turn: Turn, package: str) -> Culprit:
        """Of a search over one package's releases: was it this package, or what changed beside it?"""
        culprit = self._culprit(package, releases=turn)
        culprit.release_versions = (turn.before.version, turn.after.version)
        before, after = self._locks(turn)
        culprit.before_lock, culprit.after_lock = before, after
        if set(changes(before.packages, after.packages).moved) - {package}:
            culprit.attributed = attributed = self._attribute(before, after, turn.standard, first=package)
            culprit.package = _main(attributed.packages)
            culprit.others = tuple(name for name in attributed.packages if name != culprit.package)
            if package not in attributed.packages:
                named = " and ".join(attributed.packages)
                culprit.notes.append(f"it was not {package}: what turned it alone is {named}, changed beside it")
                self._by_release(culprit, turn.standard)
        self._by_commit(culprit, after)
        return culprit

    def of_days(self, turn: Turn) -> Culprit:
        """Of a search over days: the packages that changed on that day, then the release, then the commit."""
        before, after = self._locks(turn)
        attributed = self._attribute(before, after, turn.standard)
        package = _main(attributed.packages)
        culprit = self._culprit(package, days=turn, attributed=attributed, before_lock=before, after_lock=after)
        culprit.others = tuple(name for name in attributed.packages if name != package)
        self._by_release(culprit, turn.standard)
        self._by_commit(culprit, culprit.after_lock or after)
        return culprit

    def of_commits(self, turn: Turn, package: str | None, clone: Clone, lock: Lock | None) -> Culprit:
        return self._culprit(
            package, commits=turn, commit=clone.commit(turn.after.version), before_lock=lock, after_lock=lock
        )

    # Packages

    def _attribute(self, before: Lock, after: Lock, standard: Standard, first: str | None = None) -> Attributed:
        moved = changes(before.packages, after.packages).moved
        if not moved:
            raise BisectError(
                "the versions of the last candidate before the turn and of the first one after it do not differ, but "
                "their answers do: the predicate is not steady; say how unsteady with --noise"
            )
        atoms = sorted(moved, key=_stack_first)
        subsets = Subsets(self.matrix, self.layout, before, after, self.folder)
        self.hunt.progress.say(f"{len(atoms)} package{'s' if len(atoms) > 1 else ''} changed there: {', '.join(atoms)}")
        counted = {"asked": 0, "untold": 0}

        def ask(source: Subsets, chosen: frozenset[str]) -> Answer:
            answer = self.hunt.examine("packages", source, source.candidate(chosen), standard).answer
            counted["asked"] += 1
            counted["untold"] += answer is Answer.UNKNOWN
            return answer

        target = self.hunt.policy.after
        if len(atoms) == 1:
            return Attributed(tuple(atoms), True, 0, 0, after)
        loose = dataclasses.replace(subsets, strict=False)
        guesses = [first] if first else [atom for atom in atoms if atom in PACKAGES]
        for guess in guesses:
            # Most turns are one package's, and what it needs may move with it; that is one question instead of many.
            if ask(loose, frozenset({guess})) is target:
                return Attributed((guess,), True, counted["asked"], counted["untold"], self._lock(loose, guess))
        smallest = ddmin(atoms, lambda chosen: ask(subsets, chosen), target)
        alone = len(smallest) < len(atoms)
        lock = self._lock(subsets, *smallest) if alone else after
        return Attributed(smallest, alone, counted["asked"], counted["untold"], lock)

    def _lock(self, subsets: Subsets, *moved: str) -> Lock:
        identity = self.hunt.journal.identity(subsets.candidate(moved).key)
        lock = self.hunt.journal.lock(identity)
        assert lock is not None, "it was examined, so its lock was kept"
        return lock

    def _locks(self, turn: Turn) -> tuple[Lock, Lock]:
        before, after = (self.hunt.journal.lock(name) for name in (turn.before_identity, turn.after_identity))
        assert before is not None, "it was told, so its lock was kept"
        assert after is not None, "it was told, so its lock was kept"
        return before, after

    # Releases and commits

    def _by_release(self, culprit: Culprit, standard: Standard) -> None:
        assert culprit.package is not None
        assert culprit.attributed is not None
        assert culprit.before_lock is not None
        package, base = culprit.package, culprit.attributed.lock
        first, last = culprit.before_lock.packages[package], base.packages[package]
        culprit.release_versions = (first, last)
        try:
            versions = between(self.listing(package), *sorted((first, last), key=Version)).versions
        except BisectError as error:
            culprit.notes.append(f"not searched by release: {error}")
            return
        if Version(first) > Version(last):
            versions = versions[::-1]  # another package held it back
        if len(versions) <= 2:
            return
        source = Releases(self.matrix, self.layout, package, versions, {}, self.folder, base)
        culprit.releases = turn = self.hunt.search("releases", source, standard)
        culprit.release_versions = (turn.before.version, turn.after.version)
        culprit.before_lock, culprit.after_lock = self._locks(turn)

    def _by_commit(self, culprit: Culprit, lock: Lock) -> None:
        """The commit, where there is a clone; what was found so far is not lost when that does not come to an end."""
        clone = self.clones.get(culprit.package or "")
        if clone is None or culprit.release_versions is None or culprit.package is None:
            return
        try:
            before, after = (clone.tag_of(version) for version in culprit.release_versions)
            commits, said = span(clone, before, after)
            if said:
                self.hunt.progress.say(said)
                culprit.notes.append(said)
            source = Commits(clone, commits, culprit.package, lock, self.layout, self.folder, self.work)
            # The standard is carried over: the first commit must be as the earlier release was, the last as the later.
            culprit.commits = self.hunt.search("commits", source, culprit.turns[-1][1].standard)
            culprit.commit = clone.commit(culprit.commits.after.version)
        except BisectError as error:
            self.hunt.progress.say(f"the commit was not found: {error}")
            culprit.notes.append(f"the commit was not found: {error}")

    def _culprit(self, package: str | None, **known: object) -> Culprit:
        return Culprit(self.hunt.policy.find_fix, package, **known)  # type: ignore[arg-type]


def _main(packages: tuple[str, ...]) -> str:
    return min(packages, key=_stack_first)


def _stack_first(name: str) -> tuple[int, str]:
    return (PACKAGES.index(name) if name in PACKAGES else len(PACKAGES), name)
