"""An answer goes through the files of the package in one line, and a script counts how often it leaves that line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.passes import calls_back, importing, is_word, passes, upwards

ROOT = Path(__file__).resolve().parents[2]
LINE = {
    "a.py": "from toy import b, c\n\ndef main():\n    b.second()\n    c.third()\n"
    "    return [b.second() for _ in range(3)]\n",
    "b.py": "from toy import d\n\ndef second():\n    return Thing().method()\n\n\n"
    "class Thing:\n    def method(self):\n        return d.fourth()\n",
    "c.py": "from toy import d\n\ndef third():\n    return d.fourth(), d._words()\n",
    "d.py": "from toy import _e\n\ndef fourth():\n    return _e.word()\n\ndef _words():\n    return 1\n",
    "_e.py": "def word():\n    return 1\n",
}


def test_each_pair_of_files_counts_once_and_a_file_that_is_met_again_is_upwards(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    for name, text in {"__init__.py": "", **LINE}.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(tmp_path))
    try:
        from toy import a  # type: ignore[import-not-found]

        found = passes(a.main, folder)
    finally:
        sys.path.remove(str(tmp_path))
    assert dict(found) == {("a.py", "b.py"): 4, ("b.py", "d.py"): 4, ("a.py", "c.py"): 1, ("c.py", "d.py"): 2}
    assert upwards(list(found)) == [("c.py", "d.py")]
    assert is_word("_e.py")


UP = {
    "a.py": "from toy_up import b\n\ndef main():\n    b.second(lambda: 1, Given())\n"
    "    return list(b.third(x for x in 'ab'))\n\n\nclass Given:\n    def method(self):\n        return b.word()\n",
    "b.py": "from typing import TYPE_CHECKING\nfrom toy_up import c\nif TYPE_CHECKING:\n    from toy_up import a\n\n"
    "def second(hook, given):\n    return c.fourth(hook), given.method()\n\ndef third(given):\n    yield from given\n\n"
    "def word():\n    return 1\n",
    "c.py": "from toy_up import d\n\ndef fourth(hook):\n    return hook(), d.fifth()\n",
    "d.py": "def fifth():\n    from toy_up import e\n    return e.sixth()\n",
    "e.py": "def sixth():\n    return 1\n",
}


def test_a_call_into_a_file_that_imports_the_callers_is_a_call_back(tmp_path: Path) -> None:
    folder = tmp_path / "toy_up"
    folder.mkdir()
    for name, text in {"__init__.py": "", **UP}.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(tmp_path))
    try:
        from toy_up import a  # type: ignore[import-not-found]

        found = calls_back(a.main, folder)
    finally:
        sys.path.remove(str(tmp_path))
    # A method of what was handed over, a hook that was handed on, and a generator that is used elsewhere.
    assert dict(found) == {("b.py", "a.py"): 4, ("c.py", "a.py"): 1}
    assert importing(folder)["e.py"] == {"a.py", "b.py", "c.py", "d.py"}
    assert importing(folder)["b.py"] == {"a.py"}


def test_an_answer_passes_from_file_to_file_at_most_fifteen_times_three_of_them_upwards() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    printed = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "passes.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    *lines, last = printed.splitlines()
    counted = json.loads(last)
    assert counted["passes"] == len(lines) <= 15, printed
    assert counted["upwards"] <= 3, printed
