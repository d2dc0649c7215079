"""How often an answer passes from file to file: how far a reader has to jump who follows it from its start to its end.

A *pass* is a file of the package that calls a function of another file; each pair counts once, however often it calls.
Methods of what was handed over do not count, nor do functions of the modules of *words* that everything speaks in. A
pass is *upwards* if the answer had come to that file before, from another one: whoever follows it has to go back up the
list of files that they have read. A straight line has none.

    python benchmarks/passes.py                                       # trlcompat doctor trl==0.15.2 ...
    python benchmarks/passes.py --checkout ../before                  # of another checkout
    python benchmarks/passes.py --call PACKAGE.MODULE:FUNCTION WORD ...  # a function, with these words as its arguments

A function that is given may be anywhere on the path: a cell, a launch, or a row of conformance from a script beside
this one. What runs in other processes is not seen.

A *call back* is a call into a file that imports the caller's, through however many others: of a function, a method or a
function inside one. There a reader who follows imports down is led up again. They are counted where a function is
given.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import importlib
import inspect
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pytest_trlcompat"
WORDS = (
    *("_*.py", "stack.py", "catalog/issue.py", "catalog/ranges.py", "catalog/verdict.py"),
    "strategies/dimensions.py",
)
"""What everything speaks in: types of data, their own small functions, and what all packages share."""
DOCTOR_CALL = f"{PACKAGE}.cli:main"
DOCTOR = ("doctor", "trl==0.15.2", "transformers==4.48.3")

Pass = tuple[str, str]


def passes(call: Callable[[], object], folder: Path) -> Counter[Pass]:
    """The passes of one call, in the order in which they are first made, each with its number of calls.

    Args:
        folder: of the package.
    """
    found: Counter[Pass] = Counter()

    def note(frame: FrameType, files: Pass) -> None:
        function = inspect.unwrap(frame.f_globals.get(frame.f_code.co_name, None))  # type: ignore[arg-type]
        # Otherwise it is a method, or a function in a function.
        if getattr(function, "__code__", None) is frame.f_code and not is_word(files[1]):
            found[files] += 1

    _watch(call, folder, note)
    return found


def calls_back(call: Callable[[], object], folder: Path) -> Counter[Pass]:
    """The calls of one call into files that import the caller's, each pair with its number.

    Args:
        folder: of the package.
    """
    above = importing(folder)
    found: Counter[Pass] = Counter()

    def note(frame: FrameType, files: Pass) -> None:
        if frame.f_code.co_name != "<module>" and files[1] in above.get(files[0], ()):
            found[files] += 1

    _watch(call, folder, note)
    return found


def _watch(call: Callable[[], object], folder: Path, note: Callable[[FrameType, Pass], None]) -> None:
    """Note each call from a file of the package into another one, also through what is not of the package."""
    inside = f"{folder}/"

    def is_inside(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(inside)

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not is_inside(frame):
            return
        caller = frame.f_back
        while caller is not None and not is_inside(caller):
            caller = caller.f_back
        if caller is not None:
            origin, target = (at.f_code.co_filename.removeprefix(inside) for at in (caller, frame))
            if origin != target:
                note(frame, (origin, target))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)


def importing(folder: Path) -> dict[str, set[str]]:
    """Each file of the package to those that import it, through however many others; imports for types do not count."""
    importers: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).as_posix()
        for module in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            file = _file_of(folder, module)
            if file and file != name:
                importers.setdefault(file, set()).add(name)
    every: dict[str, set[str]] = {}
    for file in importers:
        reached: set[str] = set()
        waiting = [file]
        while waiting:
            new = importers.get(waiting.pop(), set()) - reached
            reached |= new
            waiting += new
        every[file] = reached
    return every


def _file_of(folder: Path, module: str) -> str:
    """The file of the package that a name comes from, as ``package.module.function``; empty where it is another's."""
    package, *parts = module.split(".")
    while package == folder.name and parts:
        for file in (f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__init__.py"):
            if (folder / file).is_file():
                return file
        parts.pop()
    return ""


def _imported(node: ast.AST) -> Iterator[str]:
    """The modules that a file may import, or whose functions it may."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        else:
            yield from _imported(child)


def is_word(file: str) -> bool:
    """Whether a module is of words."""
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in WORDS)


def upwards(found: Sequence[Pass]) -> list[Pass]:
    """The passes to a file to which an earlier one came already."""
    seen: set[str] = set()
    back = []
    for one in found:
        if one[1] in seen:
            back.append(one)
        seen.add(one[1])
    return back


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--call", default=DOCTOR_CALL, metavar="MODULE:FUNCTION")
    parser.add_argument("words", nargs="*", default=DOCTOR)
    parsed = parser.parse_args()
    checkout = parsed.checkout.resolve()
    sys.path[:0] = [str(checkout), str(Path.cwd())]
    module, _, name = parsed.call.partition(":")
    function = getattr(importlib.import_module(module), name)
    if parsed.call == DOCTOR_CALL:
        importlib.import_module(f"{PACKAGE}.doctor.command")  # what is called at an import is no part of an answer
        command = [sys.executable, "-m", PACKAGE, *parsed.words]
        subprocess.run(command, cwd=checkout, stdout=subprocess.DEVNULL, check=False)  # it keeps what it made
    with contextlib.redirect_stdout(io.StringIO()):
        found = passes(lambda: function(list(parsed.words)), checkout / PACKAGE)
    back = upwards(list(found))
    for one, number in found.items():
        print(f"{'up' if one in back else '  '} {one[0]} -> {one[1]}: {number}")
    counted = {"passes": len(found), "upwards": len(back)}
    if parsed.call != DOCTOR_CALL:
        with contextlib.redirect_stdout(io.StringIO()):
            led_up = calls_back(lambda: function(list(parsed.words)), checkout / PACKAGE)
        for one, number in led_up.items():
            print(f"back {one[0]} -> {one[1]}: {number}")
        counted["back"] = len(led_up)
    print(json.dumps(counted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
