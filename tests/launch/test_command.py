"""``launcher.command``: programs in ranks are what they are in interpreters of their own; plain CPU, no stack."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import CommandError, Launcher, LaunchError

SHOW = """
    import json, os, sys

    class Own:
        pass

    print(json.dumps({
        "argv": sys.argv[1:],
        "argv0": os.path.basename(sys.argv[0]),
        "name": __name__,
        "path0": sys.path[0],
        "cwd": os.getcwd(),
        "file": os.path.basename(__file__),
        "is_main": sys.modules["__main__"].Own is Own,
        "class": Own.__module__,
        "package": __package__ or "",
    }))
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(device="cpu", timeout=60) as launch:
        yield launch


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def run(launcher: Launcher, words: list[Any], **more: Any) -> str:
    """What rank 0 prints."""
    return launcher.command(words, strategy="single", **more).ranks[0].stdout


@pytest.mark.parametrize(
    "words",
    [
        ["python", "show.py", "--a", "b c"],
        ["python3.11", "-u", "show.py", "--a", "b c"],
        [sys.executable, "show.py", "--a", "b c"],
        ["python", "-m", "package.show", "--a", "b c"],
        ["python", "-m", "package", "--a", "b c"],
    ],
    ids=["python", "options", "executable", "module", "package"],
)
def test_a_program_sees_what_it_sees_in_an_interpreter_of_its_own(
    launcher: Launcher, tmp_path: Path, words: list[str]
) -> None:
    write(tmp_path, "show.py", SHOW)
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/show.py", SHOW)
    write(tmp_path, "package/__main__.py", SHOW)
    real = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run(launcher, words, cwd=tmp_path) == real.stdout
    assert '"class": "__main__"' in real.stdout


def test_a_script_by_its_path(launcher: Launcher, tmp_path: Path) -> None:
    script = write(tmp_path, "show.py", SHOW)
    printed = run(launcher, [script, "x"])
    assert f'"path0": "{tmp_path}"' in printed
    assert '"argv": ["x"]' in printed
    assert f'"cwd": "{os.getcwd()}"' in printed


