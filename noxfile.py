"""The sessions of pytest-trlcompat, implemented in ``pytest_trlcompat.matrix``.

    nox -s matrix                          sweep the default cells side by side, end with a summary
    nox -s matrix --parallel 2             the same, two processes at most
    nox -s matrix -- --full                every cell, for each TRL release the lowest and highest Transformers
    nox -s matrix -- --pairwise            cells that covering arrays have chosen: every release of TRL, and more
    nox -s matrix -- --vllm                the cells that have vLLM, by the suites that need it
    nox -s matrix -- --liger               the cells that have Liger's kernels, by the rows that use them
    nox -s matrix -- --images              the cells that have Pillow, by the rows whose prompts have images
    nox -s matrix -- --shard 3/16          the third of sixteen parts, for as many machines
    nox -s matrix -- --engine ray          on a cluster of Ray
    nox -s matrix -- --torch dated         each cell with the torch of its date, from 2.4 on
    nox -s "matrix(trl0.15.2-tf4.48.3)"    one of them
    nox -s cell -- trl=0.19.1 transformers=4.53.3 [accelerate=...] [--issue ID ...] [--date DAY]
    nox -s bisect -- releases --package transformers --good 4.49.0 --bad 4.53.3 --with trl=0.14.0 --issue ID
    nox -s tests                           this project's own tests
    nox -s fuzz                            those by examples of hypothesis's choice, with many others
    nox -s browser                         those of the report's page, in a real browser
    nox -s "unit(3.12)"                    the unit tests, which need no stack, on another Python

Environments are uv's, kept below .nox/envs and shared by the sessions, hence no virtual environments of nox's own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from pytest_trlcompat._due import Account  # noqa: E402 - needs sys.path
from pytest_trlcompat._escaping import printable  # noqa: E402 - needs sys.path
from pytest_trlcompat._secrets import redacted  # noqa: E402
from pytest_trlcompat.bisect.candidates.releases import list_releases, releases_between  # noqa: E402
from pytest_trlcompat.matrix.environments import Environment  # noqa: E402
from pytest_trlcompat.matrix.errors import MatrixError  # noqa: E402
from pytest_trlcompat.matrix.sessions import Project  # noqa: E402
from pytest_trlcompat.matrix.tools import Tool  # noqa: E402
from pytest_trlcompat.matrix.workflows import check_workflows  # noqa: E402

nox.needs_version = ">=2026.8"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests", "matrix"]

UNIT_TESTS = ["-n", "2", *(f"--ignore=tests/{name}" for name in ("stack", "operators", "upstream_reports")), "tests"]
"""The arguments of pytest for the tests that need neither torch nor the rest of the stack."""

STACK_TESTS = ["trl0.17.0-tf4.50.3", "trl1.16.0-tf5.23.0"]
"""The cells in whose environments tests/stack runs: FSDP1 before ``prepare_fsdp``, and the newest release."""

OPERATORS_TORCH = "2.13.0"
"""The torch with which PyTorch's operators are part of ``nox -s tests``: that of the stack's cells."""

OTHER_TORCHES = ["2.6.0", "2.15.0"]
"""An old one and the newest. They have their own session, since their wheels need 5 to 7 GB of CUDA libraries."""

OTHER_PYTHONS = ["3.10", "3.12", "3.13"]
"""Interpreters, as uv understands them, on which the unit tests run, besides the one that runs nox."""

CLUSTER_PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
"""Interpreters on which the engine is tried with Ray."""

FIRST_TRL = "0.9.6"
"""The first release of TRL whose config fields stand in the table, which is the matrix's."""

FUZZ_INPUTS = 50_000
"""Of ``nox -s fuzz``, in some ten minutes of processor time."""

SERVER_RELEASES = ("0.20.0", "0.26.2", "0.28.0", "1.0.0")
"""Of TRL, whose vLLM servers trainers of other releases ask: those of ``suites/in_rank/vllm_training.py``."""

