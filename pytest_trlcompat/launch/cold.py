"""Cold launches: the same function through the real ``accelerate launch``, ``torchrun`` or ``deepspeed`` command.

Slow, since every rank imports the stack again; warm launches are compared with them. The command starts one keeper
process for each rank (:mod:`pytest_trlcompat.launch.keeper`), which receives the function over a socket in a folder
that only this user can enter. Runs in the test process and must not import the stack.
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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_trlcompat import _processes
from pytest_trlcompat.launch import protocol
from pytest_trlcompat.launch.cluster import Cluster
from pytest_trlcompat.launch.messages import LaunchReport, LaunchSpec, RankReport
from pytest_trlcompat.launch.result import LaunchError, describe_exit
from pytest_trlcompat.launch.strategy import DEEPSPEED_CONFIG_NAME, FSDP_CONFIG_NAMES, Strategy
from pytest_trlcompat.launch.supervise import supervise
from pytest_trlcompat.launch.warm import MARK

__all__ = ["COMMANDS", "accelerate_settings", "default_command", "launch"]

COMMANDS = ("accelerate", "torchrun", "deepspeed")

_SOCKET = "s"  # a short name: a socket's path may have a hundred characters
_START_TIMEOUT = 300.0
_DUMP_TIME, _END_TIMEOUT = 0.5, 5.0
_POLL = 0.1
_LOG_TAIL = 6000
_CREDENTIALS = struct.Struct("3i")
_ACCELERATE_TYPES = {"software": "MULTI_NPU", "cuda": "MULTI_GPU", "cpu": "MULTI_CPU"}


@dataclass
class _Keeper:
    """The connection to the keeper process of one rank."""

    rank: int
    channel: socket.socket
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


def launch(spec: LaunchSpec, strategy: Strategy, command: str, launcher_environment: Mapping[str, str]) -> LaunchReport:
    """Run ``spec`` under a real launcher's command.

    Args:
        spec: as for the warm server; only the caller's part of its environment is used.
        launcher_environment: the environment variables of the command itself.

    Raises:
        LaunchError: the command ended before every rank had started; with its output.
    """
    mark = uuid.uuid4().hex
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trlcompat-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(folder / _SOCKET))
        listener.listen(spec.local_world_size)
        log = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            _command(spec, strategy, command, folder),
            env={**launcher_environment, **_strategy_environment(strategy, command, folder), MARK: mark},
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        stack.callback(_end, process, mark)
        keepers = _Keepers(spec, process, listener, command)
        stack.callback(keepers.close)
        try:
            keepers.start()
        except _Ended as ended:
            log.seek(0)
            tail = log.read().decode(errors="replace")[-_LOG_TAIL:]
            raise LaunchError(f"{command} {ended}; its output:\n{tail}") from None
        timed_out = supervise(keepers, spec.timeout, spec.debugged)
        if not timed_out:
            keepers.dismiss()
        return LaunchReport(keepers.reports(), timed_out, time.monotonic() - started)


class _Ended(Exception):
    """The command ended, or took too long, before all ranks had started."""


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

    def start(self) -> None:
        """Wait until the keepers of all ranks have connected, and send them the launch.

        Raises:
            _Ended: the command ended before that.
        """
        size = self._spec.local_world_size
        deadline = time.monotonic() + _START_TIMEOUT
        self._listener.settimeout(_POLL)
        while len(self._keepers) < size:
            with contextlib.suppress(TimeoutError):
                channel, _ = self._listener.accept()
                self._accept(channel)
            if self._process.poll() is not None and len(self._keepers) < size:
                raise _Ended(f"{describe_exit(self._process.returncode)} and started {len(self._keepers)} ranks")
            if time.monotonic() > deadline:
                raise _Ended(f"started {len(self._keepers)} of {size} ranks within {_START_TIMEOUT:g} s")
        self._send({"kind": "run", "spec": self._spec}, self._keepers.values())

    def running(self) -> bool:
        return any(keeper.running for keeper in self._keepers.values())

    def listen(self, limit: float) -> None:
        with selectors.DefaultSelector() as selector:
            for keeper in self._running():
                selector.register(keeper.channel, selectors.EVENT_READ, keeper)
            for key, _ in selector.select(limit):
                self._receive(key.data)

    def first_failed(self) -> int | None:
        failed = [keeper for keeper in self._keepers.values() if keeper.failed]
        ended = {keeper.rank: keeper.report.ended_at if keeper.report else math.inf for keeper in failed}
        return min(ended, key=lambda rank: ended[rank]) if ended else None

    def dump_stacks(self) -> None:
        self._send({"kind": "dump"}, self._running())
        time.sleep(_DUMP_TIME)

    def end(self, reason: str) -> None:
        """End the running ranks, and receive their reports."""
        self._send({"kind": "end", "reason": reason}, self._running())
        deadline = time.monotonic() + _END_TIMEOUT
        while self.running() and time.monotonic() < deadline:
            self.listen(_POLL)

    def dismiss(self) -> None:
        """Let the keepers exit. That of a failed rank waits, since its exit makes the command end the others."""
        self._send({"kind": "leave"}, self._keepers.values())

    def reports(self) -> tuple[RankReport, ...]:
        """The report of each rank, or that it was lost."""
        lost = f"{self._command} ended it before it could report"
        return tuple(
            keeper.report or RankReport(rank, exit_status=1, ended_by_launcher=lost)
            for rank, keeper in sorted(self._keepers.items())
        )

    def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.channel.close()

    def _running(self) -> list[_Keeper]:
        return [keeper for keeper in self._keepers.values() if keeper.running]

    @staticmethod
    def _send(message: dict[str, Any], keepers: Iterable[_Keeper]) -> None:
        for keeper in keepers:
            keeper.send(message)

    def _accept(self, channel: socket.socket) -> None:
        """Accept a keeper. No other user can reach the socket; that the peer belongs to this user is checked anyway."""
        peer = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(peer)
        if user != os.getuid():
            channel.close()
            return
        channel.settimeout(_START_TIMEOUT)
        rank = int(protocol.receive(channel)["local_rank"])
        self._keepers[rank] = _Keeper(rank, channel)

    def _receive(self, keeper: _Keeper) -> None:
        try:
            data = keeper.channel.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            keeper.gone = True
        for message in keeper.buffer.feed(data):
            keeper.report = message


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
    local, cluster = spec.local_world_size, spec.cluster
    if command == "accelerate":
        config = folder / "accelerate_config.json"
        config.write_text(json.dumps(accelerate_settings(strategy, spec.device, local, cluster, folder), indent=1))
        return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *keeper]
    if command == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *_torchrun_arguments(local, cluster), *keeper]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *_deepspeed_arguments(local), *keeper[1:]]


def accelerate_settings(strategy: Strategy, device: str, local: int, cluster: Cluster, folder: Path) -> dict[str, Any]:
    """A configuration as ``accelerate config`` writes it."""
    host, port = cluster.address or (None, _free_port())  # not 0, which older releases use as a port number
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if strategy.name == "single" else _ACCELERATE_TYPES[device],
        "num_processes": local * cluster.nnodes,
        "num_machines": cluster.nnodes,
        "machine_rank": cluster.node_rank,
        "main_process_ip": host,
        "main_process_port": port,
        "use_cpu": device == "cpu",
        "debug": False,
    }
    if strategy.config is not None:
        # Accelerate rejects settings that are also in DeepSpeed's configuration, such as mixed precision.
        config["distributed_type"] = "DEEPSPEED"
        config["deepspeed_config"] = {"deepspeed_config_file": str(folder / DEEPSPEED_CONFIG_NAME)}
    if strategy.fsdp is not None:
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = dict(_fsdp_config(strategy))
    return config


def _fsdp_config(strategy: Strategy) -> Iterator[tuple[str, Any]]:
    yield "fsdp_version", strategy.fsdp_version
    for name, value in (strategy.fsdp or {}).items():
        yield f"fsdp_{FSDP_CONFIG_NAMES.get(name, name)}", value


def _torchrun_arguments(local: int, cluster: Cluster) -> list[str]:
    if cluster.nnodes == 1:
        return ["--nproc-per-node", str(local), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [
        *("--nnodes", str(cluster.nnodes), "--node-rank", str(cluster.node_rank), "--nproc-per-node", str(local)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(cluster.rdzv_endpoint)),
    ]


def _deepspeed_arguments(local: int) -> list[str]:
    return ["--num_gpus", str(local), "--master_port", str(_free_port()), "--no_local_rank", "--module"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
