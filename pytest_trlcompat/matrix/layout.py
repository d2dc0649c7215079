"""The paths of a checkout's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The paths that the matrix reads and writes, all below ``root``."""

    root: Path

    @property
    def matrix(self) -> Path:
        """The cells that a person wrote down."""
        return self.root / "fixtures" / "matrix.toml"

    @property
    def pairwise(self) -> Path:
        """The cells that covering arrays have chosen."""
        return self.root / "fixtures" / "pairwise.toml"

    @property
    def releases(self) -> Path:
        """The releases from which they were chosen."""
        return self.root / "fixtures" / "releases.toml"

    @property
    def evidence(self) -> Path:
        """The verdicts of the published sweep, which ship with the package."""
        return self.root / "fixtures" / "evidence.json"

    @property
    def seconds(self) -> Path:
        """What its cells took, by which a sweep is divided among machines."""
        return self.root / "fixtures" / "seconds.json"

    @property
    def history(self) -> Path:
        """What was published before, a file for each day; not part of the package."""
        return self.root / "evidence"

    @property
    def page(self) -> Path:
        """The same for people, in short."""
        return self.root / "docs" / "compatibility.md"

    @property
    def explorer(self) -> Path:
        """The same as a page that one explores."""
        return self.root / "docs" / "explore" / "explore.html"

    @property
    def issues(self) -> Path:
        """The folder of a page for each known issue, and of their index."""
        return self.root / "docs" / "issues"

    @property
    def resolved(self) -> Path:
        """Locks of cells without one in the repository, resolved when they were run."""
        return self.results / "locks"

    @property
    def locks(self) -> Path:
        """Locks that are part of the repository."""
        return self.root / "fixtures" / "locks"

    @property
    def tool_locks(self) -> Path:
        """Locks of tool environments that are part of the repository."""
        return self.locks / "tools"

    @property
    def resolved_tools(self) -> Path:
        """Locks of other tool environments, resolved when they were built."""
        return self.resolved / "tools"

    @property
    def runner(self) -> Path:
        """What continuous integration installs nox from."""
        return self.root / ".ci" / "nox.txt"

    @property
    def bisections(self) -> Path:
        """Journals of bisections, with the locks of what they have tested."""
        return self.results.parent / "bisect"

    @property
    def hashes(self) -> Path:
        """A file for each Python of the locks: the hashes of what they name."""
        return self.locks.parent / "hashes"

    @property
    def resolved_hashes(self) -> Path:
        """The same for releases that no lock in the repository names, as they were first seen."""
        return self.results / "hashes"

    @property
    def downstream(self) -> Path:
        """The tests of real projects, what these are, and their locks."""
        return self.root / "downstream"

    @property
    def suites(self) -> Path:
        return self.root / "suites"

    @property
    def environments(self) -> Path:
        """Next to nox's own virtual environments, so that removing ``.nox`` removes these too."""
        return self.root / ".nox" / "envs"

    @property
    def commits(self) -> Path:
        """Wheels of commits, which no index has."""
        return self.results.parent / "commits"

    @property
    def editable(self) -> bool:
        """Whether environments hold this project as editable, by which ``root`` needs no metadata of its own. What runs
        in them imports it from ``root`` in any case, so several versions of this project can share them."""
        return True

    @property
    def results(self) -> Path:
        """The results of sweeps."""
        return self.root / "build" / "compat"