LONG_BENCHMARKS = (
    *("conformance_faults", "fused_heads", "kills", "loss_memory", "other_seeds", "sweep", "launch", "soak"),
    *("doctor_answers", "sweep_profile", "training_cost", "vllm_faults"),
)

try:
    PROJECT = Project(ROOT)
    VENVS, CELLS = PROJECT.environments, PROJECT.cells(sys.argv[1:])
except MatrixError as error:
    sys.exit(f"nox: {error}")


@contextlib.contextmanager
def errors_as_messages(session: nox.Session) -> Iterator[None]:
    """End the session with the error message only, without a traceback."""
    try:
        yield
    except MatrixError as error:
        session.error(printable(redacted(str(error))))


def group(name: str) -> list[str]:
    """A dependency group of pyproject.toml."""
    return list(nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name))


def operators_tool(torch: str) -> tuple[str, list[str]]:
    """Name and requirements of the environment in which PyTorch's operators are tried."""
    needed = [f"torch=={torch}", "numpy", "scipy", "expecttest", "hypothesis", "setuptools"]
    return f"operators-{torch.replace('.', '-')}", needed


def known_tools() -> list[Tool]:
    """The tool environments of these sessions, whose locks are part of the repository."""
    main = PROJECT.matrix.python
    ray = VENVS.extra("ray")
    ours = [
        *(("unit", group("test"), python) for python in (main, *OTHER_PYTHONS)),
        *(("cluster", [*group("test"), *ray], python) for python in CLUSTER_PYTHONS),
        *((*operators_tool(torch), main) for torch in (OPERATORS_TORCH, *OTHER_TORCHES)),
        *((name, group(name), main) for name in ("browser", "covering", "watch", "bisect", "docs")),
        ("ray", ray, main),
        ("bisect-ray", [*group("bisect"), *ray], main),
    ]
    others = [("lint", group("lint")), ("nox", group("nox")), ("expecttest", ["expecttest"])]
    return [
        *(VENVS.tool(name, needed, project=True, python=python) for name, needed, python in ours),
        *(VENVS.tool(name, needed, python=main) for name, needed in (*others, VENVS.report_tool())),
    ]


def try_operators(session: nox.Session, torch: str) -> None:
    """Compare every operator of PyTorch's database on the accelerator with the CPU."""
    environment = VENVS.tools(*operators_tool(torch), project=True)
    VENVS.run_in(environment, ["python", "-m", "pytest", "tests/operators", *session.posargs])


def unpack(session: nox.Session, releases: list[str], environment: Environment, name: str) -> Path:
    """A folder of unpacked releases, such as ``trl==1.16.0``, which are unpacked once."""
    folder = ROOT / ".nox" / name
    folder.mkdir(parents=True, exist_ok=True)
    for release in releases:
        if not (folder / release).exists():
            # Moved there when it is complete, so that what is there can be trusted.
            VENVS.unpack(release, environment, session.create_tmp()).rename(folder / release)
    return folder


TESTS = [*reversed(STACK_TESTS), "unit", "operators"]
"""The longest first: with ``--parallel 2`` it would run alone at the end, for half the time that all of them take."""


@nox.session(allow_parallel=True)
@nox.parametrize("where", TESTS, ids=TESTS)
def tests(session: nox.Session, where: str) -> None:
    """The project's tests: the stack in two environments, unit tests without the stack, and PyTorch's operators."""
    with errors_as_messages(session):
        if where == "unit":
            environment = VENVS.tools("unit", group("test"), project=True)
            command = UNIT_TESTS
        elif where == "operators":
            try_operators(session, OPERATORS_TORCH)
            return
        else:
            environment = VENVS.stack(where)
            older = [] if where == STACK_TESTS[-1] else ["-m", "not newest_stack"]
            command = ["--durations", "25", *older, "tests/stack"]
        VENVS.run_in(environment, ["python", "-m", "pytest", *command, *session.posargs])


