"""Compile the software accelerator once per torch, interpreter and source, into a cache folder.

The process that requests a build may be a light one, such as the controller of a test run. So torch is not imported
here, and facts about torch are read from its files.

The finished folder holds the stand-in package ``torch_npu`` with its shared object, and nothing else, so that a single
entry on ``PYTHONPATH`` brings the device to the ranks, and to them alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from pytest_trlcompat import _data
from pytest_trlcompat._trust import UntrustedError, check_files, check_folder, make_folder, open_lock
from pytest_trlcompat.accelerator import _child, self_test, sums

__all__ = [
    "DEVICES_VARIABLE",
    "AcceleratorError",
    "Torch",
    "build",
    "cache_folder",
    "cache_key",
    "child_variables",
    "find_compiler",
    "find_torch",
]

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
STANDIN = HERE / "standin"
LIBRARY = Path("torch_npu", "_C.so")
AUTOLOAD = HERE / "autoload"
COMPILERS = ("g++", "c++", "clang++")
# -O1: the kernels are torch's own, and optimising the way to them harder only makes the first start longer.
# -w: torch's headers warn by the hundred.
FLAGS = (
    "-std=c++20",
    "-O1",
    "-w",
    "-fPIC",
    "-shared",
    "-pipe",
    "-DTORCH_EXTENSION_NAME=_C",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-DUSE_DISTRIBUTED",
)
LIBRARIES = ("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10")
_ASK_TORCH = """
import json, torch
abi = {"_GLIBCXX_USE_CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI)}
for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
    value = getattr(torch._C, f"_PYBIND11_{name}", None)
    if value is not None:
        abi[f"PYBIND11_{name}"] = json.dumps(value)
with open("/proc/self/maps") as maps:
    mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/libstdc++.so" in line}
print(json.dumps({"definitions": [f"-D{name}={value}" for name, value in abi.items()], "libraries": sorted(mapped)}))
"""
TAIL_LINES = 20
DISK_FULL = os.strerror(errno.ENOSPC)

OLDEST_TORCH, NEWEST_TORCH = "2.4", "2.15"
"""The torch releases with which it is known to work."""
DEVICES_VARIABLE = "TRLCOMPAT_ACCELERATOR_DEVICES"

Progress = Callable[[str], None]


class AcceleratorError(RuntimeError):
    """The software accelerator cannot be built or switched on; the text says what to do about it."""


@dataclass(frozen=True)
class Torch:
    """An installed torch, seen from outside: nothing of it has been imported."""

    folder: Path
    version: str
    fingerprint: str
    """The text of ``torch/version.py``, in which two builds of one version (CPU, CUDA, a nightly) differ."""


def build(*, cache: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Compile the accelerator for this interpreter and its torch, unless the cache has it.

    Any number of processes may call this at once: one compiles, the others wait for it. A build that another user could
    have changed is refused, and a broken one is built again.

    Args:
        cache: the folder of the cache; by default :func:`cache_folder`.
        progress: gets a line whenever there is something to wait for; by default the line is printed on stderr.

    Returns:
        The folder to put on ``sys.path`` or ``PYTHONPATH``.

    Raises:
        AcceleratorError: torch or a compiler is missing or unsuitable, the build or its self-test fails, or the cache
            cannot be written or trusted.
    """
    report = progress or _print_progress
    torch = find_torch()
    if Version(torch.version) < Version(OLDEST_TORCH):
        raise AcceleratorError(
            f"The software accelerator was requested, but the installed torch is {torch.version}. {_what_else(torch)}"
        )
    root = (cache_folder() if cache is None else Path(cache).resolve()) / "accelerator"
    target = root / cache_key(torch)
    try:
        if _damage(target) is not None:
            make_folder(root)
            with _locked(root / f"{target.name}.lock", report):
                damage = _damage(target)  # another process may have built it meanwhile
                if damage is not None:
                    if target.exists():
                        report(f"{target / damage} is missing or broken; it is built again")
                    _build_into(target, torch, report)
        tested = self_test.read(target)
    except UntrustedError as error:
        raise AcceleratorError(
            f"{error}, so another user could have changed the software accelerator in {target}. It is not loaded. Let "
            "TRLCOMPAT_CACHE name a folder that, with all above it, only you and root can write to."
        ) from error
    except OSError as error:
        raise AcceleratorError(_explain(error, root)) from error
    if tested.failures:
        raise AcceleratorError(
            f"The software accelerator was compiled for torch {torch.version} and does not work with it; this says "
            f"nothing of your stack. Its self-test failed:\n{tested.describe()}\n{_what_else(torch)} "
            f"Remove {target} to build and test it again."
        )
    return target


def child_variables(folder: Path, devices: int) -> dict[str, str]:
    """What a child Python needs in its environment to load the build in ``folder``, with real GPUs hidden."""
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        DEVICES_VARIABLE: str(devices),
        # PyTorch takes one kind of accelerator per process.
        "CUDA_VISIBLE_DEVICES": "",
        # Beside the target: only within one file system is a rename atomic.
        "HIP_VISIBLE_DEVICES": "",
    }


