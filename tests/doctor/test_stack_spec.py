"""The stack that a person specifies to ``trlcompat doctor``, in each accepted form."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog.ranges import ALL, parse
from pytest_trlcompat.doctor.request import read_stack_spec
from pytest_trlcompat.doctor.stack_spec import StackSpec, StackSpecError

Ask = Callable[..., StackSpec]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Write files into a temporary folder and read a stack there."""
    monkeypatch.chdir(tmp_path)

    def ask(*words: str, r: tuple[str, ...] = (), stdin: str | bytes = b"", **files: str | bytes) -> StackSpec:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_stack_spec(words, r, lambda: stdin if isinstance(stdin, bytes) else stdin.encode())

    return ask


def refused(ask: Ask, *words: str, **more: object) -> str:
    with pytest.raises(StackSpecError) as caught:
        ask(*words, **more)
    return str(caught.value)


# What is installed


def test_without_arguments_the_installed_stack_is_meant(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"torch": "2.13.0+cpu", "trl": "0.15.2"})
    found = ask()
    assert found.source == f"installed in {sys.prefix}"
    assert found.texts == {"trl": "0.15.2", "torch": "2.13.0+cpu"}
    assert {name: str(version) for name, version in found.pinned.items()} == {"trl": "0.15.2", "torch": "2.13.0"}
    assert found.absent == ["transformers", "accelerate", "deepspeed", "peft", "datasets"]
    assert found.unknown == []


def test_an_environment_without_trl_is_refused(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"torch": "2.13.0"})
    message = refused(ask)
    assert message.startswith(
        f"trl is not installed in {sys.prefix}; run doctor with the Python of your training environment"
    )
    assert message.endswith("trlcompat doctor trl==0.15.2 transformers==4.48.3")


def test_an_invalid_installed_version_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: {"trl": "main"})
    assert refused(ask) == "installed here: the version of trl: 'main' is not a PEP 440 version"


# Pins


def test_pins_leave_the_rest_unknown(ask: Ask) -> None:
    found = ask("trl==0.15.2", "Transformers[torch]==4.48.3", "peft=0.14.0")
    assert found.texts == {"trl": "0.15.2", "transformers": "4.48.3", "peft": "0.14.0"}
    assert found.unknown == ["torch", "accelerate", "deepspeed", "datasets"]
    assert found.absent == []


def test_a_range_is_kept_as_a_range(ask: Ask) -> None:
    found = ask("trl>=0.15,<0.18")
    assert found.texts == {"trl": ">=0.15,<0.18"}
    assert found.versions["trl"] == parse(">=0.15,<0.18")
    assert found.pinned == {}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trk==1.0", "unknown package 'trk'; known are torch, .*; did you mean trl\\?"),
        ("numpy==2.0", "unknown package 'numpy'; known are torch, [^;]*$"),
        ("trl==main", "'trl==main': cannot read 'trl==main' .*; write one requirement a line, like trl==0.15.2"),
        ("trl=", "cannot read"),
        ("0.15.2", "unknown package '0.15.2'|cannot read"),
        ("trl>=2,<1", "the command line: no version of trl satisfies '<1,>=2'"),
    ],
)
def test_a_word_that_is_not_a_pin_is_refused(ask: Ask, word: str, message: str) -> None:
    with pytest.raises(StackSpecError, match=message):
        ask(word)


def test_contradicting_pins_are_refused(ask: Ask) -> None:
    assert refused(ask, "trl==0.15.2", "trl==0.16.0") == (
        "trl is required as 0.15.2 (the command line) and as 0.16.0 (the command line); no version satisfies both: "
        "remove one of them"
    )


def test_a_pre_release_may_or_may_not_contain_the_changes(ask: Ask) -> None:
    found = ask("trl==0.18.0.dev0")
    assert found.pinned == {}
    assert found.notes == (
        "trl 0.18.0.dev0 comes before 0.18.0: it may contain all of that release's changes or none, "
        "so both are considered",
    )


# Requirements files and pip freeze

FREEZE = """\
accelerate==1.4.0
# Editable install with no version control (peft==0.14.0)
-e /home/me/peft
aiohttp==3.11.12
datasets==3.3.2
-e git+https://github.com/me/mine@0123456789abcdef#egg=mine
torch==2.6.0+cu124
transformers @ file:///home/me/wheels/transformers-4.48.3-py3-none-any.whl#sha256=0123
trl==0.15.2
"""


