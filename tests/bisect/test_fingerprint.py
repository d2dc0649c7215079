"""The fingerprint of a failure: the same one is known again, another one is not taken for it."""

from __future__ import annotations

import pytest

from pytest_trlcompat.bisect.observation import Fingerprint, normalise, of_text, same

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


def test_the_last_exception_its_message_and_its_place_are_kept() -> None:
    found = of_text(TRACEBACK.format(env=1, line=7, size=20), "exit status 1")
    assert found == Fingerprint(
        "RuntimeError",
        "The size of tensor a (N) must match at 0xN in x.py",
        ("transformers/trainer.py:train", "trl/trainer/grpo_trainer.py:_prepare_inputs", "a/train.py:<module>"),
    )
    assert (
        str(found)
        == "RuntimeError: The size of tensor a (N) must match at 0xN in x.py in transformers/trainer.py:train"
    )


def test_another_environment_line_and_number_are_the_same_failure() -> None:
    one, other = (of_text(TRACEBACK.format(env=env, line=env, size=20 + env), "x") for env in (1, 2))
    assert one == other
    assert same(one, other)


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
        # A bare assert says nothing, so the place decides.
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
    assert same(Fingerprint(*one), Fingerprint(*other)) is alike
    assert same(Fingerprint(*other), Fingerprint(*one)) is alike


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


def test_the_exception_that_was_raised_last_counts() -> None:
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
    assert of_text(text, "x") == Fingerprint("DistNetworkError", "second and its second line", ("b.py:g",))


def test_a_commits_own_folder_is_no_part_of_the_place() -> None:
    place = "/w/tree-0123456789ab-01234567/pkg/a.py"
    text = f'Traceback (most recent call last):\n  File "{place}", line 1, in f\nValueError\n'
    assert of_text(text, "x") == Fingerprint("ValueError", "", ("pkg/a.py:f",))


@pytest.mark.parametrize(
    "text", ["", "no traceback\nError: but a line like one", "Traceback (most recent call last):\n"]
)
def test_without_a_traceback_the_exit_status_is_all_there_is(text: str) -> None:
    assert of_text(text, "exit status 3") == Fingerprint("exit status 3")


def test_it_survives_json() -> None:
    found = Fingerprint("ValueError", "text", ("a.py:f",))
    assert Fingerprint.from_json(found.to_json()) == found
