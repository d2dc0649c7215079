"""A package index over HTTP with tiny packages, which uv resolves against: real requests, real uploads' days."""

from __future__ import annotations

import datetime
import io
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["RELEASES", "Release", "serving"]

Release = tuple[str, str, tuple[str, ...]]
"""Version, day, requirements."""

RELEASES: dict[str, list[Release]] = {
    "trl": [
        ("1.0.0", "2026-05-01", ("transformers>=5.0", "accelerate")),
        ("1.1.0", "2026-06-10", ("transformers>=5.0", "accelerate")),
        ("1.2.0", "2026-06-20", ("transformers>=5.2", "accelerate>=1.1")),
        ("1.3.0rc1", "2026-06-21", ("transformers>=5.2", "accelerate>=1.1")),
    ],
    "transformers": [
        ("5.0.0", "2026-05-01", ("tokenizers",)),
        ("5.1.0", "2026-06-05", ("tokenizers",)),
        ("5.0.1", "2026-06-06", ("tokenizers",)),
        ("5.2.0", "2026-06-15", ("tokenizers>=0.2",)),
    ],
    "accelerate": [("1.0.0", "2026-05-01", ()), ("1.1.0", "2026-06-10", ())],
    "peft": [("0.1.0", "2026-05-01", ())],
    "datasets": [("5.0.0", "2026-05-01", ())],
    "torch": [("2.0.0", "2026-05-01", ())],
    "tokenizers": [("0.1.0", "2026-05-01", ()), ("0.2.0", "2026-06-12", ()), ("0.2.1", "2026-06-13", ())],
}
"""Without DeepSpeed: a stack may lack a package."""


def wheel(name: str, version: str, requires: tuple[str, ...]) -> bytes:
    """The same bytes each time: uv keeps what it has read by their hash."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return buffer.getvalue()


@contextmanager
def serving(releases: dict[str, list[Release]]) -> Iterator[tuple[str, list[str]]]:
    """The address of the index, and the pages that were asked for."""
    asked: list[str] = []
    wheels = {
        f"{name}-{version}-py3-none-any.whl": wheel(name, version, requires)
        for name, found in releases.items()
        for version, _, requires in found
    }

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if match := re.fullmatch(r"/simple/([a-z]+)/", self.path):
                asked.append(match[1])
                self.page(match[1])
            elif (name := self.path.rsplit("/", 1)[-1]) in wheels:
                self.answer(200, "application/octet-stream", wheels[name])
            else:
                self.answer(404, "text/plain", b"")

        do_HEAD = do_GET  # noqa: N815 (the name that the server looks for)

        def page(self, project: str) -> None:
            if project not in releases:
                self.answer(404, "text/plain", b"")
                return
            files: list[dict[str, Any]] = []
            for version, day, _ in releases[project]:
                name = f"{project}-{version}-py3-none-any.whl"
                hashes = {"sha256": sha256(wheels[name]).hexdigest()}
                moment = f"{day}T10:00:00Z"
                files.append({"filename": name, "url": f"/files/{name}", "hashes": hashes, "upload-time": moment})
            body = json.dumps({"meta": {"api-version": "1.1"}, "name": project, "files": files}).encode()
            self.answer(200, "application/vnd.pypi.simple.v1+json", body)

        def answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def day(text: str) -> datetime.date:
    return datetime.date.fromisoformat(text)