def test_a_complete_freeze_shows_what_is_not_installed(ask: Ask) -> None:
    found = ask("-", stdin=FREEZE)
    assert found.source == "standard input"
    assert found.texts == {
        "trl": "0.15.2",
        "transformers": "4.48.3",
        "torch": "2.6.0+cu124",
        "accelerate": "1.4.0",
        "peft": "0.14.0",
        "datasets": "3.3.2",
    }
    assert found.absent == ["deepspeed"]
    assert found.notes == (
        "standard input, line 8: transformers is taken to be 4.48.3, "
        "from the name transformers-4.48.3-py3-none-any.whl",
    )


def test_a_partial_freeze_leaves_the_rest_unknown(ask: Ask) -> None:
    found = ask("-", stdin="trl==0.15.2\ntorch==2.6.0\n")
    assert found.absent == []
    assert found.unknown == ["transformers", "accelerate", "deepspeed", "peft", "datasets"]


def test_a_requirements_file_leaves_the_rest_unknown_however_long_it_is(ask: Ask) -> None:
    found = ask(r=("req.txt",), req_txt=FREEZE)
    assert found.absent == []
    assert found.unknown == ["deepspeed"]


REQUIREMENTS = """\
# comment
--index-url https://example.org/simple
--extra-index-url=https://example.org/other
-f ./wheels
numpy
trl == 0.15.2   # the last one that works
transformers[torch]==4.48.3 \\
    --hash=sha256:0123 \\
    --hash=sha256:4567
    # via trl
accelerate>=1.3,<1.9 ; python_version >= "3.8"
deepspeed==0.16.4 ; sys_platform == "win32"
peft
"""


def test_a_requirements_file_as_pip_reads_it(ask: Ask) -> None:
    found = ask(r=("req.txt",), req_txt=REQUIREMENTS)
    assert found.source == "req.txt"
    assert found.texts == {
        "trl": "0.15.2",
        "transformers": "4.48.3",
        "accelerate": ">=1.3,<1.9",
        "peft": "any version",
    }
    assert found.unknown == ["torch", "deepspeed", "peft", "datasets"]
    assert found.notes == (
        'req.txt, line 12: deepspeed==0.16.4 ; sys_platform == "win32" is ignored, because its marker excludes '
        "this Python",
    )


def test_a_file_may_be_named_without_an_option(ask: Ask) -> None:
    assert ask("req.txt", req_txt="trl==0.15.2").texts == {"trl": "0.15.2"}


def test_included_files_are_found_relative_to_the_including_one(ask: Ask) -> None:
    found = ask(
        r=("req.txt",),
        req_txt="-r sub/more.txt\ntrl\n",
        sub__more_txt="transformers>=4.48\n-c constraints.txt\n--requirement=last.txt",
        sub__constraints_txt="trl==0.15.2\ntransformers<4.49\n",
        sub__last_txt="peft==0.14.0\n",
    )
    assert found.texts == {"trl": "0.15.2", "transformers": ">=4.48,<4.49", "peft": "0.14.0"}


def test_files_are_merged_and_pins_take_precedence(ask: Ask) -> None:
    files = {"one_txt": "trl==0.15.2", "two_txt": "transformers==4.48.3"}
    assert ask(r=("one.txt", "two.txt"), **files).texts == {"trl": "0.15.2", "transformers": "4.48.3"}
    assert ask("trl==1.0.0", r=("one.txt",), **files).texts == {"trl": "1.0.0"}


@pytest.mark.parametrize(
    ("line", "text", "version"),
    [
        ("trl @ git+https://github.com/huggingface/trl.git@v0.15.2", "0.15.2", "0.15.2"),
        ("git+https://github.com/huggingface/trl@0.16.1", "0.16.1", "0.16.1"),
        ("-e git+https://github.com/me/fork@v0.17.0#egg=trl[peft]", "0.17.0", "0.17.0"),
        ("./dist/trl-0.18.2.tar.gz", "0.18.2", "0.18.2"),
        ("trl-0.18.2-py3-none-any.whl", "0.18.2", "0.18.2"),
        ("https://example.org/trl-0.19.0-py3-none-any.whl", "0.19.0", "0.19.0"),
        ("trl @ git+https://github.com/huggingface/trl.git", "git+https://github.com/huggingface/trl.git", None),
        (
            "git+ssh://git@github.com/huggingface/trl.git@main",
            "git+ssh://git@github.com/huggingface/trl.git@main",
            None,
        ),
        ("-e ../trl", "../trl", None),
        ("--editable=file:///home/me/trl", "file:///home/me/trl", None),
    ],
)
def test_a_source_has_the_version_of_its_tag_or_file_name_if_any(
    ask: Ask, line: str, text: str, version: str | None
) -> None:
    found = ask("-", stdin=line)
    assert found.texts == {"trl": text}
    assert str(found.pinned.get("trl")) == str(version)
    (note,) = found.notes
    if version is None:
        assert found.versions["trl"] == ALL
        unknown = f"the version of trl cannot be read from {text}; add a pin, for example trl==VERSION"
        assert note == f"standard input, line 1: {unknown}"
    else:
        assert note.startswith(f"standard input, line 1: trl is taken to be {version}, from the name ")


