"""What this machine has left for one more process: cores that nobody else keeps busy, and memory, within the limits of
the control groups (version 1 and 2) in which this process is. Linux; imports only the standard library.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Machine"]

_TICKS = os.sysconf("SC_CLK_TCK")
_KIB = 1024
_SHORTEST = 1.0
"""Seconds between two looks at counters that count hundredths of seconds; less says nothing."""


@dataclass
class _Look:
    """Seconds of processor time since the machine's start."""

    when: float
    busy: float
    ours: float


@dataclass
class Machine:
    """
    Attributes:
        proc, cgroups: where the kernel's files are.
        root: the process whose descendants are ours.
    """

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    root: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self._last = self._look()
        self._others = math.inf

    @property
    def cores(self) -> float:
        """That this process may use: by its affinity, and by the quota of its control groups."""
        return min([float(len(os.sched_getaffinity(0))), *self._quotas()])

    def busy_with_others(self) -> float:
        """How many cores other processes kept busy since the last look, at least a second ago; infinity before."""
        if time.monotonic() - self._last.when >= _SHORTEST:
            look = self._look()
            seconds = look.when - self._last.when
            # Whoever waits for a core is not counted: what keeps all of them busy leaves none in any case.
            self._others = max((look.busy - self._last.busy) - (look.ours - self._last.ours), 0.0) / seconds
            self._last = look
        return self._others

    def free_memory(self) -> int:
        """Bytes that processes may still take before something is swapped out or killed."""
        return min([self._available(), *self._group_memory()])

    # Processors

    def _look(self) -> _Look:
        return _Look(time.monotonic(), self._busy(), self._ours())

    def _busy(self) -> float:
        """Of the cores that this process may use."""
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for line in (self.proc / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name in allowed:
                # proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
                counted = list(map(int, fields[:8]))
                ticks += sum(counted) - counted[3] - counted[4]
        return ticks / _TICKS

    def _ours(self) -> float:
        """Of this process and its descendants, those that have ended included."""
        spent: dict[int, float] = {}
        children: dict[int, list[int]] = {}
        for path in self.proc.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The program's name stands in parentheses before these, and may hold spaces and parentheses itself.
                fields = path.read_text(errors="replace").rpartition(")")[2].split()
                pid = int(path.parent.name)
                children.setdefault(int(fields[1]), []).append(pid)
                # proc_pid_stat(5): utime, stime, and of children that were waited for.
                spent[pid] = sum(map(int, fields[11:15])) / _TICKS
        total, waiting = 0.0, [self.root]
        while waiting:
            pid = waiting.pop()
            total += spent.get(pid, 0.0)
            waiting += children.pop(pid, [])
        return total

    def _quotas(self) -> Iterator[float]:
        for folder in self._folders("cpu"):
            words = _text(folder / "cpu.max").split()
            if len(words) == 2 and words[0] != "max":
                yield int(words[0]) / int(words[1])
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
            if quota and period and int(quota) > 0:
                yield int(quota) / int(period)

    # Memory

    def _available(self) -> int:
        for line in (self.proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * _KIB
        return 0

    def _group_memory(self) -> Iterator[int]:
        for folder in self._folders("memory"):
            for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
                most, used = _text(folder / limit), _text(folder / usage)
                if most.isdecimal() and used.isdecimal():
                    yield int(most) - int(used) + self._reclaimable(folder)

    def _reclaimable(self, folder: Path) -> int:
        """Files in memory that nobody has used of late: the kernel drops them when memory is short."""
        lines = [line.partition(" ") for line in _text(folder / "memory.stat").splitlines()]
        # Version 1 has those of the groups inside apart, which usage counts as well.
        return max(
            [int(number) for name, _, number in lines if name in ("total_inactive_file", "inactive_file")] or [0]
        )

    def _folders(self, controller: str) -> Iterator[Path]:
        """The folders of the control groups of this process for a controller, and of those around them."""
        for line in _text(self.proc / "self" / "cgroup").splitlines():
            number, controllers, path = line.split(":", 2)
            # Version 2 has one hierarchy for all controllers, with the number 0 and without their names.
            if number == "0" or controller in controllers.split(","):
                root = self.cgroups if number == "0" else self.cgroups / controller
                folder = root / path.lstrip("/")
                # In a container the path is often the host's, which is not there: its own group is then the root.
                for inner in (folder, *folder.parents):
                    if inner.is_dir():
                        yield inner
                    if inner == root:
                        break


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
