"""A stack from a ``uv.lock`` or a ``pylock.toml``."""

from __future__ import annotations

import pytest

from pytest_trlcompat.catalog.ranges import ABSENT, parse
from pytest_trlcompat.doctor.stack_spec import StackSpecError

from .asking import Ask, refused

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


def test_all_forks_of_a_lock_are_alternatives(ask: Ask) -> None:
    found = ask(r=("uv.lock",), uv_lock=UV_LOCK + FORKS)
    assert found.texts["torch"] == "2.6.0 or 2.6.0+cpu"
    assert str(found.pinned["torch"]) == "2.6.0"
    assert found.texts["accelerate"] == "1.3.0 or 1.9.0"
    assert found.versions["accelerate"] == parse("==1.3.0") | parse("==1.9.0")
    assert found.notes[:2] == (
        "uv.lock: torch is 2.6.0 where sys_platform == 'nowhere', 2.6.0+cpu where sys_platform != 'nowhere'; each of "
        "these is considered",
        "uv.lock: accelerate is 1.3.0 where extra == 'extra-4-mine-old', 1.9.0; each of these is considered; "
        "uv.lock: holds accelerate 1.3.0 or 1.9.0 for different environments, and its markers do not say which "
        "applies here",
    )


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
    assert found.texts["peft"] == "0.14.0 or not installed"
    assert found.versions["peft"] == parse("==0.14.0") | ABSENT
    assert found.unknown == ["transformers"]
    assert found.absent == ["torch", "accelerate", "deepspeed", "datasets"]
    assert found.notes == (
        "pylock.toml: accelerate 1.9.0 ; python_version < '3.0' is ignored, because its marker excludes every "
        "environment that is considered",
        "pylock.toml: the version of transformers is not known (from https://github.com/huggingface/transformers)",
        "pylock.toml: peft is 0.14.0 where 'adapters' in extras; each of these is considered",
    )


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
        ("", "uv.lock: neither a uv.lock nor a pylock.toml, poetry.lock or Pipfile.lock; export other locks"),
        ('[[package]]\nname = "trl"\n', "neither a uv.lock nor a pylock.toml, poetry.lock or Pipfile.lock"),
        (
            'package = []\n[metadata]\nlock-version = "3.0"\n',
            "lock-version 1.x or 2.x of poetry.lock was expected, 3.0 w",
        ),
        ("version = 2\n[[package]]\nname = 'trl'", "uv.lock: version 1 of uv.lock was expected, 2 was found"),
        ("lock-version = '2.0'\npackages = []", "uv.lock: lock-version 1.x of pylock.toml was expected, 2.0 was found"),
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