def test_an_installed_command(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip writes it, in a folder that is on ``PATH``."""
    write(tmp_path, "show-it", f"#!{sys.executable}\n{textwrap.dedent(SHOW)}").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    printed = run(launcher, ["show-it", "-v"])
    assert '"argv": ["-v"]' in printed
    assert '"argv0": "show-it"' in printed


def test_commands_beside_this_interpreter_are_found_without_path(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(launcher, ["pytest", "--version"]) == f"pytest {pytest.__version__}\n"


@pytest.mark.parametrize(
    ("end", "status", "printed"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no such file')", 1, "no such file"),
        ("sys.exit(256 + 4)", 4, ""),
        ("argparse.ArgumentParser().parse_args()", 2, "unrecognized arguments: --what"),
    ],
)
def test_an_exit_status_is_an_error(launcher: Launcher, tmp_path: Path, end: str, status: int, printed: str) -> None:
    write(tmp_path, "ends.py", f"import argparse, sys\n{end}\n")
    real = subprocess.run([sys.executable, "ends.py", "--what"], cwd=tmp_path, capture_output=True, check=False)
    assert real.returncode == status
    with pytest.raises(
        LaunchError, match=f"python ends.py --what' ended with exit status {status}|status {status}"
    ) as caught:
        run(launcher, ["python", "ends.py", "--what"], cwd=tmp_path)
    assert caught.value.failure is not None
    assert caught.value.failure.type_name == "ExitStatusError"
    assert printed in str(caught.value)


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "exit()", "pass"])
def test_exit_status_0_is_none(launcher: Launcher, tmp_path: Path, end: str) -> None:
    write(tmp_path, "ends.py", f"import sys\nprint('here')\n{end}\n")
    result = launcher.command(["python", "ends.py"], strategy="single", cwd=tmp_path)
    assert (result.values, result.ranks[0].stdout) == ([0], "here\n")


def test_an_exception_is_the_ranks(launcher: Launcher, tmp_path: Path) -> None:
    write(tmp_path, "fails.py", "def deep():\n    raise LookupError('in the script')\n\ndeep()\n")
    with pytest.raises(LaunchError, match=r"launch of python fails.py under single on 1 rank") as caught:
        run(launcher, ["python", "fails.py"], cwd=tmp_path)
    assert re.search(r'fails.py", line 2, in deep', str(caught.value))
    result = launcher.command(["python", "fails.py"], strategy="single", cwd=tmp_path, check=False)
    assert result.ranks[0].failure is not None
    assert result.ranks[0].failure.message == "in the script"


def test_threads_end_and_exit_handlers_run_the_last_first(launcher: Launcher, tmp_path: Path) -> None:
    write(
        tmp_path,
        "ends.py",
        """
        import atexit, threading, time
        def late():
            time.sleep(0.2)
            print("thread")
        atexit.register(print, "first")
        @atexit.register
        def second():
            print("second")
        def never():
            print("never")
        atexit.register(lambda: 1 / 0)
        atexit.register(never)
        atexit.unregister(never)
        threading.Thread(target=late).start()
        print("end")
        """,
    )
    real = subprocess.run([sys.executable, "ends.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run(launcher, ["python", "ends.py"], cwd=tmp_path) == real.stdout == "end\nthread\nsecond\nfirst\n"


def test_pools_of_threads_that_nobody_shut_down_end(launcher: Launcher, tmp_path: Path) -> None:
    """An interpreter ends them before it waits for threads: they would wait for work without end."""
    write(
        tmp_path,
        "ends.py",
        """
        import time
        from concurrent.futures import ThreadPoolExecutor
        def late():
            time.sleep(0.2)
            print("late")
        pool = ThreadPoolExecutor(2)
        pool.submit(print, "done").result()
        pool.submit(late)
        print("end")
        """,
    )
    real = subprocess.run([sys.executable, "ends.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run(launcher, ["python", "ends.py"], cwd=tmp_path, timeout=60) == real.stdout == "done\nend\nlate\n"


def test_processes_that_are_spawned_find_main(launcher: Launcher, tmp_path: Path) -> None:
    write(
        tmp_path,
        "spawns.py",
        """
        import multiprocessing
        class Own:
            value = 7
        def work(own):
            return own.value + 1
        if __name__ == "__main__":
            for way in ("spawn", "fork"):
                with multiprocessing.get_context(way).Pool(1) as pool:
                    print(way, pool.map(work, [Own(), Own()]))
        """,
    )
    assert run(launcher, ["python", "spawns.py"], cwd=tmp_path) == "spawn [8, 8]\nfork [8, 8]\n"


def test_nothing_of_a_command_is_left_for_the_next(launcher: Launcher, tmp_path: Path) -> None:
    write(tmp_path, "one.py", "import sys, builtins, atexit\nbuiltins.left = 1\nsys.modules['left'] = sys\nOwn = 1\n")
    write(
        tmp_path,
        "two.py",
        "import sys, builtins\nprint(hasattr(builtins, 'left'), 'left' in sys.modules, 'Own' in dir())\n",
    )
    run(launcher, ["python", "one.py"], cwd=tmp_path)
    assert run(launcher, ["python", "two.py"], cwd=tmp_path) == "False False False\n"


STARTS = """
    import os, subprocess, sys
    print("outer", os.getpid(), flush=True)
    if os.environ.get("HOW") == "exec":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    done = subprocess.run([sys.executable, *sys.argv[1:]], env={**os.environ, "MORE": "1"})
    print("after", done.returncode)
"""
INNER = "import os, sys\nprint('inner', os.getpid(), sys.argv[1:], os.environ.get('MORE'), __name__)\n"


@pytest.mark.parametrize("how", ["run", "exec"])
@pytest.mark.parametrize("words", [["inner.py", "a"], ["-u", "-m", "inner", "a"]])
def test_a_program_that_starts_another_of_pythons(
    launcher: Launcher, tmp_path: Path, words: list[str], how: str
) -> None:
    write(tmp_path, "starts.py", STARTS)
    write(tmp_path, "inner.py", INNER)
    command, more = ["python", "starts.py", *words], {"cwd": tmp_path, "env": {"HOW": how}}
    with pytest.raises(
        LaunchError, match=r"starts .* in a process of its own, which is no rank .* follow=True"
    ) as caught:
        run(launcher, command, **more)
    assert caught.value.failure is not None
    assert caught.value.failure.type_name == "NestedLauncherError"
    outer, inner, *after = run(launcher, command, follow=True, **more).splitlines()
    assert after == (["after 0"] if how == "run" else [])
    assert outer.split()[1] == inner.split()[1]  # the same process
    assert inner.split()[2:] == ["['a']", "1" if how == "run" else "None", "__main__"]
    if how == "run":  # a rank that becomes another program is lost
        left = run(launcher, command, follow=False, **more).splitlines()
        assert (left[1].split()[0], left[2:]) == ("inner", ["after 0"])


@pytest.mark.parametrize(
    "words",
    [["-c", "pass"], ["-m", "calendar", "2026"], ["-m", "pip", "--version"], ["-m", "wandb", "service"], ["--version"]],
)
def test_what_is_no_program_of_its_own_is_started(launcher: Launcher, tmp_path: Path, words: list[str]) -> None:
    write(tmp_path, "starts.py", STARTS)
    assert "\nafter " in run(launcher, ["python", "starts.py", *words], cwd=tmp_path)


def test_variables_of_the_environment(launcher: Launcher, tmp_path: Path) -> None:
    write(tmp_path, "env.py", "import os\nprint(os.environ['ONE'], 'TWO' in os.environ)\n")
    assert run(launcher, ["python", "env.py"], cwd=tmp_path, env={"ONE": "1"}) == "1 False\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["no-such-command"], r"no-such-command: no such command, neither in .* nor on PATH"),
        (["pytset"], r"did you mean .*pytest"),
        (["missing.py"], r"missing.py: there is no file .*missing.py"),
        (["python", "missing.py"], r"python missing.py: there is no .*missing.py"),
        (["python"], "not nothing"),
        (["python", "-c", "print(1)"], "ranks run -m MODULE or a script's path, not -c"),
        (["python", "-O", "-m", "timeit"], "not -O"),
        (["A=1", "pytest"], r"A=1 pytest: variables of the environment belong into env=\{...\}"),
        (["env", "A=1", "pytest"], "belong into env="),
        (["ls", "-l"], r"ls: .*ls is no Python script"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path, words: list[str], text: str) -> None:
    with Launcher(device="cpu") as launch, pytest.raises(CommandError, match=text):
        launch.command(words, cwd=tmp_path, strategy="single")
    assert not launch._servers


@pytest.mark.parametrize(
    ("words", "text"), [("trl sft", r"\['trl', 'sft'\]"), ([], "not"), ([1], "str, bytes or os.PathLike")]
)
def test_a_command_is_a_list(launcher: Launcher, words: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        launcher.command(words)


def test_options_need_a_strategy(launcher: Launcher) -> None:
    with pytest.raises(ValueError, match="options need a strategy that they are of"):
        launcher.command(["pytest"], options={"stage": 3})


def test_a_shell_script_is_refused_and_a_long_python_path_is_not(launcher: Launcher, tmp_path: Path) -> None:
    shell = write(tmp_path, "shell", "#!/bin/sh\necho python\n")
    with pytest.raises(CommandError, match="shell: .* is no Python script"):
        run(launcher, [str(shell)])
    long = write(tmp_path, "long", f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\nprint('python')\n")
    assert run(launcher, [str(long)]) == "python\n"


TWO_STEPS = """
    import json, os, subprocess, sys
    import helper
    helper.name = "outer"
    os.environ["AROUND"] = "1"
    first = subprocess.run([sys.executable, "sft.py", "a"], env={**os.environ, "GIVEN": "2"}, cwd="sub")
    del os.environ["AROUND"]
    print("then", first.returncode, "GIVEN" in os.environ, os.path.basename(os.getcwd()), helper.name, sys.argv[1:])
    second = subprocess.Popen([sys.executable, "dpo.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    print(second.communicate(), second.poll(), second.wait(), second.returncode)
    print(subprocess.check_output([sys.executable, "sft.py"], cwd="sub"))
    try:
        subprocess.run([sys.executable, "dpo.py"], check=True)
    except subprocess.CalledProcessError as error:
        print("status", error.returncode)
    print(os.spawnl(os.P_WAIT, sys.executable, "python", "dpo.py"), os.system("python dpo.py"))
    assert False, "the last line"
"""


def test_what_follows_a_started_program_is_run(launcher: Launcher, tmp_path: Path) -> None:
    write(tmp_path, "outer.py", TWO_STEPS)
    write(tmp_path, "helper.py", "name = 'fresh'\n")
    write(tmp_path, "sub/helper.py", "name = 'sub'\n")
    write(
        tmp_path,
        "sub/sft.py",
        """
        import atexit, os, sys, helper
        atexit.register(print, "handler")
        print("sft", os.environ.get("AROUND"), os.environ.get("GIVEN"), os.path.basename(os.getcwd()), helper.name)
        """,
    )
    write(tmp_path, "dpo.py", "import sys\nprint('dpo', sys.argv[1:])\nprint('late', file=sys.stderr)\nsys.exit(3)\n")
    more: dict[str, Any] = {"cwd": tmp_path, "follow": True, "check": False}
    result = launcher.command(["python", "outer.py", "x"], strategy="single", **more)
    assert result.ranks[0].stdout.splitlines() == [
        "sft 1 2 sub sub",
        "handler",
        f"then 0 False {tmp_path.name} outer ['x']",
        r"('dpo []\n', 'late\n') 3 3 3",
        r"b'sft None None sub sub\nhandler\n'",
        "dpo []",
        "status 3",
        "dpo []",
        "dpo []",
        "3 768",
    ]
    assert result.ranks[0].failure is not None
    assert result.ranks[0].failure.message == "the last line"


@pytest.mark.parametrize(
    "start", ["subprocess.run([sys.executable, 'inner.py'])", "os.system('python inner.py > log')"]
)
def test_a_refused_start_that_the_program_handles_fails(launcher: Launcher, tmp_path: Path, start: str) -> None:
    write(tmp_path, "inner.py", "print('inner')\n")
    write(tmp_path, "outer.py", f"import os, subprocess, sys\ntry:\n    {start}\nexcept:\n    pass\nprint('end')\n")
    with pytest.raises(LaunchError, match=r"NestedLauncherError") as caught:
        run(launcher, ["python", "outer.py"], cwd=tmp_path)
    assert caught.value.failure is not None


def test_a_replacement_that_the_program_handles_fails(launcher: Launcher, tmp_path: Path) -> None:
    write(tmp_path, "inner.py", "print('inner')\n")
    text = (
        "import os, sys\ntry:\n    os.execv(sys.executable, ['python', 'inner.py'])\nexcept:\n    pass\nprint('end')\n"
    )
    write(tmp_path, "outer.py", text)
    with pytest.raises(LaunchError, match=r"went on after os.exec\*, which never returns"):
        run(launcher, ["python", "outer.py"], cwd=tmp_path, follow=True)


@pytest.mark.parametrize(
    "line",
    [
        "X=$A python inner.py",
        "python inner.py > log",
        "cd . && python inner.py",
        "python inner.py $A",
        "env A=1 python inner.py | cat",
        "timeout 9 sh -c 'python inner.py; true'",
    ],
)
@pytest.mark.parametrize(
    "start", ["os.system({!r})", "subprocess.run({!r}, shell=True)", "subprocess.run(['bash', '-c', {!r}])"]
)
def test_a_line_for_a_shell_is_refused(launcher: Launcher, tmp_path: Path, line: str, start: str) -> None:
    write(tmp_path, "inner.py", "print('inner')\n")
    write(tmp_path, "outer.py", f"import os, subprocess\n{start.format(line)}\n")
    with pytest.raises(LaunchError, match=r"has a shell run .* which ranks cannot: they read plain words"):
        run(launcher, ["python", "outer.py"], cwd=tmp_path, follow=True)


def test_plain_words_for_a_shell_are_run(launcher: Launcher, tmp_path: Path) -> None:
    write(tmp_path, "inner.py", "import os\nprint(os.getpid())\n")
    write(
        tmp_path,
        "outer.py",
        "import os, subprocess\nprint(os.getpid())\nsubprocess.run(['bash', '-c', 'python inner.py'])\n",
    )
    outer, inner = run(launcher, ["python", "outer.py"], cwd=tmp_path, follow=True).splitlines()
    assert outer == inner


def test_a_command_does_not_see_what_the_test_process_added_to_its_path(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "added/of_the_tests.py", "")
    write(tmp_path, "given/of_the_user.py", "")
    write(tmp_path, "work/path.py", "import json, sys\nprint(json.dumps(sys.path))\n")
    write(tmp_path, "work/imports.py", "import of_the_user\nprint('here')\nimport of_the_tests\n")
    monkeypatch.syspath_prepend(tmp_path / "added")
    work, variables = tmp_path / "work", {"PYTHONPATH": str(tmp_path / "given")}
    real = subprocess.run(
        [sys.executable, "path.py"],
        cwd=work,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run(launcher, ["python", "path.py"], cwd=work, env=variables) == real.stdout
    result = launcher.command(["python", "imports.py"], strategy="single", cwd=work, env=variables, check=False)
    assert result.ranks[0].stdout == "here\n"
    assert result.ranks[0].failure is not None
    assert result.ranks[0].failure.message == "No module named 'of_the_tests'"
