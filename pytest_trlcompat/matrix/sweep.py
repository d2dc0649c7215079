"""One cell as a job: in goes a lock, out comes a file of JSON lines and a sidecar that says how it went.

A cell that was cut short goes on after its last verdict. Nothing here assumes that all cells run on one machine.
Imports only the standard library and rooms below, never the stack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_trlcompat.catalog.verdict import Record, RecordError, Verdict, read_records
from pytest_trlcompat.matrix import disk, process
from pytest_trlcompat.matrix.cells import Cell, Matrix, parse_day
from pytest_trlcompat.matrix.environments import Environment, ensure, standing
from pytest_trlcompat.matrix.errors import DiskFull, MatrixError, Untestable
from pytest_trlcompat.matrix.files import locked, said_plainly, write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, kept, lock_for

__all__ = [
    "Outcome",
    "Sidecar",
    "Sweep",
    "child_variables",
    "code_digest",
    "is_wrong",
    "read_sidecar",
    "read_sidecars",
    "run_cell",
    "suite_command",
]

TESTED = "tested"
UNTESTABLE = "untestable"
INTERRUPTED = "interrupted"
RUNNING = "running"

_TESTS_PASSED, _TESTS_FAILED, _NOTHING_COLLECTED = 0, 1, 5
_NAMED = 3
"""Wrong verdicts that a message names; the report names all."""

_IRRELEVANT = ("matrix", "bisect", "doctor", "templates", "__pycache__", "boundaries.py", "evidence.json")


@dataclass(frozen=True)
class Sidecar:
    """What is known of a cell beside its verdicts, in ``build/compat/<cell id>.cell.json``.

    Attributes:
        state: ``running`` until it ended; a cell found so without its lock being held was killed.
        reason: why it is untestable or was interrupted.
        seconds: wall-clock time, building the environment included, of all the runs that made it.
        digest: of all that its verdicts depend on; results of another digest are not gone on with.
        sweep: the command that ran it, see :class:`Sweep`.
        issues: the issues that were asked for; empty: all.
        python: the cell's own interpreter; ``None``: the one of the matrix.
    """

    id: str
    pins: Mapping[str, str]
    state: str
    sweep: str
    lock: Mapping[str, str] = field(default_factory=dict)
    date: str | None = None
    reason: str | None = None
    seconds: float = 0.0
    digest: str | None = None
    issues: tuple[str, ...] = ()
    schema: int = 1
    python: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


@dataclass(frozen=True)
class Outcome:
    """How a cell ended, and its verdicts.

    Attributes:
        exit_status: pytest's; ``None`` where it was not started.
        out_of_space: whether there was no room for its environment; the same command then goes on with it.
    """

    sidecar: Sidecar
    records: tuple[Record, ...]
    exit_status: int | None = None
    out_of_space: bool = False

    @property
    def wrong(self) -> list[Record]:
        """Verdicts that were predicted otherwise, and failures that nothing predicted."""
        return [record for record in self.records if is_wrong(record)]

    @property
    def problem(self) -> str | None:
        """Why the cell's session fails, in one message; ``None`` when all is as predicted."""
        cell_id = self.sidecar.id
        if self.sidecar.state == UNTESTABLE:
            return f"{cell_id} is untestable: {self.sidecar.reason}"
        if self.sidecar.state != TESTED:
            return f"{cell_id} was not finished: {self.sidecar.reason}"
        if self.wrong:
            named = [
                f"{record.issue} {record.subject} {record.strategy} is {record.verdict}"
                + (f", predicted {record.expected}" if record.expected else "")
                for record in self.wrong
            ]
            more = [f"and {len(named) - _NAMED} more"] if len(named) > _NAMED else []
            return f"{cell_id}: {len(named)} of {len(self.records)} verdicts are not as predicted: " + "; ".join(
                [*named[:_NAMED], *more]
            )
        if not self.records:
            return f"{cell_id}: no suite gave a verdict"
        untested = [record for record in self.records if record.untested]
        if untested and all(record.untested or record.verdict is Verdict.ABSENT for record in self.records):
            return f"{cell_id}: nothing could be tested. {untested[0].reason}"
        return None


def is_wrong(record: Record) -> bool:
    """Whether a verdict was predicted otherwise, or is a failure that nothing predicted."""
    return not record.as_predicted or (record.expected is None and record.verdict in (Verdict.ERROR, Verdict.HANG))


