"""What a forked rank does: reset the state it inherited, run the function, prove the strategy, and report.

Runs in a process forked by the warm server, or by a cold rank's keeper.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

import cloudpickle

from pytest_trlcompat import _processes, accelerator
from pytest_trlcompat.accelerator import artefacts
from pytest_trlcompat.launch import (
    beginnings,
    comparing,
    debugging,
    engines,
    gloo_peers,
    proof,
    protocol,
    raising,
    relay,
    store,
)
from pytest_trlcompat.launch.measuring import measured
from pytest_trlcompat.launch.messages import LaunchSpec, RankOutcome
from pytest_trlcompat.launch.result import Failure
from pytest_trlcompat.launch.subjects import Subjects

__all__ = ["STACK_DUMP_SIGNAL", "run"]

STACK_DUMP_SIGNAL = signal.SIGUSR2
_LINGER = 2.0
"""Seconds; a rank needs some milliseconds to read what is left of a collective, if it is given a core."""


def run(spec: LaunchSpec, rank: int, channel: socket.socket, parent: int, output: tuple[int, int]) -> NoReturn:
    """Run the rank, and end the process by ``os._exit``.

    Args:
        rank: its number among the ranks of this machine.
        parent: process id of the server or keeper that forked the rank. When that process ends, the rank ends too.
        output: descriptors of files for its stdout and stderr.
    """
    status, process = 1, os.getpid()
    try:
        _become_rank(spec, rank, parent, output)
        outcome = _call(spec, rank)
        with contextlib.suppress(OSError):  # the disk is full, which the outcome says
            _flush()
        # A process that the function has forked and let return has nothing to report.
        is_own = os.getpid() == process
        if is_own:
            protocol.send(channel, outcome)
        status = 0 if outcome.returned else 1
        if is_own and outcome.returned:
            _wait_for_the_others(channel)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        # The normal shutdown of a forked interpreter can hang.
        os._exit(status)


def _wait_for_the_others(channel: socket.socket) -> None:
    """Keep this process's connections open until the parent says that every rank has returned or failed.

    A process that ends right after a collective resets its connections. Another rank may still have to read from them
    what the collective sent, and then fails with gloo's "Connection reset by peer".
    """
    # Not for long: a rank that waits in a collective for one that has returned notices it by the connection's end.
    with contextlib.suppress(OSError):
        channel.settimeout(_LINGER)
        channel.recv(1)


def _become_rank(spec: LaunchSpec, rank: int, parent: int, output: tuple[int, int]) -> None:
    # A group of its own, so that it can be killed with what it has started.
    os.setpgid(0, 0)
    _use_batch_scheduling()
    _processes.die_with_parent(parent)  # a killed server must not leave ranks behind
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for ours, standard in zip(output, (1, 2), strict=True):
        os.dup2(ours, standard)
    # Line by line, so that what a rank has printed is in its file when it is killed.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    if spec.debug is not None and rank == spec.debugged:
        debugging.attach(spec.debug.terminal)
    elif spec.debugged is not None:
        debugging.ignore_breakpoints()
    _show_stacks()
    if spec.mode == "warm":  # a cold rank has its launcher's environment
        # In this order: what a launch says takes precedence over what importing the stack has set.
        os.environ.clear()
        os.environ.update(spec.extra_environment)
        os.environ.update(spec.environment)
        os.environ.update(spec.rank_environment[rank])
    tempfile.tempdir = None  # the server has cached its own
    os.chdir(spec.cwd)
    sys.path[:] = [*spec.extra_path, *spec.sys_path]
    # The server's arguments are none of a program that parses them.
    sys.argv = ["trlcompat-rank"]
    if spec.mode == "cold":
        engines.load_engines(spec.strategy)
    elif spec.device == "software":
        # Code that distributes a model over all visible devices must see as many as there are ranks.
        accelerator.show_devices(spec.local_world_size)
    if spec.store is not None:
        store.use_file(spec.store)
        if spec.device != "software":
            gloo_peers.refuse_strangers()
    # It read the variable when the server imported it.
    if "torch.distributed" in sys.modules:
        sys.modules["torch.distributed"].set_debug_level_from_env()
    if spec.device == "cpu":
        comparing.compare_collectives()
    if spec.debugged is not None:
        debugging.wait_longer()
    _seed(spec.seed)


def _use_batch_scheduling() -> None:
    """Prevent processes that this rank wakes from preempting it, if the system allows that.

    Gloo holds a connection's lock while it sends, and its other thread spins until the lock is free. If the receiver
    preempts the sender that woke it, the lock stays held, and a small collective on two cores takes three times as
    long.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _show_stacks() -> None:
    """Print the stacks of all threads to stderr on a fatal signal and on :data:`STACK_DUMP_SIGNAL`."""
    if "torch" in sys.modules:
        # Its handler prints the native stack on a fatal signal, then calls the handler that was set before.
        show = getattr(sys.modules["torch"]._C, "_set_print_stack_traces_on_fatal_signal", None)
    else:
        show = None
    # By its number, since the function may put something else in the place of sys.stderr.
    faulthandler.enable(file=2)
    if show is not None:
        show(True)
    # A handler in C, which works even while native code holds the interpreter's lock.
    faulthandler.register(STACK_DUMP_SIGNAL, file=2, all_threads=True)


