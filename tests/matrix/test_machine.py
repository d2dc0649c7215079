"""What a machine has left: by the kernel's files, as they are in containers, and by a real process that is busy."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import machine as machine_module
from pytest_trlcompat.matrix.machine import Machine

GIB = 1024**3

Kernel = Callable[[Mapping[str, str]], Machine]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A machine whose kernel's files are these, of 16 GiB that are free and two cores that may be used."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3})

    def make(files: Mapping[str, str]) -> Machine:
        usual = {
            "proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 16777216 kB\n",
            "proc/stat": "cpu 9 9 9 9\ncpu2 0 0 0 0 0 0 0 0\ncpu3 0 0 0 0 0 0 0 0\n",
            "proc/self/cgroup": "0::/\n",
        }
        for name, text in {**usual, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(tmp_path / "proc", tmp_path / "cgroup", root=100)

    return make


def test_without_control_groups_it_is_what_the_kernel_says(kernel: Kernel) -> None:
    machine = kernel({})
    assert (machine.cores, machine.free_memory()) == (2.0, 16 * GIB)


def test_the_limits_of_control_groups_of_version_2_count_also_those_further_out(kernel: Kernel) -> None:
    machine = kernel(
        {
            "proc/self/cgroup": "0::/a/b\n",
            "cgroup/a/memory.max": f"{4 * GIB}\n",
            "cgroup/a/memory.current": f"{3 * GIB}\n",
            "cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "cgroup/a/b/memory.max": "max\n",
            "cgroup/a/b/memory.current": f"{3 * GIB}\n",
            "cgroup/a/b/cpu.max": "150000 100000\n",
            "cgroup/a/cpu.max": "max 100000\n",
        }
    )
    assert (machine.cores, machine.free_memory()) == (1.5, 2 * GIB)


def test_the_limits_of_control_groups_of_version_1_count(kernel: Kernel) -> None:
    machine = kernel(
        {
            "proc/self/cgroup": "8:memory:/docker/x\n7:cpu,cpuacct:/docker/x\n0::/\n",
            # In a container the folder of its own group is the root.
            "cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            "cgroup/memory/memory.usage_in_bytes": f"{7 * GIB}\n",
            "cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}\n",
            "cgroup/cpu/cpu.cfs_quota_us": "100000\n",
            "cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert (machine.cores, machine.free_memory()) == (1.0, 3 * GIB)


def test_no_limit_is_none(kernel: Kernel) -> None:
    machine = kernel(
        {
            "proc/self/cgroup": "8:memory:/\n7:cpu:/\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "1\n",
            "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert (machine.cores, machine.free_memory()) == (2.0, 16 * GIB)


def stat_line(pid: int, parent: int, seconds: float, of_children: float = 0.0) -> str:
    ticks, theirs = (round(each * machine_module._TICKS) for each in (seconds, of_children))
    return f"{pid} (a name) with ) S {parent} 0 0 0 0 0 0 0 0 0 {ticks} 0 {theirs} 0 20 0 1 0 5\n"


def test_what_others_keep_busy_is_all_but_ours_on_our_cores(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    machine = kernel({"proc/100/stat": stat_line(100, 1, 0), "proc/101/stat": stat_line(101, 100, 0)})
    assert machine.busy_with_others() == math.inf  # before the second look nobody knows
    hundred = machine_module._TICKS
    now[0] += 10
    kernel_files = {
        # Of ten seconds: core 2 user 4, nice 1, system 2, idle 3; core 3 steal 5, iowait 5; core 0 is not ours.
        "proc/stat": "cpu 1 1 1 1\n"
        f"cpu0 {10 * hundred} 0 0 0 0 0 0 0\n"
        f"cpu2 {4 * hundred} {hundred} {2 * hundred} {3 * hundred} 0 0 0 0 0 0\n"
        f"cpu3 0 0 0 0 {5 * hundred} 0 0 {5 * hundred} 0 0\n",
        "proc/100/stat": stat_line(100, 1, 1, of_children=2),
        "proc/101/stat": stat_line(101, 100, 3),
        "proc/102/stat": stat_line(102, 1, 99),
    }
    for name, text in kernel_files.items():
        path = machine.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.busy_with_others() == pytest.approx(0.6)  # 12 of both cores, less 6
    now[0] += 0.5
    assert machine.busy_with_others() == pytest.approx(0.6)  # the last answer: it is too early for another


def test_a_real_process_that_is_busy_is_seen_as_ours_or_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_SHORTEST", 0.0)
    ours = Machine()
    before, spent = ours._ours(), time.process_time()
    while time.process_time() - spent < 0.5:
        pass
    assert ours._ours() - before == pytest.approx(time.process_time() - spent, abs=0.1)
    others = Machine(root=2**22 + 1)  # no process
    others.busy_with_others()
    began, spent = time.monotonic(), time.process_time()
    while time.process_time() - spent < 0.5:
        pass
    # Our own half second at least, whatever else the machine does.
    assert others.busy_with_others() * (time.monotonic() - began) > 0.3
    assert 0 < ours.free_memory() < 2**50