class Sweep:
    """One command of a person: a nox process together with the workers that ``nox --parallel`` starts.

    They share a name, handed down in the environment, and a folder of that name, which holds one empty file for each
    cell under way. A command that comes to its end takes its folder away, so that the next one starts afresh. One
    that was killed leaves it, and what was finished under it need not run again.
    """

    VARIABLE = "TRLCOMPAT_SWEEP"

    def __init__(self, layout: Layout, environ: MutableMapping[str, str] = os.environ) -> None:
        self.layout = layout
        self.outermost = self.VARIABLE not in environ
        self.name = environ.setdefault(self.VARIABLE, f"{int(time.time())}-{os.getpid()}")
        self._all = layout.results / ".sweeps"

    @property
    def began(self) -> bool:
        """Whether any cell was run under this command."""
        return (self._all / self.name).exists()

    def under_way(self, cell_id: str) -> None:
        (self._all / self.name).mkdir(parents=True, exist_ok=True)
        (self._all / self.name / cell_id).touch()

    def has_begun(self, cell_id: str) -> bool:
        """Whether this command has run a cell, or runs it."""
        sidecar = self.layout.results / f"{cell_id}.cell.json"
        return (self._all / self.name / cell_id).exists() or (
            sidecar.exists() and read_sidecar(sidecar).sweep == self.name
        )

    def ended(self, cell_id: str) -> None:
        """Strike a cell off, under whichever command it was begun."""
        for path in self._all.glob(f"*/{cell_id}"):
            path.unlink(missing_ok=True)

    def was_cut_short(self, name: str) -> bool:
        """Whether another command left its folder."""
        return name != self.name and (self._all / name).exists()

    def sidecars(self) -> list[Sidecar]:
        """The cells that this command ran."""
        return [sidecar for sidecar in read_sidecars(self.layout) if sidecar.sweep == self.name]

    def finished(self, python: str) -> list[Lock]:
        """The locks of the cells that this command has finished, oldest first.

        Args:
            python: of the cells that name no other.
        """
        found = []
        for path in sorted(self.layout.results.glob("*.cell.json"), key=lambda path: path.stat().st_mtime):
            with contextlib.suppress(MatrixError):  # what is damaged is told when its cell runs
                sidecar = read_sidecar(path)
                if sidecar.sweep == self.name and sidecar.state != RUNNING and sidecar.date is not None:
                    found.append(Lock(sidecar.id, parse_day(sidecar.date), sidecar.python or python, sidecar.lock, ""))
        return found

    def close(self) -> None:
        """End the command, unless a cell is still under way: then it was cut short, and its folder stays."""
        referred = {sidecar.sweep for sidecar in read_sidecars(self.layout)} - {self.name}
        for folder in self._all.glob("*"):
            if folder.name not in referred:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()


def read_sidecars(layout: Layout) -> list[Sidecar]:
    """All cells that left results."""
    return [read_sidecar(path) for path in sorted(layout.results.glob("*.cell.json"))]


