"""One cell as a job: its input is a lock, its output a file of JSON lines and a sidecar with the state of the run.

An interrupted cell continues after its last verdict. Nothing here assumes that all cells run on one machine. Must not
import the stack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat._due import Account
from pytest_trlcompat._provenance import Provenance, difference, of_environment
from pytest_trlcompat.catalog.verdict import Record, RecordError, is_wrong, read_records
from pytest_trlcompat.matrix import disk, process
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import Environment, ensure, reserved
from pytest_trlcompat.matrix.errors import DiskFull, MatrixError, Untestable
from pytest_trlcompat.matrix.files import explained_os_errors, locked, write_whole
from pytest_trlcompat.matrix.locks import Lock, kept, lock_for
from pytest_trlcompat.matrix.results import (
    INTERRUPTED,
    RUNNING,
    TESTED,
    UNTESTABLE,
    Outcome,
    Sidecar,
    read_sidecar,
)
from pytest_trlcompat.matrix.suite_run import child_variables, code_digest, suite_command
from pytest_trlcompat.matrix.sweep import Sweep

__all__ = ["CellJob", "alone", "finished_before", "run_cell"]

_TESTS_PASSED, _TESTS_FAILED, _NOTHING_COLLECTED = 0, 1, 5


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
    """Lock, build and test one cell; a cell that cannot be built is an outcome, not an exception.

    Args:
        issues: known issues whose suites run; empty: all.
        fresh: discard the results of an earlier run.
        pytest_arguments: passed to pytest unchanged.
        following: cells that this command runs later, whose environments are not removed to free disk space.

    Raises:
        MatrixError: for an error of the operating system, or a damaged results file.
        KeyboardInterrupt: after all child processes have ended; finished verdicts are kept.
    """
    # Sorted, since they are part of the digest by which an interrupted run is continued.
    arguments = (tuple(sorted(issues)), fresh, tuple(pytest_arguments), tuple(following), say)
    with explained_os_errors(), alone(cell, sweep, say):
        return CellJob(matrix, cell, sweep, *arguments).run()


@contextlib.contextmanager
def alone(cell: Cell, sweep: Sweep, say: Callable[[str], None]) -> Iterator[None]:
    """Have no other process run the cell within the block."""
    lock = sweep.layout.results / f".{cell.id}.lock"
    with locked(lock, lambda: say(f"{cell.id}: another process is running it; waiting")):
        sweep.begin_cell(cell.id)
        yield


def finished_before(
    matrix: Matrix,
    cell: Cell,
    sweep: Sweep,
    lock: Lock,
    code: str,
    *,
    issues: Sequence[str] = (),
    pytest_arguments: Sequence[str] = (),
) -> Outcome | None:
    """The outcome of a cell that an interrupted sweep has finished, now as one of this sweep; ``None``: it has to run.

    Args:
        code: of :func:`code_digest`.

    Raises:
        MatrixError: for a damaged sidecar or results file.
    """
    job = CellJob(matrix, cell, sweep, tuple(sorted(issues)), False, tuple(pytest_arguments), (), lambda text: None)
    job.identify(lock, code)
    return job.reuse()


@dataclass
class CellJob:
    """A cell, step by step: it is prepared, begun, and finished or stopped. For its fields see :func:`run_cell`."""

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
        self._is_elsewhere = False
        self._resumed = False
        self._environment: Environment | None = None
        self.results = layout.results / f"{self.cell.id}.jsonl"
        self.path = layout.results / f"{self.cell.id}.cell.json"
        self.before = None if self.fresh or not self.path.exists() else read_sidecar(self.path)
        self.sidecar = Sidecar(self.cell.id, dict(self.matrix.all_pins(self.cell)), RUNNING, self.sweep.name)
        self.sidecar = dataclasses.replace(self.sidecar, issues=self.issues, python=self.cell.python)

    def run(self) -> Outcome:
        """All of it, by one process of pytest, whose output is ours."""
        with contextlib.ExitStack() as reservations:
            if (outcome := self.prepare(reservations)) is not None:
                return outcome
            self.begin()
            try:
                status = process.run(self.command(), env=self.variables, cwd=self.sweep.layout.root)
            except KeyboardInterrupt:
                self.stop()
                raise
            return self.finish(status)

    def prepare(self, reservations: contextlib.ExitStack) -> Outcome | None:
        """Have its environment ready; the outcome where there is nothing to run.

        Args:
            reservations: keeps others from removing the environment until it is closed.
        """
        layout = self.sweep.layout
        try:
            lock = lock_for(self.matrix, self.cell, layout)
            disk.free_space(lock, layout, self.sweep.finished(self.matrix.python), self._later_locks(), self.say)
            # Before it is built: nox -s clean, or a sweep that needs room, could remove it as soon as it is there.
            reservations.enter_context(reserved(lock, layout))
            self._environment = ensure(lock, layout, self.say)
        except DiskFull as error:
            # Not the fault of the cell, with which the same command goes on.
            self._write(INTERRUPTED, str(error))
            return self._ended(Outcome(self.sidecar, (), out_of_space=True))
        except Untestable as error:
            self._write(UNTESTABLE, str(error))
            return self._ended(Outcome(self.sidecar, ()))
        self.identify(lock, code_digest(layout), of_environment(self._environment.root))
        outcome = self.reuse()
        return None if outcome is None else self._ended(outcome)

    def identify(self, lock: Lock, code: str, packages: str = "") -> None:
        """Write down all that the verdicts depend on.

        Args:
            packages: digest of what the environment holds, which was compared with the lock; empty where it is built
                elsewhere, and compared there.
        """
        self._is_elsewhere = not packages
        self.sidecar = dataclasses.replace(
            self.sidecar,
            lock=dict(lock.packages),
            date=lock.date.isoformat(),
            provenance=str(Provenance(code, packages)),
            digest=_digest(lock, code, self.issues, self.pytest_arguments),
        )

    def reuse(self) -> Outcome | None:
        """The outcome of an interrupted sweep, if that has finished the cell."""
        if not self._is_finished():
            return None
        assert self.before is not None
        which = "a sweep that still runs" if self.sweep.still_runs(self.before.sweep) else "an interrupted sweep"
        self.say(f"{self.cell.id}: finished in {which}; its verdicts are reused (not with '-- --fresh')")
        self.sidecar = dataclasses.replace(self.before, sweep=self.sweep.name)
        write_whole(self.path, self.sidecar.to_json())
        return self._outcome(None)

    def begin(self) -> None:
        """Before the first process of pytest starts."""
        self._resumed = self._can_resume()
        if self._resumed:
            count = len(_records(self.results))
            self.say(f"{self.cell.id}: continues after {count} finished verdict{'' if count == 1 else 's'}")
            _drop_partial_line(self.results)
        else:
            before = self.before
            if before is not None and before.state in (RUNNING, INTERRUPTED) and before.digest is not None:
                self.say(f"{self.cell.id}: was interrupted, but what its verdicts depend on has changed; starts again")
            self.results.unlink(missing_ok=True)
        # Before the first verdict, so that a killed run can be told from a finished one.
        self._write(RUNNING, None)

    def command(self, *options: str) -> list[str]:
        """The command of a process of pytest.

        Args:
            options: more of them.
        """
        assert self._environment is not None
        return [
            *suite_command(self._environment, self.sweep.layout, self.results, self.issues),
            *(["--trlcompat-resume"] if self._resumed else []),
            *options,
            *self.pytest_arguments,
        ]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of that process."""
        assert self._environment is not None
        return child_variables(self._environment)

    def stop(self) -> None:
        """After Ctrl-C, when its processes have ended."""
        self._write(INTERRUPTED, "it was stopped")
        count = len(_records(self.results)) if self.results.exists() else 0
        left = "1 finished verdict is kept" if count == 1 else f"{count} finished verdicts are kept"
        self.say(f"{self.cell.id}: stopped; {left}, the same command continues after {'it' if count == 1 else 'them'}")

    def finish(self, status: int, shortfall: str | None = None) -> Outcome:
        """After its processes have ended.

        Args:
            status: the exit status of pytest.
            shortfall: what of the suites has not run, although that says nothing of it.
        """
        assert self._environment is not None
        records = _records(self.results)
        ours = Provenance.parse(self.sidecar.provenance)
        incomplete = _incomplete(status, records) or shortfall or _of_others(records, ours)
        self._write(TESTED if incomplete is None else INTERRUPTED, incomplete)
        # Only the run has compiled what the suites import.
        self._environment.share_modules()
        return self._ended(self._outcome(status))

    def _ended(self, outcome: Outcome) -> Outcome:
        # A cell without room stays among the running ones, so that the same command continues with it.
        if not outcome.out_of_space:
            self.sweep.end_cell(self.cell.id)
        return outcome

    def _later_locks(self) -> list[Lock]:
        """The locks of the cells that run later, as far as they are known."""
        later_locks = []
        for cell in self.following:
            # A damaged lock is reported when its cell runs.
            with contextlib.suppress(MatrixError):
                later_locks.append(kept(self.matrix, cell, self.sweep.layout))
        return [lock for lock in later_locks if lock is not None]

    def _is_finished(self) -> bool:
        before = self.before
        return (
            before is not None
            and before.state == TESTED
            and self._measures_as(before)
            and self.sweep.was_interrupted(before.sweep)
        )

    def _can_resume(self) -> bool:
        before = self.before
        return (
            before is not None
            and before.state in (RUNNING, INTERRUPTED)
            and self._measures_as(before)
            and self.results.exists()
        )

    def _measures_as(self, before: Sidecar) -> bool:
        """Whether an earlier run measured with the same lock, settings, code and packages as this one."""
        if before.digest != self.sidecar.digest:
            return False
        recorded, current = Provenance.parse(before.provenance), Provenance.parse(self.sidecar.provenance)
        # Where the environment is elsewhere, its packages are compared there; the code is part of the digest.
        return recorded.is_known and (self._is_elsewhere or not difference(recorded, current))

    def _write(self, state: str, reason: str | None) -> None:
        spent = time.monotonic() - self.started
        earlier = self.before.seconds if self.before is not None and self._can_resume() else 0.0
        self.sidecar = dataclasses.replace(self.sidecar, state=state, reason=reason, seconds=round(earlier + spent, 1))
        write_whole(self.path, self.sidecar.to_json())

    def _outcome(self, status: int | None) -> Outcome:
        return Outcome(self.sidecar, tuple(_records(self.results)), status)