@nox.session(allow_parallel=True, default=False)
def browser(session: nox.Session) -> None:
    """The report's page in a real headless Chromium, the system's or the one that $TRLCOMPAT_BROWSER names."""
    with errors_as_messages(session):
        environment = VENVS.tools("browser", group("browser"), project=True)
        VENVS.run_in(environment, ["python", "-m", "pytest", "tests/browser", *session.posargs])


@nox.session(default=False)
@nox.parametrize("python", CLUSTER_PYTHONS, ids=CLUSTER_PYTHONS)
def cluster(session: nox.Session, python: str) -> None:
    """The engine on a real cluster of Ray, of several nodes on this machine, on each Python that it is for."""
    with errors_as_messages(session):
        environment = VENVS.tools("cluster", [*group("test"), *VENVS.extra("ray")], project=True, python=python)
        VENVS.run_in(environment, ["python", "-m", "pytest", "tests/cluster", *session.posargs])


@nox.session(default=False)
@nox.parametrize("torch", OTHER_TORCHES, ids=OTHER_TORCHES)
def operators(session: nox.Session, torch: str) -> None:
    """PyTorch's operators with another torch: an old one, or the newest."""
    with errors_as_messages(session):
        try_operators(session, torch)


@nox.session(allow_parallel=True, default=False)
@nox.parametrize("python", OTHER_PYTHONS, ids=OTHER_PYTHONS)
def unit(session: nox.Session, python: str) -> None:
    """The unit tests on another Python, which uv finds or downloads; no part of ``nox -s tests``."""
    with errors_as_messages(session):
        environment = VENVS.tools("unit", group("test"), project=True, python=python)
        VENVS.run_in(environment, ["python", "-m", "pytest", *UNIT_TESTS, *session.posargs])


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Ask the doctor about 50,000 lists and locks that are mutated and damaged [-- NUMBER], and try hostile reports."""
    if session.posargs and not session.posargs[0].isdecimal():
        session.error(f"fuzz takes a number of inputs for the doctor, not {session.posargs[0]}")
    with errors_as_messages(session):
        environment = VENVS.tools("unit", group("test"), project=True)
        os.environ["TRLCOMPAT_FUZZ_INPUTS"] = session.posargs[0] if session.posargs else str(FUZZ_INPUTS)
        # Not captured, since it ends with how many inputs of each kind were tried.
        doctor = ["python", "-m", "pytest", "tests/doctor/test_fuzz.py", "--capture=no"]
        marked = ["python", "-m", "pytest", "-m", "fuzz", "--hypothesis-profile=fuzz", *UNIT_TESTS]
        VENVS.run_all_in(environment, [doctor, marked])


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Run the unit and stack tests with coverage, ranks included; lines are in build/coverage/html [-- PYTEST ...]."""
    with errors_as_messages(session):
        unit = VENVS.tools("unit", group("test"), project=True)
        runs = [(unit, UNIT_TESTS), *((VENVS.stack(cell), ["tests/stack"]) for cell in STACK_TESTS)]
        locked = VENVS.locked(VENVS.tool("unit", group("test"), project=True), ["coverage"])
        PROJECT.measure_coverage(runs, locked, session.posargs)


@nox.session(allow_parallel=True)
@nox.parametrize("cell", CELLS, ids=CELLS)
def matrix(session: nox.Session, cell: str) -> None:
    """Run the suites in a cell's environment [-- --full, --pairwise, --torch dated, --shard 3/16, --issue ID]."""
    with errors_as_messages(session):
        PROJECT.matrix_cell(cell, session.posargs)


