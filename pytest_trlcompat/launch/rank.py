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
    """Run the rank and exit by ``os._exit``, since the normal shutdown of a forked interpreter can hang.

    Args:
        rank: its number among the ranks of this machine.
        parent: process id of the server or keeper that forked it; when that ends, so does the rank.
        output: descriptors of files for its stdout and stderr.
    """
    status, process = 1, os.getpid()
    try:
        _become_rank(spec, rank, parent, output)
        outcome = _call(spec, rank)
        with contextlib.suppress(OSError):  # the disk is full, which the outcome says
            _flush()
        is_own = os.getpid() == process  # a process that the function forked and let return has nothing to report
        if is_own:
            protocol.send(channel, outcome)
        status = 0 if outcome.returned else 1
        if is_own and outcome.returned:
            _wait_for_the_others(channel)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _wait_for_the_others(channel: socket.socket) -> None:
    """Keep this process's connections open until every rank has returned or failed, which the other end says.

    A process that ends right after a collective resets connections, from which another rank may still have to read what
    the collective sent: gloo's "Connection reset by peer" there. Not for long, since a rank that waits in a collective
    for one that has returned learns it by the connection's end.
    """
    with contextlib.suppress(OSError):
        channel.settimeout(_LINGER)
        channel.recv(1)


def _become_rank(spec: LaunchSpec, rank: int, parent: int, output: tuple[int, int]) -> None:
    os.setpgid(0, 0)
    _use_batch_scheduling()
    _processes.die_with_parent(parent)  # a killed server must not leave ranks behind
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for ours, standard in zip(output, (1, 2), strict=True):
        os.dup2(ours, standard)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    if spec.debug is not None and rank == spec.debugged:
        debugging.attach(spec.debug.terminal)
    elif spec.debugged is not None:
        debugging.ignore_breakpoints()
    _show_stacks()
    if spec.mode == "warm":  # a cold rank has its launcher's environment
        os.environ.clear()
        os.environ.update(spec.extra_environment)
        os.environ.update(spec.environment)
        os.environ.update(spec.rank_environment[rank])
    tempfile.tempdir = None  # the server has cached its own
    os.chdir(spec.cwd)
    sys.path[:] = [*spec.extra_path, *spec.sys_path]
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
    if "torch.distributed" in sys.modules:  # it read the variable when the server imported it
        sys.modules["torch.distributed"].set_debug_level_from_env()
    if spec.device == "cpu":
        comparing.compare_collectives()
    if spec.debugged is not None:
        debugging.wait_longer()
    _seed(spec.seed)


def _use_batch_scheduling() -> None:
    """Do not let processes that this rank wakes preempt it, if the system allows that.

    Gloo holds a connection's lock while it sends, and its other thread spins until it is free. If the receiver preempts
    a sender that has woken it, the lock stays held: on two cores a small collective then takes three times as long.
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
            observer.install()
            if (subjects := Subjects.of_this_process()) is not None:
                subjects.install()
            with trainings.watching() if spec.relay is not None else contextlib.nullcontext():
                returned = function(*args, **kwargs)
        ended = time.monotonic()
        seen = observer.seen()
        proof.check(spec.expectation, seen, rank)
        value = _dump(returned)
        _flush()
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
    """Write what was printed; the function may have closed or replaced the streams.

    Raises:
        OSError: the disk is full.
    """
    for stream in (sys.stdout, sys.stderr):
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
