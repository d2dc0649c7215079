"""A vLLM server as a process: how it is started, what it says when it does not start, and that nothing of it stays.

The package ``trl`` is made up: its command answers ``/health`` as vLLM's server does, or ends with an error. The real
one is tested by ``suites/vllm``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_trlcompat import _processes, stack
from pytest_trlcompat.inference import server as server_module
from pytest_trlcompat.inference import serving
from pytest_trlcompat.inference.server import ServerError, VLLMServer

COMMAND = """
import argparse, http.server, importlib.metadata, json, os, subprocess, sys, time

parser = argparse.ArgumentParser()
for name in ("model", "host", "port", "distributed_executor_backend", "max_model_len"):
    parser.add_argument(f"--{name}")
found = parser.parse_args()
if found.model == "broken":
    sys.exit("there is no such model")
if found.model == "silent":
    time.sleep(600)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)  # an engine
seen = {"version": importlib.metadata.version("vllm"), "TMPDIR": os.environ["TMPDIR"]}
print(json.dumps({**vars(found), **seen}), flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


http.server.HTTPServer((found.host, int(found.port)), Handler).serve_forever()
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(stack, "installed", lambda: {"trl": "1.16.0", "vllm": "0.31.0"})
    scripts = tmp_path / "site" / "trl" / "scripts"
    scripts.mkdir(parents=True)
    for folder in (scripts.parent, scripts):
        (folder / "__init__.py").touch()
    (scripts / "vllm_serve.py").write_text(COMMAND)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site")}


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[VLLMServer]:
    found = VLLMServer("model", environment, {"max_model_len": 64})
    yield found
    found.stop()


def runs(server: VLLMServer) -> bool:
    return server.running


def processes(server: VLLMServer) -> list[int]:
    return _processes.marked(server._mark)


def test_names_that_its_processes_give_themselves_leave_its_mark(server: VLLMServer) -> None:
    # setproctitle, by which vLLM names them, writes over their environments unless it finds this variable.
    environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in processes(server)]
    assert [b"SPT_NOENV=1" in each for each in environments] == [True, True]


def test_none_of_its_processes_compiles(server: VLLMServer) -> None:
    environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in processes(server)]
    assert [b"TORCHDYNAMO_DISABLE=1" in each for each in environments] == [True, True]


def test_it_answers_at_its_address_as_long_as_it_runs(server: VLLMServer) -> None:
    assert runs(server)
    assert '"max_model_len": "64"' in server.output()
    assert '"distributed_executor_backend": "uni"' in server.output()
    assert '"version": "0.31.0+cpu"' in server.output()
    assert '"host": "127.0.0.1"' in server.output()
    assert len(processes(server)) == 2
    server.kill()
    assert not runs(server)
    assert not processes(server)


def test_one_that_is_restarted_answers_at_the_same_address_by_new_processes(server: VLLMServer) -> None:
    before, url = processes(server), server.url
    server.restart()
    assert runs(server)
    assert server.url == url
    assert len(processes(server)) == 2
    assert not set(processes(server)) & set(before)
    assert server.output().count('"host": "127.0.0.1"') == 2


