"""Commands that run another command: ``env``, ``timeout``, ``nohup``, ``uv run``, ``conda run`` and their like.

:data:`_WRAPPERS` says of each how its options end and where the command within begins. Runs in ranks.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_trlcompat.launch.executables import executable
from pytest_trlcompat.launch.words import launcher_words, python_words

__all__ = ["Deadline", "Inner", "Surroundings", "unwrap"]

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIMED_OUT = 124
"""The exit status of ``timeout`` where the command had to be ended."""
_HAS_REQUIREMENTS = re.compile(rb"^# /// script\s*$", re.MULTILINE)
"""Inline metadata of a script, https://packaging.python.org/en/latest/specifications/inline-script-metadata"""


@dataclass(frozen=True)
class Surroundings:
    """What surrounds a command that is started.

    Attributes:
        env: its variables; ``None``: those of the process that starts it.
        unset: variables that are taken away by name.
        folder: its working directory, if it is another.
    """

    env: Mapping[str, str] | None = None
    unset: frozenset[str] = frozenset()
    folder: str | None = None

    @functools.cached_property
    def path(self) -> Path:
        """The working directory."""
        return Path.cwd() / (self.folder or "")

    @functools.cached_property
    def variables(self) -> dict[str, str]:
        """All variables of the command."""
        variables = dict(os.environ if self.env is None else self.env)
        return {name: value for name, value in variables.items() if name not in self.unset}

    @property
    def search_path(self) -> str | None:
        """``PATH`` of the command."""
        return None if "PATH" in self.unset else (os.environ if self.env is None else self.env).get("PATH")

    def assigned(self, assignments: Mapping[str, str]) -> Surroundings:
        """The same surroundings with more variables."""
        if not assignments:
            return self
        return replace(self, env={**self.variables, **assignments}, unset=self.unset - set(assignments))


@dataclass(frozen=True)
class Deadline:
    """What ``timeout`` does.

    Attributes:
        seconds: until the command is ended.
        status: the exit status then.
    """

    seconds: float
    status: int


@dataclass(frozen=True)
class Inner:
    """A command within another.

    Attributes:
        words: of the command; where ``problem`` is that they cannot be told, what may hold it.
        around: what surrounds it.
        deadline: of ``timeout``.
        is_timed: whether the time that it took is printed to stderr.
        problem: why its ranks cannot be this launch's; empty where they can.
        is_certain: whether ``words`` begin where the command begins.
    """

    words: tuple[str, ...]
    around: Surroundings
    deadline: Deadline | None = None
    is_timed: bool = False
    problem: str = ""
    is_certain: bool = True


@dataclass(frozen=True)
class _Options:
    """The options of a wrapper as they were written, and what follows them."""

    values: Mapping[str, tuple[str, ...]]
    rest: tuple[str, ...]

    def last(self, names: str) -> str | None:
        """The value of an option by one of its names, or ``None``."""
        values = [value for name in names.split() for value in self.values.get(name, ())]
        return values[-1] if values else None

    def has(self, names: str) -> bool:
        return any(name in self.values for name in names.split())


class _UnknownOptionError(ValueError):
    def __init__(self, option: str, rest: tuple[str, ...]) -> None:
        super().__init__(option)
        self.option, self.rest = option, rest


@dataclass(frozen=True)
class _Wrapper:
    """How a wrapper's words are read; an option that is not listed cannot be honoured.

    Attributes:
        flags: options without a value; ``values``: those with one.
        shows: flags with which it prints something and runs nothing.
        subcommand: the word after its own options that makes it run a command, which options may follow.
        has_scripts: whether the project may have scripts of its own, which it runs by a name.
        read: makes the command of the options.
    """

    flags: str = ""
    values: str = ""
    shows: str = ""
    subcommand: str = ""
    has_scripts: bool = False
    # A lambda, since _plain is defined below.
    read: Callable[[_Options, Surroundings], Inner | None] = field(
        default=lambda options, around: _plain(options, around)
    )


def _plain(options: _Options, around: Surroundings) -> Inner | None:
    return Inner(options.rest, around) if options.rest else None


