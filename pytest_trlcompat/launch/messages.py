"""The messages between the test process, the warm server, the keepers of cold ranks, and the ranks.

Must not import the stack: the test process sends a :class:`LaunchSpec` and receives a :class:`LaunchReport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_trlcompat.launch.cluster import Cluster
from pytest_trlcompat.launch.debugging import Debug
from pytest_trlcompat.launch.measuring import Measurement
from pytest_trlcompat.launch.proof import Expectation
from pytest_trlcompat.launch.relay import Settings, Warned
from pytest_trlcompat.launch.result import Failure

__all__ = ["LaunchReport", "LaunchSpec", "RankOutcome", "RankReport"]


@dataclass(frozen=True)
class LaunchSpec:
    """A launch, as the test process requests it.

    Attributes:
        payload: the function and its arguments, pickled.
        timeout: seconds, from the fork on.
        folder: for files that the launch needs, which exists as long as it runs.
        number: the number of this launch in its launcher, which identifies it among several machines.
        store: where the ranks' store has its files, in a folder that only this user can enter; ``None`` for one rank
            that needs none, and for several machines.
        environment: variables of every rank.
        rank_environment: the additional variables of each rank of this machine, such as ``RANK``.
        raises: whether ranks send the exceptions themselves, see :data:`pytest_trlcompat.launch.raising.RAISES`.
        relay: the settings of warnings and logging, if ranks record what they warn of and log.
        output_folder: where the ranks' output is written to be followed; without, files that nobody else can open.
        debug: which rank gets a terminal, if one does.
        coverage: how ranks measure their coverage, if the test process is measured.
        extra_path: folders that the software accelerator puts before ``sys_path``.
        extra_environment: variables that importing the stack has set, which forked ranks need too.
    """

    payload: bytes
    strategy: str
    device: str
    mode: str
    timeout: float
    seed: int
    cwd: str
    sys_path: tuple[str, ...]
    rank_environment: tuple[Mapping[str, str], ...]
    expectation: Expectation
    cluster: Cluster
    number: int
    folder: str = ""
    store: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    raises: str = "launch"
    relay: Settings | None = None
    output_folder: str | None = None
    debug: Debug | None = None
    coverage: Measurement | None = None
    extra_path: tuple[str, ...] = ()
    extra_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def debugged(self) -> int | None:
        """The number on this machine of the rank that gets a terminal."""
        ranks = [int(settings.get("RANK", "0")) for settings in self.rank_environment]
        return None if self.debug is None or self.debug.rank not in ranks else ranks.index(self.debug.rank)

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this machine."""
        return len(self.rank_environment)


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of a rank, as the rank itself reports it.

    Attributes:
        returned: whether the function returned and the launch was proved to be as requested.
        value: what it returned, pickled.
        ended_at: ``time.monotonic()`` of the function's end.
    """

    returned: bool
    ended_at: float
    value: bytes | None = None
    failure: Failure | None = None
    proof: Mapping[str, Any] = field(default_factory=dict)
    peak_accelerator_bytes: int = 0
    warned: tuple[Warned, ...] = ()
    records: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class RankReport:
    """How a rank ended, as the process that forked it reports it; see :class:`~.result.RankResult`.

    Attributes:
        outcome: the rank's own report; ``None`` if it could not send one.
    """

    rank: int
    exit_status: int
    outcome: RankOutcome | None = None
    ended_by_launcher: str | None = None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    ended_at: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class LaunchReport:
    """How the ranks of this machine ended."""

    ranks: tuple[RankReport, ...]
    timed_out: bool
    seconds: float