def test_another_release_of_trl_serves_in_place_of_the_installed_one(
    environment: dict[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "site", other)
    served = other / "trl" / "scripts" / "vllm_serve.py"
    served.write_text("print('the other one', flush=True)" + served.read_text())
    with pytest.raises(ServerError, match="there is no TRL in"):
        VLLMServer("model", environment, trl=other)
    (other / "trl-1.12.0.dist-info").mkdir()
    (other / "trl-1.12.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.12.0\n")
    server = VLLMServer("model", environment, trl=other)
    try:
        assert "the other one" in server.output()
    finally:
        server.stop()


def test_another_release_of_trl_decides_whether_weights_reach_its_server(
    environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "trl-0.26.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.26.2\n")
    with pytest.raises(ServerError, match=r"takes weights with TRL 1\.0 to 1\.10.*trl 0\.26\.2"):
        VLLMServer("model", environment, trl=tmp_path)


def test_nothing_of_it_stays(environment: dict[str, str]) -> None:
    server = VLLMServer("model", environment)
    folder = server._own.path
    assert folder.is_dir()
    assert f'"TMPDIR": "{folder}"' in server.output()
    server.stop()
    assert not folder.exists()
    assert not processes(server)
    assert server.output() == ""


def test_two_servers_have_addresses_of_their_own(server: VLLMServer, environment: dict[str, str]) -> None:
    other = VLLMServer("model", environment)
    assert other.url != server.url
    other.stop()
    assert runs(server)


def test_one_that_does_not_start_says_what_it_printed(environment: dict[str, str]) -> None:
    with pytest.raises(ServerError, match=r"ended before it answered:\nthere is no such model"):
        VLLMServer("broken", environment)


def test_one_that_does_not_answer_is_ended(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_START_TIMEOUT", 0.0)
    with pytest.raises(ServerError, match="did not answer within 0 s"):
        VLLMServer("silent", environment)  # however late the first look comes, there is no answer


@pytest.mark.parametrize("option", ["--max_model_len", "max-model-len", "port", "model", "host", ""])
def test_what_is_no_option_is_refused_before_anything_is_started(environment: dict[str, str], option: str) -> None:
    with pytest.raises(ServerError, match="is no option of a server here"):
        VLLMServer("model", environment, {option: 1})


def test_without_vllm_there_is_none(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"trl": "1.16.0"})
    with pytest.raises(ServerError, match="vLLM is not installed"):
        VLLMServer("model", environment)


STRANGER = """
import os, socket, sys

number, user = map(int, sys.argv[1:])
os.setgid(user)
os.setuid(user)
for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as stranger:
            if option is not None:
                stranger.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                stranger.bind((address, number))
            except OSError as error:
                print(error.strerror)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
def test_no_other_user_can_have_the_port_before_the_server_has_it_nor_afterwards() -> None:
    port = server_module._Port()

    def strangers() -> list[str]:
        command = [sys.executable, "-c", STRANGER, str(port.number), "65534"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    with socket.socket() as server_socket:
        serving.take(server_socket, port.descriptor)
        for _ in range(2):
            assert strangers() == ["Address already in use"] * 6
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port.number), timeout=10)
            server_socket.listen()
            assert strangers() == ["Address already in use"] * 6
            client = socket.create_connection(("127.0.0.1", port.number), timeout=10)
            accepted, _ = server_socket.accept()
            accepted.close()  # first, so that the system remembers the connection on this side
            client.close()
            port.stop_listening()
    port.close()


def test_another_server_of_this_user_gets_another_port() -> None:
    port = server_module._Port()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port.number))
    port.close()


def test_nobody_answers_in_the_place_of_a_server_that_has_ended(server: VLLMServer) -> None:
    """Its command is killed by somebody else, and leaves an engine."""
    number = int(server.url.rpartition(":")[2])
    os.killpg(server._process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while runs(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    server._watcher.join(60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", number), timeout=10)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", number))


WAITS = """
import os, subprocess, sys, time

engine = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit('the engine has no weights')"])
time.sleep(600)
"""


def test_one_that_waits_for_an_engine_that_has_ended_is_ended(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_CRASHED", 0.5)
    monkeypatch.setattr(server_module, "_START_TIMEOUT", 30.0)
    (tmp_path / "site" / "trl" / "scripts" / "vllm_serve.py").write_text(WAITS)
    with pytest.raises(ServerError, match=r"ended with status 1 before the server answered[^\0]*has no weights"):
        VLLMServer("model", environment)


def test_it_ends_with_the_process_that_has_started_it(environment: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys, os; from pytest_trlcompat import stack; from pytest_trlcompat.inference.server import VLLMServer\n"
        "stack.installed = lambda: {'trl': '1.16.0', 'vllm': '0.31.0'}\n"
        "server = VLLMServer('model', dict(os.environ)); print(server._mark, server._own.path, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as test:
        assert test.stdout is not None
        mark, folder = test.stdout.readline().split()
        assert len(_processes.marked(mark)) == 2
        test.send_signal(signal.SIGKILL)
        test.wait()
    deadline = time.monotonic() + 60
    while (_processes.marked(mark) or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _processes.marked(mark)
    assert not Path(folder).exists()


@pytest.mark.parametrize("versions", [{"trl": "0.29.1", "vllm": "0.12.0"}, {"trl": "1.12.0", "vllm": "0.27.1"}])
def test_a_stack_whose_weights_need_nccl_is_refused_before_anything_starts(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
    monkeypatch.setattr(stack, "installed", lambda: versions)
    with pytest.raises(ServerError, match=r"with TRL 1\.0 to 1\.10, or .*; found .*trl .*vllm") as refused:
        VLLMServer("model", environment)
    assert all(version in str(refused.value) for version in versions.values())


@pytest.mark.parametrize(("trl", "chosen"), [("1.0.0", False), ("1.1.0", True), ("1.16.0", True)])
def test_the_engine_is_one_process_where_the_command_lets_one_choose(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, trl: str, chosen: bool
) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"trl": trl, "vllm": "0.31.0"})
    server = VLLMServer("model", environment)
    try:
        assert ('"distributed_executor_backend": "uni"' in server.output()) is chosen
    finally:
        server.stop()


def test_the_recording_engine_is_started_as_what_it_is(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata = tmp_path / "site" / "vllm-0.9.1+recording.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1+recording\n")
    monkeypatch.setattr(stack, "installed", lambda: {"trl": "1.5.1", "vllm": "0.9.1+recording"})
    server = VLLMServer("model", environment)
    try:
        assert '"version": "0.9.1+recording"' in server.output()
        assert '"distributed_executor_backend": null' in server.output(), "its LLM has none to choose"
    finally:
        server.stop()


@pytest.mark.parametrize("trl", ["0.16.1", "1.11.0"])
def test_the_recording_engine_is_behind_trls_own_server_alone(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, trl: str
) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"trl": trl, "vllm": "0.9.1+recording"})
    with pytest.raises(ServerError, match=f"with TRL 0.17 to 1.10; found trl {trl}, vllm 0.9.1.recording"):
        VLLMServer("model", environment)
