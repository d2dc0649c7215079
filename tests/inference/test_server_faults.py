"""What stands between a trainer and its vLLM server: answers that are late or missing, and a restart in the middle."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from suites.vllm.server_faults import GENERATES, Proxy, proxied


class Behind:
    """A server that counts, answers with what it was sent, and takes a moment to end."""

    def __init__(self) -> None:
        asked: list[tuple[str, bytes]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked.append((self.path, body))
                self.send_response(418 if self.path == "/refuses" else 200)
                self.send_header("X-Forwarded-For", "somebody")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def log_message(self, *_: object) -> None:
                pass

        self.asked = asked
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}).start()


@pytest.fixture
def behind() -> Iterator[Behind]:
    found = Behind()
    yield found
    found.server.shutdown()
    found.server.server_close()


def post(passing: Proxy, path: str, body: bytes = b"") -> bytes:
    with urllib.request.urlopen(urllib.request.Request(passing.url + path, body), timeout=10) as answer:
        content: bytes = answer.read()
    return content


def timed(call: Callable[[], bytes]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_what_is_asked_and_answered_is_passed_on(behind: Behind) -> None:
    with proxied(behind.url) as passing:
        assert post(passing, "/generate/", b"prompts") == b"prompts"
        with pytest.raises(urllib.error.HTTPError, match="418"):
            post(passing, "/refuses", b"1")
        with urllib.request.urlopen(f"{passing.url}/health/", timeout=10) as answer:
            assert answer.headers["X-Forwarded-For"] == "somebody"
    assert behind.asked == [("/generate/", b"prompts"), ("/refuses", b"1"), ("/health/", b"")]
    assert (passing.late_answers, passing.unanswered, passing.handed_over) == (0, 0, 0)


def test_answers_of_some_paths_are_late(behind: Behind) -> None:
    with proxied(behind.url, late=lambda path: 0.3 if path.startswith(GENERATES) else 0.0) as passing:
        assert timed(lambda: post(passing, "/health")) < 0.3
        assert timed(lambda: post(passing, "/v1/completions")) >= 0.3
    assert passing.late_answers == 1


def test_at_first_nobody_answers(behind: Behind) -> None:
    with proxied(behind.url, silent=0.3) as passing:
        with pytest.raises(http.client.RemoteDisconnected):
            post(passing, "/health")
        time.sleep(0.3)
        assert post(passing, "/health", b"1") == b"1"
    assert passing.unanswered == 1
    assert len(behind.asked) == 1


def test_the_server_is_restarted_once_when_completions_are_asked_for_the_second_time(behind: Behind) -> None:
    restarts: list[int] = []
    with proxied(behind.url, restart=lambda: restarts.append(len(behind.asked))) as passing:
        for path in (
            "/update_named_param/",
            "/update_named_param/",
            "/generate/",
            "/generate/",
            "/update_named_param/",
        ):
            post(passing, path)
        with pytest.raises(http.client.RemoteDisconnected):
            post(passing, "/generate/", b"3")
        assert post(passing, "/generate/", b"3") == b"3"
    assert restarts == [5]
    assert (passing.handed_over, passing.unanswered) == (2, 1)


def test_a_restart_that_fails_is_said(behind: Behind) -> None:
    def restart() -> None:
        raise RuntimeError("it did not start")

    passing = Proxy(behind.url, restart=restart, restart_at=1)
    passing.start()
    post(passing, "/update_weights")
    with pytest.raises(http.client.RemoteDisconnected):
        post(passing, "/generate/")
    with pytest.raises(RuntimeError, match="it did not start"):
        passing.stop()


def test_a_server_that_is_gone_leaves_requests_unanswered(behind: Behind) -> None:
    with proxied(behind.url) as passing:
        behind.server.shutdown()
        behind.server.server_close()
        with pytest.raises(http.client.RemoteDisconnected):
            post(passing, "/health")
    assert passing.unanswered == 1
