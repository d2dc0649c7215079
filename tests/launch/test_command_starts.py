"""What a command starts through other commands: run in the rank, refused, or left alone; plain CPU, no stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

INNER = """
    import json, os, sys
    folder = os.path.basename(os.getcwd())
    print(json.dumps([os.getpid(), sys.argv[1:], os.environ.get("A"), os.environ.get("B"), folder]))
    sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(device="cpu", timeout=60) as launch:
        yield launch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a program, and this interpreter as ``python``."""
    write(tmp_path, "inner.py", INNER)
    write(tmp_path, "sub/inner.py", INNER)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("B", "b")
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip())
    return path


def run(launcher: Launcher, folder: Path, start: str, **more: Any) -> list[str]:
    """What is printed by a program that starts something."""
    text = f"import asyncio, os, subprocess, sys\nprint(os.getpid(), flush=True)\n{start}\n"
    write(folder, "outer.py", text)
    result = launcher.command(["python", "outer.py"], strategy="single", cwd=folder, **more)
    return result.ranks[0].stdout.splitlines()


def refusal(launcher: Launcher, folder: Path, start: str, **more: Any) -> str:
    with pytest.raises(LaunchError) as caught:
        run(launcher, folder, start, **more)
    assert caught.value.failure is not None
    assert caught.value.failure.type_name == "NestedLauncherError"
    return caught.value.failure.message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("env A=1 python inner.py x", [["x"], "1", "b"]),
        ("env -i A=1 python inner.py", [[], "1", None]),
        ("env -u B python inner.py", [[], None, None]),
        ("env -C sub python inner.py", [[], None, "b"]),
        ("nohup nice -n 1 stdbuf -oL python -u inner.py", [[], None, "b"]),
        ("timeout -k 1 60 python -m inner y", [["y"], None, "b"]),
        ("env A=2 timeout 60 env B=3 python inner.py", [[], "2", "3"]),
        ("bash -c 'A=4 exec python inner.py'", [[], "4", "b"]),
        ("sh -ec 'time -p python inner.py'", [[], None, "b"]),
    ],
)
@pytest.mark.parametrize("start", ["subprocess.run(shlex.split({!r}))", "os.system({!r})"])
def test_a_program_within_a_wrapper_is_run_by_the_rank(
    launcher: Launcher, folder: Path, line: str, expected: list[Any], start: str
) -> None:
    outer, inner, after = run(
        launcher,
        folder,
        f"import shlex\n{start.format(line)}\nprint(os.environ.get('A'), os.environ.get('B'), os.getcwd())",
        follow=True,
    )
    name = "sub" if "sub" in line else folder.name
    assert json.loads(inner) == [int(outer), *expected, name]
    assert after == f"None b {folder}"


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run(['env', *[f'{key}={value}' for key, value in new.items()], 'python', 'shows.py'])",
        "subprocess.run(['python', 'shows.py'], env={**os.environ, **new})",
        "subprocess.run(['python', 'shows.py'], env={**new, 'PATH': os.environ['PATH']})",
    ],
)
def test_what_a_strategy_is_said_by_can_be_given_and_how_ranks_meet_cannot(
    launcher: Launcher, folder: Path, start: str
) -> None:
    names = ["ACCELERATE_MIXED_PRECISION", "FSDP_VERSION", "RANK", "ACCELERATE_USE_CPU"]
    write(folder, "shows.py", f"import os\nprint([os.environ.get(name) for name in {names}])\n")
    before = "new = {'ACCELERATE_MIXED_PRECISION': 'bf16', 'FSDP_VERSION': '2', 'RANK': '7'}\n"
    (_, printed) = run(launcher, folder, before + start, follow=True)
    assert printed == "['bf16', '2', None, 'true']"


def test_an_assignment_before_a_command_of_a_line(launcher: Launcher, folder: Path) -> None:
    outer, inner = run(launcher, folder, "subprocess.run('A=1 B= python inner.py', shell=True)", follow=True)
    assert json.loads(inner)[:4] == [int(outer), [], "1", ""]


@pytest.mark.parametrize(
    "wrapper", ["env STATUS=3", "env STATUS=3 nohup", "env STATUS=3 time -p", "timeout 60 env STATUS=3"]
)
def test_the_exit_status_is_the_programs(launcher: Launcher, folder: Path, wrapper: str) -> None:
    lines = run(
        launcher, folder, f"print(subprocess.run({[*wrapper.split(), 'python', 'inner.py']}).returncode)", follow=True
    )
    assert lines[-1] == "3"


SLOW = "import time\ntry:\n    time.sleep(600)\nfinally:\n    print('ended')\n"


@pytest.mark.parametrize(
    ("options", "status"), [(["0.2"], 124), (["-s", "KILL", "0.2"], 137), (["--preserve-status", "0.2"], 143)]
)
def test_timeout_ends_a_program(launcher: Launcher, folder: Path, options: list[str], status: int) -> None:
    """As ``timeout`` does a process of its own; what follows is run."""
    write(folder, "slow.py", SLOW)
    words = ["timeout", *options, "python", "slow.py"]
    real = subprocess.run(words, cwd=folder, check=False, capture_output=True)
    assert real.returncode in (status, 128 - status)  # the second where it kills itself too
    lines = run(launcher, folder, f"print(subprocess.run({words}).returncode)\nprint('after')", follow=True)
    assert lines[1:] == ["ended", str(status), "after"]


def test_the_outer_of_two_timeouts_ends_a_program(launcher: Launcher, folder: Path) -> None:
    write(folder, "slow.py", SLOW)
    words = ["timeout", "0.4", "env", "A=1", "timeout", "-s", "KILL", "60", "python", "slow.py"]
    lines = run(launcher, folder, f"print(subprocess.run({words}).returncode)", follow=True)
    assert lines[1:] == ["ended", "124"]


def test_the_inner_of_two_timeouts_leaves_the_outer_in_force(launcher: Launcher, folder: Path) -> None:
    write(folder, "slow.py", SLOW)
    text = "words = ['timeout', '0.2', 'python', 'slow.py']\nfor step in range(9):\n    print(run(words).returncode)\n"
    write(folder, "two.py", f"from subprocess import run\n{text}")
    lines = run(
        launcher, folder, "print(subprocess.run(['timeout', '0.5', 'python', 'two.py']).returncode)", follow=True
    )
    assert lines[1:3] == ["ended", "124"]
    assert lines[-1] == "124"
    assert len(lines) < 2 * 9


def test_what_goes_on_after_a_timeout_fails(launcher: Launcher, folder: Path) -> None:
    write(folder, "slow.py", "import time\ntry:\n    time.sleep(600)\nexcept:\n    pass\n")
    start = "subprocess.run(['timeout', '0.2', 'python', 'slow.py'])"
    assert "which went on after 0.2 s: it handles BaseException, by a bare except" in refusal(
        launcher, folder, start, follow=True
    )


def test_time_says_what_it_took(launcher: Launcher, folder: Path) -> None:
    write(folder, "slow.py", "import time\ntime.sleep(0.2)\n")
    write(folder, "outer.py", "import subprocess\nsubprocess.run(['time', 'python', 'slow.py'])\n")
    result = launcher.command(["python", "outer.py"], strategy="single", cwd=folder, follow=True)
    real, user, system = (line.split() for line in result.ranks[0].stderr.splitlines()[-3:])
    assert [real[0], user[0], system[0]] == ["real", "user", "sys"]
    assert float(real[1]) >= 0.2 > float(user[1]) >= 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["uv", "run", "--with", "x", "torchrun", "t.py"],
            "uv --with cannot be honoured in ranks. Have the program start",
        ),
        (
            ["conda", "run", "-n", "other", "accelerate", "launch", "t.py"],
            "(the environment other, which is not the active",
        ),
        (["poetry", "run", "torchrun", "t.py"], "in /of/another, and these ranks run in "),
        (["env", "VIRTUAL_ENV=/x", "pdm", "run", "torchrun", "t.py"], "in /x, and these ranks run in "),
        (["mpirun", "-np", "2", "torchrun", "inner.py"], "which are no ranks of this launch. Have"),
        (["time", "-o", "file", "deepspeed", "t.py"], "time -o cannot be honoured in ranks"),
        (["bash", "t.sh"], "starts bash t.sh, and line 3 of t.sh starts accelerate launch t.py. Ranks cannot take the"),
        (["./t.sh"], "starts ./t.sh, and line 3 of t.sh starts accelerate launch t.py. Ranks"),
        (["sh", "-x", "t.sh"], "line 3 of t.sh starts accelerate launch t.py. Ranks"),
        (
            ["nohup", "./run", "torchrun", "t.py"],
            "starts ./run torchrun t.py, and line 2 of run starts exec torchrun t.py",
        ),
        (["make", "train"], "starts make train, and line 2 of Makefile starts torchrun t.py. Ranks"),
        (
            ["python", "-c", "import os; os.system('torchrun t.py')"],
            "names a launcher of ranks, and nothing is known of",
        ),
        (
            ["sort", "--by", "torchrun", "t.py"],
            "names a launcher of ranks, and nothing is known of what it makes of it",
        ),
        (["python", "-m", "deepspeed.launcher.launch", "t.py"], "a part of a launcher that starts ranks of its own"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("follow", [None, False])
def test_a_launcher_that_ranks_cannot_take_the_place_of_is_refused(
    launcher: Launcher, folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str, follow: bool | None
) -> None:
    write(folder, "t.py", "")
    write(folder, "t.sh", "#!/bin/bash\nset -e\naccelerate launch t.py\n").chmod(0o755)
    write(folder, "run", '#!/bin/sh\nexec "$@"\n').chmod(0o755)
    write(folder, "Makefile", "train:\n\ttorchrun t.py\n")
    monkeypatch.setenv("VIRTUAL_ENV", "/of/another")
    message = refusal(
        launcher, folder, f"try:\n    subprocess.run({words})\nexcept BaseException:\n    pass", follow=follow
    )
    assert text in message
    assert message.startswith("python outer.py starts ")
    assert "follow=False" not in message


def test_other_launchers_of_python_are_refused(launcher: Launcher, folder: Path) -> None:
    message = refusal(launcher, folder, "subprocess.run(['mpirun', '-np', '2', 'python', 'inner.py'])")
    assert "it starts processes of its own, which are no ranks of this launch. Have the program start" in message
    assert message.endswith("or pass it as the command, or pass follow=False if it trains nothing")


@pytest.mark.parametrize("follow", [None, False])
def test_a_launcher_in_a_line_for_a_shell_is_refused_whatever_follow_says(
    launcher: Launcher, folder: Path, follow: bool | None
) -> None:
    message = refusal(launcher, folder, "os.system('cd sub && torchrun inner.py > log')", follow=follow)
    assert "has a shell run 'cd sub && torchrun inner.py > log', which ranks cannot" in message
    assert message.endswith("subprocess.run([...], env=..., cwd=..., stdout=...)")


def test_a_script_that_runs_python_is_refused_and_left_alone_by_follow(launcher: Launcher, folder: Path) -> None:
    write(folder, "x.sh", "python inner.py | cat\n")
    start = "subprocess.run(['bash', 'x.sh'])"
    message = refusal(launcher, folder, start)
    assert "line 1 of x.sh starts python inner.py. Ranks" in message
    assert message.endswith("or pass them as the command, or pass follow=False if it trains nothing")
    outer, inner = run(launcher, folder, start, follow=False)
    assert json.loads(inner)[0] != int(outer)


def test_a_launcher_of_another_environment_is_refused(launcher: Launcher, folder: Path) -> None:
    venv.create(folder / "other", symlinks=True, with_pip=False)
    other = folder / "other" / "bin"
    write(other, "torchrun", f"#!{other / 'python'}\n").chmod(0o755)
    text = f"torchrun is of another environment, and these ranks run in {sys.prefix}. Install what it needs here, or"
    for start in (
        f"subprocess.run([{str(other / 'torchrun')!r}, 'inner.py'])",
        f"subprocess.run(['torchrun', 'inner.py'], env={{'PATH': {str(other)!r}}})",
        f"subprocess.run(['env', 'PATH={other}', 'torchrun', 'inner.py'])",
        f"subprocess.run(['anything', 'inner.py'], executable={str(other / 'torchrun')!r})",
        f"os.execv({str(other / 'torchrun')!r}, ['anything', 'inner.py'])",
    ):
        assert text in refusal(launcher, folder, start)
    start = f"subprocess.run([{str(other / 'python')!r}, 'inner.py'])"
    assert "python is of another environment" in refusal(launcher, folder, start, follow=True)
    outer, inner = run(launcher, folder, start, follow=False)
    assert json.loads(inner)[0] != int(outer)


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (
            "subprocess.run(['env', 'python', 'inner.py'], input=b'x')",
            "starts ['env', 'python', 'inner.py'] and writes to its standard input, and a rank has none; pass",
        ),
        (
            "os.spawnvp(os.P_NOWAIT, 'env', ['env', 'python', 'inner.py'])",
            "starts ['env', 'python', 'inner.py'] by os.spawnvp without waiting; pass what it runs as the command",
        ),
        (
            "os.posix_spawnp('env', ['env', 'python', 'inner.py'], os.environ)",
            "starts ['env', 'python', 'inner.py'] by os.posix_spawnp without waiting; pass what it runs as the command",
        ),
        (
            "from threading import Thread\n"
            "thread = Thread(target=os.system, args=['timeout 9 python inner.py'])\nthread.start()\nthread.join()",
            "starts python inner.py in a thread, where a rank cannot run it in its own place; pass what it runs",
        ),
        (
            "subprocess.run(['nice', 'python', '-O', 'inner.py'])",
            "starts python -O inner.py, which ranks cannot run: python -O inner.py: after python, ranks run -m",
        ),
        ("subprocess.run(['env', 'python', 'missing.py'])", "which ranks cannot run: python missing.py: there is no "),
    ],
)
def test_how_a_rank_cannot_run_a_program(launcher: Launcher, folder: Path, start: str, text: str) -> None:
    assert text in refusal(launcher, folder, start, follow=True)


def test_a_launcher_that_is_not_installed_is_refused(launcher: Launcher, folder: Path) -> None:
    message = refusal(launcher, folder, "subprocess.run(['torchrun', 'inner.py'])")
    assert "starts torchrun inner.py, whose ranks these cannot become: No module named 'torch'" in message


def test_what_asyncio_waits_for_is_refused(launcher: Launcher, folder: Path) -> None:
    start = """
