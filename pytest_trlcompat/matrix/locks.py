"""Locks: all packages of a cell with their versions, resolved as of its date, as plain ``name==version`` lines.

The hashes of the packages' files are kept apart from the locks, since they belong to a release: see :mod:`.hashes`.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from pytest_trlcompat.inference.recording_engine import DISTRIBUTION as RECORDING
from pytest_trlcompat.inference.recording_engine import released
from pytest_trlcompat.matrix import cuda
from pytest_trlcompat.matrix.cells import Cell, Matrix, check_python
from pytest_trlcompat.matrix.commit_wheels import COMMIT
from pytest_trlcompat.matrix.errors import MatrixError, Untestable
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.hashes import RELEASE
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import parse_day
from pytest_trlcompat.matrix.uv import WHEELS_ONLY, torch_backend, uv_network_first

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Lock",
    "compile_versions",
    "digest",
    "find_date",
    "kept",
    "kept_date",
    "known",
    "lock_for",
    "read_lock",
    "renew",
    "request_of",
    "resolve",
    "strays",
]

# uv's --exclude-newer holds for all packages; one is excepted by a day that never comes.
_FOREVER = "9999-01-01T00:00:00Z"


@dataclass(frozen=True)
class Lock:
    """All packages of a cell with their versions.

    Attributes:
        packages: canonical name to version, sorted by name, without local parts (``2.13.0``, not ``2.13.0+cpu``), so
            that a lock can be used with any build of that torch; a commit of a package is the one exception, see
            :mod:`.commit_wheels`.
        request: a digest of what the resolver was given; a lock is out of date if that of its cell differs. Called
            ``asked`` in the file.
    """

    cell_id: str
    date: datetime.date
    python: str
    packages: Mapping[str, str]
    request: str

    @property
    def kind(self) -> str:
        """How the name of its environment begins."""
        return "cell"

    @property
    def requirements(self) -> list[str]:
        return [f"{name}=={version}" for name, version in self.packages.items()]

    @property
    def releases(self) -> list[str]:
        """The same without what is of this project, and no release of a package index."""
        return [f"{name}=={version}" for name, version in released(self.packages).items()]

    @property
    def digest(self) -> str:
        """A digest of what an environment depends on: the versions and the interpreter."""
        return digest(self.python, *self.requirements)

    def to_text(self) -> str:
        return "\n".join(
            [
                "# Every version of a cell, resolved as of its date. `nox -s lock` renews the kept ones.",
                f"# cell: {self.cell_id}",
                f"# date: {self.date.isoformat()}",
                f"# python: {self.python}",
                f"# asked: {self.request}",
                *self.requirements,
                "",
            ]
        )


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        MatrixError: when it is missing or damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise MatrixError(f"{path}: no such lock; create it with: nox -s lock -- {path.stem}") from error
    except UnicodeDecodeError as error:
        raise MatrixError(f"{path}: not UTF-8 ({error}); renew it: nox -s lock -- {path.stem}") from error
    header = dict(re.findall(r"^# (cell|date|python|asked): (.+)$", "\n".join(lines), re.MULTILINE))
    packages: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, version = line.partition("==")
        if not (RELEASE.fullmatch(line) or COMMIT.fullmatch(line)) or name in packages:
            wrong = "is not NAME==VERSION" if name not in packages else f"names {name} again"
            raise MatrixError(f"{path}, line {number}: {line!r} {wrong}; renew it: nox -s lock")
        packages[name] = version
    try:
        cell_id, day = header["cell"], parse_day(header["date"])
        return Lock(cell_id, day, check_python(header["python"], "the lock's"), packages, header["asked"])
    except (KeyError, MatrixError) as error:
        raise MatrixError(f"{path}: the header is damaged ({error}); renew it: nox -s lock -- {path.stem}") from error


def lock_for(matrix: Matrix, cell: Cell, layout: Layout) -> Lock:
    """The lock of a cell: from the repository, else resolved before, else resolved now.

    A lock that is out of date, because the matrix was edited since, is not used.

    Raises:
        Untestable: when the cell cannot be resolved; the text is the resolver's reason.
    """
    lock = known(matrix, cell, layout)
    if lock is None:
        lock = resolve(matrix, cell)
        write_whole(layout.resolved / f"{cell.id}.txt", lock.to_text())
    return lock


def known(matrix: Matrix, cell: Cell, layout: Layout) -> Lock | None:
    """The lock of a cell from the repository, else as it was resolved before, unless that is out of date."""
    return kept(matrix, cell, layout) or _valid(layout.resolved / f"{cell.id}.txt", matrix, cell)


def kept(matrix: Matrix, cell: Cell, layout: Layout) -> Lock | None:
    """The lock of a cell in the repository, unless it is out of date."""
    return _valid(layout.locks / f"{cell.id}.txt", matrix, cell)


def kept_date(cell: Cell, layout: Layout) -> datetime.date | None:
    """The date as of which a cell was resolved, from its lock in the repository, else from the one resolved before."""
    paths = (folder / f"{cell.id}.txt" for folder in (layout.locks, layout.resolved))
    # The date follows from the cell's pins, so that of an outdated lock is still correct.
    return next((read_lock(path).date for path in paths if path.is_file()), None)


def strays(cells: Iterable[Cell], layout: Layout) -> list[Path]:
    """Lock files in the repository that belong to none of these cells."""
    known = {cell.id for cell in cells}
    return [path for path in sorted(layout.locks.glob("*.txt")) if path.stem not in known]


def _valid(path: Path, matrix: Matrix, cell: Cell) -> Lock | None:
    if not path.is_file():
        return None
    lock = read_lock(path)
    # Where the cell names a day, a lock of another day is of another cell.
    return lock if lock.request == request_of(matrix, cell) and cell.date in (None, lock.date) else None


def renew(matrix: Matrix, cell: Cell, layout: Layout) -> Lock:
    """Resolve a cell and write its lock into the repository."""
    lock = resolve(matrix, cell)
    write_whole(layout.locks / f"{cell.id}.txt", lock.to_text())
    return lock


def resolve(matrix: Matrix, cell: Cell) -> Lock:
    """Resolve a cell with uv, as of its date.

    Raises:
        Untestable: with the resolver's reason.
    """
    date = cell.date or find_date(matrix, cell)
    python = matrix.python_of(cell)
    changed = {"left_out": matrix.left_out_of(cell), "needed": matrix.needed_of(cell)}
    on_python = dataclasses.replace(matrix, python=python)
    versions = compile_versions(on_python, matrix.requirements(cell), date, **changed)
    packages = dict(sorted({**versions, **_own(cell)}.items()))
    return Lock(cell.id, date, python, packages, request_of(matrix, cell))


def _own(cell: Cell) -> dict[str, str]:
    """What a cell pins that no resolver knows, since it is of this project."""
    return {name: version for name, version in cell.pins.items() if name == RECORDING}


def compile_versions(
    matrix: Matrix,
    requirements: Sequence[str],
    date: datetime.date,
    preferred: Sequence[str] = (),
    left_out: Sequence[str] = (),
    needed: Sequence[str] = (),
    wheels: Sequence[str] = (),
) -> dict[str, str]:
    """Resolve ``requirements`` as of ``date`` to versions by canonical name.

    The result has the packages of a CPU build of torch, whichever build the resolver finds: see :mod:`.cuda`.

    Args:
        preferred: ``name==version`` lines to prefer wherever the requirements allow them.
        left_out: packages to leave out, whoever requires them.
        needed: packages to keep although a CPU build of torch does not have them.
        wheels: folders of wheels that are searched as well as the index.

    Raises:
        Untestable: with the resolver's reason.
    """
    try:
        return _compile(matrix, requirements, date, preferred, left_out, needed, wheels)
    except Untestable as error:
        # A package that is built for CPUs may require torch by the local version of PyTorch's CPU builds (2.11.0+cpu).
        # If the index has only another build of that release, that build is taken: both have the same interface.
        # uv says this in words alone: its exit status is that of any conflict.
        torch = next((line for line in requirements if line.startswith("torch==")), "")
        if not torch or f"no version of {torch}+cpu" not in str(error):
            raise
        return _compile(matrix, requirements, date, preferred, left_out, needed, wheels, overridden=(torch,))


def _compile(
    matrix: Matrix,
    requirements: Sequence[str],
    date: datetime.date,
    preferred: Sequence[str],
    left_out: Sequence[str],
    needed: Sequence[str],
    wheels: Sequence[str],
    overridden: Sequence[str] = (),
) -> dict[str, str]:
    later = {name: _midnight(day) for name, day in matrix.not_before.items() if day > date}
    exempted = {**later, **dict.fromkeys(matrix.undated, _FOREVER)}
    command = [
        *("pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--python", matrix.python),
        *("--exclude-newer", _midnight(date)),
        *WHEELS_ONLY,
        *(text for name, moment in exempted.items() for text in ("--exclude-newer-package", f"{name}={moment}")),
        *torch_backend(os.environ),
        *(word for folder in wheels for word in ("--find-links", folder)),
    ]
    stdin = "\n".join(requirements)
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder) / "overrides.txt"
        # A marker that never holds excludes them.
        excluded = [f"{name}; python_version < '0'" for name in sorted({*cuda.LEFT_OUT, *left_out} - set(needed))]
        overrides.write_text("".join(f"{line}\n" for line in [*excluded, *overridden]), encoding="utf-8")
        command += ["--override", str(overrides)]
        if not preferred:
            return _packages(uv_network_first(command, stdin=stdin))
        # uv prefers the versions in an existing output file.
        answer = Path(folder) / "answer.txt"
        answer.write_text("\n".join([*preferred, ""]), encoding="utf-8")
        uv_network_first([*command, "--output-file", str(answer)], stdin=stdin)
        return _packages(answer.read_text(encoding="utf-8"))


def find_date(matrix: Matrix, cell: Cell) -> datetime.date:
    """The date as of which a cell without one is resolved: the upload of its newest pin, plus ``settle_days``.

    Raises:
        Untestable: when a pinned version is unknown.
        MatrixError: when the index does not provide upload times.
    """
    pins = [f"{name}=={version}" for name, version in released(cell.pins).items() if name not in matrix.undated]
    if not pins:
        return _today()
    answer = uv_network_first(
        [
            # Of uv's formats this one states when a file was uploaded.
            *("pip", "compile", "-", "--quiet", "--no-header", "--no-deps", "--format", "pylock.toml"),
            *("--python", matrix.python_of(cell)),
            *WHEELS_ONLY,
        ],
        stdin="\n".join(pins),
    )
    # Never in the future, since later releases would then change the result.
    return min(_newest_upload(answer, cell) + datetime.timedelta(days=matrix.settle_days), _today())


def _newest_upload(pylock: str, cell: Cell) -> datetime.date:
    days = []
    for package in tomllib.loads(pylock).get("packages", []):
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        uploads = [file["upload-time"] for file in files if "upload-time" in file]
        if not uploads:
            raise MatrixError(
                f"{cell.id}: the package index does not say when {package['name']} {package.get('version', '')} was "
                "uploaded; set the date of the cell (in matrix.toml, or with --date DAY)"
            )
        # A release can be installed from its first file on; wheels may be added for years.
        days.append(min(uploads).date())
    if not days:
        raise Untestable(f"{cell.id}: the resolver found none of its pins")
    return max(days)


def _packages(answer: str) -> dict[str, str]:
    packages = {}
    for line in answer.splitlines():
        requirement = line.split(";")[0].strip()
        name, sign, version = requirement.partition("==")
        if sign:
            packages[canonicalize_name(name)] = version.split("+")[0]
    return dict(sorted(packages.items()))


def _midnight(day: datetime.date) -> str:
    # A day without a time would be one of this machine's time zone, and differ from machine to machine.
    return f"{day.isoformat()}T00:00:00Z"


def request_of(matrix: Matrix, cell: Cell) -> str:
    """A digest of what the resolver is given for a cell."""
    later = [f"{name} {day.isoformat()}" for name, day in sorted(matrix.not_before.items())]
    changed = [f"without {name}" for name in matrix.left_out_of(cell)]
    changed += [f"with {name}" for name in matrix.needed_of(cell)]
    changed += [f"own {name} {version}" for name, version in _own(cell).items()]
    return digest(matrix.python_of(cell), *matrix.requirements(cell), *matrix.undated, *later, *changed)


def digest(*texts: str) -> str:
    """Of what a resolver is given."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()
