"""Several machines: two network namespaces stand for two hosts, each with a launcher of its own.

Needs the right to make namespaces; skipped elsewhere. The namespaces share the file system and the processes, which
real hosts do not; what is tested is the network: where the ranks meet, how they are numbered, that nothing falls back
on loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOSTS = ("10.83.1.1", "10.83.1.2")
SECRET = "a secret of these hosts"
SCRIPT = """
import json, os, sys
from launch_bodies import all_reduce, train_step
from pytest_trlcompat.launch import Cluster, Launcher

node_rank = int(sys.argv[1])
with Launcher(device="software", timeout=float(sys.argv[4]), cluster=Cluster(2, node_rank, *sys.argv[2:4])) as launch:
    first = launch(all_reduce, strategy="ddp", sharded=False)
    four = launch(all_reduce, strategy="ddp", sharded=False, world_size=4)
    step = launch(train_step, strategy="zero3")
    print(json.dumps({
        "ranks": [rank.rank for rank in first.ranks],
        "ranks_of_four": [rank.rank for rank in four.ranks],
        "values": [first.values, four.values],
        "losses": [value["losses"] for value in step.values],
        "world_size": step.ranks[0].proof["world_size"],
    }))
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces with a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("there is no program ip to make network namespaces with")
    names = (f"trlcompat-a-{os.getpid()}", f"trlcompat-b-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        for name, address in zip(names, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "cable0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def run(
    hosts: tuple[str, str], folder: Path, secrets: tuple[str, str], timeout: float = 90
) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of the script on each host."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "GLOO_SOCKET_IFNAME": "cable0",
    }
    address = f"{HOSTS[0]}:29412"
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, str(script), str(number), address, secret, str(timeout)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, (name, secret) in enumerate(zip(hosts, secrets, strict=True))
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(running, outputs, strict=True)]


def test_two_hosts_train_together(hosts: tuple[str, str], tmp_path: Path) -> None:
    ended = run(hosts, tmp_path, (SECRET, SECRET))
    assert [status for status, _, _ in ended] == [0, 0], [errors[-3000:] for _, _, errors in ended]
    reports = [json.loads(output.splitlines()[-1]) for _, output, _ in ended]
    assert [each["ranks"] for each in reports] == [[0], [1]]
    assert [each["ranks_of_four"] for each in reports] == [[0, 1], [2, 3]]
    assert [each["values"] for each in reports] == [[[3.0], [10.0, 10.0]]] * 2
    assert [each["world_size"] for each in reports] == [2, 2]
    assert reports[0]["losses"] == reports[1]["losses"]
    assert reports[0]["losses"][0][0] > reports[0]["losses"][0][-1]


def test_a_host_with_another_secret_is_turned_away(hosts: tuple[str, str], tmp_path: Path) -> None:
    first, second = run(hosts, tmp_path, (SECRET, "a secret of other hosts"), timeout=20)
    assert (first[0], second[0]) == (1, 1)
    where = f"machine 0 at {HOSTS[0]}:29412"
    refused = f"PermissionError: {where} has another secret: set TRLCOMPAT_RDZV_SECRET to the same on every machine"
    assert refused in second[2]
    told = f"1 of 2 machines met at {where} within 20 s; turned away for another secret: {HOSTS[1]}"
    assert f"TimeoutError: {told}" in first[2]
