"""Forks of a lock, markers, and what has no name: nothing that may be installed is taken as not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.ranges import ABSENT, parse
from pytest_trlcompat.catalog.regions import regions

from .asking import Ask, refused
from .made_up import Run, cell, issue, predict

OLD_OR_NEW = """\
version = 1
requires-python = ">=3.10"

[[package]]
name = "trl"
version = "1.16.0"
resolution-markers = ["python_full_version >= '3.11'"]

[[package]]
name = "trl"
version = "0.15.2"
resolution-markers = ["python_full_version < '3.11'"]

[[package]]
name = "transformers"
version = "5.23.0"
resolution-markers = ["python_full_version >= '3.11'"]

[[package]]
name = "transformers"
version = "4.48.3"
resolution-markers = ["python_full_version < '3.11'"]
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "uv.lock"
    path.write_text(OLD_OR_NEW)
    return path


def test_a_fork_for_another_python_is_not_dropped(doctor: Run, small: KnownIssue, lock: Path) -> None:
    """Whichever Python runs the doctor: trl 0.15.2 has the issue, trl 1.16.0 has not."""
    status, out, _ = doctor("uv.lock", "--strategy", "single", "--strategy", "fsdp1")
    assert status == 0  # it shows under zero3 alone
    status, out, _ = doctor("uv.lock", "deepspeed==0.16.4")
    flat = " ".join(out.split())
    assert status == 1
    assert "broken under zero3, only with trl ==0.15.2: broken because" in flat
    assert (
        "note: uv.lock: trl is 1.16.0 where python_full_version >= '3.11', 0.15.2 where python_full_version < '3.11'; "
        "each of these is considered"
    ) in flat
    assert out.startswith("trl 1.16.0 or 0.15.2, transformers 5.23.0 or 4.48.3, deepspeed 0.16.4 (uv.lock); ")


@pytest.mark.parametrize(("python", "expected"), [("3.10", 1), ("3.11", 0), ("3.12", 0)])
def test_a_question_may_be_about_one_python(
    doctor: Run, small: KnownIssue, lock: Path, python: str, expected: int
) -> None:
    status, out, _ = doctor("uv.lock", "deepspeed==0.16.4", "--python", python, "--json")
    document = json.loads(out)
    assert status == expected
    assert document["stack"]["trl"] == ("1.16.0" if status == 0 else "0.15.2")
    assert document["notes"] == [
        f"uv.lock: {package} {version} ; python_full_version {sign} '3.11' is ignored, because its marker excludes "
        f"Python {python}"
        for package, new, old in (("trl", "1.16.0", "0.15.2"), ("transformers", "5.23.0", "4.48.3"))
        for version, sign in ([(old, "<")] if status == 0 else [(new, ">=")])
    ]


def test_versions_of_different_forks_are_not_combined(monkeypatch: pytest.MonkeyPatch, doctor: Run, lock: Path) -> None:
    crossed = issue(predict("broken", trl="==1.16.0", transformers="==4.48.3"), predict("ok"), strategies=("single",))
    both = issue(predict("silent", trl="<1", transformers="<5"), predict("ok"), name="two", strategies=("single",))
    monkeypatch.setattr(known_issues, "load", lambda: Catalog({each.id: each for each in (crossed, both)}))
    monkeypatch.setattr(evidence, "published", lambda: Evidence("2026-11-21", (cell("1.0.0", single="ok"),)))
    status, out, _ = doctor("uv.lock", "--json")
    document = json.loads(out)
    assert status == 1
    assert [each["id"] for each in document["issues"]] == ["two"]
    assert document["issues"][0]["when"][0]["condition"] == "transformers ==4.48.3 and trl ==0.15.2"
    assert document["clear"] == ["one"]
    assert document["forks"] == [
        {"trl": "==1.16.0", "transformers": "==5.23.0", **dict.fromkeys(REST, "not installed")},
        {"trl": "==0.15.2", "transformers": "==4.48.3", **dict.fromkeys(REST, "not installed")},
    ]


REST = ("torch", "accelerate", "deepspeed", "peft", "datasets", "vllm", "liger-kernel", "pillow", "torchvision")


def test_of_too_many_environments_every_version_goes_with_every_other(ask: Ask) -> None:
    entries = "".join(
        f"[[package]]\nname = 'peft'\nversion = '0.{number}'\nresolution-markers = [\"extra == 'e{number}'\"]\n"
        for number in range(13)
    )
    found = ask("uv.lock", uv_lock=OLD_OR_NEW + entries)
    assert found.together == ()
    assert found.texts["trl"] == "1.16.0 or 0.15.2"
    assert found.texts["peft"].endswith("0.11 or 0.12 or not installed")
    assert found.versions["trl"] == parse("==0.15.2") | parse("==1.16.0")
    assert found.notes[0] == (
        "uv.lock: its markers tell more environments apart than can be looked at one by one, so every version is taken "
        "to go with every other"
    )


