"""What to paste upstream of a known issue that the newest releases still have: a script, what it prints, with what.

The scripts are ``fixtures/upstream/<issue>.py``: plain CPU processes, and nothing of this package. This module runs
them as their first lines say and writes the Markdown beside them, from the catalogue, the script and the versions::

    python -m pytest_trlcompat.catalog.upstream_reports [ISSUE ...]

Imports no package of the stack; the interpreter that runs it must have it.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_trlcompat import _data, stack
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.verdict import Verdict

__all__ = ["commands", "folder", "main", "output_of", "report"]

_PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_ASSIGNMENT = re.compile(r"[A-Z_]+=")
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python|torchrun) (?:\S+ )*\S+\.py")
TIMEOUT = 300.0
"""Seconds for one command; on an idle machine each takes 10 to 20."""


def folder() -> Path:
    """Where scripts and reports lie."""
    return _data.fixtures() / "upstream"


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
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ACCELERATE", "FSDP"))}
    with tempfile.TemporaryDirectory() as temporary:  # in which torchrun leaves its logs
        env = {**env, **_ON_CPU, **settings, "TMPDIR": temporary}
        run = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    found = [line for line in run.stdout.splitlines() if "wrong" in line and "right" in line]
    if run.returncode or len(found) != 1:
        raise RuntimeError(f"{command}: exit status {run.returncode}\n{run.stdout[-1000:]}\n{run.stderr[-3000:]}")
    return found[0]


def _may_hold(prediction: Prediction, versions: Mapping[str, str]) -> bool:
    """Whether it is one of these versions, as far as they are known: a script may stand for a package that it lacks."""
    return stack.holds({name: text for name, text in prediction.when.items() if name in versions}, versions)


def report(issue: KnownIssue, script: Path, outputs: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """The text to paste, Markdown.

    Args:
        outputs: by command, what :func:`output_of` returned.
    """
    here = [each for each in issue.predictions if each.subject == "upstream" and _may_hold(each, versions)]
    causes = dict.fromkeys(each.why for each in here if each.verdict is Verdict.SILENT)
    causes = causes or dict.fromkeys(each.why for each in here if each.verdict is Verdict.BROKEN)
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
    """Run the scripts of these issues, or of all, and write their reports."""
    names = list(arguments) or sorted(path.stem for path in folder().glob("*.py"))
    for name in names:
        issue, script = known_issues.load().get_issue(name), folder() / f"{name}.py"
        outputs = {command: output_of(command, script) for command in commands(script)}
        script.with_suffix(".md").write_text(report(issue, script, outputs, stack.installed()), encoding="utf-8")
        print(f"{name}: {'; '.join(outputs.values())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
