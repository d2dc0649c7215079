"""The self-test of a build: run once, stored with the build, and read whenever the build is used.

The checks are in ``torch_npu.selftest``, in the stand-in, which imports torch; this module does not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat.accelerator import _child

__all__ = ["FILE", "SelfTest", "perform", "read"]

FILE = "self-test.json"
"""Its result, in the folder of the build."""

_TAIL_LINES = 20


@dataclass(frozen=True)
class SelfTest:
    """The outcome of a self-test.

    Attributes:
        failures: check to what went wrong; empty where the accelerator works.
        absent: capabilities that this torch has on no device (``fsdp2``), with the reason.
    """

    failures: Mapping[str, str]
    absent: Mapping[str, str]

    def describe(self) -> str:
        """The failures, a line each."""
        return "\n".join(f"  {name}: {text}" for name, text in self.failures.items())


def perform(folder: Path, variables: Mapping[str, str]) -> None:
    """Run the self-test of the build in ``folder`` and store its result there, a failure as well.

    Args:
        variables: the environment variables that give a child Python two devices of this build.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment.pop("GLOO_SOCKET_IFNAME", None)  # of launches on several machines
    command = [sys.executable, "-W", "ignore", "-m", "torch_npu.selftest"]
    status, output = _child.run(command, "", folder, environment)
    # A failure too, since it would be the same after another build.
    (folder / FILE).write_text(json.dumps(_document(status, output), indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> SelfTest:
    """The outcome of the self-test that was run when ``folder`` was built.

    Raises:
        OSError: the build has no such file.
    """
    document = json.loads((folder / FILE).read_text(encoding="utf-8"))
    failures = {name: text for name, text in document["checks"].items() if text is not None}
    return SelfTest(failures, document["absent"])


def _document(status: int, output: str) -> dict[str, dict[str, str | None]]:
    lines = output.splitlines()
    try:
        # The last line, since torch and what it loads may print before it.
        document = json.loads(lines[-1])
        return {key: dict(document[key]) for key in ("checks", "absent")}
    except (IndexError, KeyError, TypeError, ValueError):
        tail = "\n".join(lines[-_TAIL_LINES:])
        return {"checks": {"loading": f"the self-test ended with exit status {status}:\n{tail}"}, "absent": {}}
