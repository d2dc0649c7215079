"""Texts for a shell: which commands are in them, and which starts ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_trlcompat.launch.looking import first_start, is_start
from pytest_trlcompat.launch.shells import Text, commands, text_of
from pytest_trlcompat.launch.wrappers import Surroundings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b; c 'd e' && f|g & h", [["a", "b"], ["c", "d e"], ["f"], ["g"], ["h"]]),
        ("a > x 2>&1 < y b", [["a", "b"]]),
        ("# a\nb # c\nd#e '#f'", [["b"], ["d#e", "#f"]]),
        ('a \\\n  b\\ c "d \\" e"', [["a", "b c", 'd " e']]),
        ("if a; then b; else c; fi", [["a"], ["b"], ["c"], ["fi"]]),
        ("X=1 Y='2 3'\na $X ${Y} ${Z:-z} ${N:-}", [["a", "1", "2", "3", "z"]]),
        ("export X=1\nX=$X a", [["X=1", "a"]]),
        ('a $0 $1 $9 "$@"', [["a", "one", "one", "two"]]),
        ('a "$(b c)" `d`; X=$(e)', [["a", "$(b c)"], ["d"], ["e"], ["b", "c"]]),
        ("cat <<EOF > x\na b\nEOF\nc", [["cat"], ["c"]]),
        ("(a; b)\n{ c; }", [["a"], ["b"], ["c"]]),
        ("", []),
        ("a 'b", [["a", "b"]]),
    ],
)
def test_the_commands_of_a_text(text: str, expected: list[list[str]]) -> None:
    assert [list(command.words) for command in commands(text, {}, ["one", "two"])] == expected


def test_lines_are_counted() -> None:
    text = "#!/bin/sh\n\nset -e\na \\\n  b\ncat <<E\n1\n2\nE\nc 'x\ny'; d\n"
    assert [(command.line, command.words[0]) for command in commands(text, {})] == [
        (3, "set"),
        (5, "a"),
        (6, "cat"),
        (11, "c"),
        (11, "d"),
    ]


def test_where_a_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.sh").write_text("echo 1\n")
    (tmp_path / "run").write_text("#!/usr/bin/env bash\necho 2\n")
    (tmp_path / "python").write_text("#!/bin/sh\n'''exec' /bin/python \"$0\"\n' '''\n")
    (tmp_path / "Makefile").write_text("include more.mk\nall:\n\techo 3\n")
    (tmp_path / "more.mk").write_text("X := 4\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.mk").write_text("all:\n\t-@echo 5\n")
    around = Surroundings({"PATH": str(tmp_path)}, folder=str(tmp_path))
    for name in ("run", "python"):
        (tmp_path / name).chmod(0o755)

    def read(*words: str) -> Text | None:
        return text_of(words, around)

    assert read("bash", "t.sh", "a") == Text("t.sh", "echo 1\n", ("a",))
    assert read("sh", "-ex", "-o", "pipefail", "t.sh") == Text("t.sh", "echo 1\n")
    assert read("bash", "-euxo", "pipefail", "t.sh") == Text("t.sh", "echo 1\n")
    assert read("bash", "-lc", "echo $1", "name", "a") == Text("", "echo $1", ("a",), is_line=True)
    assert read("source", "t.sh") == read("./t.sh") == Text("t.sh", "echo 1\n")
    assert read("./run") == Text("run", "#!/usr/bin/env bash\necho 2\n")
    assert read("run") == Text("run", "#!/usr/bin/env bash\necho 2\n", only_launchers=True)
    assert read("make", "all") == Text("Makefile", "include more.mk\nall:\n\techo 3\n\nX='4'\n", only_launchers=True)
    assert read("make", "-Cother", "-f", "x.mk") == Text("x.mk", "all:\n\techo 5\n", only_launchers=True)
    for words in (["bash"], ["bash", "-i"], ["bash", "missing.sh"], ["make", "-C", "other"], ["./python"], ["missing"]):
        assert read(*words) is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("accelerate launch t.py", 1),
        ('echo 1\nexec torchrun t.py "$@"', 2),
        ("CUDA_VISIBLE_DEVICES=0 nohup deepspeed t.py &", 1),
        ("L='accelerate launch'\nA=--num_processes\n$L $A 2 t.py", 3),
        ("$LAUNCH t.py", 1),
        ("if true; then\n  uv run --with x torchrun t.py\nfi", 2),
        ("for i in 1 2; do bash -c 'torchrun t.py'; done", 1),
        ("X=$(torchrun t.py)", 1),
        ("env A=1 timeout 5 sh -c 'time torchrun t.py | tee log'", 1),
        ("python -c 'import os; os.system(\"torchrun t.py\")'", 1),
        ("bash inner.sh", 1),
        (". ./inner.sh", 1),
        ("make -s train", 1),
        ("just train", 1),
        ("pdm run train", 1),
        ("env A=1 pixi run train", 1),
        ("pdm run cat torchrun t.py", None),
        ("pdm install", None),
        ("$@", 1),
        ("some-wrapper --x torchrun t.py", None),  # there is no such command
        ("cat --x torchrun t.py", None),
        ("sort --x torchrun t.py", 1),  # nothing is known of it, and there is a t.py
        ("sort --x torchrun other.py", None),
        ("echo accelerate launch t.py\n# torchrun t.py\npip install deepspeed", None),
        ("python t.py", None),
        ("make clean -C elsewhere", None),
    ],
)
def test_the_first_launcher(text: str, line: int | None, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    (tmp_path / "inner.sh").write_text("set -e\ntorchrun t.py\n")
    (tmp_path / "Makefile").write_text("P = torchrun\n\ntrain: x\n\t@$(P) t.py\nclean:\n\trm x\n")
    (tmp_path / "justfile").write_text("train:\n    @torchrun t.py\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pdm.scripts]\nlint = 'ruff'\ntrain = {cmd = \"torchrun t.py\"}\n")
    around = Surroundings({"LAUNCH": "torchrun", "PATH": "/usr/bin:/bin"}, folder=str(tmp_path))
    start = first_start(Text("", text, ("torchrun", "t.py")), around, programs=False)
    assert (start.line if start else None) == line


def test_programs_of_pythons_count_if_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("all:\n\tpython t.py\n")
    (tmp_path / "x.sh").write_text("python t.py\n")
    around = Surroundings(folder=str(tmp_path))
    for words, expected in (
        (["python", "t.py"], True),
        (["env", "A=1", "python", "t.py"], True),
        (["bash", "x.sh"], True),
        (["make"], False),  # it may have other targets
        (["python", "-m", "pip"], False),
        (["ls"], False),
    ):
        assert is_start(words, around, programs=True) is expected, words
        assert not is_start(words, around, programs=False)


def test_a_script_that_starts_itself_is_taken_for_a_start(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text("bash x.sh\n")
    assert is_start(["bash", "x.sh"], Surroundings(folder=str(tmp_path)), programs=False)