def test_a_constraint_on_any_line_gives_the_version_of_a_source(ask: Ask) -> None:
    for lines in ("-e ../trl\ntrl==0.15.2", "trl==0.15.2\n-e ../trl"):
        found = ask("-", stdin=lines)
        assert (found.texts, found.notes) == ({"trl": "0.15.2"}, ())


def test_a_pin_gives_the_version_of_a_source(ask: Ask) -> None:
    found = ask("-", "trl==0.15.2", stdin="-e ../trl")
    assert str(found.pinned["trl"]) == "0.15.2"
    assert found.notes == ()
    assert ask("-", "trl==0.18.0rc1", stdin="trl==0.15.2").notes[0].startswith("trl 0.18.0rc1 comes before 0.18.0")


@pytest.mark.parametrize(
    "data",
    [
        codecs.BOM_UTF8 + b"trl==0.15.2\r\ntransformers==4.48.3\r\n",
        "trl==0.15.2\r\ntransformers==4.48.3\r\n".encode("utf-16"),  # PowerShell's pip freeze > requirements.txt
        "trl==0.15.2\ntransformers==4.48.3".encode("utf-32"),
    ],
)
def test_byte_order_marks_are_understood(ask: Ask, data: bytes) -> None:
    assert ask(r=("req.txt",), req_txt=data).texts == {"trl": "0.15.2", "transformers": "4.48.3"}
    assert ask("-", stdin=data).texts == {"trl": "0.15.2", "transformers": "4.48.3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trl 0.15.2", "req.txt, line 1: cannot read 'trl 0.15.2' .*like trl==0.15.2 \\(as pip freeze and pip list"),
        ("numpy\n<html>", "req.txt, line 2: cannot read '<html>'"),
        ("--frobnicate", "req.txt, line 1: unknown option '--frobnicate'"),
        (
            "trl==0.15.2\ntrl==0.16",
            "trl is required as 0.15.2 \\(req.txt, line 1\\) and as 0.16 \\(req.txt, line 2\\)",
        ),
        ("trl>=2,<1", "req.txt, line 1: no version of trl satisfies '<1,>=2'"),
        ("-r gone.txt", "req.txt, line 1: cannot read .*gone.txt: No such file or directory"),
        ("\n-r req.txt", "req.txt, line 2: req.txt includes itself"),
        ("-r https://example.org/r.txt", "req.txt, line 1: https://example.org/r.txt is not fetched"),
        ("", "req.txt: empty; expected a list of requirements such as the output of pip freeze"),
        ("# nothing\n", "req.txt: empty"),
        ("numpy==2.0", "req.txt: names none of torch, transformers, .*; is this the right list\\?"),
        (b"trl==0.15.2 # caf\xe9", "req.txt: not text in UTF-8"),
        (b"\x7fELF\0\0", "req.txt: not text \\(it holds null bytes\\)"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused(ask: Ask, text: str | bytes, message: str) -> None:
    with pytest.raises(StackSpecError, match=message):
        ask(r=("req.txt",), req_txt=text)


def test_an_empty_standard_input_is_refused(ask: Ask) -> None:
    assert (
        refused(ask, "-") == "standard input: empty; expected a list of requirements such as the output of pip freeze"
    )


def test_standard_input_includes_no_files(ask: Ask) -> None:
    assert refused(ask, "-", stdin="-r more.txt").startswith(
        "standard input, line 1: a list from standard input cannot include more.txt"
    )


def test_a_missing_file_is_named(ask: Ask) -> None:
    for word in ("gone.txt", "uv.lock", "some/folder/list"):
        assert refused(ask, word) == f"cannot read {word}: No such file or directory"
    assert refused(ask, r=("gone",)) == "cannot read gone: No such file or directory"
    assert refused(ask, r=(".",)) == "cannot read .: Is a directory"


# Locks

UV_LOCK = """\
version = 1
revision = 3
requires-python = ">=3.10"

[[package]]
name = "mine"
source = { editable = "." }

[[package]]
name = "trl"
version = "0.15.2"
source = { registry = "https://example.org/simple" }

[[package]]
name = "transformers"
version = "4.49.0.dev0"
source = { git = "https://github.com/huggingface/transformers?rev=main#0123" }
"""
FORKS = """
[[package]]
name = "torch"
version = "2.6.0"
resolution-markers = ["sys_platform == 'nowhere'"]

[[package]]
name = "torch"
version = "2.6.0+cpu"
resolution-markers = ["sys_platform != 'nowhere'"]

[[package]]
name = "accelerate"
version = "1.3.0"
resolution-markers = ["extra == 'extra-4-mine-old'"]

[[package]]
name = "accelerate"
version = "1.9.0"
"""


def test_a_uv_lock_is_complete(ask: Ask) -> None:
    found = ask("uv.lock", uv_lock=UV_LOCK)
    assert found.source == "uv.lock"
    assert found.texts == {"trl": "0.15.2", "transformers": "4.49.0.dev0"}
    assert found.absent == ["torch", "accelerate", "deepspeed", "peft", "datasets"]
    assert len(found.notes) == 1
    assert "4.49.0.dev0 comes before 4.49.0" in found.notes[0]


def test_markers_choose_among_several_versions_in_a_lock_or_leave_them_all(ask: Ask) -> None:
    found = ask(r=("uv.lock",), uv_lock=UV_LOCK + FORKS)
    assert found.texts["torch"] == "2.6.0+cpu"
    assert found.texts["accelerate"] == "1.3.0 or 1.9.0"
    assert found.versions["accelerate"] == parse("==1.3.0") | parse("==1.9.0")
    assert (
        "uv.lock: holds accelerate 1.3.0 or 1.9.0 for different environments, and its markers do not say which "
        "applies here"
    ) in found.notes


PYLOCK = """\
lock-version = "1.0"
created-by = "pip"

[[packages]]
name = "trl"
version = "0.15.2"
[[packages.wheels]]
url = "https://example.org/trl-0.15.2-py3-none-any.whl"
hashes = { sha256 = "0123" }

[[packages]]
name = "transformers"
vcs = { type = "git", url = "https://github.com/huggingface/transformers", commit-id = "0123" }

[[packages]]
name = "accelerate"
version = "1.9.0"
marker = "python_version < '3.0'"

[[packages]]
name = "peft"
version = "0.14.0"
marker = "'adapters' in extras"
"""


def test_a_pylock_is_complete(ask: Ask) -> None:
    found = ask("pylock.toml", pylock_toml=PYLOCK)
    assert str(found.pinned["trl"]) == "0.15.2"
    assert str(found.pinned["peft"]) == "0.14.0"
    assert found.unknown == ["transformers"]
    assert found.absent == ["torch", "accelerate", "deepspeed", "datasets"]
    assert found.notes[0].startswith("pylock.toml: the version of transformers is not known (from {'type': 'git'")


def test_a_lock_may_come_from_standard_input_or_have_another_name(ask: Ask) -> None:
    assert ask("-", stdin=UV_LOCK).texts["trl"] == "0.15.2"
    assert ask("pylock.gpu.toml", pylock_gpu_toml=PYLOCK).texts["trl"] == "0.15.2"


def test_a_pin_takes_precedence_over_a_lock(ask: Ask) -> None:
    found = ask("uv.lock", "trl==1.0.0", uv_lock=UV_LOCK)
    assert found.texts["trl"] == "1.0.0"
    assert "peft" in found.absent


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 1\n[[package", "uv.lock: not valid TOML: "),
        ("", "uv.lock: neither a uv.lock nor a pylock.toml; export other locks to requirements first"),
        ('[[package]]\nname = "trl"\n[metadata]\nlock-version = "2.0"\n', "neither a uv.lock nor a pylock.toml"),
        ("version = 2\n[[package]]\nname = 'trl'", "uv.lock: version 1 of uv.lock was expected, 2 was found"),
        ("lock-version = '2.0'\npackages = []", "uv.lock: lock-version 1.x of pylock.toml was expected, 2.0 found"),
        ("version = 1\n[[package]]\nversion = '1'", "uv.lock: a package has no name; the lock is damaged"),
        (
            "version = 1\n[[package]]\nname = 'torch'\nversion = '2'",
            "uv.lock: it does not contain trl, .*right lock\\?",
        ),
        ("version = 1\n[[package]]\nname = 'trl'\nversion = 'x'", "the version of trl: 'x' is not a PEP 440 version"),
    ],
)
def test_a_lock_that_cannot_be_read_is_refused(ask: Ask, text: str, message: str) -> None:
    with pytest.raises(StackSpecError, match=message):
        ask("uv.lock", uv_lock=text)


def test_a_lock_cannot_be_combined_with_other_files(ask: Ask) -> None:
    message = refused(ask, "uv.lock", r=("req.txt",), uv_lock=UV_LOCK, req_txt="trl")
    assert message.startswith("a lock cannot be combined with other files: ")
