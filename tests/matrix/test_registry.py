"""Asking the registry for releases: a small index over HTTP, with wheels of which only the metadata may be read."""

from __future__ import annotations

import io
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pytest_trlcompat.matrix.covering import registry
from pytest_trlcompat.matrix.covering.releases import PACKAGES
from pytest_trlcompat.matrix.errors import MatrixError

METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Requires-Dist: transformers>=4.2
Requires-Dist: accelerate
Requires-Dist: numpy<2
Requires-Dist: peft>=0.2; extra == "peft"
Requires-Dist: peft>=0.3; extra == "dev"
Requires-Dist: transformers!=4.3; python_version < "3.10"
"""
FILES: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "trl": [
        ("trl-0.9.4-py3-none-any.whl", "2024-06-01", {}),
        ("trl-0.9.6-py3-none-any.whl", "2024-07-08", {}),
        ("trl-0.9.6.tar.gz", "2024-07-09", {}),
        ("trl-0.10.0-py3-none-any.whl", "2024-08-01", {"yanked": "broken"}),
        ("trl-0.10.1-py3-none-any.whl", "2024-08-29", {}),
        ("trl-0.11.0rc1-py3-none-any.whl", "2024-09-01", {}),
        ("trl-0.12.0-py3-none-any.whl", "2024-09-01", {"requires-python": "<3.11"}),
    ],
    "transformers": [
        ("transformers-4.41.2-py3-none-any.whl", "2024-05-30", {}),
        ("transformers-4.42.0-py3-none-any.whl", "2024-06-27", {}),
        ("transformers-4.42.4-py3-none-any.whl", "2024-07-11", {}),
        ("transformers-4.43.0-py3-none-any.whl", "2024-07-23", {}),
    ],
    "deepspeed": [("deepspeed-0.14.5.tar.gz", "2024-08-15", {})],
}
BYTES = {"read": 0, "whole": 0}


class Index(BaseHTTPRequestHandler):
    """Pages of projects as JSON, and wheels by ranges of their bytes."""

    def do_GET(self) -> None:
        if match := re.fullmatch(r"/simple/([a-z]+)/", self.path):
            self.page(match[1])
        else:
            self.part(self.path.rsplit("/", 1)[-1])

    def page(self, project: str) -> None:
        files = [
            {"filename": name, "url": f"/files/{name}", "hashes": {}, "upload-time": f"{day}T10:00:00Z", **more}
            for name, day, more in FILES.get(project, [])
        ]
        body = json.dumps({"meta": {"api-version": "1.1"}, "name": project, "files": files}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def part(self, name: str) -> None:
        whole = wheel(*name.split("-")[:2])
        first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"]).groups()  # type: ignore[union-attr]
        start = int(first) if first else max(0, len(whole) - int(last))
        end = min(int(last), len(whole) - 1) if first and last else len(whole) - 1
        BYTES["read"] += end + 1 - start
        BYTES["whole"] += len(whole)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(whole)}")
        self.send_header("Content-Length", str(end + 1 - start))
        self.end_headers()
        self.wfile.write(whole[start : end + 1])

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


def wheel(name: str, version: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("large.bin", b"x" * 1_000_000)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", METADATA.format(name=name, version=version))
    return buffer.getvalue()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_port}/simple/")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("index")
def test_every_release_of_trl_and_the_newest_patches_of_the_others_since_then() -> None:
    BYTES.update(read=0, whole=0)
    listing = registry.ask("0.9.6", "3.11")
    found = {package: [(each.version, str(each.day)) for each in listing.releases[package]] for package in PACKAGES}
    assert found == {
        "trl": [("0.9.6", "2024-07-08"), ("0.10.1", "2024-08-29")],
        "transformers": [("4.42.4", "2024-07-11"), ("4.43.0", "2024-07-23")],
        "accelerate": [],
        "deepspeed": [("0.14.5", "2024-08-15")],
        "peft": [],
    }
    assert listing.releases["trl"][0].requires == ("transformers>=4.2", 'peft>=0.2; extra == "peft"')
    assert listing.releases["deepspeed"][0].requires == ()
    assert BYTES["read"] < BYTES["whole"] / 5


@pytest.mark.usefixtures("index")
def test_a_first_release_that_the_registry_does_not_have_is_named() -> None:
    with pytest.raises(MatrixError, match=r"the registry has no trl 0\.9\.5"):
        registry.ask("0.9.5", "3.11")
