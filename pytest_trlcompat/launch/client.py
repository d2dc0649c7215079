"""The launcher: what tests call. Owns the warm server, sends it functions, and turns its answers into results.

Runs in the test process and must import nothing of the stack.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import cloudpickle

from pytest_trlcompat.accelerator.build import cache_folder
from pytest_trlcompat.launch import protocol
from pytest_trlcompat.launch.proof import expectation
from pytest_trlcompat.launch.result import Failure, LaunchError, LaunchResult, RankResult, describe_exit
from pytest_trlcompat.launch.strategy import Strategy, strategy

__all__ = ["DEFAULT_TIMEOUT", "Launcher"]

DEFAULT_TIMEOUT = 120.0
"""Seconds that a launch may take, from the fork on."""
MAX_WORLD_SIZE = 8
_START_TIMEOUT = 600.0
# What the server needs after a launch's own timeout: to dump stacks, end the ranks and collect their output.
_ANSWER_MARGIN = 30.0


class Launcher:
    """Runs functions on N ranks under a strategy.

    The first launch starts a server, which imports the stack once (about ten seconds); every launch forks fresh ranks
    from it (about a second). Use it as a context manager, or call :meth:`close`.

    Args:
        device: ``"software"`` (the software accelerator), ``"cuda"`` (one GPU per rank) or ``"cpu"``.
        timeout: seconds that a launch may take unless it says otherwise.
    """

    def __init__(self, device: str = "software", timeout: float = DEFAULT_TIMEOUT) -> None:
        if device not in ("software", "cuda", "cpu"):
            raise ValueError(f"unknown device {device!r}; known are software, cuda, cpu")
        self.device = device
        self.timeout = timeout
        self._server: _Server | None = None

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and whatever it still runs. A later launch starts a new one."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def __call__(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        strategy: str | Strategy = "ddp",
        world_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        sharded: bool = True,
        seed: int = 0,
        **kwargs: Any,
    ) -> LaunchResult:
        """Run ``function(*args, **kwargs)`` on every rank.

        Args:
            function: any function; it and its arguments go to the ranks by cloudpickle, functions of test modules by
                value. Import the stack inside it, so that the test process stays light.
            strategy: its name (see :data:`pytest_trlcompat.launch.strategy.NAMES`) or a :class:`Strategy`.
            world_size: number of ranks, 1 to 8; by default 2, and 1 for ``single``.
            options: the strategy's options, see :func:`pytest_trlcompat.launch.strategy.strategy`.
            timeout: seconds, from the fork on.
            env: environment variables for the ranks, beside those of the test process and of the strategy.
            check: raise when any rank fails; ``False`` returns the result all the same.
            sharded: demand that the function builds an engine of the strategy (DDP, FSDP, DeepSpeed).
            seed: random state of Python, NumPy and torch in every rank.

        Raises:
            LaunchError: a rank failed (root cause first), the launch timed out, or the server could not be started.
            StrategyError: the strategy or its options make no sense.
            ValueError: a world size that the strategy cannot have.
        """
        chosen = _choose(strategy, options)
        size = _world_size(chosen, world_size)
        limit = self.timeout if timeout is None else timeout
        name = getattr(function, "__qualname__", repr(function))
        payload = _dump(function, args, kwargs)
        with tempfile.TemporaryDirectory(prefix="trlcompat-launch-") as folder:
            spec = {
                "payload": payload,
                "strategy": chosen.name,
                "device": self.device,
                "world_size": size,
                "timeout": limit,
                "seed": seed,
                "cwd": os.getcwd(),
                "sys_path": list(sys.path),
                "environment": {**_base_environment(self.device), **chosen.environment(Path(folder)), **(env or {})},
                "rank_environment": [_rank_environment(chosen, rank, size) for rank in range(size)],
                "expectation": expectation(chosen, size, self.device, sharded),
            }
            answer = self._ask(spec, limit)
        result = LaunchResult(
            name=name,
            strategy=chosen.name,
            device=self.device,
            ranks=tuple(_rank_result(raw) for raw in answer["ranks"]),
            timed_out=answer["timed_out"],
            seconds=answer["seconds"],
        )
        if check and not result.ok:
            raise LaunchError(result.describe(), result)
        return result

    def _ask(self, spec: dict[str, Any], limit: float) -> dict[str, Any]:
        try:
            if self._server is None:
                self._server = _Server(self.device)
            return self._server.ask(spec, limit + _ANSWER_MARGIN)
        except BaseException:  # also Ctrl-C: the server would otherwise answer a question that nobody remembers
            self.close()
            raise


class _Server:
    """The client's side of the warm server process."""

    def __init__(self, device: str) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop
        self._channel, theirs = socket.socketpair()
        with theirs:
            code = "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
            code += "from pytest_trlcompat.launch.server import main; main(int(sys.argv[1]))"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), _json_path()],
                pass_fds=[theirs.fileno()],
                env=_base_environment(device),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C reaches the test process, which ends the server
            )
        try:
            self._greet(device)
        except BaseException:
            self.stop()
            raise

    def _greet(self, device: str) -> None:
        _build_accelerator(device)
        self._exchange(
            {"device": device, "devices": MAX_WORLD_SIZE, "sys_path": list(sys.path)}, _START_TIMEOUT, "start"
        )

    def ask(self, spec: dict[str, Any], limit: float) -> dict[str, Any]:
        return self._exchange(spec, limit, "answer")

    def _exchange(self, message: dict[str, Any], limit: float, what: str) -> dict[str, Any]:
        self._channel.settimeout(limit)
        try:
            protocol.send(self._channel, message)
            answer: dict[str, Any] = protocol.receive(self._channel)
        except TimeoutError as error:
            raise LaunchError(f"the launch server did not {what} within {limit:g} s\n{self._log_tail()}") from error
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            status = self._process.returncode
            how = "closed its connection" if status is None else describe_exit(status)
            raise LaunchError(
                f"the launch server {how}; the next launch starts a new one\n{self._log_tail()}"
            ) from error
        if answer["kind"] == "refused":
            raise LaunchError(f"the launch server could not {what}: {answer['error']}")
        return answer

    def stop(self) -> None:
        """Close the connection, on which the server ends its ranks and leaves; kill it if it does not."""
        self._channel.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks die with it: PR_SET_PDEATHSIG
            self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]