def _records(path: Path) -> list[Record]:
    try:
        return read_records(path)
    except RecordError as error:
        raise MatrixError(f"{error}; remove the file and run the cell again") from error


def _drop_partial_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed run may have left; the next verdict must not be appended to it."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        write_whole(path, whole.decode("utf-8"))


def _incomplete(status: int, records: Sequence[Record]) -> str | None:
    """Why not all suites gave verdicts, by pytest's exit status; ``None`` if all did."""
    # A verdict that is not as predicted fails its test: with one of these the run is complete nevertheless.
    if status == _TESTS_PASSED or (status == _TESTS_FAILED and any(map(is_wrong, records))):
        return None
    if status == _TESTS_FAILED and not records:
        return "pytest failed before the first verdict; see its output"
    if status == _TESTS_FAILED:
        return "pytest failed although all verdicts are as predicted, so some are missing; see its output"
    if status < 0:
        return f"pytest was killed by signal {-status}"
    if status == _NOTHING_COLLECTED:
        return "pytest collected no suite; is the name of the issue correct?"
    return f"pytest ended with exit status {status}; see its output"


def _of_others(records: Sequence[Record], expected: Provenance) -> str | None:
    """Which verdicts were measured with other code or packages than this run was to measure with."""
    if not records:
        return None  # which is said elsewhere
    account = Account("verdicts", (" ".join(record.key) for record in records))
    for record in records:
        if why := difference(record.provenance, expected):
            account.refuse(" ".join(record.key), f"was measured {why}")
        else:
            account.meet(" ".join(record.key))
    if account.is_complete:
        return None
    return f"{len(account.refused)} of {len(records)} verdicts are not of this run: {account.shortfall()}"


def _digest(lock: Lock, code: str, issues: Sequence[str], arguments: Sequence[str]) -> str:
    """A digest of all that verdicts depend on: the versions, our code, the suites, their data and the settings."""
    digest = hashlib.sha256(lock.digest.encode())
    digest.update(repr((tuple(issues), tuple(arguments))).encode())
    digest.update(code.encode())
    return digest.hexdigest()[:16]
