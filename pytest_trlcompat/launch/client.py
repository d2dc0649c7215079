"""The launcher, which tests call: starts the warm servers, sends them functions, and returns results.

Runs in the test process.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import os
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pytest_trlcompat import stack
from pytest_trlcompat._cleaner import OwnFolder
from pytest_trlcompat._devices import visible_gpus
from pytest_trlcompat.launch import cold, commands, launchers
from pytest_trlcompat.launch.cluster import Cluster, ClusterError
from pytest_trlcompat.launch.debugging import PATIENCE, Debug
from pytest_trlcompat.launch.environment import base_environment, rank_environment
from pytest_trlcompat.launch.launchers import Read
from pytest_trlcompat.launch.limits import explain
from pytest_trlcompat.launch.live import followed
from pytest_trlcompat.launch.measuring import measurement, merge
from pytest_trlcompat.launch.messages import LaunchReport, LaunchSpec
from pytest_trlcompat.launch.payload import arguments, dump
from pytest_trlcompat.launch.program import interpreter_path
from pytest_trlcompat.launch.proof import expectation
from pytest_trlcompat.launch.raising import RAISES, error_of
from pytest_trlcompat.launch.relay import settings_of_this_process
from pytest_trlcompat.launch.result import LaunchError, LaunchResult, LaunchWarning
from pytest_trlcompat.launch.returned import of_one_accord, rank_result
from pytest_trlcompat.launch.running import Run
from pytest_trlcompat.launch.servers import MAX_WORLD_SIZE, Servers, build_accelerator
from pytest_trlcompat.launch.strategy import Strategy, accelerate_config, check_present, is_file_name, strategy
from pytest_trlcompat.launch.words import LauncherWords
from pytest_trlcompat.strategies import StrategyError, families

__all__ = ["DEFAULT_TIMEOUT", "DEVICES", "MODES", "Launcher", "Relay"]

DEFAULT_TIMEOUT = 120.0
"""Seconds that a launch may take, from the fork on."""
DEVICES = ("software", "cuda", "cpu")
MODES = ("warm", "cold")
_COVERAGE = "coverage"


class Relay(Protocol):
    """What a launcher calls after each launch."""

    @property
    def active(self) -> bool:
        """Whether the next launch is one that it is called for."""

    def __call__(self, result: LaunchResult, failed: BaseException | None) -> None:
        """Take the result, and the error that the launch is about to raise, if there is one."""


_LAUNCHER = "TRLCOMPAT_LAUNCHER"
"""The variable that identifies all processes of a launcher."""


class Launcher:
    """Runs functions on N ranks under a strategy.

    The first launch starts a server, which imports the stack once (about ten seconds). Every launch forks fresh ranks
    from that server (about a second). Launches from several threads run one after the other, and the timeout of each
    starts when it begins. Use the launcher as a context manager, or call :meth:`close`.

    Args:
        device: ``"software"`` (the software accelerator), ``"cuda"`` (one GPU per rank) or ``"cpu"``.
        timeout: seconds that a launch may take by default.
        cluster: which machine of several this is; by default a single one.
        relay: is called after each launch, while it is active, with the result and with the error that the launch is
            about to raise, if any. Ranks then record their warnings and log records, and pytest's fixtures repeat these
            in the test.
        live: print the output of ranks while they run, and the rank in front of each line.
        debug: makes a context for each launch, in which one rank has the terminal. Launches then have no timeout.
        preload: modules of the project under test, which the server imports together with the stack, so that ranks need
            not import them.
    """

    def __init__(
        self,
        device: str = "software",
        timeout: float = DEFAULT_TIMEOUT,
        cluster: Cluster | None = None,
        relay: Relay | None = None,
        live: bool = False,
        debug: Callable[[], contextlib.AbstractContextManager[Debug]] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        self.device = _known("device", device, DEVICES)
        self.timeout = timeout
        self.cluster = cluster or Cluster()
        self.relay = relay
        self.live = live
        self.debug = debug
        self.preload = tuple(preload)
        self._servers = Servers(self.preload, self._environment)
        self._accelerate_variables: dict[tuple[Any, ...], dict[str, str]] = {}
        self._folder: OwnFolder | None = None
        self._mark = uuid.uuid4().hex
        self._launches = 0
        # A server runs one launch at a time, and answers in the order of requests.
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the servers and their ranks, and remove the ranks' temporary files.

        A later launch starts a new server.
        """
        folder, self._folder = self._folder, None
        # Backwards: servers and ranks end, their coverage is merged, and then the folder goes.
        with contextlib.ExitStack() as exits:
            if folder is not None:
                exits.callback(folder.remove)
                exits.callback(merge, folder.path / _COVERAGE)
            exits.callback(self._servers.close)

    @property
    def preloaded(self) -> Mapping[str, float]:
        """The seconds that importing each module of ``preload`` took, in the servers that were started."""
        return self._servers.preloaded

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
        raises: str = "launch",
        sharded: bool = True,
        seed: int = 0,
        device: str | None = None,
        mode: str = "warm",
        command: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> LaunchResult:
        """Run ``function(*args, **kwargs)`` on every rank.

        Args:
            function: any function. Cloudpickle sends it and its arguments to the ranks; functions of test modules are
                sent by value. Import the stack inside the function, so that the test process does not import it.
            strategy: its name (see :data:`pytest_trlcompat.strategies.NAMES`), a :class:`Strategy`, or the path
                of an Accelerate configuration file, as text or as a ``Path``.
            world_size: number of ranks: 1 to 8 on each machine, and on CUDA at most the number of GPUs. The default is
                1 for ``single``, else the number in the configuration file, else 2 (1 with one GPU).
            options: the strategy's options, see :func:`pytest_trlcompat.launch.strategy.strategy`.
            timeout: seconds from the fork on. The command of a cold launch has the same time in addition, to start the
                ranks.
            env: environment variables for the ranks, in addition to those of the test process and of the strategy.
            check: raise an error when any rank fails; with ``False`` the result is returned anyway.
            raises: ``"launch"`` for a :class:`LaunchError` when a rank fails; ``"original"`` for the exception that the
                first failed rank raised, with the :class:`LaunchError` as its cause.
            sharded: require that the function builds an engine of the strategy (DDP, FSDP, DeepSpeed).
            seed: random seed of Python, NumPy and torch in every rank.
            device: replaces the launcher's.
            mode: ``"warm"``, or ``"cold"`` for new interpreters, started by a real launcher's command.
            command: for a cold launch: ``"accelerate"`` (``accelerate launch``), ``"torchrun"`` or ``"deepspeed"``.
            kwargs: keyword arguments of the function whose names are in this list: ``kwargs={"seed": 7}``.
            more: all other keyword arguments of the function.

        Raises:
            LaunchError: a rank failed (root cause first), the launch timed out, the server could not be started, or
                the system refused something that a launch needs.
            pytest.skip.Exception: a rank called ``pytest.skip``, and no rank failed for another reason. The same holds
                for ``pytest.xfail`` and ``pytest.fail``.
            StrategyError: the strategy or its options are invalid; StrategyAbsent: this stack does not have it.
            ClusterError: the ranks cannot be distributed evenly over the machines.
            ValueError: an invalid world size, or an unknown device, mode or command.
            TypeError: the function cannot be called with these arguments.
        """
        # First of all, while the parameters are the only local variables.
        parameters = locals()
        taken = {name: parameters[name] for name, default in _OWN.items() if parameters[name] != default}
        __tracebackhide__ = _HIDE
        chosen = _choose(strategy, options)
        check_present(chosen, stack.installed())
        if _known("mode", mode, MODES) == "warm" and command is not None:
            raise ValueError(f"command {command!r} is for cold launches; pass mode='cold' as well")
        device = _known("device", device or self.device, DEVICES)
        chosen = self._read_by_accelerate(chosen, device, env, timeout)
        size = self._world_size(chosen, device, world_size)
        named = arguments(function, args, kwargs or {}, more, taken)
        try:
            spec = self._spec(dump(function, args, named), chosen, size, device, mode, timeout, seed, sharded)
            spec = replace(spec, raises=_known("raises", raises, RAISES))
            relay = self.relay if self.relay is not None and self.relay.active else None
            if relay is not None:
                spec = replace(spec, relay=settings_of_this_process())
            with self._one_at_a_time:
                # Within the lock, since several machines tell their launches apart by this number.
                self._launches += 1
                report = self._launch(replace(spec, number=self._launches), chosen, command, env or {})
        except LaunchError as error:
            raise error.with_traceback(None) from None  # its text says it all
        result = self._result(getattr(function, "__qualname__", repr(function)), spec, report)
        failed = error_of(result, raises) if check and not result.ok else None
        if relay is not None:
            relay(result, failed)
        if failed is not None:
            raise failed.with_traceback(None)
        return result

    def command(
        self,
        words: Sequence[str | os.PathLike[str]],
        /,
        *,
        strategy: str | Strategy | os.PathLike[str] | None = None,
        world_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        sharded: bool = True,
        seed: int = 0,
        device: str | None = None,
        mode: str = "warm",
        follow: bool | None = None,
    ) -> LaunchResult:
        """Run a command's program on every rank, as ``__main__``: ``["trl", "sft", "--config", "sft.yaml"]``.

        Args:
            words: ``["python", "-m", "package.module", ...]``, ``["python", "script.py", ...]``, ``["script.py", ...]``
                or the name of an installed command that is written in Python. A command may also begin with
                ``accelerate launch``, ``torchrun`` or ``deepspeed``: their options then say the strategy and the number
                of ranks, and the words after them what runs. If the program itself starts one of these launchers, the
                ranks of this launch run what that launcher would.
            strategy: as in a launch of a function. The default is what the launcher's options say, else ``"ddp"``.
            world_size: as in a launch of a function. The default is what the launcher's options say.
            cwd: the working directory, to which paths are relative. The default is that of the test process.
            sharded: require that the program builds an engine of the strategy (DDP, FSDP, DeepSpeed).
            follow: what happens if the program starts another Python program as a process, which would not be a rank.
                With ``True`` each rank runs that program itself, with ``False`` the process is started as usual. By
                default the launch fails, and the error names what was started.
            options, timeout, env, check, seed, device, mode: as in a launch of a function.

        Returns:
            ``values`` holds the exit status of each rank, which is 0; ``ranks`` holds what each rank printed.

        Raises:
            LaunchError: as in a launch of a function; also if the program ends with an exit status other than 0.
            CommandError: the command cannot run in ranks, or contradicts ``strategy`` or ``world_size``.
            StrategyError, ValueError, TypeError: as in a launch of a function.
        """
        __tracebackhide__ = _HIDE
        folder = Path(_working_directory()) / (cwd or "")
        requested = None if strategy is None else _choose(strategy, options, folder)
        if requested is None and options:
            raise ValueError("options need a strategy that they are of: pass strategy= as well")
        where: dict[str, Any] = {"device": device, "env": env, "timeout": timeout}

        def read(launcher: LauncherWords) -> Read:
            parsed: Read = self(launchers.read, launcher, folder, strategy="single", raises="original", **where).values[
                0
            ]
            return parsed

        planned = commands.plan(words, folder, requested, world_size, _choose("ddp", None), read)
        cold_by = planned.launcher if mode == "cold" else None
        return self(
            Run(
                replace(planned.program, follow=follow, interpreter_path=interpreter_path(), test_path=tuple(sys.path))
            ),
            strategy=planned.strategy,
            world_size=planned.world_size,
            check=check,
            sharded=sharded,
            seed=seed,
            mode=mode,
            command=cold_by,
            **where,
        )

    def _read_by_accelerate(
        self, chosen: Strategy, device: str, env: Mapping[str, str] | None, timeout: float | None
    ) -> Strategy:
        """The strategy with what Accelerate's own launcher sets for ranks, where a user's file or options say it."""
        if chosen.needs_cpu and device != "cpu":
            source = chosen.accelerate.config_file if chosen.accelerate is not None else chosen.name
            raise StrategyError(
                f"{source} asks for the CPU (use_cpu, or distributed_type: MULTI_CPU), and the device of the launch is "
                f"{device}; pass device='cpu'"
            )
        accelerate = chosen.accelerate
        if accelerate is None or accelerate.variables is not None:
            return chosen
        content = b"" if accelerate.config_file is None else Path(accelerate.config_file).read_bytes()
        # With the file's content, since a test may change it between two launches.
        key = (accelerate.words, accelerate.folder, content, device, tuple(sorted((env or {}).items())))
        if key not in self._accelerate_variables:
            self._accelerate_variables[key] = self(
                launchers.variables_of,
                chosen,
                strategy="single",
                raises="original",
                device=device,
                env=env,
                timeout=timeout,
            ).values[0]
        return replace(chosen, accelerate=replace(accelerate, variables=self._accelerate_variables[key]))

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
            number=0,  # until its turn comes
        )

    def _result(self, name: str, spec: LaunchSpec, report: LaunchReport) -> LaunchResult:
        first = self._first_rank(spec)
        ranks = [rank_result(rank, first) for rank in report.ranks]
        if spec.expectation.engine is not None:
            ranks = of_one_accord(ranks)
        return LaunchResult(
            name=name,
            strategy=spec.strategy,
            device=spec.device,
            mode=spec.mode,
            ranks=tuple(ranks),
            timed_out=report.timed_out,
            seconds=report.seconds,
        )

    def _first_rank(self, spec: LaunchSpec) -> int:
        return 0 if spec.strategy == "single" else self.cluster.node_rank * spec.local_world_size

    def _launch(self, spec: LaunchSpec, chosen: Strategy, command: str | None, env: Mapping[str, str]) -> LaunchReport:
        try:
            with contextlib.ExitStack() as exits:
                session_folder = self._own_folder()
                name = exits.enter_context(
                    tempfile.TemporaryDirectory(prefix="launch-", dir=session_folder, ignore_cleanup_errors=True)
                )
                folder, environment = Path(name), self._environment(spec.device)
                spec = replace(spec, folder=name, coverage=measurement(session_folder / _COVERAGE))
                if spec.strategy != "single" and self.cluster.nnodes == 1:
                    spec = replace(spec, store=str(folder / "store"))
                if self.debug is not None:
                    debug = exits.enter_context(self.debug())
                    if debug.rank < self._first_rank(spec) + spec.local_world_size:
                        spec = replace(spec, debug=debug, timeout=PATIENCE)
                if self.live:
                    spec = replace(spec, output_folder=name)
                    exits.enter_context(followed(name, self._first_rank(spec), spec.local_world_size))
                if spec.mode == "cold":
                    return self._launch_cold(spec, chosen, command, {**environment, **env}, folder)
                settings = chosen.environment(folder)
                spec = replace(spec, environment={**environment, **settings, **env})
                # What a strategy sets is for its ranks; the server's imports have never had it.
                return self._servers.launch(spec, {**environment, **env})
        except OSError as error:
            raise LaunchError(f"the launch could not begin: {explain(error)}") from error

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

    def _launch_cold(
        self, spec: LaunchSpec, chosen: Strategy, command: str | None, environment: dict[str, str], folder: Path
    ) -> LaunchReport:
        program = _known("command", command or cold.default_command(chosen, spec.device), cold.COMMANDS)
        if program == "deepspeed" and chosen.config is None:
            *most, last = (name for family in families() if "deepspeed" in family.packages for name in family.names)
            raise ValueError(f"command 'deepspeed' launches {', '.join(most)} and {last}")
        if self.cluster.nnodes > 1:
            raise ClusterError(
                "cold launches run on one machine: the agents of torchrun and accelerate on several meet at a port "
                "where they unpickle what anybody sends"
            )
        # The command must find this package, which may be a checkout.
        path = [str(Path(__file__).parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
        if spec.device == "software":
            from pytest_trlcompat import accelerator

            build_accelerator("software")
            device_environment = accelerator.environment(devices=spec.local_world_size)
            # Its first entry; what follows is this process's own PYTHONPATH, which is in the list already.
            standin, *_ = device_environment.pop("PYTHONPATH").split(os.pathsep)
            environment |= device_environment
            path.insert(0, standin)
            spec = replace(spec, extra_path=(standin,))
        environment["PYTHONPATH"] = os.pathsep.join(path)
        return cold.launch(spec, chosen, program, environment, folder)

    def _environment(self, device: str) -> dict[str, str]:
        settings = {"TMPDIR": str(self._own_folder() / "tmp"), _LAUNCHER: self._mark}
        return {**base_environment(device, self.cluster), **settings}

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


_OWN = {
    name: parameter.default
    for name, parameter in inspect.signature(Launcher.__call__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("strategy", "kwargs")
}
"""The arguments of a launch, with their defaults, that its function may have as well; those get them by ``kwargs``."""
_HIDE = operator.methodcaller("errisinstance", (LaunchError, ValueError, TypeError))
"""Whether pytest leaves out the launcher's frames: they explain no error that is the caller's, or a rank's."""


def _known(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; known are {', '.join(known)}")
    return value


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError("the test process's working directory does not exist any more; ranks start in it") from error


def _choose(
    chosen: str | Strategy | os.PathLike[str], options: Mapping[str, Any] | None, folder: Path | None = None
) -> Strategy:
    if isinstance(chosen, str) and not is_file_name(chosen):
        return strategy(chosen, options)
    if options:
        raise ValueError("options cannot be combined with a Strategy or a configuration file; add them to that")
    return chosen if isinstance(chosen, Strategy) else accelerate_config(chosen, folder)
