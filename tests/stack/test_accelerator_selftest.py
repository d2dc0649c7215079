"""The accelerator's self-test: what it says of the build in use, and of one that was broken on purpose."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat import accelerator
from pytest_trlcompat.accelerator import AcceleratorError

BUILD = importlib.import_module("pytest_trlcompat.accelerator.build")  # not the function of that name
CHECKS = {
    *("allocation", "placement", "messages", "views", "autograd", "autocast", "conjugate", "random_state", "streams"),
    *("collectives", "fsdp1", "fsdp2"),
}


def test_all_checks_passed_on_the_build_in_use() -> None:
    document = json.loads((accelerator.build() / BUILD.self_test.FILE).read_text())
    assert document == {"checks": dict.fromkeys(CHECKS), "absent": {}}


def test_it_can_be_run_again_by_hand() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch_npu.selftest"],
        env={**os.environ, **accelerator.environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["checks"] == dict.fromkeys(CHECKS)
    assert document["absent"] == {}


BREAKS = {
    # The average of a collective stays a sum: wrong numbers, in whatever averages gradients too.
    "collectives.cpp": ("for (auto& tensor : averaged_) tensor.div_(divisor_);", ""),
    # An event is written to where none was made: the process is killed.
    "device.cpp": ("if (*event == nullptr) *event = new Instant;", ""),
}


@pytest.fixture
def broken_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "copy"
    for name in ("csrc", "standin", "autoload"):
        shutil.copytree(BUILD.HERE / name, folder / name)
    shutil.copyfile(str(BUILD.__file__), folder / "build.py")
    for name, (text, broken) in BREAKS.items():
        source = (folder / "csrc" / name).read_text()
        assert source.count(text) == 1
        (folder / "csrc" / name).write_text(source.replace(text, broken))
    monkeypatch.setattr(BUILD, "HERE", folder)
    monkeypatch.setattr(BUILD, "__file__", str(folder / "build.py"))
    for constant, name in {"SOURCES": "csrc", "STANDIN": "standin", "AUTOLOAD": "autoload"}.items():
        monkeypatch.setattr(BUILD, constant, folder / name)
    return folder


def test_a_build_that_is_broken_on_purpose_is_refused_with_what_is_wrong_with_it(
    broken_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++ -static-libstdc++")
    lines: list[str] = []
    with pytest.raises(AcceleratorError) as raised:
        BUILD.build(cache=tmp_path / "cache", progress=lines.append)
    text = str(raised.value)
    assert "does not work with it; this says nothing of your stack. Its self-test failed:" in text
    assert "  streams: one process: did not return (killed by signal 11 (SIGSEGV))\n" in text
    assert "  collectives: rank 0 of 2: SelfTestFailure: [1.0] instead of [0.5] (selftest.py:" in text
    assert "  fsdp1: rank 0 of 2: did not return (killed by signal 11 (SIGSEGV))\n" in text  # it records events
    assert "  fsdp2: rank 0 of 2: was not begun (killed by signal 11 (SIGSEGV))\n" in text
    # Among them the messages, which a C++ library of its own could put no number into.
    for check in ("messages", "views", "autograd", "random_state"):
        assert f"  {check}: " not in text
    assert len(lines) == 2, "compiled once"
    with pytest.raises(AcceleratorError, match="Its self-test failed"):
        BUILD.build(cache=tmp_path / "cache", progress=lines.append)
    assert len(lines) == 2, "and not again"
