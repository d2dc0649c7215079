"""The sessions of pytest-trlcompat; thin, over ``pytest_trlcompat.matrix``.

    nox -s matrix                          sweep the default cells, end with a summary
    nox -s matrix --parallel 2             two cells at a time
    nox -s matrix -- --full                every cell, for each TRL release the lowest and highest Transformers
    nox -s matrix -- --torch dated         each cell with the torch of its own day, one cell for each torch since 2.4
    nox -s "matrix(trl0.15.2-tf4.48.3)"    one of them
    nox -s cell -- trl=0.19.1 transformers=4.53.3 [accelerate=...] [--issue ID ...] [--date DAY]
    nox -s bisect -- releases --package transformers --good 4.49.0 --bad 4.53.3 --with trl=0.14.0 --issue ID
    nox -s tests                           this project's own tests
    nox -s browser                         those of the report's page, in a real browser
    nox -s "rooms(3.12)"                   those without the stack, on another Python

Environments are uv's, kept below .nox/envs and shared by the sessions, hence no virtual environments of nox's own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from pytest_trlcompat.matrix.errors import MatrixError  # noqa: E402 - needs the line above
from pytest_trlcompat.matrix.sessions import Workshop  # noqa: E402

nox.needs_version = ">=2026.8"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests", "matrix"]

STACK_TESTS = ["trl0.17.0-tf4.50.3", "trl1.16.0-tf5.23.0"]
"""Cells in whose environments tests/stack runs: FSDP1 before ``prepare_fsdp``, and the newest release."""

OPERATORS_TORCH = "2.13.0"
"""The torch with which PyTorch's operators are part of the project's tests: that of the stack's cells."""

OTHER_TORCHES = ["2.6.0", "2.15.0"]
"""An old one and the newest, for a session of their own: their wheels bring 5 to 7 GB of CUDA libraries."""

OTHER_PYTHONS = ["3.10", "3.12", "3.13"]
"""Interpreters, as uv understands them, on which the tests of single rooms run beside the running one."""

LONG_BENCHMARKS = ("sweep", "launch", "soak")

try:
    WORKSHOP = Workshop(ROOT)
    CELLS = WORKSHOP.cells(sys.argv[1:])
except MatrixError as error:
    sys.exit(f"nox: {error}")


@contextlib.contextmanager
def plainly(session: nox.Session) -> Iterator[None]:
    """End the session with the message alone, without a traceback."""
    try:
        yield
    except MatrixError as error:
        session.error(str(error))


def group(name: str) -> list[str]:
    """A dependency group of pyproject.toml."""
    return list(nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name))


def try_operators(session: nox.Session, torch: str) -> None:
    """Hold every operator of PyTorch's database, on the accelerator, against the CPU."""
    needed = [f"torch=={torch}", "numpy", "scipy", "expecttest", "hypothesis", "setuptools"]
    environment = WORKSHOP.tools(f"operators-{torch.replace('.', '-')}", needed, project=True)
    WORKSHOP.run_in(environment, ["python", "-m", "pytest", "tests/operators", *session.posargs])


@nox.session(allow_parallel=True)
@nox.parametrize("where", ["rooms", "operators", *STACK_TESTS], ids=["rooms", "operators", *STACK_TESTS])
def tests(session: nox.Session, where: str) -> None:
    """The project's tests: those of single rooms without the stack, those of the stack in two cells' environments."""
    with plainly(session):
        if where == "rooms":
            environment = WORKSHOP.tools("rooms", group("test"), project=True)
            command = ["-n", "2", "--ignore=tests/stack", "--ignore=tests/operators", "tests"]
        elif where == "operators":
            try_operators(session, OPERATORS_TORCH)
            return
        else:
            environment = WORKSHOP.stack(where)
            command = ["tests/stack"]
        WORKSHOP.run_in(environment, ["python", "-m", "pytest", *command, *session.posargs])


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """The report's page in a real headless Chromium, the system's or the one that $TRLCOMPAT_BROWSER names."""
    with plainly(session):
        environment = WORKSHOP.tools("browser", group("browser"), project=True)
        WORKSHOP.run_in(environment, ["python", "-m", "pytest", "tests/browser", *session.posargs])


@nox.session(default=False)
@nox.parametrize("torch", OTHER_TORCHES, ids=OTHER_TORCHES)
def operators(session: nox.Session, torch: str) -> None:
    """PyTorch's operators with another torch than in the project's tests, an old one or the newest."""
    with plainly(session):
        try_operators(session, torch)


