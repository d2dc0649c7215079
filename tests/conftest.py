"""Fixtures of all tests. Must not import the stack: most tests run where it is not installed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

with contextlib.suppress(ImportError):  # no cell has it, in whose environments tests/stack runs
    from hypothesis import settings

    settings.register_profile("few", deadline=None, derandomize=True)  # the same examples in each run
    settings.register_profile("fuzz", deadline=None, max_examples=2_000)
    settings.load_profile("few")

pytest_plugins = ["pytester", "trlcompat"]

ROOT = Path(__file__).resolve().parents[1]
WITH_TORCH = {Path(__file__).resolve().with_name(name) for name in ("operators", "stack")}


def pytest_configure(config: pytest.Config) -> None:
    """Let child processes be interrupted, even if this one was started to ignore that, as with ``&``."""
    config.addinivalue_line("markers", "fault(what, outcome): what goes wrong, and what happens; see tests/faults.py")
    config.addinivalue_line("markers", "fuzz: examples that hypothesis chooses, many more of them by `nox -s fuzz`")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make warnings errors, except in tests that run torch or the stack, whose warnings are not ours."""
    for item in items:
        if WITH_TORCH.isdisjoint(item.path.parents):
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)  # a test's own filter wins


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which every test was skipped has shown nothing, and ends as one that collected none."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and reporter is not None and is_all_skipped(reporter.stats):
        skipped = len(reporter.stats["skipped"])
        reporter.write_line(f"\nof {skipped} tests {skipped} were skipped, so that nothing was shown", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


MAY_BE_SKIPPED = ("tests/browser/",)
"""What a run may skip as a whole: `.ci/run` passes where no Chromium is installed, and prints that it was skipped."""


def is_all_skipped(stats: Mapping[str, Sequence[Any]]) -> bool:
    """Whether a run has skipped tests and no other outcome, by the reports of pytest's terminal."""
    skipped = [report for report in stats.get("skipped", ()) if not report.nodeid.startswith(MAY_BE_SKIPPED)]
    return bool(skipped) and not any(stats.get(name) for name in ("passed", "xfailed", "xpassed"))


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of the checkout."""
    folder = tmp_path_factory.mktemp("distributions")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.fail(f"hatchling could not build the project:\n{built.stdout}{built.stderr}")
    return folder


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    """The wheel of the checkout."""
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture
def run_installed(wheel: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs pytest in a folder of its own, with the unpacked wheel and without the checkout.

    A pure wheel is installed by unpacking it. The running environment may hold an editable installation of the
    checkout, which ``sitecustomize`` takes off the path again, in child processes too.
    """
    site, project = tmp_path / "site", tmp_path / "project"
    project.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [entry for entry in sys.path if entry.rstrip('/') != {str(ROOT)!r}]\n"
    )

    def run(*arguments: str, timeout: float = 60.0, autoload: bool = False) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRLCOMPAT_"))}
        environment = {**kept, "PYTHONPATH": str(site)}
        if not autoload:
            environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "trlcompat", "-p", "no:cacheprovider", *arguments],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


class GitHistory:
    """Makes git repositories, one commit for each state that a test describes."""

    def run(self, folder: Path, *arguments: str, stdin: str | None = None) -> str:
        """Run git in a folder; returns what it printed."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        people = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        done = subprocess.run(
            ["git", "-c", "core.hooksPath=/dev/null", *arguments],
            cwd=folder,
            env={**inherited, **people},
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def make(self, folder: Path, states: Sequence[Mapping[str, Any]], check: str = "") -> list[str]:
        """A repository whose commits hold ``state.json`` and ``check.py``; returns the commits, oldest first."""
        folder.mkdir()
        self.run(folder, "init", "--quiet", "--initial-branch=main")
        lines = [f"blob\nmark :1\ndata {len(check)}\n{check}"]
        for number, state in enumerate(states):
            text, message, time = json.dumps(state), f"change {number}", 1735689600 + 3600 * number
            lines.append(
                f"commit refs/heads/main\ncommitter A <a@b.c> {time} +0000\ndata {len(message)}\n{message}\n"
                f"M 100644 :1 check.py\nM 100644 inline state.json\ndata {len(text)}\n{text}\n"
            )
        self.run(folder, "fast-import", "--quiet", stdin="\n".join(lines))
        self.run(folder, "checkout", "--quiet", "main")
        return self.run(folder, "log", "--reverse", "--format=%H").split()


@pytest.fixture(scope="session")
def git_history() -> GitHistory:
    """Makes git repositories."""
    return GitHistory()
