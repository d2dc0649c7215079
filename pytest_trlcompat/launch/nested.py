"""A launcher of ranks that a command starts itself, as ``trl sft``, ``llamafactory-cli`` and ``axolotl train`` do.

Its ranks are there already: the rank that starts it is one of them, and runs what the launcher would within the call
that starts it, which then returns the exit status. It is seen where a process is started, and where the launcher's own
function is called. Runs in ranks; imports of the stack only what is there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NoReturn

from pytest_trlcompat.launch import launchers
from pytest_trlcompat.launch.launchers import Read
from pytest_trlcompat.launch.program import CommandError, Program, launcher_words, program, started_program
from pytest_trlcompat.launch.strategy import Strategy, StrategyError

__all__ = ["NestedLauncherError", "Replaced", "Starts", "replaced"]

_FUNCTIONS = (
    ("accelerate.commands.launch", "launch_command", "accelerate"),
    ("torch.distributed.run", "run", "torchrun"),
)
"""Functions that start a launcher in the process that calls them, with the options as their parser made them."""
_EXECS = ("execv", "execve", "execvp", "execvpe")
_SPAWNS = ("spawnv", "spawnve", "spawnvp", "spawnvpe")
_POSIX_SPAWNS = ("posix_spawn", "posix_spawnp")
_OF_THE_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "ACCELERATE_", "FSDP_", "TORCHELASTIC_")
_KEPT = (
    "TRLCOMPAT",
    "GLOO_",
    "NCCL_",
    "TORCH_",
    "OMP_",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
)
"""Variables of a launch's own that stay where a program gives another variables that lack them."""
_ADVICE = "pass what it runs as the command, or have it start no launcher"
_SHELL_WORDS = frozenset("<>|&;()`\n")
_SHELLS = ("sh", "bash", "dash", "zsh")
_BUILTINS = ("cd", "env", "exec", "export", "nohup", "source", "timeout", "xargs", ".")
_STARTS_RANKS = re.compile(r"\b(python[\d.]*|accelerate|accelerate-launch|torchrun|deepspeed|\S+\.py)\b")
_HOOK = "_trlcompat_started"


class NestedLauncherError(RuntimeError):
    """A command starts ranks that are not this launch's, or another program of Python's that would be none."""