@nox.session(default=False)
def cell(session: nox.Session) -> None:
    """Run any other combination: -- trl=0.19.1 transformers=4.53.3 [--issue ID ...] [--date DAY] [--fresh]."""
    with errors_as_messages(session):
        PROJECT.free_cell(session.posargs)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Resolve the cells again, as of their dates, and the tools [-- CELL ..., --missing, --tools]: fixtures/locks."""
    with errors_as_messages(session):
        PROJECT.renew_locks(session.posargs, known_tools())


@nox.session(default=False)
def pairwise(session: nox.Session) -> None:
    """Choose the cells of `nox -s matrix -- --pairwise` anew, from the releases on the registry [-- --listed]."""
    with errors_as_messages(session):
        environment = VENVS.tools("covering", group("covering"), project=True)
        VENVS.run_in(environment, ["python", "-m", "pytest_trlcompat.matrix.covering", *session.posargs])


@nox.session(default=False)
def rows(session: nox.Session) -> None:
    """Make the rows of the conformance suites anew that hold every two values of their space [-- --strength 3]."""
    with errors_as_messages(session):
        environment = VENVS.tools("covering", group("covering"), project=True)
        VENVS.run_in(environment, ["python", "-m", "pytest_trlcompat.conformance.array", *session.posargs])


@nox.session(default=False)
def clean(session: nox.Session) -> None:
    """Remove the environments that belong to no lock any more."""
    with errors_as_messages(session):
        PROJECT.clean()


@nox.session(default=False)
def report(session: nox.Session) -> None:
    """Make the report of build/compat, print its summary [-- --tables, --merge DIR ..., --publish, --pages]."""
    with errors_as_messages(session):
        PROJECT.report(session.posargs)


@nox.session(default=False)
def bisect(session: nox.Session) -> None:
    """Find what broke or cured a verdict: -- releases | days | commits, see -- --help; continues if stopped."""
    with errors_as_messages(session):
        environment = VENVS.bisect_tools(group("bisect"), session.posargs)
    command = [str(environment.python), "-m", "pytest_trlcompat.bisect", *session.posargs]
    if session.posargs and session.posargs[0] in ("releases", "days", "commits", "test"):
        command += ["--called-as", "nox -s bisect --"]
    # Time for a stopped search to end its child processes.
    session.run(*command, external=True, interrupt_timeout=15, terminate_timeout=5)


@nox.session(default=False)
def watch(session: nox.Session) -> None:
    """Measure releases that the matrix does not know, and bisect what nobody predicted: see -- --help."""
    with errors_as_messages(session):
        environment = VENVS.tools("watch", group("watch"), project=True)
    session.run(
        *(str(environment.python), "-m", "pytest_trlcompat.watch", *session.posargs),
        external=True,
        interrupt_timeout=15,
        terminate_timeout=5,
    )


@nox.session(default=False)
def watch_replay(session: nox.Session) -> None:
    """Ask the watch about a past, day by day, and compare with what is known today; goes on where it stopped."""
    with errors_as_messages(session):
        environment = VENVS.tools("watch", group("watch"), project=True)
        VENVS.run_in(environment, ["python", "benchmarks/watch_replay.py", *session.posargs])


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks except the long ones, or one of them [-- NAME ARGUMENTS ...]; see benchmarks/README.md."""
    scripts = {script.stem: script for script in sorted((ROOT / "benchmarks").glob("*.py"))}
    del scripts["mutations"], scripts["watch_replay"]  # sessions of their own
    name, *arguments = session.posargs or [""]
    if name and name not in scripts:
        session.error(f"no benchmark {name!r}; there are: {', '.join(scripts)}")
    with errors_as_messages(session):
        for stem in [name] if name else [stem for stem in scripts if stem not in LONG_BENCHMARKS]:
            more = []
            if stem == "launch":  # PyTorch's own test class imports expecttest, which is not part of the stack
                (packages,) = (VENVS.tools("expecttest", ["expecttest"]).root / "lib").glob("python*/site-packages")
                more = ["--extra-path", str(packages)]
            added = {tag: [each.id for each in PROJECT.matrix.with_added(tag)] for tag in ("vllm", "liger")}
            vllm = [next(each for each in added["vllm"] if each.startswith("trl0.18.2-")), added["vllm"][-1]]
            cells = {"loss_memory": added["liger"], "training_cost": STACK_TESTS, "vllm_faults": vllm}
            for cell in cells.get(stem, STACK_TESTS[-1:]):
                VENVS.run_in(VENVS.stack(cell), ["python", str(scripts[stem]), *more, *arguments])