def _seed(seed: int) -> None:
    """Start every rank of every launch from the same random state."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _call(spec: LaunchSpec, rank: int) -> RankOutcome:
    observer, recorder, trainings = engines.Observer(), relay.Recorder(), beginnings.Beginnings()
    value, failure = None, None
    if spec.relay is not None:
        recorder.install(spec.relay)
    try:
        with measured(spec.coverage):
            function, args, kwargs = cloudpickle.loads(spec.payload)  # noqa: TID251 - of the test process
            # After the payload, whose modules may import engines, and before the function, which builds them.
            observer.install()
            if (subjects := Subjects.of_this_process()) is not None:
                subjects.install()
            with trainings.watching() if spec.relay is not None else contextlib.nullcontext():
                returned = function(*args, **kwargs)
        # Before the proof, whose time is not the function's.
        ended = time.monotonic()
        seen = observer.seen()
        proof.check(spec.expectation, seen, rank)
        value = _dump(returned)
        # Within the try: a full disk fails the rank, instead of losing what it has printed.
        _flush()
    # Also SystemExit, and what pytest.skip and pytest.fail raise, which is no Exception.
    except BaseException as error:
        if spec.debug is not None and spec.debug.post_mortem and rank == spec.debugged:
            debugging.post_mortem(error, spec.debug.rank)
        ended, failure, seen = time.monotonic(), _failure(error, spec.raises), _seen(observer)
    return RankOutcome(
        returned=failure is None,
        ended_at=ended,
        value=value,
        failure=failure,
        proof=seen,
        peak_accelerator_bytes=_peak_accelerator_bytes(),
        warned=tuple(recorder.warned),
        records=(*recorder.records, *trainings.records()),
    )


def _flush() -> None:
    """Write what was printed.

    Raises:
        OSError: the disk is full.
    """
    for stream in (sys.stdout, sys.stderr):
        # The function may have closed the stream, or put something else in its place.
        with contextlib.suppress(ValueError, AttributeError):
            stream.flush()


def _dump(value: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be pickled ({error}); "
            "return plain numbers, strings, lists or tensors"
        ) from error


def _peak_accelerator_bytes() -> int:
    """The peak of allocated memory, summed over the devices of this rank; 0 without an accelerator."""
    torch = sys.modules.get("torch")
    for name in ("npu", "cuda"):
        device = getattr(torch, name, None)
        if device is not None and device.is_available() and device.is_initialized():
            return sum(device.max_memory_allocated(index) for index in range(device.device_count()))
    return 0


def _seen(observer: engines.Observer) -> dict[str, Any]:
    try:
        return observer.seen()
    except Exception:  # the function's own failure is more important
        return {}


def _failure(error: BaseException, raises: str) -> Failure:
    return Failure(
        type_name=type(error).__name__,
        message=artefacts.text_of(error),
        traceback="".join([*traceback.format_exception(error), debugging.quit_reason(error)]),
        mro=tuple(base.__name__ for base in type(error).__mro__),
        artefact=artefacts.of_exception(error),
        outcome=raising.outcome_of(error),
        pickled=_pickled(error) if raises == "original" else None,
    )


def _pickled(error: BaseException) -> bytes | None:
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:
        return None
