"""A stack from requirements files and from ``pip freeze``."""

from __future__ import annotations

import codecs

import pytest

from pytest_trlcompat.catalog.ranges import ALL
from pytest_trlcompat.doctor.stack_spec import StackSpecError

from .asking import Ask, refused

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
        "deepspeed": "0.16.4 or any version",
        "peft": "any version",
    }
    assert found.unknown == ["torch", "deepspeed", "peft", "datasets"]
    assert found.notes == ('req.txt: deepspeed is 0.16.4 where sys_platform == "win32"; each of these is considered',)
    found = ask(r=("req.txt",), req_txt=REQUIREMENTS, platform="linux")
    assert "deepspeed" not in found.texts
    assert found.notes == (
        'req.txt, line 12: deepspeed 0.16.4 ; sys_platform == "win32" is ignored, because its marker excludes linux',
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
        (
            "trl 0.15.2",
            "req.txt, line 1: cannot read this line about trl; .*like trl==0.15.2 \\(as pip freeze and pip ",
        ),
        ("numpy\n<html>", "req.txt, line 2: cannot read this line; write one requirement a line"),
        ("--frobnicate", "req.txt, line 1: begins with an unknown option of pip"),
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
