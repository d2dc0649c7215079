"""Files of strangers, and files given by mistake: what they cost, what is repeated of them, and how the doctor ends."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.ranges import parse
from pytest_trlcompat.doctor import command, diagnosis
from pytest_trlcompat.doctor.files import MOST_BYTES
from pytest_trlcompat.doctor.stack_spec import StackSpecError
from tests.counting import calls

from .asking import Ask, refused
from .made_up import Run

U = 'version = 1\n[[package]]\nname = "trl"\nversion = "0.15.2"\n'
SECRET = "hunter2-5f3a9c"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("req.txt", "trl==0.15.2; " + "(" * 3000 + "python_version < '3'" + ")" * 3000),
        ("req.txt", "trl==" + "1" * 5000),
        ("req.txt", "trl==" + "1." * 5000 + "1"),
        ("req.txt", "trl" + ",".join(f"!=0.{number}" for number in range(201))),
        ("req.txt", "".join(f"trl!=0.{number}\n" for number in range(201))),
        ("uv.lock", f"{U}x = {'[' * 3000}{']' * 3000}"),
        ("uv.lock", f"{U}{'a.' * 3000}b = 1"),
        ("uv.lock", f"{U}x = {'9' * 5000}"),
        ("uv.lock", f"{U}resolution-markers = 5"),
        ("uv.lock", f"{U}resolution-markers = [5]"),
        ("uv.lock", f"{U}dependencies = [1]"),
        ("uv.lock", U + "[[package]]\nname = 'trl'\nversion = '1'\n" * 1001),
        ("pylock.toml", 'lock-version = "1.0"\n[[packages]]\nname = "trl"\nmarker = 5'),
        ("Pipfile.lock", '{"_meta": {}, "default": {"trl": 5}}'),
        ("Pipfile.lock", '{"a": ' + "[" * 9999),
        ("poetry.lock", 'package = [{ name = "trl", markers = 5 }]\n[metadata]\nlock-version = "2.1"'),
    ],
)
def test_what_cannot_be_read_ends_with_status_2(doctor: Run, name: str, text: str) -> None:
    Path(name).write_text(text)
    status, out, err = doctor("-r", name)
    assert (status, out) == (2, "")
    assert err.startswith("trlcompat doctor: " + name)
    assert "a fault of the doctor" not in err
    assert len(err) < 500


def test_a_fault_of_the_doctor_itself_ends_with_status_2(doctor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr(diagnosis, "diagnose", fail)
    status, out, err = doctor("trl==0.15.2")
    assert (status, out) == (2, "")
    assert re.match(
        r"trlcompat doctor: a fault of the doctor: KeyError in test_strangers.py, line \d+; please report", err
    )
    assert SECRET not in err


# Included files


def test_a_file_outside_the_folder_of_the_list_is_read_only_if_it_is_named(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".env").write_text(f"TOKEN={SECRET}\n")
    (tmp_path / "base.txt").write_text("trl==0.15.2\n")
    (tmp_path / "sub" / "link.txt").symlink_to(tmp_path / "base.txt")
    for path in ("../.env", "../base.txt", str(tmp_path / "base.txt"), "link.txt", "x/../../base.txt"):
        assert refused(ask, r=("sub/req.txt",), sub__req_txt=f"-r {path}") == (
            f"sub/req.txt, line 1: {path} is not in the folder of req.txt or below it, and is not read unless you name "
            f"it: add -r {path} with its path from here"
        )
    assert ask(r=("sub/req.txt", "base.txt"), sub__req_txt="-r ../base.txt").texts == {"trl": "0.15.2"}


@pytest.mark.parametrize("path", ["pipe", "folder", "device"])
def test_special_files_are_not_read(ask: Ask, tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    special = "Is a directory" if path == "folder" else "not a regular file; pipe what it holds to: trlcompat doctor -"
    assert refused(ask, r=(path,)) == f"cannot read {path}: {special}"
    if path != "device":  # which leads out of the folder
        assert refused(ask, r=("req.txt",), req_txt=f"-r {path}") == f"req.txt, line 1: cannot read {path}: {special}"


def test_input_without_end_is_not_read(ask: Ask, doctor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("big.txt").write_bytes(b"")
    os.truncate("big.txt", MOST_BYTES + 1)
    assert refused(ask, "big.txt") == "cannot read big.txt: more than 16 MiB in all"
    with open("/dev/zero") as zeros:
        monkeypatch.setattr(sys, "stdin", zeros)
        status, _, err = doctor("-")
    assert (status, err) == (2, "trlcompat doctor: cannot read standard input: more than 16 MiB in all\n")


def test_the_files_together_have_one_limit(ask: Ask) -> None:
    half = "#" * (MOST_BYTES // 2 + 1)
    message = refused(ask, "a.txt", "b.txt", a_txt=half, b_txt=half)
    assert message == "cannot read b.txt: more than 16 MiB in all"


def test_includes_have_a_depth_and_a_number(ask: Ask, tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text(f"trl\n-r {number + 1}.txt\n")
    limit = "more than 20 files include each other, or more than 100 are included"
    assert refused(ask, "0.txt") == f"19.txt, line 2: {limit}"
    (tmp_path / "wide.txt").write_text("".join(f"-r leaf{number}.txt\n" for number in range(101)))
    for number in range(101):
        (tmp_path / f"leaf{number}.txt").write_text("trl==0.15.2\n")
    assert refused(ask, "wide.txt") == f"wide.txt, line 100: {limit}"


def test_a_file_that_is_included_often_is_read_once(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eighteen files each of which includes the next one twice the last would be read 131,072 times."""
    for number in range(18):
        (tmp_path / f"{number}.txt").write_text(f"-r {number + 1}.txt\n-r {number + 1}.txt\n")
    (tmp_path / "18.txt").write_text("trl==0.15.2\n")
    opened: list[object] = []
    real = os.open

    def noted(path: Path, flags: int) -> int:
        opened.append(path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", noted)
    assert ask("0.txt").texts == {"trl": "0.15.2"}
    assert len(opened) == 19


# What is repeated


@pytest.mark.parametrize(
    "text",
    [
        f"PASSWORD={SECRET}\n",
        f"PASSWORD: {SECRET}\n",
        f"-----BEGIN {SECRET}-----\n",
        f"--password={SECRET}\n",
        f"trl {SECRET}\n",
        f"trl==0.15.2; {SECRET}\n",
        f'{{"{SECRET}": }}',
        f"mine @ {SECRET}\n-",
    ],
)
@pytest.mark.parametrize("name", ["env", ".env.txt", "uv.lock", "pylock.toml", "Pipfile.lock"])
def test_nothing_of_a_file_that_is_no_list_is_repeated(doctor: Run, name: str, text: str) -> None:
    Path(name).write_text(text)
    status, out, err = doctor("-r", name)
    assert (status, out) == (2, "")
    assert SECRET not in err


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"trl @ git+https://{SECRET}@example.org/trl", "git+https://***@example.org/trl"),
        (f"trl @ git+https://me:{SECRET}@example.org/trl", "git+https://***@example.org/trl"),
        (f"trl @ https://example.org/trl?token={SECRET}", "https://example.org/trl"),
        (f"-e git+ssh://git@example.org/trl#egg=trl&{SECRET}", "git+ssh://git@example.org/trl"),
    ],
)
def test_tokens_in_addresses_are_not_shown(doctor: Run, line: str, shown: str) -> None:
    Path("req.txt").write_text(line + "\n")
    for more in ((), ("--json",)):
        _, out, err = doctor("-r", "req.txt", *more)
        assert f"trl {shown}" in out or f'"trl": "{shown}"' in out
        assert SECRET not in out + err
    lock = (
        f'version = 1\n[[package]]\nname = "trl"\nsource = {{ git = "https://{SECRET}@example.org/trl?rev=main#0" }}\n'
    )
    Path("uv.lock").write_text(lock)
    out = " ".join(doctor("uv.lock")[1].split())
    assert "note: uv.lock: the version of trl is not known (from https://***@example.org/trl)" in out
    assert SECRET not in out


