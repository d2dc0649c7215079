"""How suites run in an environment: the command, its environment variables, and a digest of what verdicts depend on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pytest_trlcompat import _provenance
from pytest_trlcompat._provenance import OF_THE_MACHINE
from pytest_trlcompat.matrix.engines import places
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.sweep import Sweep

__all__ = ["OF_THE_MACHINE", "child_variables", "code_digest", "inherited_variables", "suite_command"]


def suite_command(environment: Environment, layout: Layout, results: Path, issues: Sequence[str] = ()) -> list[str]:
    """The command that runs the suites of ``issues`` (empty: all) with pytest, and appends their verdicts to a file."""
    return [
        # The plugin is named, since child_variables keeps pytest from loading any by itself.
        *(str(environment.python), "-m", "pytest", "-p", "trlcompat", "-p", "no:cacheprovider"),
        *("--trlcompat-results", str(results)),
        *(option for issue in issues for option in ("--trlcompat-issue", issue)),
        str(layout.suites),
    ]


def inherited_variables(*also: str) -> dict[str, str]:
    """The caller's variables without those that are for its own Python, pytest or nox.

    Args:
        also: prefixes of further names that are left out.
    """
    return {
        name: value
        for name, value in os.environ.items()
        # With Sweep.VARIABLE a nox that a test starts would take itself for a worker of this sweep.
        if not name.startswith(("PYTEST_", "PYTHON", "NOX_", *also)) and name not in (Sweep.VARIABLE, places.VARIABLE)
    }


def child_variables(environment: Environment) -> dict[str, str]:
    """The child's variables: none of the caller's Python or pytest, no other plugins, no model hub, no progress bar."""
    return {
        # By pytest-cov's variables every Python of the cell would measure coverage.
        **inherited_variables("COV_"),
        **environment.variables,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }


def code_digest(layout: Layout) -> str:
    """A digest of our code, the suites, their data and the ``TRLCOMPAT_`` settings."""
    return _provenance.code_digest(layout.root)
