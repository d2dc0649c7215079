"""Launchers that a command starts through other commands, as axolotl and LlamaFactory do, and by functions."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

INNER = """
    import json, os, sys
    from accelerate import PartialState
    PartialState()  # a launch fails whose ranks have not met
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "A", "ACCELERATE_MIXED_PRECISION")
    print("RESULT", json.dumps([os.getpid(), sys.argv[1:], {name: os.environ.get(name) for name in names}]), flush=True)
    sys.exit(int(os.environ.get("STATUS", "0")))
"""
OUTER = """
    import os, subprocess, sys
    print("OUTER", os.getpid(), flush=True)
    def start():
        {start}
    start()
    print("AFTER", os.environ.get("A"), flush=True)
"""
CONSOLE = """
    #!{executable}
    import sys
    from {module} import main
    if __name__ == '__main__':
        sys.exit(main())
"""
TORCHRUN_OF_A_TEXT = """
    import os, subprocess, sys
    from copy import deepcopy
    def main():
        print("OUTER", os.getpid(), flush=True)
        environment = deepcopy(os.environ)
        environment["A"] = "torchrun"
        line = "torchrun --nnodes {nodes} --node_rank 0 --nproc_per_node {ranks} --master_addr 127.0.0.1 "
        line += "--master_port 29511 {file} {arguments}"
        file = __file__.replace("by_text", "inner")
        line = line.format(nodes=1, ranks=2, file=file, arguments=" ".join(sys.argv[1:]))
        sys.exit(subprocess.run(line.split(), env=environment, check=True).returncode)
