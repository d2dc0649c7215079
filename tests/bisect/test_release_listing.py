"""What pip lists of a package, the range to search in it, and locks near another one."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_trlcompat.bisect import candidates
from pytest_trlcompat.bisect.candidates import releases
from pytest_trlcompat.bisect.candidates.releases import Listing, list_releases, parse_listing, releases_between
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.locks import Lock

PIP = """\
transformers (4.53.3)
  Skipping link: yanked for reason: Version was: not set: https://host/f/transformers-4.25.0-py3-none-any.whl#sha256=0 \
(from https://host/simple/transformers/) (requires-python:>=3.7.0)
  Skipping link: yanked for reason: <none given>: https://host/f/transformers-4.52.0.tar.gz#sha256=1 (from https://host/)
  Skipping link: not a file: https://host/f/other
Available versions: 4.53.3, 4.53.0, 5.0.0rc1, 4.9.2
"""


def test_pips_listing_is_read_with_yanked_releases() -> None:
    assert parse_listing("transformers", PIP, "2026-01-01") == Listing(
        "transformers",
        ("4.9.2", "4.53.0", "4.53.3", "5.0.0rc1"),
        {"4.25.0": "Version was: not set", "4.52.0": ""},
        "2026-01-01",
    )


def test_the_kept_listing_is_used_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        subprocess.CompletedProcess([], 0, PIP, ""),
        subprocess.CompletedProcess([], 1, "", "ERROR: Could not find a version\nERROR: No matching distribution\n"),
    ]
    monkeypatch.setattr(
        "pytest_trlcompat.bisect.candidates.releases.subprocess.run", lambda *words, **options: answers.pop(0)
    )
    monkeypatch.setattr(releases, "find_uv", lambda: "uv")
    monkeypatch.setattr(releases, "settings", lambda environ: {})
    first = list_releases("transformers", "3.11", tmp_path / "kept.json")
    assert list_releases("transformers", "3.11", tmp_path / "kept.json") == first
    answers.append(subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution\n"))
    with pytest.raises(BisectError, match="could not be listed: ERROR: No matching distribution\ncheck the network"):
        list_releases("transformers", "3.11", tmp_path / "other.json")


def test_the_ends_may_be_yanked_or_pre_releases() -> None:
    listing = Listing("p", ("1.0", "1.1", "1.2", "1.3rc1", "2.0"), {"1.1.1": "bad", "0.9": ""}, "today")
    found = releases_between(listing, "0.9", "1.3rc1")
    assert found.versions == ("0.9", "1.0", "1.1", "1.2", "1.3rc1")
    assert found.left_out == ("yanked: 1.1.1 (bad)",)
    assert releases_between(listing, "1.0.0", "2").versions == ("1.0", "1.1", "1.2", "2.0")
    assert releases_between(listing, "1.0", "2.0", pre=True, yanked=True).versions == (
        "1.0",
        "1.1",
        "1.1.1",
        "1.2",
        "1.3rc1",
        "2.0",
    )


def test_a_lock_near_another_holds_the_stack_and_prefers_the_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Sequence[str], datetime.date, Sequence[str]]] = []

    def compile_versions(
        matrix: Matrix, requirements: Sequence[str], date: datetime.date, preferred: Sequence[str] = ()
    ) -> dict[str, str]:
        calls.append((requirements, date, preferred))
        return {"transformers": "4.52.1"}

    monkeypatch.setattr(candidates, "compile_versions", compile_versions)
    matrix = Matrix("3.11", {}, ("trl",), ("pytest>=8",), (), 3)
    day = datetime.date(2025, 5, 1)
    base = Lock("x", day, "3.11", {"trl": "0.14.0", "transformers": "4.51.3", "tokenizers": "0.21.1"}, "y")
    lock = candidates.lock_near(matrix, "near", {"transformers": "4.52.1"}, base)
    assert dict(lock.packages) == {"transformers": "4.52.1"}
    (call,) = calls
    assert call == (
        ["transformers==4.52.1", "trl==0.14.0", "pytest>=8"],
        day,
        ["trl==0.14.0", "tokenizers==0.21.1"],
    )