def read_sidecar(path: Path) -> Sidecar:
    """Read a sidecar.

    Raises:
        MatrixError: when it is damaged.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Sidecar(**{**raw, "issues": tuple(raw["issues"])})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise MatrixError(f"{path}: damaged ({error}); remove it and run the cell again") from error


def run_cell(
    matrix: Matrix,
    cell: Cell,
    sweep: Sweep,
    *,
    issues: Sequence[str] = (),
    fresh: bool = False,
    pytest_arguments: Sequence[str] = (),
    following: Sequence[Cell] = (),
    say: Callable[[str], None] = print,
) -> Outcome:
    """Lock, build and test one cell; a cell that cannot be built, or has no room, is an outcome, not an exception.

    Args:
        issues: suites to run, by known issue; empty: all.
        fresh: forget what an earlier run left.
        pytest_arguments: handed to pytest as they are.
        following: cells that this command runs later; the next one's environment is read ahead meanwhile, and none of
            theirs is removed to make room.

    Raises:
        MatrixError: when the machine refuses, or a results file is damaged.
        KeyboardInterrupt: after everything that was started has ended; finished verdicts are kept.
    """
    layout = sweep.layout
    lock = layout.results / f".{cell.id}.lock"
    with said_plainly(), locked(lock, lambda: say(f"{cell.id}: another process runs it; waiting")):
        sweep.under_way(cell.id)
        job = _Job(matrix, cell, sweep, tuple(sorted(issues)), fresh, tuple(pytest_arguments), tuple(following), say)
        outcome = job.run()
        if not outcome.out_of_space:
            sweep.ended(cell.id)
        return outcome


@dataclass
class _Job:
    matrix: Matrix
    cell: Cell
    sweep: Sweep
    issues: tuple[str, ...]
    fresh: bool
    pytest_arguments: tuple[str, ...]
    following: tuple[Cell, ...]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        layout = self.sweep.layout
        self.started = time.monotonic()
        self.results = layout.results / f"{self.cell.id}.jsonl"
        self.path = layout.results / f"{self.cell.id}.cell.json"
        self.before = None if self.fresh or not self.path.exists() else read_sidecar(self.path)
        self.sidecar = Sidecar(self.cell.id, dict(self.matrix.all_pins(self.cell)), RUNNING, self.sweep.name)
        self.sidecar = dataclasses.replace(self.sidecar, issues=self.issues, python=self.cell.python)

    def run(self) -> Outcome:
        layout = self.sweep.layout
        try:
            lock = lock_for(self.matrix, self.cell, layout)
            disk.make_room(lock, layout, self.sweep.finished(self.matrix.python), self._wanted_later(), self.say)
            environment = ensure(lock, layout, self.say)
        except DiskFull as error:
            self._write(INTERRUPTED, str(error))
            return Outcome(self.sidecar, (), out_of_space=True)
        except Untestable as error:
            self._write(UNTESTABLE, str(error))
            return Outcome(self.sidecar, ())
        self.sidecar = dataclasses.replace(
            self.sidecar,
            lock=dict(lock.packages),
            date=lock.date.isoformat(),
            digest=_digest(lock, layout, self.issues, self.pytest_arguments),
        )
        if self._is_finished():
            assert self.before is not None
            self.say(f"{self.cell.id}: finished in a sweep that was cut short; taken over ('-- --fresh' runs it again)")
            self.sidecar = dataclasses.replace(self.before, sweep=self.sweep.name)
            write_whole(self.path, self.sidecar.to_json())
            return self._outcome(None)
        return self._test(environment)

    def _test(self, environment: Environment) -> Outcome:
        resumed = self._goes_on()
        if resumed:
            count = len(_records(self.results))
            self.say(f"{self.cell.id}: goes on after {count} finished verdict{'' if count == 1 else 's'}")
            _drop_torn_line(self.results)
        else:
            before = self.before
            if before is not None and before.state in (RUNNING, INTERRUPTED) and before.digest is not None:
                self.say(f"{self.cell.id}: was cut short, and what it depends on has changed since; starts afresh")
            self.results.unlink(missing_ok=True)
        self._write(RUNNING, None)
        try:
            environment.read_ahead()
            with environment.used(), self._reading_ahead_of_the_next():
                status = process.run(
                    self._command(environment, resumed), env=child_variables(environment), cwd=self.sweep.layout.root
                )
        except KeyboardInterrupt:
            self._write(INTERRUPTED, "it was stopped")
            count = len(_records(self.results))
            left = "1 finished verdict is kept" if count == 1 else f"{count} finished verdicts are kept"
            self.say(
                f"{self.cell.id}: stopped; {left}, the same command goes on after {'it' if count == 1 else 'them'}"
            )
            raise
        unheard = _unheard(status, _records(self.results))
        self._write(TESTED if unheard is None else INTERRUPTED, unheard)
        environment.share_modules()
        return self._outcome(status)

    def _reading_ahead_of_the_next(self) -> contextlib.AbstractContextManager[None]:
        environment = self._next_environment()
        if environment is None:
            return contextlib.nullcontext()
        return process.beside(environment.read_ahead_command(), cwd=self.sweep.layout.root)

    def _wanted_later(self) -> list[Lock]:
        """The locks of the cells that come later, as far as they are known."""
        found = []
        for cell in self.following:
            with contextlib.suppress(MatrixError):  # what is damaged there is told when that cell runs
                found.append(kept(self.matrix, cell, self.sweep.layout))
        return [lock for lock in found if lock is not None]

    def _next_environment(self) -> Environment | None:
        """The environment of the cell that comes next, if it is built."""
        with contextlib.suppress(MatrixError):  # what is damaged there is told when that cell runs
            cell = next((cell for cell in self.following if not self.sweep.has_begun(cell.id)), None)
            lock = kept(self.matrix, cell, self.sweep.layout) if cell is not None else None
            return standing(lock, self.sweep.layout) if lock is not None else None
        return None

    def _command(self, environment: Environment, resumed: bool) -> list[str]:
        return [
            *suite_command(environment, self.sweep.layout, self.results, self.issues),
            *(["--trlcompat-resume"] if resumed else []),
            *self.pytest_arguments,
        ]

    def _is_finished(self) -> bool:
        before = self.before
        return (
            before is not None
            and before.state == TESTED
            and before.digest == self.sidecar.digest
            and self.sweep.was_cut_short(before.sweep)
        )

    def _goes_on(self) -> bool:
        before = self.before
        return (
            before is not None
            and before.state in (RUNNING, INTERRUPTED)
            and before.digest == self.sidecar.digest
            and self.results.exists()
        )

    def _write(self, state: str, reason: str | None) -> None:
        spent = time.monotonic() - self.started
        earlier = self.before.seconds if self.before is not None and self._goes_on() else 0.0
        self.sidecar = dataclasses.replace(self.sidecar, state=state, reason=reason, seconds=round(earlier + spent, 1))
        write_whole(self.path, self.sidecar.to_json())

    def _outcome(self, status: int | None) -> Outcome:
        return Outcome(self.sidecar, tuple(_records(self.results)), status)


def _records(path: Path) -> list[Record]:
    try:
        return read_records(path)
    except RecordError as error:
        raise MatrixError(f"{error}; remove the file and run the cell again") from error


def _drop_torn_line(path: Path) -> None:
    """A run that was killed may have left half a line, which the next verdict must not be appended to."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        write_whole(path, whole.decode("utf-8"))