@nox.session(default=False)
def upstream_reports(session: nox.Session) -> None:
    """Run the scripts to paste upstream, which need nothing of this project, in the newest stack."""
    with errors_as_messages(session):
        environment = VENVS.stack(STACK_TESTS[-1])
        VENVS.run_in(environment, ["python", "-m", "pytest", "tests/upstream_reports", *session.posargs])


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Launch a thousand times, and kill something at random at a tenth of them [-- --launches N, --seed N]."""
    with errors_as_messages(session):
        VENVS.run_in(VENVS.stack(STACK_TESTS[-1]), ["python", "benchmarks/kills.py", *session.posargs])


@nox.session(default=False)
def mutations(session: nox.Session) -> None:
    """Break one cure after the other: its suite must catch it [-- ISSUE or CURE ...]."""
    with errors_as_messages(session):
        environment = VENVS.tools("unit", group("test"), project=True)
        VENVS.run_in(environment, ["python", "benchmarks/mutations.py", *session.posargs])


@nox.session(default=False)
def absences(session: nox.Session) -> None:
    """Leave out what is due, in one place after the other: a test must fail [-- AREA ..., --where unit]."""
    with errors_as_messages(session):
        environment = VENVS.tools("unit", group("test"), project=True)
        VENVS.run_in(environment, ["python", "benchmarks/absences.py", *session.posargs])


@nox.session(default=False)
def upstream_fixes(session: nox.Session) -> None:
    """Look for faults that TRL has mended, before and after, by the conformance suite: -- --clone REPOSITORY."""
    with errors_as_messages(session):
        environment = VENVS.tools("unit", group("test"), project=True)
        VENVS.run_in(environment, ["python", "-m", "benchmarks.upstream_fixes", *session.posargs])


@nox.session(default=False)
def upstream_tests(session: nox.Session) -> None:
    """Run TRL's own tests with the corrected trainers, and compare: -- 0.15.2 0.18.2 [--git REPOSITORY]."""
    with errors_as_messages(session):
        environment = VENVS.tools("unit", group("test"), project=True)
        VENVS.run_in(environment, ["python", "-m", "benchmarks.upstream_tests", *session.posargs])


@nox.session(default=False)
def downstream(session: nox.Session) -> None:
    """Test real projects by their own commands beside this one [-- NAME ... | --lock NAME ...]; all: no name."""
    with errors_as_messages(session):
        PROJECT.test_downstream(session.posargs)


@nox.session(default=False)
def branches(session: nox.Session) -> None:
    """List undecided branches for NPUs in releases, or in the newest cell [-- trl==1.17.0 ...]."""
    with errors_as_messages(session):
        environment = VENVS.stack(STACK_TESTS[-1])
        folders = [VENVS.unpack(release, environment, session.create_tmp()) for release in session.posargs]
        VENVS.run_in(environment, ["python", "-m", "pytest_trlcompat.accelerator.decisions", *map(str, folders)])


@nox.session(default=False)
def points(session: nox.Session) -> None:
    """Hold the names that cures change of upstream against the sources of every release in the locks."""
    with errors_as_messages(session):
        environment, unit = VENVS.stack(STACK_TESTS[-1]), VENVS.tools("unit", group("test"), project=True)
        releases = VENVS.locked_releases(("accelerate", "deepspeed", "liger-kernel", "peft", "transformers", "trl"))
        os.environ["TRLCOMPAT_RELEASES"] = str(unpack(session, releases, environment, "releases"))
        VENVS.run_in(unit, ["python", "-m", "pytest", "tests/points", *session.posargs])


