"""The test process's side of a warm server: starts it, sends it launches, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from pytest_trlcompat import _processes
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.launch import protocol
from pytest_trlcompat.launch.messages import LaunchReport, LaunchSpec
from pytest_trlcompat.launch.result import LaunchError, describe_exit

__all__ = ["MARK", "Refused", "Server"]

MARK = "TRLCOMPAT_LAUNCH"
"""The variable that identifies the processes of one server or command, whatever their process group or session."""

_START_TIMEOUT = 600.0
# Time for the server after a launch's own timeout: to dump stacks, end the ranks and collect their output.
_ANSWER_MARGIN = 30.0
_STOP_TIMEOUT = 5.0
# The path comes first, since the package itself may be found by the test process's alone, as in a checkout.
_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from pytest_trlcompat.launch.server import main; main(int(sys.argv[1]))"
)


class Refused(LaunchError):
    """The server could not begin a launch, and waits for the next."""


class Server:
    """A process that has imported the stack and forks the ranks of one launch at a time.

    Args:
        device: ``software``, ``cuda`` or ``cpu``.
        devices: the largest number of software accelerators that its ranks can see.
        environment: its environment variables.
        project_modules: packages of the project under test, which the server imports as well.

    Attributes:
        environment: the environment variables of the server.
        preloaded: the packages of the project, each with the seconds that its import took.
        read: names of the variables that were read while it imported the stack.

    Raises:
        LaunchError: the server could not be started. The error contains the server's output.
        OSError: the system refused a process or a descriptor.
    """

    def __init__(
        self, device: str, devices: int, environment: Mapping[str, str], project_modules: Sequence[str] = ()
    ) -> None:
        self._mark = uuid.uuid4().hex
        self.environment = dict(environment)
        # Undone in reverse where the system refuses the process or a descriptor; kept where it starts.
        with contextlib.ExitStack() as refused:
            self._log: IO[bytes] = refused.enter_context(tempfile.TemporaryFile(dir=environment.get("TMPDIR")))
            self._channel, theirs = socket.socketpair()
            refused.callback(self._channel.close)
            # A test process may have closed its standard streams: one of their numbers would be replaced in the server
            # by its own.
            with socket.socket(fileno=_processes.beyond_standard(theirs.detach())) as theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, str(theirs.fileno()), _json_path()],
                    pass_fds=[theirs.fileno()],
                    env={**environment, MARK: self._mark},
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    # Ctrl-C then reaches the test process alone, which ends the server.
                    start_new_session=True,
                )
            refused.pop_all()
        hello = {
            "device": device,
            "devices": devices,
            "sys_path": list(sys.path),
            "project_modules": tuple(project_modules),
        }
        try:
            refused_text = "the launch server could not start"
            answer = self._exchange(hello, _START_TIMEOUT, "start", refused_text)
            self.preloaded: dict[str, float] = answer["preloaded"]
            self.read: frozenset[str] = answer["read"]
        except BaseException:
            self.stop()
            raise

    @property
    def death(self) -> str | None:
        """How the server ended by itself; ``None`` while it runs."""
        status = self._process.poll()
        return None if status is None else describe_exit(status)

    def launch(self, spec: LaunchSpec) -> LaunchReport:
        """Run a launch.

        Raises:
            Refused: the server could not begin the launch.
            LaunchError: the server died, or did not answer in time.
        """
        marked = replace(spec, environment={**spec.environment, MARK: self._mark})
        meeting = spec.timeout if spec.cluster.nnodes > 1 else 0.0  # which has as long again
        limit, refused = meeting + spec.timeout + _ANSWER_MARGIN, "the launch could not begin"
        report: LaunchReport = self._exchange(marked, limit, "answer", refused)["report"]
        return report

    def stop(self) -> None:
        """Close the connection, which makes the server end its ranks and exit; kill it if it does not."""
        self._channel.close()
        try:
            self._process.wait(timeout=_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._kill()
        # A second Ctrl-C shortens the waiting, but everything is still ended.
        except BaseException:
            self._kill()
            raise
        finally:
            if self._process.returncode != 0:
                # It did not exit by itself, so processes that its ranks started may still run.
                self._kill()
            self._log.close()

    def _kill(self) -> None:
        with _processes.ignore_signals():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # It leads a process group, since it was started in a session of its own.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            _processes.kill_marked(f"{MARK}={self._mark}")

    def _exchange(
        self, message: Mapping[str, Any] | LaunchSpec, limit: float, what: str, refused: str
    ) -> dict[str, Any]:
        self._channel.settimeout(limit)
        try:
            protocol.send(self._channel, message)
            answer: dict[str, Any] = protocol.receive(self._channel)
        except TimeoutError as error:
            raise LaunchError(f"the launch server did not {what} within {limit:g} s\n{self._log_tail()}") from error
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            # The connection ends before the process has, and how that ended is part of the text.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_STOP_TIMEOUT)
            raise LaunchError(
                f"the launch server {self.death or 'closed its connection'}; the next launch starts a new one\n"
                f"{self._log_tail()}"
            ) from error
        if answer["kind"] == "refused":
            raise Refused(f"{refused}: {answer['error']}")
        return answer

    def _log_tail(self) -> str:
        self._log.seek(0)
        return redacted(self._log.read().decode(errors="replace"))[-4000:]


def _json_path() -> str:
    return json.dumps([os.path.abspath(entry) for entry in sys.path])
