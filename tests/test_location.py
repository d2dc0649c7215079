"""Where an exception was raised, as a line that is the same in every environment."""

from __future__ import annotations

import traceback

import pytest

from pytest_trlcompat import _location

TRACEBACK = """Traceback (most recent call last):
  File "/e/lib/python3.11/site-packages/trl/trainer/utils.py", line 1, in earlier
KeyError: 'handled'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/src/suites/in_rank/grpo.py", line 2, in train
  File "/src/trl/trl/trainer/grpo_trainer.py", line 3, in compute_loss
  File "/e/lib/python3.11/site-packages/torch/nn/modules/module.py", line 4, in _call_impl
  File "/e/lib/python3.11/contextlib.py", line 5, in inner
  File "/e/lib/python3.11/site-packages/transformers/models/x.py", line 6, in <genexpr>
  File "/e/lib/python3.11/site-packages/transformers/models/x.py", line 7, in <genexpr>
  File "/e/lib/python3.11/site-packages/torch/nn/functional.py", line 8, in embedding
RuntimeError: no
"""
LOCATION = (
    "torch/nn/functional.py:embedding < transformers/models/x.py:<genexpr> < trl/trainer/grpo_trainer.py:compute_loss"
)


def test_functions_of_the_stacks_libraries_innermost_first() -> None:
    assert _location.of_traceback(TRACEBACK) == LOCATION
    assert _location.frames(LOCATION)[-1] == "trl/trainer/grpo_trainer.py:compute_loss"
    assert _location.of_traceback("tb") == ""
    assert _location.frames("") == ()


def test_an_exception_in_hand_and_its_traceback_have_the_same_location() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    here = "test_location.py:test_an_exception_in_hand_and_its_traceback_have_the_same_location"
    assert _location.of_exception(caught.value) == here
    assert _location.of_traceback("".join(traceback.format_exception(caught.value))) == here
    assert _location.of_exception(ValueError("x")) == ""


@pytest.mark.parametrize("text", ["KeyError: True", "ValueError: a (in b)\nc", "KeyError: 'x (in'"])
@pytest.mark.parametrize("after", ["", " [This is a limit]"])
def test_a_text_and_its_location_come_apart_again(text: str, after: str) -> None:
    assert _location.apart(_location.with_location(text, LOCATION) + after) == (text + after, LOCATION)
    assert _location.apart(_location.with_location(text, "") + after) == (text + after, "")


def test_deep_calls_are_cut_at_the_outer_end() -> None:
    frames = "".join(f'  File "/e/site-packages/trl/x.py", line 1, in f{number}\n' for number in range(40))
    found = _location.frames(_location.of_traceback(f"Traceback (most recent call last):\n{frames}ValueError\n"))
    assert (len(found), found[0], found[-1]) == (16, "trl/x.py:f39", "trl/x.py:f24")