class Replaced(BaseException):
    """Ends a program that has replaced itself by ``os.exec*``; not an ``Exception``, so that it is not handled there.

    Attributes:
        status: the exit status of what has run in its place.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Starts:
    """What the programs of one rank start.

    Attributes:
        running: the program that runs.
        run: runs another one to its end within the call, and returns its exit status.
        refused: the first start that was refused, which fails the launch also where the program handles the error.
        replaced: whether a program has replaced itself, and must have ended with that.
        path: ``sys.path`` before the first program's folder was put there.
    """

    running: Program
    run: Callable[[Program], int]
    refused: NestedLauncherError | None = field(default=None)
    replaced: Replaced | None = field(default=None)
    path: tuple[str, ...] = ()

    def refuse(self, text: str) -> NoReturn:
        """Raises: NestedLauncherError, and keeps the first."""
        error = NestedLauncherError(text)
        self.refused = self.refused or error
        raise error from None


@contextlib.contextmanager
def replaced(starts: Starts) -> Iterator[None]:
    """Within the block, a launcher that is started is run by ``starts.run``, or raises a :class:`NestedLauncherError`.

    So does, as ``follow`` of the program says, another program of Python's.
    """
    with contextlib.ExitStack() as exits:
        for owner, name, substitute in _substitutes(starts):
            original = getattr(owner, name)
            exits.callback(setattr, owner, name, original)
            setattr(owner, name, substitute(original))
        if "torch" in sys.modules:
            for module, name, launcher in _FUNCTIONS:
                with contextlib.suppress(ImportError):
                    _replace_function(starts, importlib.import_module(module), name, launcher, exits)
        yield


def _stub(args: Any) -> None:
    """The code of a launcher's function, which finds the name in that function's module."""
    _trlcompat_started(args)  # type: ignore[name-defined]  # noqa: F821


def _replace_function(starts: Starts, owner: Any, name: str, launcher: str, exits: contextlib.ExitStack) -> None:
    function = getattr(owner, name, None)
    if not isinstance(function, types.FunctionType):
        return

    def called(options: Any) -> None:
        title = launchers.NAMES[launcher]
        status = _launched(starts, title, None, None, lambda: launchers.read_parsed(launcher, vars(options)))
        if status:
            raise subprocess.CalledProcessError(status, title)

    # Its code, since another module may have imported the function by its name.
    exits.callback(setattr, function, "__code__", function.__code__)
    exits.callback(owner.__dict__.pop, _HOOK, None)
    setattr(owner, _HOOK, called)
    function.__code__ = _stub.__code__


def _substitutes(starts: Starts) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    def popen(original: Any) -> Any:
        signature = inspect.signature(original)

        def start(process: Any, *args: Any, **options: Any) -> None:
            bound = signature.bind(process, *args, **options)
            bound.apply_defaults()
            given = bound.arguments
            run = _found(starts, given["args"], given["env"], given["cwd"], is_shell=bool(given["shell"]))
            if run is None:
                original(process, *args, **options)
            else:
                _as_process(starts, process, given, run)

        return start

    def execs(name: str) -> Callable[[Any], Any]:
        def substitute(original: Any) -> Any:
            def called(file: Any, args: Any, *env: Any) -> Any:
                run = _found(starts, args, env[0] if env else None, None)
                if run is None:
                    return original(file, args, *env)
                starts.replaced = Replaced(run())
                raise starts.replaced

            return called

        return substitute

    def spawns(name: str) -> Callable[[Any], Any]:
        def substitute(original: Any) -> Any:
            def called(mode: int, file: Any, args: Any, *env: Any) -> Any:
                run = _found(starts, args, env[0] if env else None, None)
                if run is None:
                    return original(mode, file, args, *env)
                if mode != os.P_WAIT:
                    starts.refuse(f"{starts.running!r} starts {args} by os.{name} without waiting; {_ADVICE}")
                return run()

            return called

        return substitute

    def posix_spawns(name: str) -> Callable[[Any], Any]:
        def substitute(original: Any) -> Any:
            def called(path: Any, args: Any, env: Any, **options: Any) -> Any:
                if _found(starts, args, env, None) is not None:
                    starts.refuse(f"{starts.running!r} starts {args} by os.{name} without waiting; {_ADVICE}")
                return original(path, args, env, **options)

            return called

        return substitute

    def system(original: Any) -> Any:
        def called(command: Any) -> Any:
            run = _found(starts, command, None, None, is_shell=True)
            return original(command) if run is None else run() << 8

        return called

    yield subprocess.Popen, "__init__", popen
    for names, kind in ((_EXECS, execs), (_SPAWNS, spawns), (_POSIX_SPAWNS, posix_spawns)):
        for name in names:
            if hasattr(os, name):
                yield os, name, kind(name)
    yield os, "system", system


def _found(starts: Starts, command: Any, env: Any, folder: Any, is_shell: bool = False) -> Callable[[], int] | None:
    """What runs a command in this rank's place for it; ``None`` for one that may start as it is.

    Raises:
        NestedLauncherError: it may not, or cannot be run here.
    """
    running = starts.running
    words = _words(starts, command, is_shell)
    if words is None:
        return None
    found = launcher_words(words)
    if found is not None:
        text, read = shlex.join(words), functools.partial(launchers.read, found)
        return lambda: _launched(starts, text, env, folder, read)
    if running.follow is not False and started_program(words):
        return lambda: _followed(starts, words, env, folder)
    return None


def _words(starts: Starts, command: Any, is_shell: bool) -> list[str] | None:
    """The words of what is started; ``None`` if they cannot be told.

    Raises:
        NestedLauncherError: a shell would make more of the line than its words, and they name Python or a launcher.
    """
    try:
        if not isinstance(command, (str, bytes, os.PathLike)):
            words = [os.fsdecode(word) for word in command]
            if not is_shell and len(words) > 2 and Path(words[0]).name in _SHELLS and words[1] in ("-c", "-lc", "-ec"):
                return _words(starts, words[2], True)
            if not is_shell:
                return words
            command = words[0]
        line = os.fsdecode(command)
        if not is_shell:
            return [line]
        words = shlex.split(line)
    except (TypeError, ValueError):
        words = None
    if words is not None and not _needs_shell(line, words):
        return words
    if _STARTS_RANKS.search(str(command)) and starts.running.follow is not False:
        starts.refuse(
            f"{starts.running!r} has a shell run {command!r}, which ranks cannot: they read plain words, without "
            "variables, redirections and several commands. Have the program start the list of the words by "
            "subprocess.run([...], env=..., cwd=..., stdout=...), or pass follow=False if it trains nothing"
        )
    return None


def _needs_shell(line: str, words: list[str]) -> bool:
    if not words:
        return True
    return bool(_SHELL_WORDS & set(line) or set("$*?[~#") & set(line) or "=" in words[0] or words[0] in _BUILTINS)


def _launched(starts: Starts, started: str, env: Any, folder: Any, read: Callable[[], Read]) -> int:
    """Run what the ranks of a launcher would.

    Args:
        started: the launcher, for messages.
        env: variables for it, if it gets others; ``folder`` likewise.
        read: reads its options.

    Returns:
        The exit status.

    Raises:
        NestedLauncherError: the launcher asks for other ranks than this launch's.
    """
    running = starts.running
    text = f"{running!r} starts {started}"
    if threading.current_thread() is not threading.main_thread():
        starts.refuse(f"{text} in a thread, where a rank cannot become one of its ranks; {_ADVICE}")
    here = Path.cwd() / os.fspath(folder or "")
    try:
        found = read()
        asked = launchers.strategy_of(found, here)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        launchers.world_size_of(found, size)
        inner = program(("python", *found.target), here)
    except (CommandError, StrategyError) as error:
        starts.refuse(f"{text}, whose ranks these cannot become: {error}; {_ADVICE}")
    if asked is not None and running.strategy is not None:
        try:
            _check(text, asked, running.strategy, found, size)
        except NestedLauncherError as error:
            starts.refuse(str(error))
    with _variables(env):
        if asked is not None and running.strategy is not None:
            try:
                launchers.enter(asked, running.strategy, os.environ, Path(tempfile.mkdtemp()))
            except StrategyError as error:
                starts.refuse(f"{text}, whose ranks these cannot become: {error}; {_ADVICE}")
        return starts.run(replace(inner, gets_local_rank=found.gets_local_rank))


def _followed(starts: Starts, words: list[str], env: Any, folder: Any) -> int:
    """Run what a process of its own would, which would be no rank.

    Raises:
        NestedLauncherError: nobody has said that it may.
    """
    running = starts.running
    text = f"{running!r} starts {shlex.join(words)}"
    if running.follow is None:
        starts.refuse(
            f"{text} in a process of its own, which is no rank of this launch. If that is what trains, pass it as the "
            "command, or follow=True, and each rank runs it in its own place; if it is not, pass follow=False"
        )
    if threading.current_thread() is not threading.main_thread():
        starts.refuse(f"{text} in a thread, where a rank cannot run it in its own place; {_ADVICE}")
    try:
        inner = program(words, Path.cwd() / os.fspath(folder or ""))
    except CommandError as error:
        starts.refuse(f"{text}, which ranks cannot run: {error}")
    with _variables(env):
        return starts.run(inner)


@contextlib.contextmanager
def _variables(env: Any) -> Iterator[None]:
    """Within the block, the variables that a program gives to another, and those of the launch."""
    before = dict(os.environ)
    variables = before
    if isinstance(env, Mapping):
        new = {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()}
        ours = {key: value for key, value in before.items() if key.startswith(_OF_THE_LAUNCH)}
        defaults = {key: value for key, value in before.items() if key.startswith(_KEPT)}
        variables = {**defaults, **{key: new[key] for key in new if not key.startswith(_OF_THE_LAUNCH)}, **ours}
    try:
        _set_variables(variables)
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str]) -> None:
    for key in set(os.environ) - set(variables):
        del os.environ[key]
    os.environ.update(variables)


def _as_process(starts: Starts, process: Any, given: Mapping[str, Any], run: Callable[[], int]) -> None:
    """Make a :class:`subprocess.Popen` that has ended of what has run in this process; its output is in files.

    Raises:
        NestedLauncherError: the program would write to its standard input.
    """
    if given["stdin"] == subprocess.PIPE:
        starts.refuse(f"{starts.running!r} writes to the standard input of {given['args']}, a rank has none; {_ADVICE}")
    process._child_created = False  # nothing to wait for when it is collected
    process._communication_started, process._input = False, None
    process._waitpid_lock, process._sigint_wait_secs = threading.Lock(), 0
    process.args, process.pid, process.returncode = given["args"], os.getpid(), None
    process.stdin = process.stdout = process.stderr = None
    process.encoding, process.errors = given["encoding"], given["errors"]
    process.text_mode = bool(given["text"] or given["universal_newlines"] or given["encoding"] or given["errors"])
    process.pipesize = -1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = [os.dup(number) for number in (1, 2)]
    pipes: dict[str, IO[bytes]] = {}
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            _redirect(number, name, given[name], pipes)
        process.returncode = run()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in zip((1, 2), before, strict=True):
            os.dup2(copy, number)
            os.close(copy)
    for name, file in pipes.items():
        file.seek(0)
        text = io.TextIOWrapper(file, given["encoding"], given["errors"]) if process.text_mode else file
        setattr(process, name, text)


def _redirect(number: int, name: str, target: Any, pipes: dict[str, IO[bytes]]) -> None:
    if target is None:
        return
    if target == subprocess.STDOUT:
        os.dup2(1, number)
    elif target == subprocess.PIPE:
        pipes[name] = tempfile.TemporaryFile()  # noqa: SIM115 - the program's to close
        os.dup2(pipes[name].fileno(), number)
    elif target == subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
    else:
        os.dup2(target if isinstance(target, int) else target.fileno(), number)


def _check(text: str, asked: Strategy, own: Strategy, found: Read, size: int) -> None:
    if asked.name != own.name:
        raise NestedLauncherError(
            f"{text}, which asks for {asked.name}, while the launch runs under {own.name}; pass strategy={asked.name!r}"
        )
    if found.size is None and asked.world_size not in (None, size):
        raise NestedLauncherError(
            f"{text}, whose configuration file says {asked.world_size} ranks, while the launch has {size}; pass "
            f"world_size={asked.world_size}, or say --num_processes {size} there"
        )
