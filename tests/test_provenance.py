"""What a verdict was measured with: digests of code and packages, and the one function that compares them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat import _provenance
from pytest_trlcompat._provenance import (
    Provenance,
    code_digest,
    difference,
    distributions_in,
    of_environment,
    of_this_process,
    packages_digest,
)

CURRENT = Provenance("a" * 12, "b" * 12)
ROOT = Path(__file__).resolve().parents[1]


def put(folder: Path, name: str, version: str, file: str = "METADATA") -> Path:
    path = folder / f"{name}-{version}.dist-info"
    path.mkdir(parents=True)
    (path / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: of Name: no\n")
    return path


@pytest.mark.parametrize(
    "recorded, why",
    [
        (str(CURRENT), ""),
        (f"{'c' * 12}.{'b' * 12}", "with other code"),
        (f"{'a' * 12}.{'c' * 12}", "with other packages"),
        (f"{'c' * 12}.{'c' * 12}", "with other code and other packages"),
        ("", "with code and packages that nobody wrote down"),
        ("a.b", "with code and packages that nobody wrote down"),
        (f"{'a' * 12}.", "with code and packages that nobody wrote down"),
    ],
)
def test_only_what_was_measured_with_this_code_and_these_packages_is_the_same(recorded: str, why: str) -> None:
    assert difference(recorded, CURRENT) == why


def test_what_is_not_known_is_not_even_equal_to_itself() -> None:
    assert difference(Provenance(), Provenance()) == "with code and packages that nobody wrote down"
    assert difference(CURRENT, Provenance()) == "with code and packages that nobody wrote down"
    assert difference(Provenance("a" * 12), Provenance("a" * 12)) == "with code and packages that nobody wrote down"


def test_the_code_is_this_package_the_suites_their_data_and_the_settings(tmp_path: Path) -> None:
    for name in ("pytest_trlcompat/a.py", "suites/test_a.py", "fixtures/releases.toml", "pytest_trlcompat/watch/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = code_digest(tmp_path, {"TRLCOMPAT_SWEEP": "1", "HOME": "/home"})
    assert code_digest(tmp_path, {}) == before
    assert code_digest(tmp_path, {"TRLCOMPAT_TIMEOUT": "9"}) != before
    (tmp_path / "pytest_trlcompat" / "watch" / "b.py").write_text("2")
    # What a build makes, there or not by how this project is installed.
    for name in ("__init__.pyi", "known.json", "index.json"):
        (tmp_path / "pytest_trlcompat" / "trainers").mkdir(exist_ok=True)
        (tmp_path / "pytest_trlcompat" / "trainers" / name).write_text("1")
    assert code_digest(tmp_path, {}) == before
    for name in ("pytest_trlcompat/a.py", "suites/test_a.py", "fixtures/releases.toml"):
        (tmp_path / name).write_text("2")
        assert code_digest(tmp_path, {}) != before
        (tmp_path / name).write_text("1")


def test_every_distribution_counts_but_this_project_and_what_measures_its_coverage() -> None:
    packages = {"torch": "2.13.0+cpu", "trl": "1.16.0"}
    digest = packages_digest("3.11", packages)
    assert packages_digest("3.11", {**packages, "pytest-trlcompat": "0.1.0", "coverage": "7.0"}) == digest
    assert packages_digest("3.12", packages) != digest
    assert packages_digest("3.11", {**packages, "verl": "0.3"}) != digest
    assert packages_digest("3.11", {**packages, "torch": "2.13.0"}) != digest
    assert packages_digest("3.11", {"trl": "1.16.0"}) != digest


def test_distributions_are_read_from_their_metadata(tmp_path: Path) -> None:
    put(tmp_path / "first", "Ruamel.YAML_clib", "0.2")
    put(tmp_path / "first", "trl", "1.0.0")
    put(tmp_path / "first", "trl", "1.0.1")
    (put(tmp_path / "first", "peft", "0.1") / "METADATA").unlink()
    put(tmp_path / "second", "peft", "0.2")
    put(tmp_path / "second", "torch", "2.13.0+cpu")
    assert distributions_in([tmp_path / "first", tmp_path / "second", tmp_path / "none"]) == {
        "peft": "unreadable",
        "ruamel-yaml-clib": "0.2",
        "trl": "1.0.0 and 1.0.1",
        "torch": "2.13.0+cpu",
    }


def test_a_process_has_what_its_path_has_before_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(_provenance.CODE_VARIABLES)]:
        monkeypatch.delenv(name)
    program = "from pytest_trlcompat._provenance import of_this_process; print(of_this_process())"

    def printed(*path: Path) -> Provenance:
        variables = {"PYTHONPATH": ":".join(map(str, (ROOT, *path)))}
        done = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
        )
        return Provenance.parse(done.stdout.strip())

    plain = printed()
    assert plain == of_this_process()
    assert plain.packages == of_environment(Path(sys.prefix))
    assert plain.code == code_digest(ROOT)
    put(tmp_path, "trl", "9.9.9")
    assert difference(printed(tmp_path), plain) == "with other packages"


def test_a_setting_that_was_set_before_is_no_part_of_a_later_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = of_this_process()
    with monkeypatch.context() as setting:
        setting.setenv("TRLCOMPAT_TIMEOUT", "90")
        assert difference(of_this_process(), plain) == "with other code"
    assert of_this_process() == plain


COUNTED = (
    *("TRLCOMPAT_ACCELERATOR_DEVICES", "TRLCOMPAT_ACCELERATOR_TRACE", "TRLCOMPAT_COMPARE_COLLECTIVES"),
    *("TRLCOMPAT_DEBUG_RANK", "TRLCOMPAT_DEVICE", "TRLCOMPAT_NNODES", "TRLCOMPAT_NODE_RANK", "TRLCOMPAT_PRELOAD"),
    *("TRLCOMPAT_RDZV_ENDPOINT", "TRLCOMPAT_SERVER_RELEASES", "TRLCOMPAT_TIMEOUT", "TRLCOMPAT_UNORDERED_COLLECTIVES"),
    *("TRLCOMPAT_VLLM_ON_CPU",),
)
"""Variables on which a verdict may depend."""


def test_each_variable_is_known_to_decide_verdicts_or_not_to() -> None:
    from pytest_trlcompat.plugin.settings import SPECS

    sources = [path for folder in ("pytest_trlcompat", "suites") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"\bTRLCOMPAT_[A-Z_]*[A-Z]\b", path.read_text())}
    variables = named | {spec.variable for spec in SPECS}
    assert sorted(variables) == sorted({*COUNTED, *_provenance.OF_THE_MACHINE, *_provenance.OF_A_RUN})
    assert not {*COUNTED} & {*_provenance.OF_THE_MACHINE, *_provenance.OF_A_RUN}


@pytest.mark.parametrize("variable", [*_provenance.OF_THE_MACHINE, *_provenance.OF_A_RUN])
def test_what_decides_no_verdict_is_no_part_of_a_provenance(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv(variable, raising=False)
    plain = of_this_process()
    monkeypatch.setenv(variable, "other")
    assert of_this_process() == plain


def test_a_settings_name_is_that_of_the_sweep() -> None:
    from pytest_trlcompat.matrix.sweep import Sweep

    assert Sweep.VARIABLE in _provenance.OF_THE_MACHINE
