"""What a launch returns: one result per rank, and one error that describes the root cause first."""

from __future__ import annotations

import pickle
import re
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.launch.relay import Warned
from pytest_trlcompat.launch.stacks import innermost_frame, last_stack

if TYPE_CHECKING:
    from pytest_trlcompat.accelerator.artefacts import Artefact

__all__ = [
    "Failure",
    "LaunchError",
    "LaunchResult",
    "LaunchWarning",
    "RankResult",
    "describe_exit",
    "is_of_ended_peer",
]

_OUTPUT_LINES = 25
_PEER_GONE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
"""Messages of gloo and NCCL after another rank has ended."""
_COLLECTIVES = "torch/distributed/distributed_c10d.py"


@dataclass(frozen=True)
class Failure:
    """An exception that a rank's function raised.

    Attributes:
        type_name: the class's own name, ``RuntimeError``.
        mro: the names of the class and of its bases.
        traceback: the whole formatted traceback, as text.
        artefact: the limit of the software accelerator that caused the exception, if any. Such an exception proves
            nothing about the library.
        outcome: ``"skip"``, ``"xfail"`` or ``"fail"`` if that function of pytest raised the exception.
        pickled: the exception itself, if the launch asked for it.
    """

    type_name: str
    message: str
    traceback: str
    mro: tuple[str, ...] = ()
    artefact: Artefact | None = None
    outcome: str | None = None
    pickled: bytes | None = field(default=None, repr=False)

    def original(self) -> BaseException:
        """The exception itself.

        Raises:
            ValueError: there is none, or it cannot be read in this process; the text, a clause, says why.
        """
        if self.pickled is None:
            raise ValueError("it cannot be pickled")
        try:
            original: BaseException = pickle.loads(self.pickled)  # noqa: S301 - of a rank
        except Exception as problem:
            raise ValueError(f"it cannot be unpickled: {type(problem).__name__}: {problem}") from problem
        return original


@dataclass(frozen=True)
class RankResult:
    """One rank of a launch.

    Attributes:
        value: what the function returned; ``None`` when it did not return.
        failure: the exception it raised, if it did.
        exit_status: as :attr:`subprocess.Popen.returncode`: the negative number of a signal that ended it.
        ended_by_launcher: why the launcher ended this rank (a timeout, another rank's failure), else ``None``.
        seconds: from fork to the function's end, or to the rank's exit.
        ended_at: ``time.monotonic()`` of that end, comparable among the ranks of a launch.
        peak_bytes: peak resident memory of the process, including what it shares with the warm server.
        peak_accelerator_bytes: peak of allocated memory on its accelerator; 0 without one.
        proof: the observed world size, device, distributed type and sharding.
        warned: the warnings that it has shown, of a launch by pytest's fixtures.
        records: the log records that reached its root logger, as plain values, of such a launch.
    """

    rank: int
    value: Any = None
    failure: Failure | None = None
    exit_status: int = 0
    ended_by_launcher: str | None = None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    ended_at: float = 0.0
    peak_bytes: int = 0
    peak_accelerator_bytes: int = 0
    returned: bool = False
    proof: dict[str, Any] = field(default_factory=dict)
    warned: tuple[Warned, ...] = ()
    records: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        return self.returned and self.failure is None and self.exit_status == 0 and self.ended_by_launcher is None

    @property
    def noticed(self) -> bool:
        """Whether it failed with no more than that another rank had ended."""
        return self.failure is not None and is_of_ended_peer(self.failure.message)

    @property
    def was_in_collective(self) -> bool:
        """Whether this rank failed, or was ended, while it waited for other ranks."""
        if self.failure is not None:
            return self.noticed
        return any(_COLLECTIVES in frame.file for frame in last_stack(self.stderr)[:1])

    @property
    def artefact(self) -> Artefact | None:
        """The limit of the software accelerator that ended it, if any; its end then says nothing about the library."""
        if self.ok or (self.failure is not None and self.failure.artefact is not None):
            return None if self.failure is None else self.failure.artefact
        from pytest_trlcompat.accelerator import artefacts

        printed = artefacts.printed_in(self.stderr)
        # Only a signal that nobody here has sent is a crash.
        if printed is not None or self.exit_status >= 0 or self.ended_by_launcher is not None:
            return printed
        return artefacts.of_crash(describe_exit(self.exit_status), self.stderr)

    def describe(self) -> str:
        """One line on how this rank ended."""
        if self.failure is not None:
            return f"rank {self.rank} raised {self.failure.type_name} after {self.seconds:.1f} s"
        if self.ended_by_launcher is not None:
            ended = f"rank {self.rank} was ended by the launcher after {self.seconds:.1f} s: {self.ended_by_launcher}"
            location = innermost_frame(self.stderr)
            return ended if location is None else f"{ended}; it was in {location}"
        if not self.returned or self.exit_status != 0:
            return f"rank {self.rank} {describe_exit(self.exit_status)} after {self.seconds:.1f} s"
        return f"rank {self.rank} returned after {self.seconds:.1f} s"


