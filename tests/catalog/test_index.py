"""The index of the catalogue: what was read and checked, where it is kept, and when it is made anew."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import index, known_issues, reading
from pytest_trlcompat.catalog.issue import KnownIssue

ROOT = Path(known_issues.__file__).parents[2]


@pytest.fixture(scope="module")
def catalog() -> known_issues.Catalog:
    """Every file of the catalogue, read and checked."""
    return reading.read(known_issues.SOURCE)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRLCOMPAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "catalog"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, catalog: known_issues.Catalog) -> Iterator[list[Path]]:
    """Which catalogues were read from their files."""
    asked: list[Path] = []

    def read(path: Path) -> known_issues.Catalog:
        asked.append(path)
        return catalog

    monkeypatch.setattr(reading, "read", read)
    known_issues.load.cache_clear()
    yield asked
    known_issues.load.cache_clear()


def values(issue: KnownIssue) -> dict[str, object]:
    return {field.name: getattr(issue, field.name) for field in dataclasses.fields(issue)}


def loaded() -> dict[str, dict[str, object]]:
    """Of this project's catalogue, as a new process would."""
    known_issues.load.cache_clear()
    return {name: values(issue) for name, issue in known_issues.load().items()}


def test_the_index_says_all_that_the_files_say(catalog: known_issues.Catalog) -> None:
    issues = index.parse(index.text_of(catalog.values(), "x"), "x")
    assert issues is not None
    assert [values(issue) for issue in issues] == [values(issue) for issue in catalog.values()]
    assert len(issues) == len(list(known_issues.SOURCE.glob("*/*.toml"))) > 500
    assert all(issue.predict("corrected", "single", {}) for issue in issues)


def test_a_second_process_reads_the_index_alone(cache: Path, reads: list[Path], catalog: known_issues.Catalog) -> None:
    expected = {name: values(issue) for name, issue in catalog.items()}
    assert loaded() == loaded() == expected
    assert reads == [known_issues.SOURCE]
    (path,) = cache.iterdir()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["", "[]", "{", '{"made_from": "x"}', '{"made_from": 1, "issues": []}'])
def test_an_index_that_is_none_is_made_anew(cache: Path, reads: list[Path], text: str) -> None:
    loaded()
    (path,) = cache.iterdir()
    whole = path.read_text()
    path.write_text(text)
    loaded()
    assert reads == [known_issues.SOURCE] * 2
    assert path.read_text() == whole


def test_an_index_with_a_part_missing_is_made_anew(cache: Path, reads: list[Path]) -> None:
    loaded()
    (path,) = cache.iterdir()
    document = json.loads(path.read_text())
    document["predictions"] = document["predictions"][:-1]
    path.write_text(json.dumps(document))
    loaded()
    assert len(reads) == 2


def test_an_index_that_another_user_could_have_written_is_not_read(cache: Path, reads: list[Path]) -> None:
    loaded()
    (path,) = cache.iterdir()
    path.chmod(0o666)
    loaded()
    assert len(reads) == 2


def test_without_a_place_for_an_index_the_files_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reads: list[Path]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRLCOMPAT_CACHE", str(tmp_path / "file"))
    assert len(loaded()) == len(loaded()) > 500
    assert len(reads) == 2


def test_what_the_index_was_made_from_changes_with_each_file(tmp_path: Path) -> None:
    file = tmp_path / "grpo" / "grpo-x.toml"
    file.parent.mkdir()
    file.write_text("a")
    (tmp_path / "absent.toml").write_text("a")
    stamps = [index.stamp(tmp_path)]
    os.utime(file, ns=(1, 1))
    stamps.append(index.stamp(tmp_path))
    file.write_text("ab")
    stamps.append(index.stamp(tmp_path))
    file.rename(file.with_name("grpo-y.toml"))
    stamps.append(index.stamp(tmp_path))
    (tmp_path / "absent.toml").write_text("ab")
    stamps.append(index.stamp(tmp_path))
    assert len(set(stamps)) == 5
    assert index.stamp(tmp_path) == stamps[-1]


def test_what_the_reader_imports_is_part_of_what_the_index_was_made_from() -> None:
    sources = {Path(path).relative_to(ROOT).as_posix() for path in index._sources(known_issues.SOURCE)}
    assert {"pytest_trlcompat/catalog/reading.py", "pytest_trlcompat/conformance/grpo/rows.toml"} <= sources
    assert not any(source.startswith("pytest_trlcompat/trainers/") for source in sources)
    text = Path(reading.__file__).read_text()
    imported = set(re.findall(r"from pytest_trlcompat(?:\.(\w+))? import (\w+)", text))
    named = {f"pytest_trlcompat/{f'{package}/' if package else ''}{name}.py" for package, name in imported}
    modules = {name for name in named if (ROOT / name).is_file()}
    assert modules == {"pytest_trlcompat/stack.py", "pytest_trlcompat/conformance/rows.py"}
    assert modules <= sources


def test_the_index_is_made_anew_where_a_cure_moves_but_not_where_its_text_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path in (ROOT / "pytest_trlcompat").iterdir():
        if path.name != "trainers":
            (tmp_path / path.name).symlink_to(path)
    trainers = shutil.copytree(ROOT / "pytest_trlcompat" / "trainers", tmp_path / "trainers")
    monkeypatch.setattr(index, "_PACKAGE", tmp_path)
    before = index.stamp(known_issues.SOURCE)
    (trainers / "fsdp" / "fsdp_save.py").write_text("")
    assert index.stamp(known_issues.SOURCE) == before
    (trainers / "fsdp" / "fsdp_save.py").rename(trainers / "loss" / "fsdp_save.py")
    assert index.stamp(known_issues.SOURCE) != before


def test_a_wheel_has_the_index_beside_the_reader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reads: list[Path], catalog: known_issues.Catalog
) -> None:
    monkeypatch.setattr(index, "FILE", tmp_path / "index.json")
    monkeypatch.setattr(index, "cached", None)
    index.FILE.write_text(index.text_of(catalog.values()))
    assert loaded() == {name: values(issue) for name, issue in catalog.items()}
    assert reads == []
    before = known_issues.fingerprint()
    os.utime(index.FILE, ns=(1, 1))
    assert known_issues.fingerprint() != before