# What a terminal obeys

ESCAPES = "\x1b[2J\x1b]0;x\x07\x9b31m\u202e\u2028\x7f"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"req{ESCAPES}.txt", "trl==0.15.2"),
        (f"{ESCAPES}.lock", U),
        ("gone\x1b[31m.txt", None),
        ("req.txt", f"trl==0.15.2\npeft @ https://example.org/{ESCAPES}"),
        ("req.txt", f"trl==0.15.2\n-e ./{ESCAPES}"),
        ("req.txt", f"trl==0.15.2\n-r ./{ESCAPES}"),
        ("uv.lock", U + '[[package]]\nname = "peft"\nsource = { git = "x\\u001b[2J\\u009b" }\n'),
        ("uv.lock", U.replace("0.15.2", "0.15.2\\u001b[2J")),
        ("pylock.toml", 'lock-version = "\\u001b[2J"\npackages = []'),
        (os.fsdecode(b"\xff\xfe.txt"), "trl==0.15.2"),
    ],
)
def test_no_control_character_reaches_the_output(doctor: Run, name: str, text: str | None) -> None:
    if text is not None:
        Path(name).write_text(text)
    for more in ((), ("--json",)):
        _, out, err = doctor("-r", name, *more)
        assert re.search(r"[^\n\x20-\x7e\xa0-\u1fff\u3000-\ud7ff]", out + err) is None
        assert out or err


