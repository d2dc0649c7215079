"""Reports to paste upstream of known issues that the newest releases still have: a script, its output and versions.

The scripts are ``fixtures/upstream/<issue>.py``: plain CPU processes, and nothing of this package. This module runs
them as their first lines say, and keeps what they printed, and with which versions, in ``measured.json`` beside them::

    python -m pytest_trlcompat.catalog.upstream_reports [ISSUE ...]

``trlcompat issue ISSUE --report`` makes the text to paste from that file, the catalogue and the script; a wheel has the
text as a file. The interpreter that runs the scripts must have the stack.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_trlcompat import _data, stack
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.verdict import Verdict

__all__ = ["commands", "folder", "main", "output_of", "report", "reported", "stored_report"]

# By the interpreter that runs this module, whatever comes first on the path.
_PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_ASSIGNMENT = re.compile(r"[A-Z_]+=")
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python|torchrun) (?:\S+ )*\S+\.py")
_MEASURED = "measured.json"
TIMEOUT = 300.0
"""Seconds for one command; on an idle machine each takes 10 to 20."""


def folder() -> Path:
    """Where scripts and reports lie."""
    return _data.fixtures() / "upstream"


def reported() -> list[str]:
    """The ids of the issues that have a script."""
    return sorted(path.stem for path in folder().glob("*.py"))


def stored_report(issue: KnownIssue) -> str:
    """The text to paste, Markdown, by what its script printed when it was last run.

    Raises:
        FileNotFoundError: the issue has no script.
    """
    script = folder() / f"{issue.id}.py"
    if not script.is_file():
        others = ", ".join(reported())
        raise FileNotFoundError(f"{issue.id} has no script to paste upstream; those that have one: {others}")
    measured = _measured()[issue.id]
    versions = dict(package.split(" ") for package in measured["versions"].split(", "))
    return report(issue, script, measured["outputs"], versions)


def _measured() -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((folder() / _MEASURED).read_text(encoding="utf-8"))
    return measured


def commands(script: Path) -> list[str]:
    """How a script is run: the lines of its docstring that are commands."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return [line.strip() for line in text.splitlines() if _COMMAND.fullmatch(line.strip())]


def output_of(command: str, script: Path) -> str:
    """Run one of :func:`commands`, and return the line that holds the wrong and the right number.

    Raises:
        RuntimeError: it failed or printed no such line; with the end of what it printed.
    """
    words = shlex.split(command)
    count = next(number for number, word in enumerate(words) if not _ASSIGNMENT.match(word))
    settings = dict(word.split("=", 1) for word in words[:count])
    arguments = [*_PROGRAMS[words[count]], *words[count + 1 : -1], str(script)]
    # Accelerate would take over the settings of a launch in which this one may run.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ACCELERATE", "FSDP"))}
    with tempfile.TemporaryDirectory() as temporary:  # in which torchrun leaves its logs
        env = {**env, **_ON_CPU, **settings, "TMPDIR": temporary}
        run = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    lines = [line for line in run.stdout.splitlines() if "wrong" in line and "right" in line]
    if run.returncode or len(lines) != 1:
        raise RuntimeError(f"{command}: exit status {run.returncode}\n{run.stdout[-1000:]}\n{run.stderr[-3000:]}")
    return lines[0]


def _may_hold(prediction: Prediction, versions: Mapping[str, str]) -> bool:
    """Whether it is one of these versions, as far as they are known: a script may stand for a package that it lacks."""
    return stack.holds({name: text for name, text in prediction.when.items() if name in versions}, versions)


def report(issue: KnownIssue, script: Path, outputs: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """The text to paste, Markdown.

    Args:
        outputs: by command, what :func:`output_of` returned.
    """
    here = [
        prediction
        for prediction in issue.predictions
        if prediction.subject == "upstream" and _may_hold(prediction, versions)
    ]
    causes = dict.fromkeys(prediction.why for prediction in here if prediction.verdict is Verdict.SILENT)
    causes = causes or dict.fromkeys(prediction.why for prediction in here if prediction.verdict is Verdict.BROKEN)
    runs = "\n".join(f"$ {command}\n{line}" for command, line in outputs.items())
    seen = "\n".join(f"- {link}" for link in issue.upstream)
    return "\n".join(
        [
            f"# {issue.title}",
            "",
            f"{issue.wrong[0].upper()}{issue.wrong[1:]}.",
            "",
            *(f"Cause: {why}." for why in causes),
            "",
            "## To reproduce",
            "On plain CPU processes:",
            "",
            "```python",
            script.read_text(encoding="utf-8").rstrip(),
            "```",
            "",
            "```text",
            runs,
            "```",
            "",
            "## Versions",
            stack.describe(versions),
            *(["", "## See also", seen] if seen else []),
            "",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Run the scripts of these issues, or of all, and keep what they print."""
    for name in list(arguments) or reported():
        known_issues.load().get_issue(name)
        script = folder() / f"{name}.py"
        outputs = {command: output_of(command, script) for command in commands(script)}
        measured = {**_measured(), name: {"outputs": outputs, "versions": stack.describe(stack.installed())}}
        text = json.dumps({issue_id: measured[issue_id] for issue_id in sorted(measured)}, indent=1, ensure_ascii=False)
        (folder() / _MEASURED).write_text(f"{text}\n", encoding="utf-8")
        print(f"{name}: {'; '.join(outputs.values())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
