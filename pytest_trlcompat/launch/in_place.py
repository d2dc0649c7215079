"""Runs in a rank what a launcher, or another program that a command starts, would run in a process of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_trlcompat.launch import launchers
from pytest_trlcompat.launch.launchers import Read
from pytest_trlcompat.launch.program import CommandError, program
from pytest_trlcompat.launch.starts import ADVICE, NestedLauncherError, Starts
from pytest_trlcompat.launch.strategy import Strategy
from pytest_trlcompat.launch.wrappers import Deadline, Inner, Surroundings
from pytest_trlcompat.strategies import StrategyError

__all__ = ["run_bounded", "run_launcher", "run_program"]

_OF_THE_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Variables that say how ranks meet, which stay the launch's whatever a program gives another."""
_KEPT = (
    "TRLCOMPAT",
    "ACCELERATE_",
    "FSDP_",
    "GLOO_",
    "NCCL_",
    "TORCH_",
    "OMP_",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
)
"""Variables of a launch's own that stay where a program gives another variables that lack them."""


def run_launcher(starts: Starts, started: str, around: Surroundings, read: Callable[[], Read]) -> int:
    """Run what the ranks of a launcher would run.

    Args:
        started: the launcher, for messages.
        around: what surrounds it.
        read: reads its options.

    Returns:
        The exit status.

    Raises:
        NestedLauncherError: the launcher asks for other ranks than this launch's.
    """
    running = starts.running
    text = f"{running!r} starts {started}"
    if threading.current_thread() is not threading.main_thread():
        starts.refuse(f"{text} in a thread, where a rank cannot become one of its ranks; {ADVICE}")
    here = around.path
    try:
        parsed = read()
        asked = launchers.strategy_of(parsed, here)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        launchers.world_size_of(parsed, size)
        inner = program(("python", *parsed.target), here)
    except (CommandError, StrategyError, ImportError) as error:
        starts.refuse(f"{text}, whose ranks these cannot become: {error}; {ADVICE}")
    if asked is not None and running.strategy is not None:
        try:
            _check(text, asked, running.strategy, parsed, size)
        except NestedLauncherError as error:
            starts.refuse(str(error))
    with _variables(around):
        if asked is not None and running.strategy is not None:
            try:
                # TMPDIR is the launcher's own folder, which is removed when that is closed.
                launchers.enter(asked, running.strategy, os.environ, Path(tempfile.mkdtemp()))
            except StrategyError as error:
                starts.refuse(f"{text}, whose ranks these cannot become: {error}; {ADVICE}")
        return starts.run(replace(inner, gets_local_rank=parsed.gets_local_rank))


def run_program(starts: Starts, words: Sequence[str], around: Surroundings) -> int:
    """Run a program that would run in a process of its own, which would be no rank.

    Raises:
        NestedLauncherError: nobody has said that it may.
    """
    running = starts.running
    text = f"{running!r} starts {shlex.join(words)}"
    if running.follow is None:
        starts.refuse(
            f"{text} in a process of its own, which is no rank of this launch. If that is what trains, pass it as the "
            "command, or follow=True, and each rank runs it in its own place; if it is not, pass follow=False"
        )
    if threading.current_thread() is not threading.main_thread():
        starts.refuse(f"{text} in a thread, where a rank cannot run it in its own place; {ADVICE}")
    try:
        inner = program(words, around.path)
    except CommandError as error:
        starts.refuse(f"{text}, which ranks cannot run: {error}")
    with _variables(around):
        return starts.run(inner)


@contextlib.contextmanager
def _variables(around: Surroundings) -> Iterator[None]:
    """Within the block, the variables that a program gives to another, and those of the launch."""
    before = dict(os.environ)
    variables = before
    if around.env is not None:
        ours = {key: value for key, value in before.items() if key.startswith(_OF_THE_LAUNCH)}
        defaults = {key: value for key, value in before.items() if key.startswith(_KEPT)}
        new = {key: value for key, value in around.env.items() if not key.startswith(_OF_THE_LAUNCH)}
        variables = {**defaults, **new, **ours}
    unset = {key for key in around.unset if not key.startswith((*_OF_THE_LAUNCH, "TRLCOMPAT"))}
    try:
        _set_variables({key: value for key, value in variables.items() if key not in unset})
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str]) -> None:
    for key in set(os.environ) - set(variables):
        del os.environ[key]
    os.environ.update(variables)


def _check(text: str, asked: Strategy, running: Strategy, parsed: Read, size: int) -> None:
    if asked.name != running.name:
        raise NestedLauncherError(
            f"{text}, which asks for {asked.name}, while the launch runs under {running.name}; pass "
            f"strategy={asked.name!r}"
        )
    if parsed.size is None and asked.world_size not in (None, size):
        raise NestedLauncherError(
            f"{text}, whose configuration file says {asked.world_size} ranks, while the launch has {size}; pass "
            f"world_size={asked.world_size}, or say --num_processes {size} there"
        )


class _Expired(BaseException):
    """Ends a program whose ``timeout`` is over; not an ``Exception``, so that it is not handled there."""


class _Alarm:
    """A handler of signals that raises once."""

    def __init__(self, expired: _Expired) -> None:
        self.expired, self.has_rung = expired, False

    def __call__(self, number: int, frame: Any) -> None:
        if not self.has_rung:
            self.has_rung = True
            raise self.expired


def run_bounded(starts: Starts, text: str, inner: Inner, run: Callable[[], int]) -> int:
    """Run a command as ``time`` and ``timeout`` do."""
    before, clock = os.times(), time.perf_counter()
    status = run() if inner.deadline is None else _until(starts, text, inner.deadline, run)
    if inner.is_timed:
        after = os.times()
        user, system = after.user - before.user, after.system - before.system
        print(f"real {time.perf_counter() - clock:.2f}\nuser {user:.2f}\nsys {system:.2f}", file=sys.stderr)
    return status


def _until(starts: Starts, text: str, deadline: Deadline, run: Callable[[], int]) -> int:
    """Run it, and end it at the deadline by an exception, where ``timeout`` sends a signal.

    Raises:
        NestedLauncherError: it went on after the deadline.
    """
    if threading.current_thread() is not threading.main_thread():
        return run()  # which refuses
    handler, remaining = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    if isinstance(handler, _Alarm) and 0 < remaining <= deadline.seconds:
        return run()  # a command around this one ends it before
    alarm, started = _Alarm(_Expired(deadline.status)), time.monotonic()
    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, deadline.seconds)
    try:
        run_status = run()
    except _Expired as error:
        # That of a command around this one.
        if error is not alarm.expired:
            raise
        return deadline.status
    finally:
        # Off first, so that it does not ring in the handler that was there before.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            # Never 0, which would switch the alarm of the command around this one off.
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - started), 1e-3))
    if alarm.has_rung:
        starts.refuse(
            f"{starts.running!r} starts {text}, which went on after {deadline.seconds:g} s: it handles BaseException, "
            "by a bare except. Let it handle Exception there"
        )
    return run_status
