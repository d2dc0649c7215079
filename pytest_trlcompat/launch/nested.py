"""A launcher of ranks that a command starts itself, as ``trl sft``, ``llamafactory-cli`` and ``axolotl train`` do.

Its ranks are there already: the rank that starts it is one of them, and runs what the launcher would within the call
that starts it, which then returns the exit status. It is seen where a process is started, and where the launcher's own
function is called. Runs in ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from pytest_trlcompat.launch import ended_process, launchers
from pytest_trlcompat.launch.executables import executable, is_foreign, look_anew, started_program
from pytest_trlcompat.launch.hooks import Hook, hooked
from pytest_trlcompat.launch.in_place import run_bounded, run_launcher, run_program
from pytest_trlcompat.launch.looking import first_start, hides_launcher, is_start
from pytest_trlcompat.launch.shells import Command, Text, text_of
from pytest_trlcompat.launch.starts import ADVICE, NestedLauncherError, Replaced, Starts
from pytest_trlcompat.launch.words import LauncherWords, is_launcher_text, launcher_words, python_words
from pytest_trlcompat.launch.wrappers import Inner, Surroundings, unwrap

__all__ = ["NestedLauncherError", "Replaced", "Starts", "replaced"]

_FUNCTIONS = (
    ("accelerate.commands.launch", "launch_command", "accelerate"),
    ("torch.distributed.run", "run", "torchrun"),
)
"""Functions that start a launcher in the process that calls them, with the options as their parser made them."""
_REFUSED_FUNCTIONS = (
    ("accelerate.launchers", "debug_launcher"),
    ("torch.distributed.launcher.api", "launch_agent"),
)
"""Functions that start ranks which run a function; ``notebook_launcher`` and ``elastic_launch`` call the second."""
_EXECS = ("execv", "execve", "execvp", "execvpe")
_SPAWNS = ("spawnv", "spawnve", "spawnvp", "spawnvpe")
_POSIX_SPAWNS = ("posix_spawn", "posix_spawnp")
_PLAIN = (
    "Have the program start the launcher itself, by subprocess.run([...], env=..., cwd=...), or pass it as the command"
)
_LEAVE = ", or pass follow=False if it trains nothing"
_OF_ONE_MACHINE = ("deepspeed.launcher.launch",)
"""Modules that a launcher runs on each machine, with what it has made of its options."""
_SHELL_WORDS = frozenset("<>|&;()`\n")
_BUILTINS = ("cd", "export", "source", ".")
_STARTS_RANKS = re.compile(r"\b(python[\d.]*|accelerate|accelerate-launch|torchrun|deepspeed|\S+\.py)\b")


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
        exits.enter_context(hooked(_hooks(starts)))
        yield


def _hooks(starts: Starts) -> dict[tuple[str, str], Hook]:
    """What takes the place of functions that start ranks in the process that calls them."""

    def launched(launcher: str, options: Any) -> None:
        title = launchers.NAMES[launcher]
        status = run_launcher(starts, title, Surroundings(), lambda: launchers.read_parsed(launcher, vars(options)))
        if status:
            raise subprocess.CalledProcessError(status, title)

    def deepspeed(args: Sequence[str] | None = None) -> None:
        words = LauncherWords("deepspeed", tuple(sys.argv[1:] if args is None else args))
        status = run_launcher(starts, "deepspeed", Surroundings(), functools.partial(launchers.read, words))
        # As deepspeed.launcher.runner.main itself ends.
        if status:
            sys.exit(status)

    def refused(name: str) -> Hook:
        def called(*args: Any, **kwargs: Any) -> NoReturn:
            starts.refuse(
                f"{starts.running!r} calls {name}, which starts processes of its own that are no ranks of this launch. "
                "Have it call the function itself where RANK is set, as a script for torchrun does"
            )

        return called

    hooks = {(module, name): functools.partial(launched, launcher) for module, name, launcher in _FUNCTIONS}
    refusals = {(module, name): refused(f"{module}.{name}") for module, name in _REFUSED_FUNCTIONS}
    return {**hooks, ("deepspeed.launcher.runner", "main"): deepspeed, **refusals}


def _substitutes(starts: Starts) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    def popen(original: Any) -> Any:
        signature = inspect.signature(original)

        def start(process: Any, *args: Any, **options: Any) -> None:
            bound = signature.bind(process, *args, **options)
            bound.apply_defaults()
            arguments = bound.arguments
            is_shell = bool(arguments["shell"])
            run = _found(
                starts, arguments["args"], arguments["env"], arguments["cwd"], is_shell, arguments["executable"]
            )
            if run is None:
                original(process, *args, **options)
                return
            text = f"{starts.running!r} starts {arguments['args']}"
            if sys._getframe(1).f_globals.get("__name__", "").startswith("asyncio."):
                starts.refuse(f"{text} by asyncio, which would wait for a process that there is none of; {ADVICE}")
            if arguments["stdin"] == subprocess.PIPE:
                starts.refuse(f"{text} and writes to its standard input, and a rank has none; {ADVICE}")
            ended_process.fill(process, arguments, run)

        return start

    def execs(name: str) -> Callable[[Any], Any]:
        def substitute(original: Any) -> Any:
            def called(file: Any, args: Any, *env: Any) -> Any:
                run = _found(starts, args, env[0] if env else None, None, file=file)
                if run is None:
                    return original(file, args, *env)
                starts.replaced = Replaced(run())
                raise starts.replaced

            return called

        return substitute

    def spawns(name: str) -> Callable[[Any], Any]:
        def substitute(original: Any) -> Any:
            def called(mode: int, file: Any, args: Any, *env: Any) -> Any:
                run = _found(starts, args, env[0] if env else None, None, file=file)
                if run is None:
                    return original(mode, file, args, *env)
                if mode != os.P_WAIT:
                    starts.refuse(f"{starts.running!r} starts {args} by os.{name} without waiting; {ADVICE}")
                return run()

            return called

        return substitute

    def posix_spawns(name: str) -> Callable[[Any], Any]:
        def substitute(original: Any) -> Any:
            def called(path: Any, args: Any, env: Any, **options: Any) -> Any:
                if _found(starts, args, env, None, file=path) is not None:
                    starts.refuse(f"{starts.running!r} starts {args} by os.{name} without waiting; {ADVICE}")
                return original(path, args, env, **options)

            return called

        return substitute

    def system(original: Any) -> Any:
        def called(command: Any) -> Any:
            run = _found(starts, command, None, None, is_shell=True)
            # os.system returns a wait status, which has the exit status in its high byte.
            return original(command) if run is None else run() << 8

        return called

    # Not the class: it may be imported by its name already, or have subclasses.
    yield subprocess.Popen, "__init__", popen
    for names, kind in ((_EXECS, execs), (_SPAWNS, spawns), (_POSIX_SPAWNS, posix_spawns)):
        for name in names:
            if hasattr(os, name):
                yield os, name, kind(name)
    yield os, "system", system


def _found(
    starts: Starts, command: Any, env: Any, folder: Any, is_shell: bool = False, file: Any = None
) -> Callable[[], int] | None:
    """What runs a command in this rank's place for it; ``None`` for one that may start as it is.

    Args:
        env: variables for it, if it gets others; ``folder`` likewise.
        file: what is run, if that is not the first word.

    Raises:
        NestedLauncherError: it may not, or cannot be run here.
    """
    try:
        around = Surroundings(
            {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()} if isinstance(env, Mapping) else None,
            folder=None if folder is None else os.fsdecode(folder),
        )
        if isinstance(command, (str, bytes, os.PathLike)):
            words = [os.fsdecode(command)]
        else:
            words = [os.fsdecode(word) for word in command]
        if file is not None and not is_shell:
            words[:1] = [os.fsdecode(file)]
    except (TypeError, ValueError):  # which the call itself refuses
        return None
    look_anew()
    if is_shell:
        # Of a list with shell=True, the word after the line is $0.
        line = Text("", words[0] if words else "", tuple(words[2:]), is_line=True)
        run = _run_of_text(starts, line, repr(command), around)
    else:
        run = _run_of(starts, words, around)
    if run is not None and os.getpid() != starts.pid:
        starts.refuse(
            f"{starts.running!r} starts {command} in a process that a rank has forked, which is no rank; {ADVICE}"
        )
    return run


def _run_of(
    starts: Starts, words: Sequence[str], around: Surroundings, in_shell: bool = False
) -> Callable[[], int] | None:
    """As :func:`_found`, for words as a shell or ``exec`` of the system reads them."""
    running, text = starts.running, shlex.join(words)
    launcher = launcher_words(words)
    if launcher is not None:
        _check_environment(starts, words, around)
        return lambda: run_launcher(starts, text, around, functools.partial(launchers.read, launcher))
    programs = running.follow is not False
    inner = unwrap(words, around, in_shell)
    if inner is not None:
        return _run_of_inner(starts, text, inner, in_shell)
    script = text_of(words, around)
    if script is not None:
        return _run_of_text(starts, script, text, around)
    python = python_words(words)
    if python is not None and python.target in _OF_ONE_MACHINE:
        starts.refuse(f"{running!r} starts {text}, a part of a launcher that starts ranks of its own; {ADVICE}")
    if (python is not None and python.kind == "c" and is_launcher_text(python.target)) or hides_launcher(words, around):
        starts.refuse(
            f"{running!r} starts {text}, which names a launcher of ranks, and nothing is known of what it makes of it. "
            f"{_PLAIN}"
        )
    if programs and started_program(words, around.path, around.search_path):
        if running.follow:
            _check_environment(starts, words, around)
        return lambda: run_program(starts, words, around)
    return None


def _run_of_inner(starts: Starts, text: str, inner: Inner, in_shell: bool) -> Callable[[], int] | None:
    """As :func:`_found`, for a command that another one runs."""
    if inner.problem:
        if not _starts(inner, starts.running.follow is not False):
            return None
        starts.refuse(
            f"{starts.running!r} starts {text}, whose ranks these cannot become: {inner.problem}. {_PLAIN}"
            f"{'' if _starts(inner, False) else _LEAVE}"
        )
    run = _run_of(starts, inner.words, inner.around, in_shell)
    return None if run is None else functools.partial(run_bounded, starts, text, inner, run)


def _starts(inner: Inner, programs: bool) -> bool:
    begins = (0,) if inner.is_certain else range(len(inner.words))
    return any(is_start(inner.words[begin:], inner.around, programs) for begin in begins)


def _run_of_text(starts: Starts, script: Text, shown: str, around: Surroundings) -> Callable[[], int] | None:
    """As :func:`_found`, for a line for a shell, a shell's script or a Makefile.

    Raises:
        NestedLauncherError: a shell would make more of the text than words, and it starts Python or a launcher.
    """
    running = starts.running
    if script.is_line:
        try:
            words = shlex.split(script.text)
        except ValueError:
            words = []
        if words and not _needs_shell(script.text, words):
            return _run_of(starts, words, around, in_shell=True)
    programs = running.follow is not False
    start = first_start(script, around, programs)
    mentions = programs and script.is_line and _STARTS_RANKS.search(script.text) is not None
    if start is not None or mentions:
        _refuse_text(starts, script, shown, around, start)
    return None


def _refuse_text(starts: Starts, script: Text, shown: str, around: Surroundings, start: Command | None) -> NoReturn:
    running = starts.running
    left = _LEAVE if first_start(script, around, False) is None else ""
    if script.is_line:
        starts.refuse(
            f"{running!r} has a shell run {shown}, which ranks cannot: they read plain words, without variables, "
            "redirections and several commands. Have the program start the list of the words by "
            f"subprocess.run([...], env=..., cwd=..., stdout=...){left}"
        )
    assert start is not None
    starts.refuse(
        f"{running!r} starts {shown}, and line {start.line} of {script.name} starts {shlex.join(start.words)}. Ranks "
        "cannot take the place of what a shell starts. Have the program start these words by subprocess.run([...], "
        f"env=..., cwd=...), or pass them as the command{left}"
    )


def _needs_shell(line: str, words: list[str]) -> bool:
    return bool(_SHELL_WORDS & set(line) or set("$*?[~#") & set(line) or words[0] in _BUILTINS)


def _check_environment(starts: Starts, words: Sequence[str], around: Surroundings) -> None:
    """Raises: NestedLauncherError, where the command is another virtual environment's."""
    search_path = around.search_path
    if os.sep not in words[0] and search_path == os.environ.get("PATH"):
        return
    path = executable(words[0], around.path, search_path)
    if path is not None and is_foreign(path):
        starts.refuse(
            f"{starts.running!r} starts {shlex.join(words)}, whose ranks these cannot become: {path} is of another "
            f"environment, and these ranks run in {sys.prefix}. Install what it needs here, or start what is here"
        )
