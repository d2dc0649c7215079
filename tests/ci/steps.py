"""Runs the shell steps of workflow files here, as the services' runners do: one shell for each step, or for each job.

Steps that are no shell are left out, each for a reason that :data:`LEFT_OUT` gives. Expressions are filled in by what
the test gives; one that it does not know is an error, so that no step runs with a hole in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

__all__ = ["LEFT_OUT", "Ran", "Runner", "StepFailed", "read"]

LEFT_OUT = {
    "actions/checkout": "the files are there",
    "actions/setup-python": "the interpreter of this test is",
    "actions/cache": "a service of GitHub; the caches of this machine are used",
    "actions/upload-artifact": "a service of GitHub; the test looks at the files themselves",
    "actions/download-artifact": "a service of GitHub; the test puts the files there",
}
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")
_TIMEOUT = 300


class StepFailed(AssertionError):
    """A step ended with another exit status than 0."""

    def __init__(self, script: str, status: int, output: str) -> None:
        super().__init__(f"exit status {status} of:\n{script}\n{output}")
        self.status = status
        self.output = output


@dataclass
class Ran:
    """What one job did.

    Attributes:
        scripts: as they were run.
        left_out: actions that were not.
    """

    scripts: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    output: str = ""
    summary: str = ""


def read(text: str) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads the key ``on`` as true."""
    return {"on" if name is True else str(name): value for name, value in yaml.safe_load(text).items()}


@dataclass
class Runner:
    """A machine on which jobs run, in ``folder``.

    Attributes:
        home: of the user, for the runner's own files.
        variables: what the environment has beside the usual.
    """

    folder: Path
    home: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def github(self, workflow: Mapping[str, Any], job: str, context: Mapping[str, str]) -> Ran:
        """Run a job of a GitHub workflow; ``context`` is what expressions say: ``matrix.python``."""
        found = workflow["jobs"][job]
        ran = Ran()
        path: list[str] = []
        files = {name: self.home / name.lower() for name in ("GITHUB_PATH", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
        shell = workflow.get("defaults", {}).get("run", {}).get("shell", "")
        failure: StepFailed | None = None
        for step in found["steps"]:
            if "run" not in step:
                name = step["uses"].partition("@")[0]
                assert name in LEFT_OUT, f"nothing is known of {name}"
                ran.left_out.append(name)
                continue
            if failure is not None and step.get("if") != "always()":
                continue
            for file in files.values():
                file.write_text("")
            given = {**workflow.get("env", {}), **found.get("env", {}), **step.get("env", {})}
            environ = {name: fill(str(value), context) for name, value in given.items()}
            environ.update({name: str(file) for name, file in files.items()}, CI="true", GITHUB_ACTIONS="true")
            script = fill(step["run"], context)
            # As GitHub documents: "bash", where it is named, stops at a failure within a pipe, the default does not.
            options = ["--noprofile", "--norc", "-eo", "pipefail"] if shell == "bash" else ["-e"]
            try:
                ran.output += self._bash(options, script, environ, path)
            except StepFailed as error:
                ran.output += error.output
                failure = failure or error
            ran.scripts.append(script)
            ran.summary += files["GITHUB_STEP_SUMMARY"].read_text()
            path = [*files["GITHUB_PATH"].read_text().split(), *path]
        if failure is not None:
            failure.args = (*failure.args, ran)
            raise failure
        return ran

    def gitlab(self, pipeline: Mapping[str, Any], job: str, variables: Mapping[str, str]) -> Ran:
        """Run a job of a GitLab pipeline, its script in one shell and what comes after it in another, failed or not."""
        found = pipeline[job]
        given = {**pipeline.get("variables", {}), **found.get("variables", {})}
        environ = {**variables, "CI_PROJECT_DIR": str(self.folder), "CI": "true", "GITLAB_CI": "true"}
        for name, value in given.items():
            environ[name] = re.sub(r"\$\{?(\w+)\}?", lambda match: environ[match[1]], str(value))
        ran = Ran()
        script, after = ("\n".join(found.get(part, [])) for part in ("script", "after_script"))
        options = ["--noprofile", "--norc", "-eo", "pipefail"]
        try:
            ran.scripts.append(script)
            ran.output += self._bash(options, script, environ, [])
        finally:
            if after:
                ran.scripts.append(after)
                ran.output += self._bash(options, after, environ, [])
        return ran

    def _bash(self, options: list[str], script: str, environ: Mapping[str, str], path: list[str]) -> str:
        inherited = {"LANG": "C.UTF-8", "HOME": str(self.home), **self.variables, **environ}
        before = [*path, str(self.home / "python" / "bin")]
        inherited["PATH"] = os.pathsep.join([*before, inherited.get("PATH", os.defpath)])
        done = subprocess.run(
            ["bash", *options, "-c", script],
            cwd=self.folder,
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
        if done.returncode != 0:
            raise StepFailed(script, done.returncode, done.stdout)
        return done.stdout

    def make_python(self) -> None:
        """The ``python`` of the steps: with pip, and with this environment's nox and uv, so that none is fetched."""
        python = self.home / "python"
        subprocess.run([sys.executable, "-m", "venv", str(python)], check=True, timeout=_TIMEOUT)
        (packages,) = (python / "lib").glob("python*/site-packages")
        here = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "as_here.pth").write_text("".join(f"{path}\n" for path in here))
        for name in ("nox", "uv"):
            (python / "bin" / name).symlink_to(Path(sys.executable).parent / name)


def fill(text: str, context: Mapping[str, str]) -> str:
    """A text with its expressions filled in."""
    return _EXPRESSION.sub(lambda match: context[match[1].strip()], text)
