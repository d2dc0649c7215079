"""A stand-in for torch and for the compiler, with which the tests build the software accelerator."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

# Takes g++'s arguments: counts its calls, reads the source, and writes what -o names.
COMPILER = """\
#!{python}
import pathlib, subprocess, sys, time
with open({calls!r}, "a") as calls:
    calls.write("called\\n")
source = sys.stdin.read()
{body}
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text(source)
"""

MODULE = importlib.import_module("pytest_trlcompat.accelerator.build")  # not the function of that name
PERFORM, FILE = MODULE.self_test.perform, MODULE.self_test.FILE
DRIVER = """\
import importlib, sys
from pathlib import Path
root, cache = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(root))
module = importlib.import_module("pytest_trlcompat.accelerator.build")
module._python_headers = lambda: root / "python"
module.self_test.perform = lambda folder, variables: (folder / "self-test.json").write_text(sys.argv[3])
print(module.build(cache=cache))
"""


# Asked in a process of its own how it was compiled, and in no other. Like torch from 2.5 on, it loads backends.
TORCH = """\
import os
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
    raise RuntimeError("a build must not import torch")
import ctypes
ctypes.CDLL("libstdc++.so.6")
class _C:
    _GLIBCXX_USE_CXX11_ABI = False
    _PYBIND11_BUILD_ABI = "_cxxabi1011"
backends = "torch.backends"
"""
PASSED = '{"checks": {"views": null}, "absent": {"fsdp2": "this torch has no fully_shard"}}'


class Site:
    """A folder with a torch to compile against and a compiler to do it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        self.calls_file = root / "calls"
        self.make_torch("2.99.0+cpu")
        (root / "python").mkdir()
        (root / "python" / "Python.h").touch()

    def make_torch(self, version: str, git: str = "abc") -> None:
        torch = self.root / "torch"
        (torch / "include" / "torch").mkdir(parents=True, exist_ok=True)
        (torch / "include" / "torch" / "library.h").touch()
        (torch / "__init__.py").write_text(TORCH)
        self.make_version(version, git)

    def make_version(self, version: str, git: str = "abc") -> None:
        text = f"__version__ = '{version}'\ngit_version = '{git}'\n"
        (self.root / "torch" / "version.py").write_text(text)

    def compiler(self, body: str = "") -> str:
        path = self.root / "compiler"
        path.write_text(COMPILER.format(python=sys.executable, calls=str(self.calls_file), body=textwrap.dedent(body)))
        path.chmod(0o755)
        return str(path)

    @property
    def calls(self) -> int:
        return len(self.calls_file.read_text().splitlines()) if self.calls_file.exists() else 0

    def start(self) -> subprocess.Popen[str]:
        """A build in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.root), str(self.cache), PASSED],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
