"""How the tests ask the doctor to read a stack from words and files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_trlcompat.doctor.stack_spec import StackSpec, StackSpecError

Ask = Callable[..., StackSpec]


def refused(ask: Ask, *words: str, **more: object) -> str:
    with pytest.raises(StackSpecError) as caught:
        ask(*words, **more)
    return str(caught.value)