"""
ACCELERATE_OF_A_LIST = """
    import os, subprocess, sys
    def main():
        print("OUTER", os.getpid(), flush=True)
        words = ["accelerate", "launch", "--main_process_port", "29512", "--num_processes", "2", "-m", "inner"]
        words += sys.argv[1:]
        environment = {**os.environ, "A": "accelerate"}
        if os.environ.get("HOW") == "exec":
            os.execvpe(words[0], words, environment)
        try:
            subprocess.run(words, check=True, env=environment)
        except subprocess.CalledProcessError as error:
            sys.exit(error.returncode)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a program that says which rank it is, and two installed commands that start launchers for it.

    ``PATH`` stays as it is: imports of the stack read it, so that each launch would get a warm server of its own.
    """
    write(tmp_path, "inner.py", INNER)
    write(tmp_path, "by_text.py", TORCHRUN_OF_A_TEXT)
    write(tmp_path, "by_list.py", ACCELERATE_OF_A_LIST)
    for module in ("by_text", "by_list"):
        write(tmp_path, module.replace("_", "-"), CONSOLE.format(executable=sys.executable, module=module)).chmod(0o755)
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip())
    return path


def check_ranks(ranks: Any, arguments: list[str], **variables: str) -> None:
    """Each rank has run the inner program once, in its own process, as the rank that it is."""
    assert len(ranks) == 2
    for number, rank in enumerate(ranks):
        lines = rank.stdout.splitlines()
        (outer,) = (line.split()[1] for line in lines if line.startswith("OUTER "))
        ((pid, seen, environment),) = (json.loads(line[7:]) for line in lines if line.startswith("RESULT "))
        assert (str(pid), seen) == (outer, arguments)
        assert (environment["RANK"], environment["LOCAL_RANK"]) == (str(number), str(number))
        assert environment["WORLD_SIZE"] == "2"
        for name, value in variables.items():
            assert environment[name] == value


def outer(launch: Launcher, folder: Path, start: str, **more: Any) -> Any:
    write(folder, "outer.py", OUTER.replace("{start}", start))
    return launch.command(["python", "outer.py"], strategy="ddp", sharded=False, cwd=folder, **more)


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("env A=1 torchrun --nproc_per_node 2 inner.py x", "subprocess.run({!r}.split(), check=True)"),
        ("A=1 exec accelerate launch --num_processes 2 inner.py x", "assert os.system({!r}) == 0"),
        (
            "nohup timeout 300 env A=1 python -W ignore -um torch.distributed.run --nproc-per-node=2 inner.py x",
            "subprocess.run(['bash', '-lc', {!r}], check=True)",
        ),
        (
            "env --unset=B A=1 nice stdbuf -oL deepspeed --num_gpus 2 --no_local_rank inner.py x",
            "assert os.spawnvp(os.P_WAIT, 'env', {!r}.split()) == 0",
        ),
    ],
    ids=["torchrun", "accelerate", "module", "deepspeed"],
)
def test_a_launcher_within_a_wrapper(launch: Launcher, folder: Path, line: str, start: str) -> None:
    result = outer(launch, folder, start.format(line))
    check_ranks(result.ranks, ["x"], A="1")
    assert [rank.stdout.splitlines()[-1] for rank in result.ranks] == ["AFTER None"] * 2


def test_a_launcher_that_a_timeout_ends(launch: Launcher, folder: Path) -> None:
    write(folder, "slow.py", "import time\ntime.sleep(600)\n")
    start = """
        print(subprocess.run(["timeout", "0.5", "torchrun", "--nproc_per_node", "2", "slow.py"]).returncode)
        from accelerate import PartialState
        PartialState()"""
    result = outer(launch, folder, start)
    assert [rank.stdout.splitlines()[1:] for rank in result.ranks] == [["124", "AFTER None"]] * 2


@pytest.mark.parametrize(
    ("words", "how", "value", "status"),
    [
        (["./by-text"], "", "torchrun", 0),
        (["./by-text"], "", "torchrun", 3),
        (["./by-list"], "", "accelerate", 3),
        (["./by-list"], "exec", "accelerate", 0),
        (["./by-list"], "exec", "accelerate", 3),
    ],
)
def test_installed_commands_that_start_launchers(
    launch: Launcher, folder: Path, words: list[str], how: str, value: str, status: int
) -> None:
    env = {"HOW": how, "STATUS": str(status)}
    more: dict[str, Any] = {"strategy": "ddp", "sharded": False, "cwd": folder, "env": env, "check": False}
    result = launch.command([*words, "train", "x.yaml"], **more)
    check_ranks(result.ranks, ["train", "x.yaml"], A=value)
    messages = {"" if rank.failure is None else rank.failure.message for rank in result.ranks}
    assert ("" in messages) is (status == 0)
    if status:
        assert all("exit status 3" in message for message in messages)


def test_an_installed_command_that_a_program_starts(launch: Launcher, folder: Path) -> None:
    start = "subprocess.run(['env', 'STATUS=0', './by-list', 'x'], check=True)"
    with pytest.raises(LaunchError, match="starts ./by-list x in a process of its own, which is no rank"):
        outer(launch, folder, start)
    result = outer(launch, folder, start, follow=True)
    for number, rank in enumerate(result.ranks):
        lines = rank.stdout.splitlines()
        assert len({line.split()[1] for line in lines if line.startswith("OUTER ")}) == 1
        ((_, arguments, environment),) = (json.loads(line[7:]) for line in lines if line.startswith("RESULT "))
        assert (arguments, environment["RANK"], environment["A"]) == (["x"], str(number), "accelerate")


FUNCTIONS = {
    "deepspeed": """
        from deepspeed.launcher.runner import main
        main(["--num_gpus", "2", "--no_local_rank", "inner.py", "x"])""",
    "deepspeed-argv": """
        import deepspeed.launcher.runner as runner
        sys.argv = ["deepspeed", "--num_gpus=2", "--no_local_rank", "inner.py", "x"]
        runner.main()""",
    "torchrun": """
        from torch.distributed.run import main
        main(["--nproc_per_node", "2", "inner.py", "x"])""",
    "torchrun-run": """
        from torch.distributed.run import parse_args, run
        run(parse_args(["--nproc_per_node", "2", "inner.py", "x"]))""",
    "torch-launch": """
        from torch.distributed.launch import main
        main(["--nproc_per_node", "2", "--use_env", "inner.py", "x"])""",
    "accelerate": """
        from accelerate.commands.launch import launch_command, launch_command_parser
        launch_command(launch_command_parser().parse_args(["--num_processes", "2", "inner.py", "x"]))""",
    "accelerate-argv": """
        from accelerate.commands.accelerate_cli import main
        sys.argv = ["accelerate", "launch", "--num_processes", "2", "inner.py", "x"]
        main()""",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_a_launcher(launch: Launcher, folder: Path, name: str) -> None:
    result = outer(launch, folder, FUNCTIONS[name])
    check_ranks(result.ranks, ["x"])
    assert [rank.stdout.splitlines()[-1] for rank in result.ranks] == ["AFTER None"] * 2


@pytest.mark.parametrize("name", ["deepspeed", "torchrun"])
def test_the_exit_status_of_a_function_that_is_a_launcher(launch: Launcher, folder: Path, name: str) -> None:
    result = outer(launch, folder, FUNCTIONS[name], env={"STATUS": "3"}, check=False)
    for rank in result.ranks:
        assert rank.failure is None or "exit status 3" in rank.failure.message
        assert "AFTER" not in rank.stdout
    assert any(rank.failure is not None for rank in result.ranks)


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (
            "from torch.distributed.launcher.api import LaunchConfig, elastic_launch; "
            "elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2), print)()",
            "torch.distributed.launcher.api.launch_agent",
        ),
        (
            "import accelerate; accelerate.debug_launcher(print, num_processes=2)",
            "accelerate.launchers.debug_launcher",
        ),
    ],
)
def test_a_function_that_starts_ranks_of_a_function_is_refused(
    launch: Launcher, folder: Path, start: str, name: str
) -> None:
    with pytest.raises(LaunchError, match=f"calls {name}, which starts processes of its own that are no ranks"):
        outer(launch, folder, start)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("bash train.sh", "line 4 of train.sh starts accelerate launch --num_processes 2 inner.py"),
        ("make train", "line 2 of Makefile starts torchrun --nproc_per_node 2 inner.py"),
        ("python -m torch.distributed.launch inner.py", "torch.distributed.launch without --use_env gives the script"),
        ("timeout 60 torchrun --nproc_per_node 4 inner.py", "torchrun is asked for 4 ranks"),
    ],
)
def test_what_ranks_cannot_become_is_refused(launch: Launcher, folder: Path, line: str, text: str) -> None:
    write(
        folder,
        "train.sh",
        "#!/bin/bash\nset -euo pipefail\nRANKS=2\naccelerate launch --num_processes $RANKS inner.py\n",
    )
    write(folder, "Makefile", "train:\n\ttorchrun --nproc_per_node 2 inner.py\n")
    start = f"subprocess.run({line.split()})"
    with pytest.raises(LaunchError, match="NestedLauncherError") as caught:
        outer(launch, folder, start)
    assert text in str(caught.value)
    assert "RESULT" not in str(caught.value)
