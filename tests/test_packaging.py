"""The wheel and the sdist: what a user without the checkout gets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pytest_trlcompat import __version__
from pytest_trlcompat.catalog import evidence, index, known_issues, reading, upstream_reports
from pytest_trlcompat.catalog.measurements import Measurements
from pytest_trlcompat.trainers.curing import known, names, stub

ROOT = Path(__file__).resolve().parents[1]
MADE = ("__init__.pyi", "known.json", "index.json", "measurements.json", "*.md")
"""What a build makes."""


@pytest.fixture(scope="session")
def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"pytest_trlcompat-{__version__}.dist-info/METADATA").decode())


def sources(folder: str) -> set[str]:
    """Files of a folder of the checkout, without what Python leaves there."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_is_pure_and_holds_nothing_but_the_package(wheel: Path, members: set[str]) -> None:
    assert wheel.name == f"pytest_trlcompat-{__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in members} == {
        "pytest_trlcompat",
        f"pytest_trlcompat-{__version__}.dist-info",
    }
    assert "pytest_trlcompat/py.typed" in members
    assert "pytest_trlcompat/trainers/__init__.pyi" in members
    assert f"pytest_trlcompat-{__version__}.dist-info/licenses/LICENSE" in members


def test_the_wheel_holds_what_git_has_no_copy_of(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("pytest_trlcompat/trainers/__init__.pyi").decode() == stub.stub()
        assert archive.read("pytest_trlcompat/trainers/known.json").decode() == known.stored()
        made = archive.read("pytest_trlcompat/catalog/index.json").decode()
        assert made == index.text_of(reading.read(known_issues.SOURCE).values())
        kept = archive.read("pytest_trlcompat/catalog/measurements.json").decode()
        assert kept == Measurements.of(known_issues.load(), evidence.published()).to_json()
        for name in upstream_reports.reported():
            report = archive.read(f"pytest_trlcompat/fixtures/upstream/{name}.md").decode()
            assert report == upstream_reports.stored_report(known_issues.load()[name])
        names_in_wheel = archive.namelist()
    assert len(names_in_wheel) == len(set(names_in_wheel))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources as git has them."""
    folder = tmp_path / "checkout"
    for name in ("pytest_trlcompat", "suites", "fixtures"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", *MADE))
    for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    return folder


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def build_editable(checkout: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """As pip and uv build an editable installation."""
    folder.mkdir()
    program = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def test_an_editable_installation_gets_the_stub_and_reads_all_else_from_its_sources(
    checkout: Path, tmp_path: Path
) -> None:
    before = files(checkout)
    done = build_editable(checkout, tmp_path / "built")
    assert done.returncode == 0, done.stderr
    assert files(checkout) - before == {checkout / "pytest_trlcompat" / "trainers" / "__init__.pyi"}
    assert (checkout / "pytest_trlcompat" / "trainers" / "__init__.pyi").read_text(encoding="utf-8") == stub.stub()
    with zipfile.ZipFile(tmp_path / "built" / done.stdout.splitlines()[-1]) as archive:
        names_of_package = [name for name in archive.namelist() if name.startswith("pytest_trlcompat/")]
        assert {name.split("/")[1] for name in names_of_package} == {"fixtures", "suites"}
        assert archive.read("_editable_impl_pytest_trlcompat.pth").decode().strip() == str(checkout)


def test_an_editable_installation_of_a_checkout_that_cannot_be_written_works_without_the_stub(
    checkout: Path, tmp_path: Path
) -> None:
    (checkout / "pytest_trlcompat" / "trainers" / "__init__.pyi").mkdir()  # root may write wherever it likes, but here
    done = build_editable(checkout, tmp_path / "built")
    assert done.returncode == 0, done.stderr
    assert "type checkers will not know the names of pytest_trlcompat.trainers: [Errno 21]" in done.stderr


def test_a_checkout_that_nobody_has_built_is_read_as_it_is_and_nothing_is_written(checkout: Path) -> None:
    before = files(checkout)
    program = (
        "import pytest_trlcompat, sys; from pytest_trlcompat import cli; "
        "from pytest_trlcompat.trainers.curing import known, names; "
        "cured = known.issues_of('AbsolutePositionsMixin'); "
        "print(pytest_trlcompat.__file__, len(names.MODULES), cured[0].id); sys.exit(cli.main(['issue', cured[0].id]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, title, *_ = done.stdout.splitlines()
    assert first == f"{checkout / 'pytest_trlcompat' / '__init__.py'} {len(names.MODULES)} distillation-positions"
    assert title == "distillation-positions"
    assert files(checkout) == before


def test_the_wheel_holds_every_source_file_the_suites_and_the_fixtures(members: set[str]) -> None:
    assert sources("pytest_trlcompat") <= members
    for folder in ("suites", "fixtures"):
        assert {f"pytest_trlcompat/{name}" for name in sources(folder)} <= members
    assert "pytest_trlcompat/suites/conftest.py" in members
    assert "pytest_trlcompat/fixtures/matrix.toml" in members
    assert "pytest_trlcompat/fixtures/evidence.json" in members
    assert "pytest_trlcompat/accelerator/csrc/allocator.cpp" in members


def test_the_plugin_and_the_program_are_registered_by_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"pytest_trlcompat-{__version__}.dist-info/entry_points.txt").decode()
    assert text.split("\n") == [
        "[console_scripts]",
        "trlcompat = pytest_trlcompat.cli:main",
        "",
        "[pytest11]",
        "trlcompat = pytest_trlcompat.plugin",
        "",
        "[vllm.general_plugins]",
        "trlcompat = pytest_trlcompat.inference.cpu_engine:install",
        "",
    ]


def test_the_stack_is_an_extra_and_nothing_heavy_is_required(metadata: Message) -> None:
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    plain = {each.name for each in required if each.marker is None or "extra" not in str(each.marker)}
    assert plain == {"pytest", "packaging", "cloudpickle", "tomli"}
    stack = {each.name for each in required if "extra == 'stack'" in str(each.marker).replace('"', "'")}
    assert stack == {"torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "datasets"}
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_no_reader_is_sent_to_the_package_index_where_the_project_is_not() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "pytest_trlcompat").rglob("*.*")]
    texts = {
        str(path): path.read_text(encoding="utf-8") for path in pages if path.suffix in (".md", ".py", ".j2", ".toml")
    }
    named = re.compile(r"pip install [\"']?pytest-trlcompat")
    assert [name for name, text in texts.items() if named.search(text)] == []


def test_the_sdist_is_complete(distributions: Path, wheel: Path, members: set[str], tmp_path: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    for name in (
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "hatch_build.py",
        "noxfile.py",
        ".ci/run",
        ".github/workflows/ci.yml",
        "pyproject.toml",
    ):
        assert (unpacked / name).is_file(), name
    assert {name for name in sources("tests") if name.endswith(".py")} <= {
        path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*.py")
    }
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=unpacked, check=True, capture_output=True)
    with zipfile.ZipFile(tmp_path / wheel.name) as archive:
        assert set(archive.namelist()) == members


RunInstalled = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_plugin_loads_once_by_name_from_the_wheel(run_installed: RunInstalled, tmp_path: Path) -> None:
    (tmp_path / "project" / "test_it.py").write_text(
        "import sys\n"
        "from pytest_trlcompat import _data\n"
        "def test_it(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('trlcompat')\n"
        "    print('from', _data.fixtures(), _data.suites())\n"
        f"    assert {str(ROOT)!r} not in sys.path\n"
    )
    package = tmp_path / "site" / "pytest_trlcompat"
    for autoload in ([], ["-p", "trlcompat"]):  # once more by name, as with autoload on
        run = run_installed("-s", *autoload)
        assert run.returncode == 0, run.stdout + run.stderr
        assert f"from {package / 'fixtures'} {package / 'suites'}\n" in run.stdout
        assert run.stdout.count("trlcompat: device ") == 1


def test_the_suites_run_from_the_wheel_with_one_command(run_installed: RunInstalled) -> None:
    run = run_installed("--pyargs", "pytest_trlcompat.suites", "--collect-only", "-q", "--strict-markers")
    assert run.returncode == 0, run.stdout + run.stderr
    for subject in ("upstream", "corrected"):
        assert f"grpo/test_log_probabilities.py::test_logits_to_keep[{subject}]" in run.stdout


def test_the_doctor_runs_from_the_wheel_without_pytest(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if p.rstrip('/') != {str(ROOT)!r})]; "
        "sys.modules['pytest'] = None; from pytest_trlcompat import _data, cli; print(_data.fixtures()); "
        "sys.exit(cli.main(['doctor', 'trl==0.15.2', 'transformers==4.48.3']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 1, run.stderr
    first, second = run.stdout.splitlines()[:2]
    assert first == str(tmp_path / "pytest_trlcompat" / "fixtures")
    assert second.startswith("trl 0.15.2, transformers 4.48.3 (the command line); not specified: ")


def test_autoload_and_the_option_together_do_not_clash(run_installed: RunInstalled, tmp_path: Path) -> None:
    (tmp_path / "project" / "test_it.py").write_text("def test_it(version_matrix): pass\n")
    run = run_installed(autoload=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("trlcompat: device ") == 1
    assert f"trlcompat-{__version__}" in next(line for line in run.stdout.splitlines() if line.startswith("plugins:"))
