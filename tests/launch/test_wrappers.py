"""Commands that run another one: where it begins, and what surrounds it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from pytest_trlcompat.launch.wrappers import Deadline, Inner, Surroundings, unwrap

HERE = Surroundings(env={"A": "0", "B": "b", "VIRTUAL_ENV": sys.prefix})


def inner_of(line: str, around: Surroundings = HERE) -> Inner:
    inner = unwrap(shlex.split(line), around, in_shell=True)
    assert inner is not None
    return inner


@pytest.mark.parametrize(
    "line",
    [
        "nohup torchrun t.py",
        "nohup -- torchrun t.py",
        "nice torchrun t.py",
        "nice -n 5 torchrun t.py",
        "nice -5 torchrun t.py",
        "nice --adjustment=5 torchrun t.py",
        "ionice -c2 -n 7 torchrun t.py",
        "stdbuf -oL -e L torchrun t.py",
        "setsid -w torchrun t.py",
        "exec torchrun t.py",
        "exec -a name torchrun t.py",
        "command torchrun t.py",
        "command -p torchrun t.py",
        "env torchrun t.py",
        "env -S 'torchrun t.py'",
        "/usr/bin/env -- torchrun t.py",
        "uv run torchrun t.py",
        "uv -q run --active --no-sync -- torchrun t.py",
        "poetry run torchrun t.py",
        "poetry --quiet run torchrun t.py",
        "pdm run -v torchrun t.py",
        "pipenv run torchrun t.py",
    ],
)
def test_a_wrapper_that_changes_nothing(line: str, tmp_path: Path) -> None:
    around = Surroundings(HERE.env, folder=str(tmp_path))
    assert inner_of(line, around) == Inner(("torchrun", "t.py"), around)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("env A=1 C='x y=z' torchrun t.py", {"A": "1", "B": "b", "C": "x y=z"}),
        ("A=1 C= torchrun t.py", {"A": "1", "B": "b", "C": ""}),
        ("env -i A=1 torchrun t.py", {"A": "1"}),
        ("env - A=1 torchrun t.py", {"A": "1"}),
        ("env -iu B A=1 torchrun t.py", {"A": "1"}),
        ("env -u A -uC torchrun t.py", {"B": "b"}),
        ("env --unset=A --unset B torchrun t.py", {}),
        ("env -u A A=2 torchrun t.py", {"A": "2", "B": "b"}),
        ("exec -c torchrun t.py", {}),
    ],
)
def test_variables(line: str, expected: dict[str, str]) -> None:
    inner = inner_of(line, Surroundings(env={"A": "0", "B": "b"}))
    assert inner.words == ("torchrun", "t.py")
    assert inner.around.variables == expected


def test_variables_that_are_taken_away_are_named() -> None:
    assert inner_of("env -u A -u C torchrun t.py").around.unset == {"A", "C"}


def test_variables_are_the_processes_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_PROCESS", "1")
    around = inner_of("env A=2 torchrun t.py", Surroundings()).around
    assert (around.variables["OF_THE_PROCESS"], around.variables["A"]) == ("1", "2")


@pytest.mark.parametrize("line", ["env -C sub torchrun t.py", "env --chdir=sub torchrun t.py"])
def test_the_working_directory(line: str, tmp_path: Path) -> None:
    assert inner_of(line, Surroundings(folder=str(tmp_path))).around.path == tmp_path / "sub"


@pytest.mark.parametrize(
    ("options", "deadline"),
    [
        ("9", Deadline(9.0, 124)),
        ("1.5m", Deadline(90.0, 124)),
        ("-k 5 -s INT 2h", Deadline(7200.0, 124)),
        ("--signal=KILL .5", Deadline(0.5, 137)),
        ("-s 9 1d", Deadline(86400.0, 137)),
        ("--preserve-status 1", Deadline(1.0, 143)),
        ("-ps SIGINT --foreground 1", Deadline(1.0, 130)),
        ("0", None),
    ],
)
def test_timeout(options: str, deadline: Deadline | None) -> None:
    assert inner_of(f"timeout {options} torchrun t.py") == Inner(("torchrun", "t.py"), HERE, deadline)


def test_time() -> None:
    assert inner_of("time -p torchrun t.py") == Inner(("torchrun", "t.py"), HERE, is_timed=True)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "torchrun t.py",
        "env",
        "env A=1",
        "nohup",
        "timeout 5",
        "command -v torchrun",
        "uv pip install torchrun",
        "uv --quiet",
        "conda install torchrun",
        "poetry add torchrun",
        "pdm run train",
        "hatch run train:all",
    ],
)
def test_no_command_within(line: str) -> None:
    assert unwrap(shlex.split(line), HERE, in_shell=True) is None


@pytest.mark.parametrize("line", ["A=1 torchrun t.py", "exec torchrun t.py"])
def test_only_a_shell_knows_these(line: str) -> None:
    assert unwrap(shlex.split(line), HERE) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("env --nonsense torchrun t.py", "env --nonsense cannot be honoured in ranks"),
        ("time -o file torchrun t.py", "time -o cannot be honoured in ranks"),
        ("timeout soon torchrun t.py", "soon is no duration"),
        ("timeout -s NEVER 5 torchrun t.py", "NEVER is no signal"),
        ("uv run --with torch torchrun t.py", "uv --with cannot be honoured in ranks"),
        ("uv run --isolated torchrun t.py", "uv --isolated cannot be honoured in ranks"),
        ("uv run -p 3.12 torchrun t.py", "uv -p cannot be honoured in ranks"),
        ("rye run torchrun t.py", "it runs its command in an environment of its own"),
        ("uvx torchrun t.py", "it runs its command in an environment of its own"),
        ("mpirun -np 2 torchrun t.py", "it starts processes of its own, which are no ranks of this launch"),
        ("ssh host torchrun t.py", "it runs its command as another user, or in another system"),
        ("taskset -c 0 torchrun t.py", "it binds its command to processors or memory"),
        ("conda run -n other torchrun t.py", "the environment other, which is not the active one"),
        ("mamba run torchrun t.py", "CONDA_PREFIX is not set"),
        ("hatch run train:torchrun t.py", "HATCH_ENV_ACTIVE does not name it"),
        ("hatch run torchrun t.py", "HATCH_ENV_ACTIVE does not name it"),
    ],
)
def test_what_cannot_be_honoured(line: str, problem: str) -> None:
    inner = inner_of(line)
    assert problem in inner.problem
    assert inner.words[-2:] == ("torchrun", "t.py")


@pytest.mark.parametrize("manager", ["poetry run", "pdm run", "pipenv run"])
@pytest.mark.parametrize(
    ("active", "problem"),
    [("/of/another", f"in /of/another, and these ranks run in {sys.prefix}"), ("", "VIRTUAL_ENV is not set")],
)
def test_another_environment(manager: str, active: str, problem: str) -> None:
    around = Surroundings(env={"VIRTUAL_ENV": active} if active else {})
    assert problem in inner_of(f"{manager} torchrun t.py", around).problem


@pytest.mark.parametrize(
    ("line", "env", "is_here"),
    [
        ("conda run torchrun t.py", {"CONDA_PREFIX": sys.prefix}, True),
        ("conda run -n here torchrun t.py", {"CONDA_PREFIX": sys.prefix, "CONDA_DEFAULT_ENV": "here"}, True),
        ("conda run -n other torchrun t.py", {"CONDA_PREFIX": sys.prefix, "CONDA_DEFAULT_ENV": "here"}, False),
        (f"conda run --no-capture-output -p {sys.prefix} torchrun t.py", {}, True),
        ("micromamba run -p /of/another torchrun t.py", {"CONDA_PREFIX": sys.prefix}, False),
        ("hatch run torchrun t.py", {"HATCH_ENV_ACTIVE": "default", "VIRTUAL_ENV": sys.prefix}, True),
        ("hatch run train:torchrun t.py", {"HATCH_ENV_ACTIVE": "train", "VIRTUAL_ENV": sys.prefix}, True),
        ("hatch run train:torchrun t.py", {"HATCH_ENV_ACTIVE": "default", "VIRTUAL_ENV": sys.prefix}, False),
    ],
)
def test_the_environment_that_is_active(line: str, env: dict[str, str], is_here: bool) -> None:
    inner = inner_of(line, Surroundings(env=env))
    assert inner.words == ("torchrun", "t.py")
    assert (inner.problem == "") is is_here


def test_uv_runs_in_the_environment_of_the_project(tmp_path: Path) -> None:
    """Wherever below the project it is started; the active one counts where there is no project, or if asked for."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "sub").mkdir()
    around = Surroundings({"VIRTUAL_ENV": sys.prefix}, folder=str(tmp_path / "sub"))
    assert f"in {tmp_path / '.venv'}, and these ranks" in inner_of("uv run torchrun t.py", around).problem
    assert inner_of("uv run --active torchrun t.py", around).problem == ""
    assert inner_of("uv run --no-project torchrun t.py", around).problem == ""
    named = around.assigned({"UV_PROJECT_ENVIRONMENT": sys.prefix})
    assert inner_of("uv run torchrun t.py", named).problem == ""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    assert inner_of("uv run torchrun t.py", around).problem == ""
    elsewhere = Surroundings({}, folder="/")
    assert inner_of(f"uv run --directory {tmp_path} torchrun t.py", elsewhere).around.path == tmp_path
    assert inner_of(f"uv run --project {tmp_path} torchrun t.py", elsewhere).problem == ""
    assert "there is no .venv" in inner_of("uv run torchrun t.py", elsewhere).problem


def test_uv_runs_scripts_and_modules(tmp_path: Path) -> None:
    around = Surroundings({"VIRTUAL_ENV": sys.prefix}, folder=str(tmp_path))
    assert inner_of("uv run t.py a", around).words == ("python", "t.py", "a")
    assert inner_of("uv run -m module a", around).words == ("python", "-m", "module", "a")
    (tmp_path / "t.py").write_text("# /// script\n# dependencies = []\n# ///\n")
    assert "t.py has requirements of its own" in inner_of("uv run t.py", around).problem
