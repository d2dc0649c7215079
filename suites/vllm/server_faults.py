"""What goes wrong with a vLLM server during a training: answers come late or never, it is restarted, or it is lost.

A :class:`Proxy` stands between trainer and server and delays or drops answers; :func:`lost_on_request` ends the server
when a rank asks for it (``suites/in_rank/vllm_loss.py``). Runs in the test process.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..in_rank.vllm_loss import DONE, REQUEST

__all__ = ["GENERATES", "TAKES_WEIGHTS", "Proxy", "lost_on_request", "proxied"]

GENERATES = ("/generate", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
"""Paths by which TRL's client asks for completions: of TRL's own server, and of vLLM's."""
TAKES_WEIGHTS = ("/update_named_param", "/update_weights")
"""The same by which it announces weights."""
_POLL = 0.1
"""Seconds."""
_NOT_FORWARDED = ("connection", "content-length", "date", "keep-alive", "server", "transfer-encoding")


class Proxy:
    """An HTTP server on the loopback that passes requests on to another, and answers back.

    Args:
        url: of the server behind it.
        late: by path, seconds by which its answers are held back.
        silent: seconds from the first request on in which none gets an answer.
        restart: called once, while the first completions are asked for after weights were handed over
            :attr:`restart_at` times; the requests of that time get no answer.
        restart_at: see there.

    Attributes:
        url: to give to a trainer.
        late_answers: how many were held back.
        unanswered: requests whose connection was closed without an answer.
        handed_over: how often weights were handed over before completions were asked for.
    """

    def __init__(
        self,
        url: str,
        late: Callable[[str], float] = lambda path: 0.0,
        silent: float = 0.0,
        restart: Callable[[], None] | None = None,
        restart_at: int = 2,
    ) -> None:
        self._behind, self._late, self._silent = urlsplit(url), late, silent
        self._restart, self._restart_at = restart, restart_at
        self._lock = threading.Lock()
        self._is_handing_over = False
        self._first: float | None = None
        self.late_answers = self.unanswered = self.handed_over = 0
        self.failure: Exception | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        # A request that is still held back must not keep the test process from ending.
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def start(self) -> None:
        """Begin to pass on."""
        self._thread.start()

    def stop(self) -> None:
        """
        Raises:
            Exception: of ``restart``.
        """
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        if self.failure is not None:
            raise self.failure

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # keeps connections open, as the servers behind do

            def do_GET(self) -> None:
                outer._pass_on(self)

            def do_POST(self) -> None:
                outer._pass_on(self)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def _pass_on(self, asked: BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        if self._is_silent() or self._restarts(asked.path):
            self._leave_unanswered(asked)
            return
        try:
            status, headers, content = self._answer(asked, body)
        except (OSError, http.client.HTTPException):  # the server behind has ended, or ends
            self._leave_unanswered(asked)
            return
        if seconds := self._late(asked.path):
            self.late_answers += 1
            time.sleep(seconds)
        with contextlib.suppress(OSError):  # whoever asked has gone
            asked.send_response_only(status)
            for name, value in headers:
                asked.send_header(name, value)
            asked.send_header("Content-Length", str(len(content)))
            asked.end_headers()
            asked.wfile.write(content)

    def _is_silent(self) -> bool:
        with self._lock:
            self._first = time.monotonic() if self._first is None else self._first
            return time.monotonic() < self._first + self._silent

    def _restarts(self, path: str) -> bool:
        """Whether the server was restarted for this request. Others wait meanwhile."""
        with self._lock:
            if path.startswith(TAKES_WEIGHTS):
                self._is_handing_over = True
            elif path.startswith(GENERATES) and self._is_handing_over:
                self._is_handing_over = False
                self.handed_over += 1
                if self._restart is not None and self.handed_over == self._restart_at:
                    try:
                        self._restart()
                    except Exception as error:
                        self.failure = error
                    return True
            return False

    def _answer(self, asked: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(str(self._behind.hostname), self._behind.port)
        try:
            headers = {name: value for name, value in asked.headers.items() if name.lower() != "connection"}
            connection.request(str(asked.command), asked.path, body, headers)
            answer = connection.getresponse()
            forwarded = [(name, value) for name, value in answer.getheaders() if name.lower() not in _NOT_FORWARDED]
            return answer.status, forwarded, answer.read()
        finally:
            connection.close()

    def _leave_unanswered(self, asked: BaseHTTPRequestHandler) -> None:
        self.unanswered += 1
        asked.close_connection = True
        with contextlib.suppress(OSError):
            asked.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(url: str, **options: Any) -> Iterator[Proxy]:
    """A :class:`Proxy` with these options that serves within the block.

    Raises:
        Exception: of ``restart``, at the end.
    """
    proxy = Proxy(url, **options)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


@contextmanager
def lost_on_request(folder: Path, lose: Callable[[], None]) -> Iterator[None]:
    """Call ``lose`` when a rank asks for it within the block.

    Raises:
        Exception: of ``lose``, at the end.
        AssertionError: no rank has asked.
    """
    over = threading.Event()
    failures: list[Exception] = []

    def watch() -> None:
        while not (folder / REQUEST).exists():
            if over.wait(_POLL):
                return
        try:
            lose()
        except Exception as error:
            failures.append(error)
        # After a failure as well, since the rank waits for it.
        (folder / DONE).touch()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
    for failure in failures:
        raise failure
    assert (folder / DONE).exists(), "the server was not lost: the training ended before"