@dataclass(frozen=True)
class LaunchResult:
    """All ranks of a launch, in the order of rank."""

    name: str
    strategy: str
    device: str
    ranks: tuple[RankResult, ...]
    timed_out: bool = False
    seconds: float = 0.0
    mode: str = "warm"

    @property
    def ok(self) -> bool:
        return not self.timed_out and all(rank.ok for rank in self.ranks)

    @property
    def values(self) -> list[Any]:
        """The functions' return values, one per rank."""
        return [rank.value for rank in self.ranks]

    @property
    def root_cause(self) -> RankResult | None:
        """The first failure by time.

        Ranks that only noticed another one's end come after those that failed by themselves, and last come those that
        the launcher ended.
        """
        failed = [rank for rank in self.ranks if not rank.ok]
        # Not by time alone: others may notice the end of a killed rank before it is reported itself.
        return min(
            failed, key=lambda rank: (rank.ended_by_launcher is not None, rank.noticed, rank.ended_at), default=None
        )

    @property
    def failed_by_themselves(self) -> tuple[RankResult, ...]:
        """The root cause first, then the other ranks that failed for a reason of their own, in the order of rank.

        Those are not among them that the launcher ended, or that only noticed in a collective that another had failed.
        """
        cause = self.root_cause
        if cause is None:
            return ()
        others = (
            rank
            for rank in self.ranks
            if rank is not cause and not rank.ok and rank.ended_by_launcher is None and not rank.was_in_collective
        )
        return (cause, *others)

    @property
    def artefact(self) -> Artefact | None:
        """The limit of the software accelerator that made it fail, if any; it then says nothing about the library.

        It is that of the root cause; if that rank only waited for others, or noticed that one had ended, of any other.
        """
        cause = self.root_cause
        if cause is None or cause.artefact is not None:
            return None if cause is None else cause.artefact
        others = self.ranks if cause.was_in_collective or self.timed_out else ()
        return next((rank.artefact for rank in others if rank.artefact is not None), None)

    def _left_early(self, rank: RankResult, cause: RankResult) -> str:
        """The addition for a rank that returned while the failed one waited for it in a collective."""
        if not rank.ok or rank.ended_at > cause.ended_at or not cause.was_in_collective:
            return ""
        before = cause.ended_at - rank.ended_at
        return f", {before:.1f} s before that: it did not take part in the collective in which rank {cause.rank} waited"

    def describe(self) -> str:
        """A full description of a failed launch, without secrets: the root cause first, then the other ranks."""
        what = f"{self.name} under {self.strategy} on {len(self.ranks)} rank(s), device {self.device}"
        cause = self.root_cause
        if cause is None:
            return f"launch of {what} succeeded"
        verb = "timed out" if self.timed_out else "failed"
        lines = [f"launch of {what} {verb}; first observed failure: {cause.describe()}"]
        if self.artefact is not None:
            lines.append(self.artefact.describe())
        if cause.failure is not None:
            lines.append(cause.failure.traceback.rstrip())
        for rank in self.ranks:
            if rank is not cause:
                lines.append(rank.describe() + self._left_early(rank, cause))
                if rank.failure is not None and not _same(rank.failure, cause.failure):
                    lines.append(rank.failure.traceback.rstrip())
        # After a timeout, the output of any of them may say why.
        shown = self.ranks if self.timed_out else (cause,)
        for rank in shown:
            for name in ("stdout", "stderr"):
                tail = getattr(rank, name).rstrip().splitlines()[-_OUTPUT_LINES:]
                if tail:
                    lines += [f"--- {name} of rank {rank.rank}, last {len(tail)} line(s)", *tail]
        return redacted("\n".join(lines))


class LaunchWarning(UserWarning):
    """Something went wrong, but the launch could still run."""


class LaunchError(Exception):
    """A launch failed. ``result`` has the results of all ranks; ``None`` if no rank was started.

    The message is kept in evidence and in the logs of continuous integration, so it has no secrets.
    """

    def __init__(self, message: str, result: LaunchResult | None = None) -> None:
        super().__init__(redacted(message))
        self.result = result

    @property
    def failure(self) -> Failure | None:
        """The root cause's exception, if there is one."""
        cause = None if self.result is None else self.result.root_cause
        return None if cause is None else cause.failure

    @property
    def artefact(self) -> Artefact | None:
        """The limit of the software accelerator that caused it, if any; it then says nothing about the library."""
        return None if self.result is None else self.result.artefact


def describe_exit(status: int) -> str:
    """``-9`` -> ``was killed by SIGKILL (often: out of memory)``; ``0`` -> it ended without a result."""
    if status == 0:
        return "exited with status 0 before its function returned"
    if status > 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")


def is_of_ended_peer(message: str) -> bool:
    """Whether an exception's text says no more than that another rank had ended."""
    return _PEER_GONE.search(message) is not None


def _same(failure: Failure, other: Failure | None) -> bool:
    return other is not None and (failure.type_name, failure.message) == (other.type_name, other.message)
