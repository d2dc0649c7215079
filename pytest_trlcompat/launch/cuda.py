"""Has the stack imported without CUDA being initialised, which no forked process could then use.

On import, libraries ask whether there is a GPU and what it can do: DeepSpeed of each of its operators. Without more ado
``torch`` initialises CUDA for that, and every rank fails with "Cannot re-initialize CUDA in forked subprocess".
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from pytest_trlcompat._devices import cuda_initialized

__all__ = ["CudaInitialized", "check_left_alone", "left_alone"]

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_ASKED = ("get_device_properties", "current_device")
"""Functions of ``torch.cuda`` that initialise CUDA for an answer; others that imports call are made from these."""


class CudaInitialized(RuntimeError):
    """Something that was imported has initialised CUDA, so that no rank forked from this process could use it."""


def check_left_alone(what: str) -> None:
    """Raise CudaInitialized if ``what`` has initialised CUDA in this process."""
    if cuda_initialized():
        raise CudaInitialized(
            f"{what} has initialised CUDA, which a rank that is forked from here could not use; "
            "launch with mode='cold', which forks nothing, and tell pytest-trlcompat"
        )


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Answer what is asked of ``torch.cuda`` meanwhile without initialising CUDA in this process.

    ``is_available()`` asks the driver's management library (``PYTORCH_NVML_BASED_CUDA_CHECK``,
    https://docs.pytorch.org/docs/stable/cuda_environment_variables.html); a GPU's properties are asked of CUDA in a
    process of its own. Afterwards everything is as before, also where the functions were imported by name.
    """
    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    still = [True]
    asked: Any = None
    with contextlib.suppress(Exception):  # who imports torch meets the same error
        asked = importlib.import_module("torch").cuda
    functions = {} if asked is None else {name: getattr(asked, name) for name in _ASKED}
    try:
        for name, function in functions.items():
            setattr(asked, name, _asked_elsewhere(function, still))
        yield
    finally:
        still.clear()
        for name, function in functions.items():
            setattr(asked, name, function)
        if before is None:
            del os.environ[_NVML_CHECK]
        else:
            os.environ[_NVML_CHECK] = before


def _asked_elsewhere(function: Callable[..., Any], still: list[bool]) -> Callable[..., Any]:
    def alone(*args: Any, **kwargs: Any) -> Any:
        still.clear()  # what CUDA's start asks in turn is answered by the process itself
        return function(*args, **kwargs)

    asked = functools.cache(functools.partial(_in_child, alone))

    @functools.wraps(function)
    def ask(*args: Any, **kwargs: Any) -> Any:
        return asked(*args, **kwargs) if still else function(*args, **kwargs)

    return ask


def _in_child(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns in a forked process: a number, or an object with the same plain attributes.

    Raises:
        RuntimeError: with the function's own text, if it raised.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as stream:
                json.dump(_answer(function, args, kwargs), stream)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    answer = json.loads(text or '{"error": "the process that asked CUDA died"}')
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"] if "value" in answer else SimpleNamespace(**answer["attributes"])


def _answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if isinstance(value, (bool, int, float, str)):
        return {"value": value}
    names = (name for name in dir(value) if not name.startswith("_"))
    attributes = {name: getattr(value, name) for name in names}
    return {"attributes": {name: kept for name, kept in attributes.items() if isinstance(kept, (int, float, str))}}
