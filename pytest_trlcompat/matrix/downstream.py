"""Real projects with the plugin: an environment of a project at a pinned release, and tests through its own commands.

The project's packages are resolved first, alone, and pinned; then those that this project adds.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from pytest_trlcompat.matrix import locks
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.environments import Environment, ensure
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors, write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.uv import uv

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Downstream", "build", "lock_of", "read_projects", "renew", "session"]

_RENEW = "renew it: nox -s downstream -- --lock"
_ADDED = re.compile(r"^# added: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Downstream:
    """One project of ``downstream/projects.toml``; see there.

    Attributes:
        tests: the folder of its tests, below ``downstream``.
    """

    name: str
    requirements: tuple[str, ...]
    date: datetime.date
    tests: str
    undated: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()


def read_projects(path: Path) -> dict[str, Downstream]:
    """Read ``downstream/projects.toml``.

    Raises:
        MatrixError: it is missing or damaged; with the project.
    """
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise MatrixError(f"{path}: {error}") from error
    projects = {}
    for name, table in tables.items():
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        try:
            projects[name] = Downstream(name, **{**table, **lists})
        except TypeError as error:
            raise MatrixError(f"{path}, {name}: {error}") from error
    return projects


def lock_of(matrix: Matrix, project: Downstream, layout: Layout) -> tuple[Lock, list[str]]:
    """The lock of a project together with this one, and the names of the packages that this one added.

    Raises:
        MatrixError: it is missing, damaged, or was made from other requirements.
    """
    path = layout.downstream / "locks" / f"{project.name}.txt"
    lock = locks.read_lock(path)
    if lock.request != _request(matrix, project):
        raise MatrixError(f"{path} was made from other requirements; {_RENEW} {project.name}")
    added = _ADDED.search(path.read_text(encoding="utf-8"))
    if added is None:
        raise MatrixError(f"{path} does not say what was added; {_RENEW} {project.name}")
    return lock, added[1].split()


def renew(matrix: Matrix, project: Downstream, layout: Layout) -> Lock:
    """Resolve a project, then this one together with it, and write the lock into the repository.

    Raises:
        Untestable: the project cannot be resolved, or not together with this one; with the resolver's reason.
    """
    dated = dataclasses.replace(matrix, undated=(*matrix.undated, *project.undated))
    options = {"left_out": project.left_out, "needed": project.needed}
    theirs = locks.compile_versions(dated, project.requirements, project.date, **options)
    # What the project has alone is pinned, so that a package of ours can add to it and change nothing.
    pins = [f"{name}=={version}" for name, version in theirs.items()]
    both = locks.compile_versions(dated, [*pins, *matrix.harness], project.date, **options)
    lock = Lock(f"downstream-{project.name}", project.date, matrix.python, both, _request(matrix, project))
    added = " ".join(name for name in both if name not in theirs)
    # A lock has no field for it; read_lock passes over lines of the header that it does not know.
    text = lock.to_text().replace("# asked:", f"# added: {added}\n# asked:", 1)
    text = text.replace("`nox -s lock` renews the kept ones", "`nox -s downstream -- --lock` renews it", 1)
    write_whole(layout.downstream / "locks" / f"{project.name}.txt", text)
    return lock


def _request(matrix: Matrix, project: Downstream) -> str:
    inputs = (*project.requirements, *project.undated, *project.left_out, *project.needed, str(project.date))
    return locks.digest(matrix.python, *inputs, *matrix.harness)


def build(matrix: Matrix, project: Downstream, layout: Layout, say: Callable[[str], None]) -> Environment:
    """The project's environment, with this project in it; says what that added.

    Raises:
        Untestable: it cannot be built, with uv's reason.
        MatrixError: a package has another version than the project alone would have.
    """
    lock, added = lock_of(matrix, project, layout)
    with explained_os_errors():
        environment = ensure(lock, layout, say)
    installed = freeze(environment)
    theirs = {name: version for name, version in lock.packages.items() if name not in added}
    changed = [name for name, version in theirs.items() if installed.get(name) != version]
    if changed:
        texts = (f"{name} {installed.get(name, 'is missing')} instead of {theirs[name]}" for name in changed)
        raise MatrixError(f"{project.name}: {', '.join(texts)}")
    added_versions = " ".join(f"{name} {installed[name]}" for name in added if name in installed)
    say(f"{project.name}: {len(theirs)} packages, each as it is without this project, which added {added_versions}")
    return environment


def freeze(environment: Environment) -> Mapping[str, str]:
    """What an environment really has: canonical name to version, without local parts."""
    listed = json.loads(uv(["pip", "list", "--format", "json", "--python", str(environment.python)], offline=True))
    return {canonicalize_name(package["name"]): package["version"].split("+")[0] for package in listed}


def command(project: Downstream, arguments: Sequence[str]) -> list[str]:
    """The command that runs its tests."""
    preload = ("-o", f"trlcompat_preload={' '.join(project.preload)}") if project.preload else ()
    return ["python", "-m", "pytest", "-p", "trlcompat", *preload, f"downstream/{project.tests}", *arguments]


def session(
    matrix: Matrix,
    layout: Layout,
    arguments: Sequence[str],
    say: Callable[[str], None],
    run: Callable[[Environment, Sequence[str]], None],
) -> None:
    """What ``nox -s downstream -- [--lock] [NAME ...] [-- PYTEST ...]`` does; all projects where none is named.

    Raises:
        MatrixError: an unknown project, or one whose tests failed; the others are tested as well.
    """
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    names, more = [word for word in words[:cut] if word != "--lock"], words[cut + 1 :]
    projects = read_projects(layout.downstream / "projects.toml")
    if unknown := [name for name in names if name not in projects]:
        raise MatrixError(f"no project {unknown[0]!r}; there are: {', '.join(projects)}")
    failed = []
    for name in names or projects:
        try:
            if "--lock" in words[:cut]:
                lock = renew(matrix, projects[name], layout)
                say(f"{name}: {len(lock.packages)} packages as of {lock.date}")
            else:
                run(build(matrix, projects[name], layout, say), command(projects[name], more))
        except MatrixError as error:
            failed.append(f"{name}: {error}")
    if failed:
        raise MatrixError("; ".join(failed))