def _unheard(status: int, records: Sequence[Record]) -> str | None:
    """Why not all suites were heard, from pytest's exit status; ``None`` when they were."""
    if status == _TESTS_PASSED or (status == _TESTS_FAILED and any(map(is_wrong, records))):
        return None
    if status == _TESTS_FAILED and not records:
        return "pytest failed before the first verdict; see its output"
    if status == _TESTS_FAILED:
        return "verdicts are missing, pytest failed though all that it gave are as predicted; see its output"
    if status < 0:
        return f"pytest was killed by signal {-status}"
    if status == _NOTHING_COLLECTED:
        return "pytest collected no suite; is the issue's name right?"
    return f"pytest ended with exit status {status}; see its output"


def suite_command(environment: Environment, layout: Layout, results: Path, issues: Sequence[str] = ()) -> list[str]:
    """The pytest of an environment that runs the suites of ``issues`` (empty: all) and appends their verdicts."""
    return [
        *(str(environment.python), "-m", "pytest", "-p", "trlcompat", "-p", "no:cacheprovider"),
        *("--trlcompat-results", str(results)),
        *(option for issue in issues for option in ("--trlcompat-issue", issue)),
        str(layout.suites),
    ]


def child_variables(environment: Environment) -> dict[str, str]:
    """The child's environment: nothing of the caller's Python or pytest, no plugin but ours, no model hub, no bars.

    And memory in huge pages, where malloc is glibc's: ranks are forks of a process that holds the whole stack, and
    spend a tenth of their time on small pages. What they measure of memory is coarser by it, and no verdict depends on
    that.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "PYTHON", "NOX_", "COV_")) and name != Sweep.VARIABLE
    }
    return {
        **inherited,
        **environment.variables,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "GLIBC_TUNABLES": ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"])),
    }


def _digest(lock: Lock, layout: Layout, issues: Sequence[str], arguments: Sequence[str]) -> str:
    """Of all that verdicts depend on: the versions, our code, the suites, their data, the settings in force."""
    digest = hashlib.sha256(lock.digest.encode())
    digest.update(repr((tuple(issues), tuple(arguments))).encode())
    digest.update(code_digest(layout).encode())
    return digest.hexdigest()[:16]


def code_digest(layout: Layout) -> str:
    """Of our code, the suites, their data and the settings in force."""
    digest = hashlib.sha256()
    for name, value in sorted(os.environ.items()):
        if name.startswith("TRLCOMPAT_") and name not in (Sweep.VARIABLE, "TRLCOMPAT_CACHE", "TRLCOMPAT_RUN"):
            digest.update(f"{name}={value}".encode())
    for folder in (layout.root / "pytest_trlcompat", layout.suites, layout.root / "fixtures"):
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(layout.root)
            if path.is_file() and not set(relative.parts) & {*_IRRELEVANT, "locks", "matrix.toml"}:
                with contextlib.suppress(FileNotFoundError):
                    digest.update(str(relative).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
