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
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import inspect
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
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
    inside = f"{folder}/"

    def file_of(frame: FrameType) -> str:
        return frame.f_code.co_filename.removeprefix(inside)

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(inside) or code.co_name.startswith("<"):
            return
        function = inspect.unwrap(frame.f_globals.get(code.co_name, None))  # type: ignore[arg-type]
        if getattr(function, "__code__", None) is not code:
            return  # a method, or a function in a function
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(inside):
            caller = caller.f_back
        if caller is not None and file_of(caller) != file_of(frame) and not is_word(file_of(frame)):
            found[file_of(caller), file_of(frame)] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


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
    print(json.dumps({"passes": len(found), "upwards": len(back)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
