"""What a freshly forked rank does: leave the server's state behind, run the function, prove the strategy, report.

Runs inside the fork; must import nothing of the stack that the server has not imported already.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import cloudpickle

from pytest_trlcompat import accelerator
from pytest_trlcompat.launch import proof, protocol

__all__ = ["STACK_DUMP_SIGNAL", "run"]

STACK_DUMP_SIGNAL = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def run(spec: Mapping[str, Any], rank: int, channel: socket.socket, stdout: int, stderr: int) -> NoReturn:
    """Never returns: the rank leaves by ``os._exit``, since returning into a forked interpreter's shutdown can hang."""
    status = 1
    try:
        _become_rank(spec, rank, stdout, stderr)
        message = _call(spec, rank)
        status = 0 if message["kind"] == "returned" else 1
        sys.stdout.flush()
        sys.stderr.flush()
        protocol.send(channel, message)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _become_rank(spec: Mapping[str, Any], rank: int, stdout: int, stderr: int) -> None:
    os.setpgid(0, 0)
    _yield_to_no_wakeup()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed server must not leave ranks behind
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    # A handler in C: it tells where a rank stands even while native code holds the interpreter's lock.
    faulthandler.register(STACK_DUMP_SIGNAL, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(spec["extra_environment"])
    os.environ.update(spec["environment"])
    os.environ.update(spec["rank_environment"][rank])
    os.chdir(spec["cwd"])
    sys.path[:] = [*spec["extra_path"], *spec["sys_path"]]
    sys.argv = ["trlcompat-rank"]
    if spec["device"] == "software":
        # Code that spreads a model over all devices it sees must see as many as there are ranks.
        accelerator.show_devices(spec["world_size"])
    _seed(spec["seed"])


def _yield_to_no_wakeup() -> None:
    """Let whom this rank wakes wait for its turn, where the system allows it.

    Gloo holds a connection's lock while it sends, and its other thread spins until it is free. A sender that gives its
    core to the receiver that it has just woken keeps the lock meanwhile: on two cores a small collective then takes
    three times as long.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _seed(seed: int) -> None:
    """Every rank of every launch starts from the same random state; the server's own never moves."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _call(spec: Mapping[str, Any], rank: int) -> dict[str, Any]:
    observer = proof.Observer()
    try:
        function, args, kwargs = cloudpickle.loads(spec["payload"])
        observer.install()
        value = function(*args, **kwargs)
        ended = time.monotonic()
        seen = observer.seen()
        proof.check(spec["expectation"], seen, rank)
        return {"kind": "returned", "value": _dump(value), "proof": seen, "at": ended}
    except BaseException as error:
        return {"kind": "raised", "failure": _failure(error), "proof": _seen(observer), "at": time.monotonic()}


def _dump(value: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be pickled ({error}); "
            "return plain numbers, strings, lists or tensors"
        ) from error


def _seen(observer: proof.Observer) -> dict[str, Any]:
    try:
        return observer.seen()
    except Exception:  # the function's own failure is what matters
        return {}


def _failure(error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)
    except Exception as broken:
        message = f"<{type(error).__name__} whose text cannot be had: {type(broken).__name__}>"
    return {
        "type_name": type(error).__name__,
        "message": message,
        "traceback": "".join(traceback.format_exception(error)),
        "mro": tuple(base.__name__ for base in type(error).__mro__),
    }
