"""An HTTP server for tests, which ends when it is told to."""

from __future__ import annotations

from http.server import ThreadingHTTPServer

__all__ = ["LocalServer"]


class LocalServer(ThreadingHTTPServer):
    """Waits a second at most for a connection that was announced.

    A client may go away before it is accepted. The standard library's server then waits for the next one, for good, and
    so does whoever shuts it down.
    """

    def server_activate(self) -> None:
        super().server_activate()
        self.socket.settimeout(1.0)
