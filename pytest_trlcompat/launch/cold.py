"""Cold launches: the same function through the real ``accelerate launch``, ``torchrun`` or ``deepspeed`` command.

Cold launches are slow, since every rank imports the stack again. Warm launches are compared with them. The command
starts one keeper process for each rank (:mod:`pytest_trlcompat.launch.keeper`). The keeper receives the function over a
socket in a folder that only this user can enter. Runs in the test process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pytest_trlcompat import _processes
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.launch import protocol, store
from pytest_trlcompat.launch.messages import LaunchReport, LaunchSpec, RankReport
from pytest_trlcompat.launch.result import LaunchError, describe_exit
from pytest_trlcompat.launch.strategy import Strategy
from pytest_trlcompat.launch.supervise import supervise
from pytest_trlcompat.launch.warm import MARK

__all__ = ["COMMANDS", "accelerate_settings", "default_command", "launch"]

COMMANDS = ("accelerate", "torchrun", "deepspeed")

_SOCKET = "s"
_AGENT_STORE = "agent"
# The elastic agents of torchrun and accelerate otherwise host a store that listens on all interfaces, and unpickle what
# is in it. Without an endpoint, for which accelerate has no option, its file is a temporary one of this user's.
_AGENT = ("--rdzv_backend", "c10d", "--rdzv_conf", "store_type=file")
# From torch 2.5 on, the agents of torchrun and accelerate host a TCPStore for the ranks, too.
_NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_DUMP_TIME, _END_TIMEOUT = 0.5, 5.0
_POLL = 0.1
_LOG_TAIL = 6000
_CREDENTIALS = struct.Struct("3i")


@dataclass
class _Keeper:
    """The connection to the keeper process of one rank.

    Attributes:
        rank: its number on this machine; ``None`` as long as the keeper has not told it.
    """

    channel: socket.socket
    rank: int | None = None
    buffer: protocol.Buffer = field(default_factory=protocol.Buffer)
    report: RankReport | None = None
    gone: bool = False

    @property
    def running(self) -> bool:
        return self.report is None and not self.gone

    @property
    def failed(self) -> bool:
        return self.gone if self.report is None else self.report.exit_status != 0

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            protocol.send(self.channel, message)


def default_command(strategy: Strategy, device: str) -> str:
    """``accelerate``, except for several ranks on a plain CPU, for which it would require MPI."""
    return "torchrun" if device == "cpu" and strategy.name != "single" else "accelerate"


def launch(
    spec: LaunchSpec, strategy: Strategy, command: str, launcher_environment: Mapping[str, str], folder: Path
) -> LaunchReport:
    """Run ``spec`` under a real launcher's command.

    Args:
        spec: as for the warm server; only the caller's part of its environment is used.
        launcher_environment: the environment variables of the command itself.
        folder: an empty one that only this user can enter.

    Raises:
        LaunchError: the command ended before every rank had started, started other ranks than were asked for, or had
            not started all of them within the launch's timeout. The error contains the command's output.
    """
    mark = uuid.uuid4().hex
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with protocol.short_path(folder / _SOCKET) as path:
            listener.bind(path)
        listener.listen(spec.local_world_size)
        log = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        process = subprocess.Popen(
            _command(spec, strategy, command, folder),
            env={
                **launcher_environment,
                **_NO_SHARED_STORE,
                **_strategy_environment(strategy, command, folder),
                MARK: mark,
            },
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        stack.callback(_end, process, mark)
        keepers = _Keepers(spec, process, listener, command)
        # Undone first, as the last: the keepers then see that nobody listens and exit, and the command with them.
        stack.callback(keepers.close)
        try:
            keepers.start()
        except _NotStarted as reason:
            raise LaunchError(f"{command} {reason}; its output:\n{_tail(log)}") from None
        timed_out = supervise(keepers, spec.timeout, spec.debugged)
        if not timed_out:
            keepers.dismiss()
        if keepers.lost:  # the command has still to print why
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT)
        return LaunchReport(keepers.reports(_tail(log)), timed_out, time.monotonic() - started)


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return redacted(log.read().decode(errors="replace"))[-_LOG_TAIL:]


class _NotStarted(Exception):
    """The command ended, or took too long, before all ranks had started, or started others than were asked for."""


class _Keepers:
    """The ranks of one launch, each with a keeper process that the command has started."""

    def __init__(
        self, spec: LaunchSpec, process: subprocess.Popen[bytes], listener: socket.socket, command: str
    ) -> None:
        self._spec = spec
        self._process = process
        self._listener = listener
        self._command = command
        self._keepers: dict[int, _Keeper] = {}
        self._ending = False
        self._silent: list[_Keeper] = []
        """Those that have connected and not told their rank."""

    def start(self) -> None:
        """Wait until all keepers have said which rank they keep, and send them the launch.

        Raises:
            _NotStarted: the command ended before that, started other ranks, or took longer than the launch may.
        """
        size = self._spec.local_world_size
        deadline = time.monotonic() + self._spec.timeout
        self._listener.setblocking(False)
        while True:
            ended = self._process.poll()
            # After poll(), so that what keepers had sent before the command ended is received.
            heard = self._meet(_POLL)
            if len(self._keepers) == size:
                break
            began = f"{len(self._keepers)} of {size} ranks"
            if ended is not None and not heard:
                raise _NotStarted(f"{describe_exit(ended)} and started {began}")
            if time.monotonic() > deadline:
                silent = f"; {len(self._silent)} more had connected and said nothing" if self._silent else ""
                raise _NotStarted(f"started {began} within the launch's timeout of {self._spec.timeout:g} s{silent}")
        self._send({"kind": "run", "spec": self._spec}, self._keepers.values())

    def running(self) -> bool:
        return any(keeper.running for keeper in self._keepers.values())

    def listen(self, limit: float) -> None:
        with selectors.DefaultSelector() as selector:
            for keeper in self._running():
                selector.register(keeper.channel, selectors.EVENT_READ, keeper)
            for key, _ in selector.select(limit):
                self._receive(key.data)
        if not self._ending and self.running() and self._process.poll() is not None:
            # It waits for its ranks, so it has been killed, and they would not learn of it.
            self.end(f"{self._command} {describe_exit(self._process.returncode)}")

    def first_failed(self) -> int | None:
        failed = [keeper for keeper in self._keepers.values() if keeper.failed]
        # A keeper that has gone told no time.
        first = min(failed, key=lambda keeper: keeper.report.ended_at if keeper.report else math.inf, default=None)
        return None if first is None else first.rank

    def dump_stacks(self) -> None:
        self._send({"kind": "dump"}, self._running())
        time.sleep(_DUMP_TIME)

    def end(self, reason: str) -> None:
        """End the running ranks, and receive their reports."""
        # listen, which waits for the reports below, would otherwise come back here.
        self._ending = True
        self._send({"kind": "end", "reason": reason}, self._running())
        deadline = time.monotonic() + _END_TIMEOUT
        while self.running() and time.monotonic() < deadline:
            self.listen(_POLL)

    def dismiss(self) -> None:
        """Let the keepers exit. That of a failed rank waits, since its exit makes the command end the others."""
        self._send({"kind": "leave"}, self._keepers.values())

    @property
    def lost(self) -> bool:
        """Whether a rank has no report."""
        return any(keeper.report is None for keeper in self._keepers.values())

    def reports(self, output: str) -> tuple[RankReport, ...]:
        """The report of each rank, or that it was lost.

        Args:
            output: what the command printed, which is all that is known of a lost rank.
        """
        lost = f"{self._command} ended it, or the process that kept it ended, before it could report"
        return tuple(
            keeper.report or RankReport(rank, exit_status=1, ended_by_launcher=lost, stderr=output)
            for rank, keeper in sorted(self._keepers.items())
        )

    def close(self) -> None:
        for keeper in (*self._keepers.values(), *self._silent):
            keeper.channel.close()

    def _running(self) -> list[_Keeper]:
        return [keeper for keeper in self._keepers.values() if keeper.running]

    @staticmethod
    def _send(message: dict[str, Any], keepers: Iterable[_Keeper]) -> None:
        for keeper in keepers:
            keeper.send(message)

    def _meet(self, limit: float) -> bool:
        """Accept keepers and hear their ranks; ``False`` when there was nothing to do within ``limit`` seconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for keeper in self._silent:
                selector.register(keeper.channel, selectors.EVENT_READ, keeper)
            ready = selector.select(limit)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            else:
                self._hear(key.data)
        return bool(ready)

    def _accept(self) -> None:
        """Accept a keeper."""
        try:
            channel, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        # No other user can reach the socket; that the peer belongs to this one is checked anyway.
        peer = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(peer)
        if user != os.getuid():
            channel.close()
            return
        # For what is sent to it: a keeper that reads nothing must not stop this process for ever.
        channel.settimeout(self._spec.timeout)
        self._silent.append(_Keeper(channel))

    def _hear(self, keeper: _Keeper) -> None:
        """Receive a keeper's rank.

        Raises:
            _NotStarted: it is none of those that were asked for.
        """
        for hello in self._messages(keeper):
            rank, world_size = hello["local_rank"], hello["world_size"]
            requested = self._spec.expectation.world_size
            if world_size != requested:
                raise _NotStarted(f"started {world_size} of {requested} ranks{self._why_fewer()}")
            if rank in self._keepers or not 0 <= rank < self._spec.local_world_size:
                raise _NotStarted(f"started rank {rank} of {requested} twice, or one too many")
            keeper.rank = rank
            self._keepers[rank] = keeper
        if keeper.gone and keeper.rank is None:
            keeper.channel.close()
        if keeper.gone or keeper.rank is not None:
            self._silent.remove(keeper)

    def _why_fewer(self) -> str:
        if self._command == "accelerate" and self._spec.device == "cpu":
            return ": on a plain CPU it starts several by MPI alone, so leave command out, or pass command='torchrun'"
        return ""

    def _receive(self, keeper: _Keeper) -> None:
        for message in self._messages(keeper):
            keeper.report = message

    @staticmethod
    def _messages(keeper: _Keeper) -> list[Any]:
        """What the keeper has sent, now that its connection is readable."""
        try:
            data = keeper.channel.recv(1 << 20)
        except OSError:
            data = b""
        keeper.gone = not data
        return keeper.buffer.feed(data)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Give the command a moment to exit, then end it and all its descendants."""
    try:
        process.wait(timeout=_END_TIMEOUT)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with _processes.ignore_signals():
            process.kill()
            process.wait()
            _processes.kill_marked(f"{MARK}={mark}")


def _strategy_environment(strategy: Strategy, command: str, folder: Path) -> dict[str, str]:
    """The variables that ``accelerate launch`` sets itself and the other commands do not."""
    environment = strategy.environment(folder)  # also writes the DeepSpeed configuration
    return {} if command == "accelerate" else environment


def _command(spec: LaunchSpec, strategy: Strategy, command: str, folder: Path) -> list[str]:
    keeper = ["-m", "pytest_trlcompat.launch.keeper", str(folder / _SOCKET)]
    module = [sys.executable, "-m"]
    local = spec.local_world_size
    if command == "accelerate" and strategy.accelerate is not None:
        # What the launch says itself comes last, and so takes precedence over the user's file and options.
        meeting = ("--num_processes", str(local), "--main_process_port", "0", "--max_restarts", "0")
        return [*module, "accelerate.commands.launch", *strategy.accelerate.words, *meeting, *_AGENT, *keeper]
    if command == "accelerate":
        config = folder / "accelerate_config.json"
        config.write_text(json.dumps(accelerate_settings(strategy, spec.device, local, folder), indent=1))
        return [*module, "accelerate.commands.launch", "--config_file", str(config), *_AGENT, *keeper]
    if command == "torchrun":
        ranks = ("--nproc-per-node", str(local), "--rdzv-endpoint", str(folder / _AGENT_STORE))
        return [*module, "torch.distributed.run", *_AGENT, *ranks, *keeper]
    # Without its -m, for which --module stands there.
    return [*module, "deepspeed.launcher.runner", *_deepspeed_arguments(local), *keeper[1:]]


def accelerate_settings(strategy: Strategy, device: str, local: int, folder: Path) -> dict[str, Any]:
    """A configuration as ``accelerate config`` writes it."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": strategy.family.distributed_type(device),
        "num_processes": local,
        "num_machines": 1,
        "machine_rank": 0,
        "main_process_ip": None,
        "main_process_port": 0,  # nobody listens there; of any other, accelerate asks whether it is free
        "use_cpu": device == "cpu",
        "debug": False,
    }
    if strategy.family.section:
        section = strategy.family.launcher_section(strategy.name, strategy.settings, folder)
        config[strategy.family.section] = section
    return config


def _deepspeed_arguments(local: int) -> list[str]:
    return ["--num_gpus", str(local), "--master_port", store.PORT, "--no_local_rank", "--module"]
