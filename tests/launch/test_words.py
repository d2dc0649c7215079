"""What the words of a command say: launchers by their names and modules, and what an interpreter is given."""

from __future__ import annotations

import shlex
import sys

import pytest

from pytest_trlcompat.launch.words import LauncherWords, PythonWords, is_launcher_text, launcher_words, python_words


@pytest.mark.parametrize(
    ("line", "launcher", "rest"),
    [
        ("accelerate launch --num_processes 2 t.py", "accelerate", "--num_processes 2 t.py"),
        ("/env/bin/accelerate-launch t.py", "accelerate", "t.py"),
        ("torchrun t.py", "torchrun", "t.py"),
        ("ds --num_gpus 2 t.py", "deepspeed", "--num_gpus 2 t.py"),
        ("python -m accelerate launch t.py", "accelerate", "t.py"),
        ("python3 -u -m torch.distributed.run t.py", "torchrun", "t.py"),
        ("python -um torch.distributed.run t.py", "torchrun", "t.py"),
        ("python -W ignore -X faulthandler -Im torch.distributed.launch t.py", "torchrun", "t.py"),
        ("python -Wignore -OO -m deepspeed.launcher.runner t.py", "deepspeed", "t.py"),
        ("python --check-hash-based-pycs never -m accelerate.commands.launch t.py", "accelerate", "t.py"),
        ("python /env/bin/torchrun t.py", "torchrun", "t.py"),
        ("python /env/bin/accelerate launch t.py", "accelerate", "t.py"),
        ("python /env/site-packages/torch/distributed/run.py t.py", "torchrun", "t.py"),
    ],
)
def test_a_launcher(line: str, launcher: str, rest: str) -> None:
    found = launcher_words(shlex.split(line))
    assert found == LauncherWords(launcher, tuple(shlex.split(rest)), is_legacy="distributed.launch" in line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "accelerate env",
        "python torchrun.py",
        "python -c torchrun",
        "python -m torchrun_of_mine t.py",
        "python run.py",
        "my-torchrun t.py",
        "python",
        "python -m",
        "python --version",
    ],
)
def test_no_launcher(line: str) -> None:
    assert launcher_words(shlex.split(line)) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "-u", "-B", "t.py", "-m"], PythonWords((), "script", "t.py", ("-m",))),
        (["python3.11", "-O", "-m", "m", "a"], PythonWords(("-O",), "m", "m", ("a",))),
        ([sys.executable, "-cprint(1)", "a"], PythonWords((), "c", "print(1)", ("a",))),
        (["python", "-X", "dev", "t.py"], PythonWords(("-X", "dev"), "script", "t.py")),
        (["python", "-"], PythonWords(("-",))),
        (["python", "--help"], PythonWords(("--help",))),
        (["python", "-V"], PythonWords(("-V",))),
        (["python"], PythonWords(())),
        (["pythonic", "t.py"], None),
    ],
)
def test_what_an_interpreter_is_given(words: list[str], expected: PythonWords | None) -> None:
    assert python_words(words) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import subprocess; subprocess.run(['torchrun', 't.py'])", True),
        ("run(['accelerate', 'launch'])", True),
        ("os.system('deepspeed t.py')", True),
        ("from torch.distributed.run import main; main()", True),
        ("import deepspeed; print(deepspeed.__version__)", False),
        ("import accelerate", False),
    ],
)
def test_code_that_names_a_launcher(text: str, expected: bool) -> None:
    assert is_launcher_text(text) is expected