@nox.session(default=False)
def fields(session: nox.Session) -> None:
    """Hold the table of config fields against all of TRL's releases from 0.9.6 on, and Transformers' in the locks."""
    with errors_as_messages(session):
        unit = VENVS.tools("unit", group("test"), project=True)
        listing = list_releases("trl", PROJECT.matrix.python, ROOT / ".nox" / "trl-releases.json")
        last = listing.versions[-1]
        releases = [f"trl=={version}" for version in releases_between(listing, FIRST_TRL, last).versions]
        releases += VENVS.locked_releases(["transformers"])
        folder = unpack(session, releases, unit, "releases-of-fields")
        VENVS.run_in(unit, ["python", "-m", "pytest_trlcompat.conformance.walk", str(folder)])


@nox.session(default=False)
def server_releases(session: nox.Session) -> None:
    """Train with a vLLM server of another release of TRL, in every cell with the recording engine [-- CELL ...]."""
    with errors_as_messages(session):
        unit = VENVS.tools("unit", group("test"), project=True)
        folder = unpack(session, [f"trl=={release}" for release in SERVER_RELEASES], unit, "server-releases")
        os.environ["TRLCOMPAT_SERVER_RELEASES"] = str(folder)
        recording = [cell.id for cell in PROJECT.matrix.with_added("vllm") if "vllm-recording" in cell.pins]
        account = Account("cells", session.posargs or recording)
        for cell in account.due:
            try:
                PROJECT.matrix_cell(cell, ["--issue", "grpo-vllm-server-release"])
                account.meet(cell)
            except MatrixError as error:
                account.refuse(cell, f"failed: {error}")
    if not account.is_complete:
        session.error(account.shortfall())


@nox.session(allow_parallel=True, default=False)
def lint(session: nox.Session) -> None:
    """Run ruff and mypy, and check the workflows of GitHub and GitLab, and those that init-ci writes."""
    with errors_as_messages(session):
        environment = VENVS.tools("lint", group("lint"))
        workflows = check_workflows(ROOT, session.log)
        # By the stub mypy knows the names of the trainers' package; git has no copy of it.
        stub = ["python", "-m", "pytest_trlcompat.trainers.curing.stub"]
        VENVS.run_all_in(environment, [stub, ["ruff", "check"], ["ruff", "format", "--check"], ["mypy"], *workflows])


@nox.session(allow_parallel=True, default=False)
def docs(session: nox.Session) -> None:
    """Build the site into build/docs; a warning is an error [-- --external: ask for links to other sites as well]."""
    external = session.posargs == ["--external"]
    if session.posargs and not external:
        session.error(f"docs takes --external alone, not {' '.join(session.posargs)}")
    with errors_as_messages(session):
        environment = VENVS.tools("docs", group("docs"), project=True)
        build = ["sphinx-build", "--fail-on-warning", "--keep-going", "--quiet", "-d", "build/docs-doctrees"]
        commands = [[*build, "docs", "build/docs"]]
        if external:
            commands.append([*build, "-b", "linkcheck", "docs", "build/docs-links"])
        VENVS.run_all_in(environment, commands)
    session.log("the site is in build/docs/index.html")


EXAMPLES = ["unit", "stack", "checkout"]
"""Where examples are run. ``nox -s tests`` runs those of the first two too, ``.ci/run`` therefore the last alone."""


@nox.session(allow_parallel=True, default=False)
@nox.parametrize("where", EXAMPLES, ids=EXAMPLES)
def examples(session: nox.Session, where: str) -> None:
    """Run what README and the tutorials show, and compare what is printed [-- --update: write it there]."""
    with errors_as_messages(session):
        in_stack = where == "stack"
        environment = VENVS.stack(STACK_TESTS[-1]) if in_stack else VENVS.tools("unit", group("test"), project=True)
        VENVS.run_in(environment, ["python", "-m", "tests.docs.examples", where, *session.posargs])