def test_what_is_left_out_of_an_answer_is_told(ask: Ask) -> None:
    lock = 'lock-version = "1.0"\n[[packages]]\nname = "trl"\nversion = "0.15.2"\nmarker = "os_name == \'posix\'"\n'
    assert ask("pylock.toml", pylock_toml=lock).notes == (
        "pylock.toml: trl is there only where os_name == 'posix'; nothing is said about other environments",
    )
    assert refused(ask, "pylock.toml", pylock_toml=lock, platform="win32") == (
        "pylock.toml: its markers leave out trl, which all known issues are about, for win32"
    )
    lines = "trl==0.15.2\ntrl==0.16.0 ; sys_platform == 'darwin'\n"
    assert ask("req.txt", req_txt=lines).notes == (
        "not considered are environments in which this holds: trl is required as 0.15.2 (req.txt, line 1) and as "
        "0.16.0 (req.txt, line 2); no version satisfies both: remove one of them",
    )
    assert "no version satisfies both" in refused(ask, "req.txt", req_txt=lines, platform="darwin")


def test_markers_of_a_list_are_alternatives(ask: Ask) -> None:
    text = "trl==0.15.2\npeft==0.14.0 ; python_version < '3.12'\npeft==0.21.2 ; python_version >= '3.12'\n"
    found = ask("req.txt", req_txt=text)
    assert found.texts["peft"] == "0.14.0 or 0.21.2"
    assert found.versions["peft"] == parse("==0.14.0") | parse("==0.21.2")
    assert ask("req.txt", req_txt=text, python="3.11").texts["peft"] == "0.14.0"
    alone = ask("req.txt", req_txt="trl==0.15.2\npeft==0.14.0 ; sys_platform == 'linux'\n")
    assert (alone.texts["peft"], "peft" in alone.unknown) == ("0.14.0 or any version", True)


def test_a_marker_that_every_supported_python_meets_is_none(ask: Ask) -> None:
    """``poetry export`` writes one at every line."""
    found = ask("req.txt", req_txt='trl==0.15.2 ; python_version >= "3.8" and python_version < "4.0"\n')
    assert (found.texts, found.notes, found.together) == ({"trl": "0.15.2"}, (), ())


def test_the_deepest_marker_of_a_lock_is_read(ask: Ask) -> None:
    marker = "(" * 3000 + "python_version < '3'" + ")" * 3000
    lock = f'version = 1\n[[package]]\nname = "trl"\nversion = "1"\nresolution-markers = ["{marker}"]\n'
    assert refused(ask, "uv.lock", uv_lock=lock).startswith("uv.lock: its markers leave out trl, ")


@pytest.mark.parametrize(
    "marker", ["python_version", "python_version < 3", "python <'3'", "os_name == 'a' or", "()", "'a' == 'b'"]
)
def test_a_marker_that_is_none_is_refused(ask: Ask, marker: str) -> None:
    lock = f'lock-version = "1.0"\n[[packages]]\nname = "trl"\nversion = "1"\nmarker = "{marker}"\n'
    message = "pylock.toml: a marker cannot be read; write it like python_version < '3.12'"
    assert refused(ask, "pylock.toml", pylock_toml=lock) == message


POETRY = """\
# This file is automatically @generated by Poetry 2.1.1 and should not be changed by hand.
[[package]]
name = "trl"
version = "0.15.2"
optional = false
groups = ["main"]

[[package]]
name = "peft"
version = "0.14.0"
optional = false
groups = ["dev"]

[[package]]
name = "torch"
version = "2.6.0"
optional = false
groups = ["main"]
markers = "sys_platform == 'darwin'"

[[package]]
name = "torch"
version = "2.9.1"
optional = false
groups = ["main"]
markers = "sys_platform != 'darwin'"

[metadata]
lock-version = "2.1"
python-versions = ">=3.10"
"""
PIPENV = {
    "_meta": {"requires": {"python_version": "3.11"}},
    "default": {"trl": {"version": "==0.15.2"}, "torch": {"version": "==2.6.0", "markers": "sys_platform == 'linux'"}},
    "develop": {"peft": {"version": "==0.14.0"}},
}


def test_locks_of_poetry_and_pipenv_are_read_with_their_markers_and_groups(ask: Ask) -> None:
    found = ask("poetry.lock", poetry_lock=POETRY)
    assert found.texts == {"trl": "0.15.2", "torch": "2.6.0 or 2.9.1", "peft": "0.14.0 or not installed"}
    assert found.versions["peft"] == parse("==0.14.0") | ABSENT
    assert found.absent == ["transformers", "accelerate", "deepspeed", "datasets"]
    assert ask("poetry.lock", poetry_lock=POETRY, platform="darwin").texts["torch"] == "2.6.0"
    found = ask("-", stdin=json.dumps(PIPENV))
    assert found.texts == {"trl": "0.15.2", "torch": "2.6.0 or not installed", "peft": "0.14.0 or not installed"}