async def main():
    process = await asyncio.create_subprocess_exec("python", "inner.py")
    await process.wait()
asyncio.run(main())"""
    assert "by asyncio, which would wait for a process that there is none of" in refusal(
        launcher, folder, start, follow=True
    )


def test_what_a_forked_process_starts_is_refused(launcher: Launcher, folder: Path) -> None:
    start = """
child = os.fork()
if child == 0:
    for function, command in ((subprocess.run, ["python", "inner.py"]), (os.system, "python inner.py")):
        try:
            function(command)
        except RuntimeError as error:
            print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)"""
    (_, *printed) = run(launcher, folder, start, follow=True)
    assert len(printed) == 2
    assert all("in a process that a rank has forked, which is no rank" in line for line in printed)


def installed(folder: Path, name: str, module: str) -> None:
    """A command as pip writes it."""
    write(
        folder,
        name,
        f"#!{sys.executable}\nimport sys\nfrom {module} import main\nif __name__ == '__main__':\n"
        "    sys.exit(main())\n",
    ).chmod(0o755)


@pytest.mark.parametrize("words", [["my-train", "x"], ["env", "A=1", "./my-train", "x"], ["bash", "-c", "my-train x"]])
def test_an_installed_command_of_pythons_is_run_by_the_rank(
    launcher: Launcher, folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    write(folder, "of_mine.py", "import os, sys\ndef main():\n    print(os.getpid(), sys.argv[1:])\n    return 3\n")
    installed(folder, "my-train", "of_mine")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    start = f"print(subprocess.run({words}).returncode)"
    assert "in a process of its own, which is no rank of this launch" in refusal(launcher, folder, start)
    outer, inner, status = run(launcher, folder, start, follow=True)
    assert (inner, status) == (f"{outer} ['x']", "3")
    outer, inner, status = run(launcher, folder, start, follow=False)
    assert (inner.split()[0] != outer, status) == (True, "3")


@pytest.mark.parametrize(
    "start",
    [
        "print(subprocess.run(['env', 'A=1', 'sh', '-c', 'echo $A; exit 3']).returncode)",
        "print(subprocess.run(['timeout', '0.1', 'sleep', '9']).returncode)",
        "print(subprocess.run(['env', '-i', 'C=1', 'env'], capture_output=True, text=True))",
        "print(subprocess.run(['bash', 'plain.sh', 'x'], cwd='sub').returncode)",
        "print(subprocess.run(['./plain'], env={**os.environ, 'A': '2'}).returncode)",
        "print(subprocess.run(['make', '-s', 'all']).returncode)",
        "print(os.system('echo torch run; exit 4'))",
        "print(subprocess.run('cd sub && pwd | tail -c 4', shell=True).returncode)",
        "print(subprocess.run(['python', '-W', 'ignore', '-c', 'print(1)']).returncode)",
        "print(subprocess.run(['pip-like', 'torchrun']).returncode)",
        "print(subprocess.run('exit $A', shell=True, env={'A': '5'}).returncode)",
        "print(subprocess.run(['of-the-path']).returncode)",
        "print(subprocess.run(['nice', '-n', '1', 'true']).returncode)",
        "print(subprocess.run(['anything', '-c', 'exit 6'], executable='/bin/sh').returncode)",
        "print(os.spawnvp(os.P_WAIT, 'env', ['env', 'false']))",
        "subprocess.run(['no-such-command'])",
        "subprocess.run(['A=1', 'python', 'inner.py'])",
        "subprocess.run([])",
        "subprocess.run(['true', None])",
        "subprocess.run(['true'], env={'A': 1})",
    ],
)
def test_what_starts_no_ranks_runs_as_before(
    launcher: Launcher, folder: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    write(folder, "sub/plain.sh", "echo python inner.py $1\npwd | tail -c 4\nexit 7\n")
    write(folder, "plain", "#!/bin/sh\necho $A torchrun t.py\nexit 8\n").chmod(0o755)
    write(folder, "Makefile", "all:\n\techo torchrun\ntrain:\n\tpython train.py\n")
    write(folder, "of-the-path", "#!/bin/sh\npython inner.py > log\nexit 9\n").chmod(0o755)
    installed(folder, "pip-like", "pluggy")  # which requires nothing of the stack
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    write(folder, "real.py", f"import os, subprocess, sys\n{start}\n")
    real = subprocess.run([sys.executable, "real.py"], cwd=folder, capture_output=True, text=True, check=False)
    for follow in (None, True, False):
        result = launcher.command(["python", "real.py"], strategy="single", cwd=folder, follow=follow, check=False)
        assert result.ranks[0].stdout == real.stdout
        failure = result.ranks[0].failure
        last = real.stderr.strip().splitlines()[-1] if real.returncode else ""
        assert ("" if failure is None else f"{failure.type_name}: {failure.message}") == last
