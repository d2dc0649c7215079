"""The fingerprint of a failure: the same failure is recognised, another one is not taken for it."""

from __future__ import annotations

import pytest

from pytest_trlcompat.bisect.observation import Fingerprint, fingerprint_of, normalise, same_failure

TRACEBACK = """\
some output
Traceback (most recent call last):
  File "/home/a/train.py", line 3, in <module>
    trainer.train()
  File "/env{env}/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", line {line}, in _prepare_inputs
    x
  File "/env{env}/lib/python3.11/site-packages/transformers/trainer.py", line 9, in train
    y
RuntimeError: The size of tensor a ({size}) must match at 0x7f{env}00 in /env{env}/lib/x.py
"""


def test_the_last_exception_its_message_and_its_location_are_kept() -> None:
    found = fingerprint_of(TRACEBACK.format(env=1, line=7, size=20), "exit status 1")
    assert found == Fingerprint(
        "RuntimeError",
        "The size of tensor a (N) must match at 0xN in x.py",
        ("transformers/trainer.py:train", "trl/trainer/grpo_trainer.py:_prepare_inputs", "a/train.py:<module>"),
    )
    assert (
        str(found)
        == "RuntimeError: The size of tensor a (N) must match at 0xN in x.py in transformers/trainer.py:train"
    )


def test_the_environment_line_and_numbers_do_not_matter() -> None:
    one, other = (fingerprint_of(TRACEBACK.format(env=env, line=env, size=20 + env), "x") for env in (1, 2))
    assert one == other
    assert same_failure(one, other)


@pytest.mark.parametrize(
    "one, other, alike",
    [
        (
            ("ValueError", "too many values to unpack", ("a.py:f",)),
            ("ValueError", "too many values to unpack", ("b.py:g",)),
            True,
        ),
        (("ValueError", "too many values to unpack", ()), ("TypeError", "too many values to unpack", ()), False),
        (("ValueError", "bad loss seen", ()), ("ValueError", "bad gradient seen", ()), False),
        # A bare assert has no message, so the location decides.
        (("AssertionError", "", ("a.py:f", "c.py:h")), ("AssertionError", "", ("a.py:f",)), True),
        (("AssertionError", "", ("a.py:f",)), ("AssertionError", "", ("a.py:g",)), False),
        (("KeyError", "True", ("a.py:f",)), ("KeyError", "True", ("b.py:f",)), False),
        (("silent", "", ()), ("silent", "", ()), True),
        (("silent", "", ()), ("wasteful", "", ()), False),
    ],
)
def test_what_makes_two_failures_the_same(
    one: tuple[str, str, tuple[str, ...]], other: tuple[str, str, tuple[str, ...]], alike: bool
) -> None:
    assert same_failure(Fingerprint(*one), Fingerprint(*other)) is alike
    assert same_failure(Fingerprint(*other), Fingerprint(*one)) is alike


@pytest.mark.parametrize(
    "message, kept",
    [
        ("expected 3 but got -1.5e-07", "expected N but got N"),
        ("tensor at 0xdeadBEEF on npu:1, cpu:0!", "tensor at 0xN on DEVICE, DEVICE!"),
        ("no file '/a/b/c.json' here", "no file 'c.json' here"),
        ("first line\nsecond\n\nother paragraph", "first line second"),
        ("Qwen2ForCausalLM needs fp16 and x2", "Qwen2ForCausalLM needs fp16 and x2"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id UUID"),
        ("since 4.51.3", "since N"),
    ],
)
def test_what_changes_from_run_to_run_is_left_out(message: str, kept: str) -> None:
    assert normalise(message) == kept


def test_of_chained_exceptions_the_last_one_counts() -> None:
    text = """\
Traceback (most recent call last):
  File "/x/site-packages/a.py", line 1, in f
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/site-packages/b.py", line 2, in g
    raise ValueError(
        ^^^^^
torch.distributed.DistNetworkError: second
and its second line
"""
    assert fingerprint_of(text, "x") == Fingerprint("DistNetworkError", "second and its second line", ("b.py:g",))


def test_the_folder_of_a_commit_is_no_part_of_the_location() -> None:
    path = "/w/tree-0123456789ab-01234567/pkg/a.py"
    text = f'Traceback (most recent call last):\n  File "{path}", line 1, in f\nValueError\n'
    assert fingerprint_of(text, "x") == Fingerprint("ValueError", "", ("pkg/a.py:f",))


@pytest.mark.parametrize(
    "text", ["", "no traceback\nError: but a line like one", "Traceback (most recent call last):\n"]
)
def test_without_a_traceback_the_exit_status_is_the_fingerprint(text: str) -> None:
    assert fingerprint_of(text, "exit status 3") == Fingerprint("exit status 3")


def test_a_fingerprint_survives_json() -> None:
    found = Fingerprint("ValueError", "text", ("a.py:f",))
    assert Fingerprint.from_json(found.to_json()) == found
