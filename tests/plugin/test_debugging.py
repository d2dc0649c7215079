"""A person debugs a rank: in a pseudo-terminal, with pytest and the debugger as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .terminal import Terminal

CPU = "--trlcompat-device=cpu"


def write(folder: Path, source: str) -> None:
    (folder / "test_it.py").write_text(source)


@pytest.mark.parametrize("capture", ["fd", "no"])
def test_breakpoint_stops_in_the_rank_with_a_prompt(tmp_path: Path, capture: str) -> None:
    write(
        tmp_path,
        "import time\n"
        "def train(rate):\n"
        "    steps = 3\n"
        "    breakpoint()\n"
        "    return rate * steps\n"
        "def test_it(launcher):\n"
        "    print('not shown' if True else '')\n"
        "    assert launcher(train, 0.5, strategy='single', timeout=0.5).values == [3.5]\n"
        "    print('captured again')\n",
    )
    with Terminal(tmp_path, CPU, "--trlcompat-debug-rank=0", f"--capture={capture}") as terminal:
        terminal.wait_for("(Pdb) ")
        import time

        time.sleep(1.5)  # beyond the timeout that the launch was given
        terminal.type("p rate, steps")
        assert "(0.5, 3)" in terminal.wait_for("(Pdb) ")
        terminal.type("steps = 7")
        terminal.wait_for("(Pdb) ")
        terminal.type("c")
        end = terminal.wait_for("1 passed")
    assert ("captured again" in end) == (capture == "no")


def test_pdb_stops_where_the_rank_failed(tmp_path: Path) -> None:
    write(
        tmp_path,
        "def inner(value):\n"
        "    raise LookupError('no such thing')\n"
        "def train():\n"
        "    inner(41)\n"
        "def test_it(launcher):\n"
        "    launcher(train, strategy='single')\n",
    )
    with Terminal(tmp_path, CPU, "--trlcompat-debug-rank=0", "--pdb") as terminal:
        assert "rank 0 raised LookupError: no such thing" in terminal.wait_for("(Pdb) ")
        terminal.type("p value + 1")
        assert "42" in terminal.wait_for("(Pdb) ")
        terminal.type("up")
        assert "inner(41)" in terminal.wait_for("(Pdb) ")
        terminal.type("q")
        assert "first observed failure: rank 0 raised LookupError" in terminal.wait_for("(Pdb) ")  # pytest's own
        terminal.type("q")
        terminal.wait_for("1 failed")


def test_without_a_terminal_it_says_what_to_do(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    write(
        pytester.path,
        "def train():\n    breakpoint()\ndef test_it(launcher):\n    launcher(train, strategy='single')\n",
    )
    plain = pytester.runpytest_subprocess("-p", "pytest_trlcompat.plugin", CPU)
    plain.assert_outcomes(failed=1)
    assert "a rank has no terminal; pytest --trlcompat-debug-rank=0 gives rank 0 yours" in plain.stdout.str()
    lent = pytester.runpytest_subprocess("-p", "pytest_trlcompat.plugin", CPU, "--trlcompat-debug-rank=0")
    lent.assert_outcomes(failed=1)
    assert re.search(
        "trlcompat: option --trlcompat-debug-rank lends rank 0 a terminal, but stdin of this process is none; run "
        "pytest in a terminal, and without -n of pytest-xdist",
        lent.stdout.str(),
    )


def test_the_terminal_is_as_before_when_a_rank_is_killed_at_its_prompt(tmp_path: Path) -> None:
    write(
        tmp_path,
        "import os, signal, termios\n"
        "def train():\n"
        "    attributes = termios.tcgetattr(0)\n"
        "    attributes[3] &= ~termios.ECHO\n"
        "    termios.tcsetattr(0, termios.TCSANOW, attributes)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def test_it(launcher):\n"
        "    before = termios.tcgetattr(0)\n"
        "    result = launcher(train, strategy='single', check=False)\n"
        "    assert result.ranks[0].exit_status == -9\n"
        "    assert termios.tcgetattr(0) == before\n",
    )
    with Terminal(tmp_path, CPU, "--trlcompat-debug-rank=0", "-s") as terminal:
        terminal.wait_for("1 passed")