def test_arguments_are_printed_without_control_characters(doctor: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in doctor("trl\x1b[31m==1")[2]
    assert "\x1b" not in doctor("trl==1", "--strategy", "\x1b[31m")[2]
    with pytest.raises(SystemExit) as caught:
        doctor("--\x1b[31m")
    assert caught.value.code == 2
    assert "\\x1b[31m" in capsys.readouterr().err


def test_an_encoding_that_lacks_a_character_has_it_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Path("caf\xe9.txt").write_text("trl==0.15.2")
    with open("out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert command.main(["-r", "caf\xe9.txt"]) == 1
    assert Path("out").read_text(encoding="ascii").startswith("trl 0.15.2 (caf\\xe9.txt); ")


# What they cost


LONG: dict[str, Callable[[int], str]] = {
    "names": lambda n: "a\n" * n,
    "editables": lambda n: "-e .\n" * n,
    "continued": lambda n: "\\\n" * n,
    "extras": lambda n: f"peft[{'a,' * n}b]==1\n",
    "exclusions": lambda n: "trl" + ",".join(f"!=0.{number}" for number in range(n // 10)) + "\n",
    "comments": lambda n: "# Editable (a==b" * n,
    "markers": lambda n: "".join(f"peft>=0.{number % 7} ; extra == 'e{number % 4}'\n" for number in range(n // 10)),
}


@pytest.mark.parametrize("kind", LONG)
def test_twice_the_lines_cost_twice_the_time(doctor: Run, small: KnownIssue, kind: str) -> None:
    costs = []
    for number in (1000, 1000, 2000):
        parse.cache_clear()
        Path("req.txt").write_text("trl==0.15.2\n" + LONG[kind](number))
        costs.append(calls(lambda: doctor("-r", "req.txt")))
    assert costs[2] / costs[1] < 2.6  # n log n; n squared makes it 4


@pytest.mark.parametrize(
    "line",
    [
        "# Editable " + "(a==b" * 20_000,
        "trl==0.15.2 " + "--hash " * 14_000,
        "a.whl" * 20_000,
        "trl" + " " * 100_000 + "x",
        "-" * 100_000,
        "a" + "." * 100_000,
        "https:" + "/" * 100_000,
        "x = '" + "a" * 100_000 + "'",
        "x = {" + "a." * 49 + "b = 1}" + "#" * 100_000,
    ],
)
def test_no_pattern_goes_through_a_line_again_and_again(ask: Ask, line: str) -> None:
    """By processor time, of 100 kB over 25 kB: 4 if it is in proportion, 16 if each sign costs a look back."""

    def seconds(text: str) -> float:
        taken = []
        for _ in range(3):
            begin = time.process_time()
            for name in ("req.txt", "uv.lock"):
                with contextlib.suppress(StackSpecError):
                    ask(
                        name, **{name.replace(".", "_"): f"trl==0.15.2\n{text}\n" if name == "req.txt" else f"{text}\n"}
                    )
            taken.append(time.process_time() - begin)
        return min(taken)

    middle = len(line) // 2
    short = line[: middle // 4] + line[-(middle // 4) :]
    assert seconds(line) < max(10 * seconds(short), 0.05)


def test_memory_stays_near_the_size_of_the_input(ask: Ask) -> None:
    """100 kB of lines that each say something; 200 MB is what a whole run may have."""
    text = "trl==0.15.2\n" + "-e .\n" * 20_000
    tracemalloc.start()
    try:
        ask("req.txt", req_txt=text)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()