def cache_folder() -> Path:
    """:func:`pytest_trlcompat._data.cache_folder`, with an error that says what it is for.

    Raises:
        AcceleratorError: neither variable is set, and the user has no home directory.
    """
    try:
        return _data.cache_folder()
    except RuntimeError as error:
        raise AcceleratorError(
            "there is no folder for what is compiled: HOME is not set, and the system knows no home directory of this "
            "user; set TRLCOMPAT_CACHE to a folder"
        ) from error


def cache_key(torch: Torch) -> str:
    """A folder name that differs if the shared object or the stand-in would."""
    digest = hashlib.sha256(repr((FLAGS, LIBRARIES, torch.fingerprint)).encode())
    for path in (*_files(SOURCES), *_files(STANDIN), *_files(AUTOLOAD), Path(__file__)):
        digest.update(f"\0{path.resolve().relative_to(HERE).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    # SOABI names interpreter, architecture and C library: cpython-311-x86_64-linux-gnu.
    return f"torch{torch.version}-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:12]}"


def find_torch() -> Torch:
    """The torch that the running interpreter would import.

    Raises:
        AcceleratorError: there is none, or it does not name its version.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise AcceleratorError(
            f"The software accelerator is compiled against torch, and {sys.executable} has no torch. "
            "Install torch in this environment, or run in the environment that is to be tested."
        )
    folder = Path(spec.origin).parent
    file = folder / "version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    version = re.search(r"^__version__\s*=\s*['\"]([\w.+-]+)['\"]", text, re.MULTILINE)
    if version is None:
        raise AcceleratorError(f"The torch in {folder} does not name its version in version.py; reinstall it.")
    return Torch(folder, version[1], text)


def find_compiler() -> list[str]:
    """The C++ compiler as a command: ``$CXX``, which may carry arguments, else the first of ``COMPILERS``.

    Raises:
        AcceleratorError: there is no such program.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen and shutil.which(chosen[0]) is None:
        raise AcceleratorError(
            f"CXX names the C++ compiler {chosen[0]!r}, which was not found. "
            f"Correct CXX, or unset it to use the first of {', '.join(COMPILERS)} on PATH."
        )
    if chosen:
        return chosen
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise AcceleratorError(
        "The software accelerator has to be compiled once, and no C++ compiler was found: "
        f"CXX is not set, and none of {', '.join(COMPILERS)} is on PATH. "
        "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; conda: conda install gxx), "
        "or name one in CXX."
    )


def _files(top: Path) -> list[Path]:
    """Every source file, in a fixed order, without the bytecode that an interpreter left behind."""
    return sorted(path for path in top.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _damage(target: Path) -> str | None:
    """What is missing or broken in a build; ``None`` if it is whole, and nobody else could have changed it."""
    if not target.exists():
        return sums.FILE
    # Before anything in it is read: what others can write to is not believed, sums neither.
    check_folder(target)
    damage = sums.damage(target)
    if damage is None:
        check_files(target, sums.names(target))
    return damage


def _build_into(target: Path, torch: Torch, report: Progress) -> None:
    """Build in a folder next to ``target``, then rename it. Called under the lock."""
    for leftover in (target, *target.parent.glob(f".{target.name}.*")):  # of a build that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    compiler = find_compiler()
    report(
        f"compiling the software accelerator for torch {torch.version} with {compiler[0]}, once; about half a minute"
    )
    started = time.monotonic()
    # Beside the target: only within one file system is a rename atomic.
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _copy(STANDIN, work)
        if not _loads_backends(torch):
            _copy(AUTOLOAD, work)
        _compile(compiler, torch, work, target.with_name(f"{target.name}.log"))
        self_test.perform(work, child_variables(work, devices=2))
        # After all the others: a build that has its sums is taken for whole.
        sums.write(work)
        # mkdtemp's 0700 would lock other users out of a shared cache.
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"compiled in {time.monotonic() - started:.0f} s, kept in {target}")


def _loads_backends(torch: Torch) -> bool:
    """Whether ``import torch`` loads the packages that name themselves a backend, as it does from 2.5 on."""
    return "torch.backends" in (torch.folder / "__init__.py").read_text(encoding="utf-8")


def _copy(folder: Path, work: Path) -> None:
    for path in _files(folder):
        copy = work / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Without its mode: an installed file may be read-only.
        shutil.copyfile(path, copy)


def _compile(compiler: Sequence[str], torch: Torch, work: Path, log: Path) -> None:
    # One translation unit of all: the headers, which are most of the work, are read once.
    unit = "".join(f'#include "{path.name}"\n' for path in _files(SOURCES) if path.suffix == ".cpp")
    includes = _include_flags(torch)
    definitions, libraries = _as_torch(torch)
    command = [*compiler, *FLAGS, *definitions, *includes, "-x", "c++", "-", "-o", str(work / LIBRARY)]
    # No rpath: the stand-in imports torch first, and its libraries are then found by name among those that are loaded.
    # So one build serves every environment that has this torch.
    # -x none ends "-x c++": what follows are libraries.
    command += ["-x", "none", f"-L{torch.folder / 'lib'}", *LIBRARIES, *libraries]
    status, output = _child.run(command, unit, work, os.environ)
    log.write_text(f"{shlex.join(command)}\n{output}", encoding="utf-8")
    if status != 0:
        # The cause is not the compiler's: the same advice is due as where this process meets the full disk itself.
        if DISK_FULL in output:
            raise OSError(errno.ENOSPC, DISK_FULL)
        tail = "\n".join(output.splitlines()[-TAIL_LINES:])
        raise AcceleratorError(
            f"{compiler[0]} could not compile the software accelerator for torch {torch.version} "
            f"(exit status {status}). All of its output is in {log}; it ends with:\n{tail}\n{_what_else(torch)}"
        )


def _what_else(torch: Torch) -> str:
    """Advice for a torch that is not supported."""
    newer = Version(torch.version).release[:2] > Version(NEWEST_TORCH).release
    return (
        f"It works with torch {OLDEST_TORCH} to {NEWEST_TORCH}: use one of these, "
        + ("update pytest-trlcompat, " if newer else "")
        + "or test on a GPU (--trlcompat-device cuda) or on the plain CPU (--trlcompat-device cpu)."
    )


def _include_flags(torch: Torch) -> list[str]:
    headers, python = torch.folder / "include", _python_headers()
    if not (headers / "torch" / "library.h").is_file():
        raise AcceleratorError(f"The torch in {torch.folder} has no C++ headers in {headers}; reinstall it with pip.")
    if not (python / "Python.h").is_file():
        raise AcceleratorError(
            f"Python.h is not in {python}: the headers of this Python are needed to compile the software accelerator. "
            "Install them (Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel)."
        )
    return [f"-I{folder}" for folder in (SOURCES, headers, headers / "torch" / "csrc" / "api" / "include", python)]


def _as_torch(torch: Torch) -> tuple[list[str], list[str]]:
    """How this torch was compiled, as torch.utils.cpp_extension queries it, and the C++ library that it has loaded.

    Code that shares its types must be compiled in the same way: wheels up to 2.6 have the C++ library's old strings,
    and pybind11 up to 2.8 names the compiler's own version. A compiler may link its C++ library statically, as many do
    that come in containers; with two such libraries in a process, the second crashes or cannot write numbers into
    messages.
    """
    # In another process: torch must not be imported into this one.
    done = subprocess.run(
        [sys.executable, "-c", _ASK_TORCH],
        # With this torch alone: a backend that loads with it, as the stand-in does, must not be asked.
        env={**os.environ, "PYTHONPATH": str(torch.folder.parent), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-TAIL_LINES:])
        raise AcceleratorError(f"The software accelerator needs torch, and {sys.executable} cannot import it:\n{tail}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["definitions"], answer["libraries"]


def _python_headers() -> Path:
    return Path(sysconfig.get_path("include"))


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold an advisory lock."""
    # flock, since the kernel releases it when its process ends: a killed build blocks no other.
    with open_lock(path) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process, which is compiling the software accelerator")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _explain(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk is too full to build the software accelerator in {root}; it needs about 20 MB. "
            "Free some space, or let TRLCOMPAT_CACHE name a folder on another disk."
        )
    return f"The software accelerator cannot be built in {root}: {error}. Let TRLCOMPAT_CACHE name a writable folder."


def _print_progress(line: str) -> None:
    print(f"trlcompat: {line}", file=sys.stderr, flush=True)
