"""The launcher, which tests call: starts the warm servers, sends them functions, and returns results.

Runs in the test process and must import nothing of the stack.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import traceback
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_trlcompat import stack
from pytest_trlcompat._cleaner import OwnFolder
from pytest_trlcompat._devices import visible_gpus
from pytest_trlcompat.launch import cold
from pytest_trlcompat.launch.cluster import Cluster, ClusterError
from pytest_trlcompat.launch.environment import base_environment, rank_environment
from pytest_trlcompat.launch.limits import explain
from pytest_trlcompat.launch.messages import LaunchReport, LaunchSpec, RankOutcome, RankReport
from pytest_trlcompat.launch.payload import dump
from pytest_trlcompat.launch.proof import expectation
from pytest_trlcompat.launch.result import Failure, LaunchError, LaunchResult, LaunchWarning, RankResult
from pytest_trlcompat.launch.strategy import Strategy, accelerate_config, check_present, strategy
from pytest_trlcompat.launch.warm import Refused, Server

__all__ = ["DEFAULT_TIMEOUT", "DEVICES", "MAX_WORLD_SIZE", "MODES", "Launcher"]

DEFAULT_TIMEOUT = 120.0
"""Seconds that a launch may take, from the fork on."""
MAX_WORLD_SIZE = 8
"""The most ranks on one machine."""
DEVICES = ("software", "cuda", "cpu")
MODES = ("warm", "cold")

_LAUNCHER = "TRLCOMPAT_LAUNCHER"
"""The variable that identifies all processes of a launcher."""


class Launcher:
    """Runs functions on N ranks under a strategy.

    The first launch starts a server, which imports the stack once (about ten seconds); every launch forks fresh ranks
    from it (about a second). Use it as a context manager, or call :meth:`close`.

    Args:
        device: ``"software"`` (the software accelerator), ``"cuda"`` (one GPU per rank) or ``"cpu"``.
        timeout: seconds that a launch may take by default.
        cluster: which machine of several this is; by default a single one.
    """

    def __init__(
        self, device: str = "software", timeout: float = DEFAULT_TIMEOUT, cluster: Cluster | None = None
    ) -> None:
        self.device = _known("device", device, DEVICES)
        self.timeout = timeout
        self.cluster = cluster or Cluster()
        self._servers: dict[str, Server] = {}
        self._folder: OwnFolder | None = None
        self._mark = uuid.uuid4().hex
        self._launches = 0

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the servers and their ranks, and remove the ranks' temporary files.

        A later launch starts a new server.
        """
        servers, self._servers = self._servers, {}
        folder, self._folder = self._folder, None
        with contextlib.ExitStack() as exits:
            if folder is not None:
                exits.callback(folder.remove)
            for server in servers.values():
                exits.callback(server.stop)

    def __call__(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        strategy: str | Strategy | os.PathLike[str] = "ddp",
        world_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        sharded: bool = True,
        seed: int = 0,
        device: str | None = None,
        mode: str = "warm",
        command: str | None = None,
        **kwargs: Any,
    ) -> LaunchResult:
        """Run ``function(*args, **kwargs)`` on every rank.

        Args:
            function: any function. It and its arguments are sent to the ranks by cloudpickle, functions of test
                modules by value. Import the stack inside it, so that the test process does not.
            strategy: its name (see :data:`pytest_trlcompat.launch.strategy.NAMES`), a :class:`Strategy`, or the path
                of an Accelerate configuration file.
            world_size: number of ranks, 1 to 8 on each machine, and on CUDA at most the number of GPUs; by default
                that of the configuration file, else 2 (1 with one GPU), and 1 for ``single``.
            options: the strategy's options, see :func:`pytest_trlcompat.launch.strategy.strategy`.
            timeout: seconds, from the fork on. The command of a cold launch has as long again to start the ranks.
            env: environment variables for the ranks, besides those of the test process and of the strategy.
            check: raise an error when any rank fails; with ``False`` the result is returned anyway.
            sharded: require that the function builds an engine of the strategy (DDP, FSDP, DeepSpeed).
            seed: random seed of Python, NumPy and torch in every rank.
            device: instead of the launcher's.
            mode: ``"warm"``, or ``"cold"`` for new interpreters, started by a real launcher's command.
            command: for a cold launch: ``"accelerate"`` (``accelerate launch``), ``"torchrun"`` or ``"deepspeed"``.

        Raises:
            LaunchError: a rank failed (root cause first), the launch timed out, the server could not be started, or
                the system refused something that a launch needs.
            StrategyError: the strategy or its options are invalid; StrategyAbsent: this stack does not have it.
            ClusterError: the ranks cannot be distributed evenly over the machines.
            ValueError: an invalid world size, or an unknown device, mode or command.
        """
        chosen = _choose(strategy, options)
        check_present(chosen, stack.installed())
        if _known("mode", mode, MODES) == "warm" and command is not None:
            raise ValueError(f"command {command!r} is for cold launches; pass mode='cold' as well")
        device = _known("device", device or self.device, DEVICES)
        size = self._world_size(chosen, device, world_size)
        spec = self._spec(dump(function, args, kwargs), chosen, size, device, mode, timeout, seed, sharded)
        self._launches += 1
        report = self._launch(spec, chosen, command, env or {})
        result = self._result(getattr(function, "__qualname__", repr(function)), spec, report)
        if check and not result.ok:
            raise LaunchError(result.describe(), result)
        return result

    def _spec(
        self,
        payload: bytes,
        chosen: Strategy,
        size: int,
        device: str,
        mode: str,
        timeout: float | None,
        seed: int,
        sharded: bool,
    ) -> LaunchSpec:
        return LaunchSpec(
            payload=payload,
            strategy=chosen.name,
            device=device,
            mode=mode,
            timeout=self.timeout if timeout is None else timeout,
            seed=seed,
            cwd=_working_directory(),
            sys_path=tuple(sys.path),
            rank_environment=self._rank_environment(chosen, size),
            expectation=expectation(chosen, size, device, sharded),
            cluster=self.cluster,
            number=self._launches,
        )

    def _result(self, name: str, spec: LaunchSpec, report: LaunchReport) -> LaunchResult:
        first = self.cluster.node_rank * len(report.ranks) if spec.strategy != "single" else 0
        return LaunchResult(
            name=name,
            strategy=spec.strategy,
            device=spec.device,
            mode=spec.mode,
            ranks=tuple(_rank_result(rank, first) for rank in report.ranks),
            timed_out=report.timed_out,
            seconds=report.seconds,
        )

    def _launch(self, spec: LaunchSpec, chosen: Strategy, command: str | None, env: Mapping[str, str]) -> LaunchReport:
        try:
            own = self._own_folder()
            with tempfile.TemporaryDirectory(prefix="launch-", dir=own, ignore_cleanup_errors=True) as name:
                folder, environment = Path(name), self._environment(spec.device)
                spec = replace(spec, folder=name)
                if spec.strategy != "single" and self.cluster.nnodes == 1:
                    spec = replace(spec, store=str(folder / "store"))
                if spec.mode == "cold":
                    return self._launch_cold(spec, chosen, command, {**environment, **env}, folder)
                settings = chosen.environment(folder)
                return self._launch_warm(replace(spec, environment={**environment, **settings, **env}))
        except OSError as error:
            raise LaunchError(f"the launch could not begin: {explain(error)}") from error

    def _launch_warm(self, spec: LaunchSpec) -> LaunchReport:
        try:
            return self._server(spec.device).launch(spec)
        except Refused:
            raise
        except BaseException:  # also on Ctrl-C: the next launch would otherwise receive the report of this one
            self._forget(spec.device)
            raise

    def _rank_environment(self, chosen: Strategy, size: int) -> tuple[dict[str, str], ...]:
        local = 1 if chosen.name == "single" else self.cluster.local_world_size(size)
        if local > MAX_WORLD_SIZE:
            raise ValueError(f"world_size={size} means {local} ranks on this machine; the maximum is {MAX_WORLD_SIZE}")
        return tuple(rank_environment(chosen, number, size, self.cluster) for number in range(local))

    def _world_size(self, chosen: Strategy, device: str, requested: int | None) -> int:
        here = min(MAX_WORLD_SIZE, visible_gpus()) if device == "cuda" else MAX_WORLD_SIZE
        most = here * self.cluster.nnodes
        default = 1 if chosen.name == "single" else min(most, chosen.world_size or max(2, self.cluster.nnodes))
        size = default if requested is None else requested
        if not 1 <= size <= most:
            why = f": each rank needs a GPU, and {here} are visible" if device == "cuda" else ""
            raise ValueError(f"world_size must be 1 to {most}, not {size}{why}")
        if chosen.name == "single" and size != 1:
            raise ValueError(f"strategy 'single' has one rank, but world_size={size} was requested")
        return size

    def _server(self, device: str) -> Server:
        known = self._servers.get(device)
        if known is not None and known.death is not None:
            warnings.warn(
                f"the launch server {known.death} since the last launch; a new one is started", LaunchWarning, 4
            )
            self._forget(device)
        if device not in self._servers:
            _build_accelerator(device)
            self._servers[device] = Server(device, MAX_WORLD_SIZE, self._environment(device))
        return self._servers[device]

    def _forget(self, device: str) -> None:
        server = self._servers.pop(device, None)
        if server is not None:
            server.stop()

    def _launch_cold(
        self, spec: LaunchSpec, chosen: Strategy, command: str | None, environment: dict[str, str], folder: Path
    ) -> LaunchReport:
        program = _known("command", command or cold.default_command(chosen, spec.device), cold.COMMANDS)
        if program == "deepspeed" and chosen.config is None:
            raise ValueError("command 'deepspeed' launches zero1, zero2 and zero3")
        if self.cluster.nnodes > 1:
            raise ClusterError(
                "cold launches run on one machine: the agents of torchrun and accelerate on several meet at a port "
                "where they unpickle what anybody sends"
            )
        path = [str(Path(__file__).parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
        if spec.device == "software":
            from pytest_trlcompat import accelerator

            _build_accelerator("software")
            device_environment = accelerator.environment(devices=spec.local_world_size)
            standin, *_ = device_environment.pop("PYTHONPATH").split(os.pathsep)
            environment |= device_environment
            path.insert(0, standin)
            spec = replace(spec, extra_path=(standin,))
        environment["PYTHONPATH"] = os.pathsep.join(path)
        return cold.launch(spec, chosen, program, environment, folder)

    def _environment(self, device: str) -> dict[str, str]:
        own = {"TMPDIR": str(self._own_folder() / "tmp"), _LAUNCHER: self._mark}
        return {**base_environment(device, self.cluster), **own}

    def _own_folder(self) -> Path:
        """The folder for temporary files of this launcher and its ranks, until it is closed."""
        if self._folder is not None and not self._folder.exists:
            text = f"the folder for temporary files, {self._folder.path}, has vanished; a new one is made"
            warnings.warn(text, LaunchWarning, 4)
            self._folder.remove()
            self._folder = None
        if self._folder is None:
            path = Path(tempfile.mkdtemp(prefix="trlcompat-"))
            try:
                self._folder = OwnFolder(path, f"{_LAUNCHER}={self._mark}")
            except BaseException:
                path.rmdir()
                raise
        (self._folder.path / "tmp").mkdir(exist_ok=True)
        return self._folder.path


def _known(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; known are {', '.join(known)}")
    return value


def _build_accelerator(device: str) -> None:
    """Compile in the test process, so that its progress line is visible."""
    if device == "software":
        from pytest_trlcompat import accelerator

        accelerator.build()


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError("the test process's working directory does not exist any more; ranks start in it") from error


def _choose(chosen: str | Strategy | os.PathLike[str], options: Mapping[str, Any] | None) -> Strategy:
    if isinstance(chosen, str):
        return strategy(chosen, options)
    if options:
        raise ValueError("options cannot be combined with a Strategy or a configuration file; add them to that")
    return chosen if isinstance(chosen, Strategy) else accelerate_config(chosen)


def _rank_result(report: RankReport, first: int) -> RankResult:
    outcome = report.outcome or RankOutcome(returned=False, ended_at=report.ended_at)
    value, failure = None, outcome.failure
    try:
        value = None if outcome.value is None else pickle.loads(outcome.value)
    except Exception as error:
        failure = _unreadable(error)
    return RankResult(
        rank=first + report.rank,
        value=value,
        failure=failure,
        exit_status=report.exit_status,
        ended_by_launcher=report.ended_by_launcher,
        stdout=report.stdout,
        stderr=report.stderr,
        seconds=report.seconds,
        ended_at=report.ended_at,
        peak_bytes=report.peak_bytes,
        peak_accelerator_bytes=outcome.peak_accelerator_bytes,
        returned=outcome.returned,
        proof=dict(outcome.proof),
    )


def _unreadable(error: Exception) -> Failure:
    message = f"the function's result cannot be unpickled in the test process: {type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return Failure(
        type(error).__name__, message, f"{trace}{message}", tuple(base.__name__ for base in type(error).__mro__)
    )