def _env(options: _Options, around: Surroundings) -> Inner | None:
    if options.has("-i - --ignore-environment"):
        around = replace(around, env={}, unset=frozenset())
    unset = {name for key in ("-u", "--unset") for name in options.values.get(key, ())}
    around = replace(around, unset=around.unset | unset)
    if (folder := options.last("-C --chdir")) is not None:
        around = replace(around, folder=str(around.path / folder))
    split = options.last("-S --split-string")
    words = (*(shlex.split(split) if split else ()), *options.rest)
    return _assigned(words, around)


def _assigned(words: tuple[str, ...], around: Surroundings) -> Inner | None:
    count = next((index for index, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    pairs = (word.partition("=") for word in words[:count])
    around = around.assigned({name: value for name, _, value in pairs})
    return Inner(words[count:], around) if words[count:] else None


def _exec(options: _Options, around: Surroundings) -> Inner | None:
    if options.has("-c"):
        around = replace(around, env={}, unset=frozenset())
    return _plain(options, around)


def _time(options: _Options, around: Surroundings) -> Inner | None:
    return Inner(options.rest, around, is_timed=True) if options.rest else None


def _timeout(options: _Options, around: Surroundings) -> Inner | None:
    if len(options.rest) < 2:
        return None
    duration = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([smhd]?)", options.rest[0])
    if duration is None:
        return Inner(options.rest[1:], around, problem=f"{options.rest[0]} is no duration")
    seconds = float(duration[1]) * _SECONDS[duration[2]]
    name = (options.last("-s --signal") or "TERM").upper()
    try:
        number = int(name) if name.isdigit() else int(signal.Signals[f"SIG{name.removeprefix('SIG')}"])
    except KeyError:
        return Inner(options.rest[1:], around, problem=f"{name} is no signal")
    # With --preserve-status it is the command's own, which the signal ended; SIGKILL ends timeout as well.
    is_killed = number == signal.SIGKILL or options.has("-p --preserve-status")
    # A duration of 0 switches timeout off.
    deadline = Deadline(seconds, 128 + number if is_killed else _TIMED_OUT) if seconds else None
    return Inner(options.rest[1:], around, deadline)


def _is_here(prefix: str | os.PathLike[str]) -> bool:
    return Path(prefix).resolve() == Path(sys.prefix).resolve()


def _in_environment(inner: Inner | None, prefix: str | os.PathLike[str] | None, looked: str) -> Inner | None:
    """The command, with a problem unless the environment that it runs in is this process's."""
    if inner is None or (prefix is not None and _is_here(prefix)):
        return inner
    seen = f"in {prefix}" if prefix is not None else f"in an environment that cannot be told from here ({looked})"
    return replace(inner, problem=f"it runs its command {seen}, and these ranks run in {sys.prefix}")


def _of_virtual_env(options: _Options, around: Surroundings) -> Inner | None:
    """Poetry, PDM and Pipenv use the environment that is active."""
    if (folder := options.last("-C --directory")) is not None:
        around = replace(around, folder=str(around.path / folder))
    return _in_environment(_plain(options, around), around.variables.get("VIRTUAL_ENV"), "VIRTUAL_ENV is not set")


def _hatch(options: _Options, around: Surroundings) -> Inner | None:
    # hatch run ENVIRONMENT:COMMAND; without a colon the environment is called default.
    name, colon, first = options.rest[0].partition(":") if options.rest else ("", "", "")
    words = ((first,) if first else ()) + options.rest[1:] if colon else options.rest
    active = around.variables.get("HATCH_ENV_ACTIVE")
    is_active = active is not None and active == (name if colon else "default")
    prefix = around.variables.get("VIRTUAL_ENV") if is_active else None
    return _in_environment(_plain(replace(options, rest=words), around), prefix, "HATCH_ENV_ACTIVE does not name it")


def _conda(options: _Options, around: Surroundings) -> Inner | None:
    active, name, path = (
        around.variables.get("CONDA_PREFIX"),
        options.last("-n --name"),
        options.last("-p --prefix"),
    )
    if (folder := options.last("--cwd")) is not None:
        around = replace(around, folder=str(around.path / folder))
    prefix = str(around.path / path) if path is not None else active
    looked = "CONDA_PREFIX is not set"
    if path is None and name is not None and name != around.variables.get("CONDA_DEFAULT_ENV"):
        prefix, looked = None, f"the environment {name}, which is not the active one"
    return _in_environment(_plain(options, around), prefix, looked)


def _uv(options: _Options, around: Surroundings) -> Inner | None:
    if (folder := options.last("--directory")) is not None:
        around = replace(around, folder=str(around.path / folder))
    words = options.rest
    if options.has("-m --module"):
        words = ("python", "-m", *words)
    elif words and (options.has("-s --script") or words[0].endswith(".py")):
        words = ("python", *words)
    inner = _plain(replace(options, rest=words), around)
    script = around.path / words[1] if words[:1] == ("python",) and len(words) > 1 else None
    if inner is not None and script is not None and script.is_file() and _HAS_REQUIREMENTS.search(script.read_bytes()):
        return replace(inner, problem=f"{words[1]} has requirements of its own, for which it makes an environment")
    return _in_environment(inner, *_uv_environment(options, around))


def _uv_environment(options: _Options, around: Surroundings) -> tuple[Path | None, str]:
    """Where ``uv run`` finds the environment, as its documentation says, and what was looked for."""
    variables, folder = around.variables, around.path / (options.last("--project") or "")
    above = (folder.resolve(), *folder.resolve().parents)
    project = next((path for path in above if (path / "pyproject.toml").is_file()), None)
    if project is not None and not options.has("--no-project --active"):
        return project / variables.get("UV_PROJECT_ENVIRONMENT", ".venv"), ""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if variables.get(name):
            return Path(variables[name]), ""
    beside = next((path / ".venv" for path in above if (path / ".venv").is_dir()), None)
    return beside, "VIRTUAL_ENV is not set, and there is no .venv"


def _elsewhere(reason: str) -> Callable[[_Options, Surroundings], Inner | None]:
    """A wrapper whose command never runs in ranks of this launch, whatever its options are."""

    def read(options: _Options, around: Surroundings) -> Inner | None:
        return Inner(options.rest, around, problem=reason, is_certain=False) if options.rest else None

    return read


_ANY = "*"
_ITS_OWN_RANKS = _Wrapper(_ANY, read=_elsewhere("it starts processes of its own, which are no ranks of this launch"))
_ITS_OWN_ENVIRONMENT = _Wrapper(_ANY, read=_elsewhere("it runs its command in an environment of its own"))
_OTHER_MACHINE = _Wrapper(_ANY, read=_elsewhere("it runs its command as another user, or in another system"))
_OTHER_PROCESSORS = _Wrapper(_ANY, read=_elsewhere("it binds its command to processors or memory"))
_CONDA = _Wrapper(
    "-v --verbose --dev --debug-wrapper-scripts --no-capture-output --live-stream -s",
    "-n --name -p --prefix --cwd",
    subcommand="run",
    read=_conda,
)
_OF_VIRTUAL_ENV = _Wrapper(
    "-q --quiet -v --verbose -n --no-interaction --ansi --no-ansi", "-C --directory -P --project"
)
_WRAPPERS: Mapping[str, _Wrapper] = {
    "env": _Wrapper(
        "-i - --ignore-environment -v --debug -0 --null", "-u --unset -C --chdir -S --split-string", read=_env
    ),
    "timeout": _Wrapper(
        "-f --foreground -v --verbose -p --preserve-status", "-k --kill-after -s --signal", read=_timeout
    ),
    "time": _Wrapper("-p --portability", read=_time),
    "exec": _Wrapper("-c -l", "-a", read=_exec),
    "command": _Wrapper("-p", shows="-v -V"),
    # These change how it is scheduled, buffered or ended by a terminal; nothing that it computes.
    "nohup": _Wrapper(),
    "nice": _Wrapper(values="-n --adjustment"),
    "ionice": _Wrapper("-t --ignore", "-c --class -n --classdata"),
    "stdbuf": _Wrapper(values="-i --input -o --output -e --error"),
    "setsid": _Wrapper("-w --wait -c --ctty"),
    "uv": _Wrapper(
        "-q --quiet -v --verbose --no-sync --frozen --locked --offline --no-progress --active --no-project -m --module"
        " -s --script --native-tls --no-config --no-env-file",
        "--directory --project --color --cache-dir",
        subcommand="run",
        read=_uv,
    ),
    "conda": _CONDA,
    "mamba": _CONDA,
    "micromamba": _CONDA,
    "poetry": replace(_OF_VIRTUAL_ENV, subcommand="run", read=_of_virtual_env),
    "pdm": replace(_OF_VIRTUAL_ENV, values="-p --project", subcommand="run", has_scripts=True, read=_of_virtual_env),
    "pipenv": replace(_OF_VIRTUAL_ENV, values="", subcommand="run", has_scripts=True, read=_of_virtual_env),
    "hatch": _Wrapper("-q --quiet -v --verbose --no-color --color", subcommand="run", has_scripts=True, read=_hatch),
    **dict.fromkeys(("uvx", "pipx", "tox", "nox"), _ITS_OWN_ENVIRONMENT),
    **dict.fromkeys(("rye", "pixi"), replace(_ITS_OWN_ENVIRONMENT, subcommand="run", has_scripts=True)),
    **dict.fromkeys(("mpirun", "mpiexec", "srun", "horovodrun", "parallel", "xargs"), _ITS_OWN_RANKS),
    **dict.fromkeys(("docker", "podman", "singularity", "apptainer", "ssh", "sudo", "su", "doas"), _OTHER_MACHINE),
    **dict.fromkeys(("taskset", "numactl", "chrt"), _OTHER_PROCESSORS),
}


def unwrap(words: Sequence[str], around: Surroundings, in_shell: bool = False) -> Inner | None:
    """The command within a command; ``None`` where it is no wrapper, or runs nothing.

    A project's own script by its name is none, such as ``train`` in ``pdm run train``.

    Args:
        in_shell: whether a shell reads the words, for which ``NAME=VALUE`` before a command, and ``exec``, count too.
    """
    if not words:
        return None
    if in_shell and _ASSIGNMENT.fullmatch(words[0]):
        return _assigned(tuple(words), around)
    name = os.path.basename(words[0])
    wrapper = _WRAPPERS.get(name) if in_shell or name != "exec" else None
    if wrapper is None:
        return None
    try:
        options = _read(wrapper, tuple(words[1:]))
        if wrapper.subcommand:
            if options.rest[:1] != (wrapper.subcommand,):
                return None
            more = _read(wrapper, options.rest[1:])
            options = _Options({**options.values, **more.values}, more.rest)
    except _UnknownOptionError as error:
        problem = f"{name} {error.option} cannot be honoured in ranks"
        return Inner(error.rest, around, problem=problem, is_certain=False)
    inner = None if options.has(wrapper.shows) else wrapper.read(options, around)
    if inner is None or not wrapper.has_scripts:
        return inner
    # A project's script is a text that says what it starts.
    is_known = launcher_words(inner.words) is not None or python_words(inner.words) is not None
    return inner if is_known or executable(inner.words[0], inner.around.path, inner.around.search_path) else None


@functools.cache
def _names(wrapper_options: str) -> frozenset[str]:
    return frozenset(wrapper_options.split())


def _read(wrapper: _Wrapper, words: tuple[str, ...]) -> _Options:
    """The options before the first word that is none, as ``getopt`` splits them."""
    if wrapper.flags == _ANY:
        return _Options({}, words)
    flags, valued = _names(wrapper.flags) | _names(wrapper.shows), _names(wrapper.values)
    values: dict[str, tuple[str, ...]] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        long, has_value, value = word.partition("=")
        if word in flags:
            taken = [(word, "")]
        elif word.startswith("--") and long in valued and (has_value or rest):
            taken = [(long, value if has_value else rest.pop(0))]
        elif not word.startswith("--"):
            taken = _cluster(word, flags, valued, rest)
        else:
            raise _UnknownOptionError(word, tuple(rest))
        for option, text in taken:
            values[option] = (*values.get(option, ()), text)
    return _Options(values, tuple(rest))


def _cluster(word: str, flags: frozenset[str], valued: frozenset[str], rest: list[str]) -> list[tuple[str, str]]:
    """``-iu NAME`` or ``-uNAME``; ``nice -5`` too, whose number is the value of ``-n``."""
    if "-n" in valued and re.fullmatch(r"-{1,2}\d+", word):
        return [("-n", word[1:])]
    taken = []
    for index, letter in enumerate(word[1:], start=1):
        option = f"-{letter}"
        if option in flags:
            taken.append((option, ""))
        elif option in valued and (word[index + 1 :] or rest):
            return [*taken, (option, word[index + 1 :] or rest.pop(0))]
        else:
            raise _UnknownOptionError(word, tuple(rest))
    return taken
