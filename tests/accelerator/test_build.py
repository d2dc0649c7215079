"""Building the software accelerator, with a stand-in for torch and for the compiler: neither is needed here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat.accelerator import build, environment
from pytest_trlcompat.accelerator.build import AcceleratorError, cache_folder, cache_key, find_compiler, find_torch

from .building import MODULE, TORCH, Site


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_build_is_one_folder_that_holds_the_standin_and_its_library(site: Site) -> None:
    lines: list[str] = []
    folder = build(progress=lines.append)
    assert folder.parent == site.cache / "accelerator"
    assert folder.name.startswith(f"torch2.99.0+cpu-{sysconfig.get_config_var('SOABI')}-")
    assert (folder / "torch_npu" / "_C.so").read_text().startswith('#include "aliases.cpp"\n#include "allocator.cpp"\n')
    assert (folder / "torch_npu" / "__init__.py").is_file()
    assert (folder / "torch_npu" / "ascend" / "version.cfg").read_text() == "[Version]\nversion=8.0\n"
    (metadata,) = folder.glob("*.dist-info")
    assert "torch_npu:_autoload" in (metadata / "entry_points.txt").read_text()
    assert oct(folder.stat().st_mode & 0o777) == "0o755"
    assert lines[0].startswith("compiling the software accelerator for torch 2.99.0+cpu with ")
    assert lines[1].startswith("compiled in ")


def test_a_second_build_compiles_nothing_and_says_nothing(site: Site) -> None:
    lines: list[str] = []
    first = build()
    assert build(progress=lines.append) == first
    assert site.calls == 1
    assert lines == []


def test_progress_goes_to_stderr(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    build()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("trlcompat: compiling the software accelerator for torch 2.99.0+cpu with ")


def test_no_leftovers_beside_a_build(site: Site) -> None:
    name = build().name
    found = sorted(path.name for path in (site.cache / "accelerator").iterdir())
    assert found == [name, f"{name}.lock", f"{name}.log"]


def test_the_key_follows_torch(site: Site) -> None:
    first = cache_key(find_torch())
    assert cache_key(find_torch()) == first
    site.make_torch("2.99.0+cpu", git="another build of the same version")
    second = cache_key(find_torch())
    site.make_torch("3.0.0")
    third = cache_key(find_torch())
    assert len({first, second, third}) == 3
    assert third.startswith("torch3.0.0-")


def test_the_key_follows_the_sources_but_not_bytecode(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    for folder in ("csrc", "standin", "autoload"):
        shutil.copytree(MODULE.HERE / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    original = cache_key(find_torch())
    monkeypatch.setattr(MODULE, "HERE", copy)
    shutil.copyfile(str(MODULE.__file__), copy / "build.py")
    monkeypatch.setattr(MODULE, "__file__", str(copy / "build.py"))
    monkeypatch.setattr(MODULE, "SOURCES", copy / "csrc")
    monkeypatch.setattr(MODULE, "AUTOLOAD", copy / "autoload")
    monkeypatch.setattr(MODULE, "STANDIN", copy / "standin")
    assert cache_key(find_torch()) == original
    (copy / "standin" / "torch_npu" / "__pycache__").mkdir()
    (copy / "standin" / "torch_npu" / "__pycache__" / "x.pyc").touch()
    assert cache_key(find_torch()) == original
    (copy / "csrc" / "aliases.h").write_text("// another")
    assert cache_key(find_torch()) != original


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("TRLCOMPAT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("TRLCOMPAT_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "pytest-trlcompat"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "pytest-trlcompat"


@pytest.mark.fault(
    "There is no home directory where the software accelerator is to be compiled.",
    "An error says so, and which variable to set.",
)
def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TRLCOMPAT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(AcceleratorError, match="^there is no folder for what is compiled: .* set TRLCOMPAT_CACHE to"):
        cache_folder()


# ---- several at once, and some that are killed


def test_of_several_at_once_one_compiles(site: Site) -> None:
    site.compiler("time.sleep(1)")
    started = [site.start() for _ in range(4)]
    outputs = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0] * 4, outputs
    assert len({out for out, _ in outputs}) == 1
    assert site.calls == 1
    assert sum("waiting for another process" in err for _, err in outputs) == 3


def test_a_killed_build_blocks_no_later_one(site: Site) -> None:
    site.compiler("time.sleep(20)")
    process = site.start()
    wait_for(lambda: site.calls == 1)
    process.kill()
    process.communicate()
    (compiler,) = processes_that_run(site.root / "compiler")
    os.kill(compiler, signal.SIGKILL)
    half_built = [path for path in (site.cache / "accelerator").iterdir() if path.name.startswith(".")]
    assert len(half_built) == 1
    site.compiler()
    lines: list[str] = []
    folder = build(progress=lines.append)
    assert (folder / "torch_npu" / "_C.so").is_file()
    assert not half_built[0].exists()
    assert "waiting" not in lines[0]


def test_an_interrupted_build_leaves_nothing_running(site: Site) -> None:
    """A compiler is a driver with children, which killing the driver does not end."""
    seconds = f"20.{os.getpid()}"
    site.compiler(f"subprocess.run(['sleep', '{seconds}'])")
    process = site.start()
    wait_for(lambda: processes_that_run(seconds))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    wait_for(lambda: not processes_that_run(seconds), seconds=10)
    assert [path.suffix for path in (site.cache / "accelerator").iterdir()] == [".lock"]


def processes_that_run(argument: str | Path) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(argument).encode() in arguments and b"-c" not in arguments:
            found.append(int(folder.name))
    return found


def test_a_compiler_of_the_path(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(site.root))
    (site.root / "compiler").rename(site.root / "clang++")
    assert find_compiler() == ["clang++"]
    (site.root / "g++").symlink_to("clang++")
    assert find_compiler() == ["g++"]


def test_cxx_may_carry_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -I 'two words'")
    assert find_compiler() == [sys.executable, "-I", "two words"]


def test_it_is_built_as_torch_was(site: Site) -> None:
    build()
    (log,) = (site.cache / "accelerator").glob("*.log")
    command = log.read_text().splitlines()[0]
    assert "-D_GLIBCXX_USE_CXX11_ABI=0" in command
    assert "'-DPYBIND11_BUILD_ABI=\"_cxxabi1011\"'" in command
    assert "PYBIND11_STDLIB" not in command
    # The one that torch has loaded, whatever the compiler would link: after what needs it, and as a library.
    assert "/libstdc++.so.6" in command.split(" -lc10 ")[1]
    assert "-x none" in command.split(" -o ")[1]


# ---- the self-test, whose checks are tested with the stack


def test_what_this_torch_lacks_is_stored_with_the_build(site: Site) -> None:
    assert MODULE.self_test.read(build()).absent == {"fsdp2": "this torch has no fully_shard"}


# ---- torch 2.4, which loads no backend by itself


def test_a_torch_that_loads_no_backends_gets_a_hook(site: Site) -> None:
    assert not (build() / "sitecustomize.py").exists()
    (site.root / "torch" / "__init__.py").write_text(TORCH.replace("torch.backends", ""))
    site.make_version("2.4.1")
    assert (build() / "sitecustomize.py").is_file()


@pytest.mark.parametrize("autoload", ["1", "0"])
def test_the_hook_loads_the_device_with_torch_and_runs_the_hook_that_it_hides(tmp_path: Path, autoload: str) -> None:
    """With modules of the names of torch and torch_npu that only say that they were imported."""
    for name in ("torch", "torch_npu"):
        (tmp_path / f"{name}.py").write_text(f"print({name!r})")
    (tmp_path / "sitecustomize.py").write_text("print('hidden')")
    code = "print('start'); import json; import torch; print(torch.__name__); import torch; import torch_npu"
    path = os.pathsep.join([str(MODULE.AUTOLOAD), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    loaded = ["torch", "torch_npu", "torch"] if autoload == "1" else ["torch", "torch", "torch_npu"]
    assert done.stdout.split() == ["hidden", "start", *loaded]


# ---- the environment of a child


def test_the_environment_of_a_child(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build()
    monkeypatch.setenv("PYTHONPATH", "one:two")
    assert environment(devices=4) == {
        "PYTHONPATH": f"{folder}:one:two",
        "TRLCOMPAT_ACCELERATOR_DEVICES": "4",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == str(folder)
