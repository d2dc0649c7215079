"""The tests' own HTTP server ends when it is told to."""

from __future__ import annotations

import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from .local_server import LocalServer


def test_it_ends_although_a_connection_that_was_announced_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    announced = threading.Event()

    class Selector(socketserver._ServerSelector):  # type: ignore[name-defined]
        def select(self, timeout: float | None = None) -> list[Any]:
            if announced.is_set():
                return super().select(timeout)
            announced.set()
            return [*self.get_map().values()]

    monkeypatch.setattr(socketserver, "_ServerSelector", Selector)
    server = LocalServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    assert announced.wait(10)
    ended = threading.Thread(target=server.shutdown, daemon=True)
    ended.start()
    ended.join(30)
    assert not ended.is_alive()
    thread.join()
    server.server_close()