def _build_accelerator(device: str) -> None:
    """Compile in the test process, where people see the progress line."""
    if device == "software":
        from pytest_trlcompat import accelerator

        accelerator.build()


def _choose(chosen: str | Strategy, options: Mapping[str, Any] | None) -> Strategy:
    if isinstance(chosen, Strategy):
        if options:
            raise ValueError("options were given beside a ready Strategy; put them into it")
        return chosen
    return strategy(chosen, options)


def _world_size(chosen: Strategy, given: int | None) -> int:
    size = given if given is not None else 1 if chosen.name == "single" else 2
    if not 1 <= size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size must be 1 to {MAX_WORLD_SIZE}, not {size}")
    if chosen.name == "single" and size != 1:
        raise ValueError(f"strategy 'single' is one rank, but world_size={size} was asked for")
    return size


def _rank_environment(chosen: Strategy, rank: int, size: int) -> dict[str, str]:
    if chosen.name == "single":
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the server's; no rank hosts it
    }


def _base_environment(device: str) -> dict[str, str]:
    """The test process's environment, less what another launcher may have left, plus what keeps launches offline."""
    inherited = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in inherited}
    defaults = {
        "OMP_NUM_THREADS": "1",  # ranks share the cores; and a thread pool does not survive a fork
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_EXTENSIONS_DIR": str(_extensions_folder()),
    }
    if device == "cpu":
        defaults["ACCELERATE_USE_CPU"] = "true"
    return {**defaults, **environment}


def _extensions_folder() -> Path:
    """One folder per environment: extensions built against one torch and DeepSpeed must not meet another's."""
    digest = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return cache_folder() / "torch_extensions" / digest


def _json_path() -> str:
    return json.dumps([os.path.abspath(entry) for entry in sys.path])


def _dump(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        with _by_value(function):
            return bytes(cloudpickle.dumps((function, args, kwargs)))
    except Exception as error:
        raise LaunchError(
            f"{getattr(function, '__qualname__', function)} or its arguments cannot be sent to the ranks: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Pickle functions of test modules by value: a rank then need not import the test module, and often could not."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or not _is_test_module(module):
        yield
        return
    registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if not registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if not registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_test_module(module: ModuleType) -> bool:
    """A module that is not part of an installed package; this package's own suites count as test modules."""
    file = getattr(module, "__file__", None)
    top = module.__name__.partition(".")[0]
    if file is None or top == "__main__" or top in sys.stdlib_module_names:
        return False
    stem = Path(file).stem
    if stem.startswith("test_") or stem.endswith("_test"):
        return True
    return top != "pytest_trlcompat" and "site-packages" not in Path(file).parts


def _rank_result(raw: dict[str, Any]) -> RankResult:
    failure = raw["failure"]
    value = raw["value"]
    return RankResult(
        **{
            **raw,
            "failure": None if failure is None else Failure(**failure),
            "value": None if value is None else pickle.loads(value),
        }
    )