def test_a_package_of_a_uv_lock_that_not_every_install_has_may_be_missing(ask: Ask) -> None:
    project = '[[package]]\nname = "mine"\nversion = "1"\nsource = {{ editable = "." }}\ndependencies = [{}]\n'
    peft = '[[package]]\nname = "peft"\nversion = "0.14.0"\n'
    lock = 'version = 1\n[[package]]\nname = "trl"\nversion = "0.15.2"\n' + peft
    certain = ask("uv.lock", uv_lock=lock + project.format('{ name = "peft" }'))
    assert certain.texts["peft"] == "0.14.0"
    for asked_for in ("", '{ name = "peft", marker = "sys_platform == \'linux\'" }'):
        assert ask("uv.lock", uv_lock=lock + project.format(asked_for)).texts["peft"] == "0.14.0 or not installed"


def test_that_a_package_is_not_installed_is_no_worse_than_some_version_of_it() -> None:
    """So that a package of which nothing is known may be asked about as one in any version."""
    for entry in known_issues.load().values():
        for package in set(entry.packages) - set(entry.needs):
            for label in entry.labels():
                problems = [
                    {id(each) for each in regions(entry, "upstream", label, domain).predicted.values()
                     if each is not None and each.verdict.is_problem}
                    for domain in ({}, {package: None})
                ]  # fmt: skip
                assert problems[1] <= problems[0], (entry.id, package, label)


# What has no name

COMPLETE = "trl==0.15.2\ntransformers==4.48.3\ntorch==2.6.0\naccelerate==1.4.0\ndatasets==3.3.2\n"


@pytest.mark.parametrize(
    "line",
    [
        "-e .",
        "-e file:///home/me/project",
        "--editable=../project",
        "-e git+https://example.org/me/project",
        "git+https://example.org/me/project@v1.0",
        "https://example.org/latest.zip",
        "./dist/archive.tar.gz",
        "wheels/peft.whl",
        ".",
    ],
)
def test_what_has_no_name_may_be_any_package_of_the_stack(ask: Ask, line: str) -> None:
    assert ask("-", stdin=COMPLETE).absent == ["deepspeed", "peft"]
    found = ask("-", stdin=f"{COMPLETE}{line}\n")
    assert (found.absent, found.unknown) == ([], ["deepspeed", "peft"])
    (note,) = found.notes
    assert note.startswith("standard input, line 6, ")
    assert "installs something whose name is not given; it may be a package of the stack in any version" in note


@pytest.mark.parametrize(
    "line",
    [
        "# Editable install with no version control (mine==1.0)\n-e /home/me/mine",
        "-e git+https://example.org/me/project#egg=mine",
        "mine @ file:///home/me/project",
        "./dist/mine-1.0.tar.gz",
        "https://example.org/mine-1.0-py3-none-any.whl",
    ],
)
def test_what_has_another_name_is_none_of_the_stack(ask: Ask, line: str) -> None:
    found = ask("-", stdin=f"{COMPLETE}{line}\n")
    assert (found.absent, found.notes) == (["deepspeed", "peft"], ())


@pytest.mark.parametrize("between", ["", "\n", "# more\n"])
def test_a_folder_of_the_stack_is_no_other_package_whatever_a_comment_says(ask: Ask, between: str) -> None:
    comment = "# Editable install with no version control (mine==1.0)\n"
    line = "--editable=file:///home/me/peft ; python_version < '3.11'\n"
    found = ask("-", stdin=f"{COMPLETE}{comment}{between}{line}peft==0.14.0 ; python_version >= '3.11'\n")
    assert any("the version of peft cannot be read from file:///home/me/peft" in note for note in found.notes)


def test_a_comment_is_of_the_line_below_it(ask: Ask) -> None:
    comment = "# Editable install with no version control (mine==1.0)\n"
    assert ask("-", stdin=f"{COMPLETE}{comment}-e .\n").unknown == []
    for between in ("\n", " \n", "# more\n"):
        assert ask("-", stdin=f"{COMPLETE}{comment}{between}-e .\n").unknown == ["deepspeed", "peft"]


def test_a_file_of_another_name_says_no_version(ask: Ask) -> None:
    found = ask("-", stdin="trl @ https://example.org/other-9.9-py3-none-any.whl\n")
    assert found.unknown[0] == "trl"
    assert (
        ask("-", stdin="https://github.com/huggingface/trl/archive/refs/tags/v0.15.2.tar.gz").texts["trl"] == "0.15.2"
    )
    assert ask("-", stdin="https://github.com/huggingface/trl/archive/main.zip").unknown[0] == "trl"


@pytest.mark.parametrize("text", ["trl==1!0.15.2", "trl>=1!0", "trl!=1!0.15", "trl===1!0.15.2", "trl==1!0.*"])
def test_no_release_of_the_stack_has_an_epoch(ask: Ask, text: str) -> None:
    for words, files in (((text,), {}), (("req.txt",), {"req_txt": text})):
        message = refused(ask, *words, **files)
        assert "has an epoch (1!), and no release of these packages has one" in message
    lock = 'version = 1\n[[package]]\nname = "trl"\nversion = "1!0.15.2"\n'
    assert "has an epoch (1!)" in refused(ask, "uv.lock", uv_lock=lock)