@nox.session(allow_parallel=True, default=False)
@nox.parametrize("python", OTHER_PYTHONS, ids=OTHER_PYTHONS)
def rooms(session: nox.Session, python: str) -> None:
    """The tests of single rooms on another Python, which uv finds or downloads; no part of ``nox -s tests``."""
    with plainly(session):
        environment = WORKSHOP.tools("rooms", group("test"), project=True, python=python)
        command = ["-n", "2", "--ignore=tests/stack", "--ignore=tests/operators", "tests"]
        WORKSHOP.run_in(environment, ["python", "-m", "pytest", *command, *session.posargs])


@nox.session(allow_parallel=True)
@nox.parametrize("cell", CELLS, ids=CELLS)
def matrix(session: nox.Session, cell: str) -> None:
    """Run the suites in a cell's environment [-- --full, --torch dated, --issue ID, --fresh]; goes on if killed."""
    with plainly(session):
        WORKSHOP.matrix_cell(cell, session.posargs)


@nox.session(default=False)
def cell(session: nox.Session) -> None:
    """Any other combination: -- trl=0.19.1 transformers=4.53.3 [--issue ID ...] [--date DAY] [--fresh]."""
    with plainly(session):
        WORKSHOP.free_cell(session.posargs)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Resolve the cells anew, as of their dates, into fixtures/locks [-- CELL ..., --missing]."""
    with plainly(session):
        WORKSHOP.renew_locks(session.posargs)


@nox.session(default=False)
def clean(session: nox.Session) -> None:
    """Remove the environments that no lock asks for any more."""
    with plainly(session):
        WORKSHOP.clean()


@nox.session(default=False)
def report(session: nox.Session) -> None:
    """Merge what sweeps left in build/compat into the report, print its summary [-- --tables, --publish, --pages]."""
    with plainly(session):
        WORKSHOP.report(session.posargs)


@nox.session(default=False)
def bisect(session: nox.Session) -> None:
    """What broke or cured a verdict: -- releases | days | commits, see -- --help; goes on where it was stopped."""
    with plainly(session):
        environment = WORKSHOP.tools("bisect", group("bisect"), project=True)
    command = [str(environment.python), "-m", "pytest_trlcompat.bisect", *session.posargs]
    if session.posargs and session.posargs[0] in ("releases", "days", "commits", "test"):
        command += ["--called-as", "nox -s bisect --"]
    # Time for a search that is stopped to take down what it has started.
    session.run(*command, external=True, interrupt_timeout=15, terminate_timeout=5)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run a benchmark [-- NAME ARGUMENTS ...], all but the long ones by default; see benchmarks/README.md."""
    scripts = {script.stem: script for script in sorted((ROOT / "benchmarks").glob("*.py"))}
    del scripts["mutations"]  # a session of its own
    name, *arguments = session.posargs or [""]
    if name and name not in scripts:
        session.error(f"no benchmark {name!r}; there are: {', '.join(scripts)}")
    with plainly(session):
        environment = WORKSHOP.stack(STACK_TESTS[-1])
        for stem in [name] if name else [stem for stem in scripts if stem not in LONG_BENCHMARKS]:
            more = []
            if stem == "launch":  # PyTorch's own test class imports expecttest, which the stack has not
                (packages,) = (WORKSHOP.tools("expecttest", ["expecttest"]).root / "lib").glob("python*/site-packages")
                more = ["--extra-path", str(packages)]
            WORKSHOP.run_in(environment, ["python", str(scripts[stem]), *more, *arguments])


@nox.session(default=False)
def mutations(session: nox.Session) -> None:
    """Break each cure in turn: its suite must catch it [-- ISSUE or CURE ...]."""
    with plainly(session):
        environment = WORKSHOP.tools("rooms", group("test"), project=True)
        WORKSHOP.run_in(environment, ["python", "benchmarks/mutations.py", *session.posargs])


@nox.session(default=False)
def branches(session: nox.Session) -> None:
    """Branches for NPUs alone that nobody has decided about [-- trl==1.17.0 ..., or of the newest cell]."""
    with plainly(session):
        environment = WORKSHOP.stack(STACK_TESTS[-1])
        folders = [WORKSHOP.unpack(release, environment, session.create_tmp()) for release in session.posargs]
        WORKSHOP.run_in(environment, ["python", "-m", "pytest_trlcompat.accelerator.decisions", *map(str, folders)])


@nox.session(default=False)
def lint(session: nox.Session) -> None:
    """ruff and mypy."""
    with plainly(session):
        environment = WORKSHOP.tools("lint", group("lint"))
        WORKSHOP.run_all_in(environment, [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]])
