"""Lets the stack be imported without initialising CUDA, which forked processes could then not use.

On import, libraries query whether there is a GPU and what it supports: DeepSpeed for each of its operators. ``torch``
initialises CUDA to answer, and every rank fails with "Cannot re-initialize CUDA in forked subprocess".
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

__all__ = ["CudaInitialized", "check_uninitialized", "without_initialization"]

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_QUERIES = ("get_device_properties", "current_device")
"""Functions of ``torch.cuda`` that initialise CUDA; others that are called during imports use these."""


class CudaInitialized(RuntimeError):
    """An import has initialised CUDA, so that ranks forked from this process could not use it."""


def check_uninitialized(what: str) -> None:
    """Raise CudaInitialized if ``what`` has initialised CUDA in this process."""
    if cuda_initialized():
        raise CudaInitialized(
            f"{what} has initialised CUDA, so ranks forked from this process could not use it; "
            "launch with mode='cold', which does not fork, and report this to pytest-trlcompat"
        )


@contextlib.contextmanager
def without_initialization() -> Iterator[None]:
    """Within the block, answer queries of ``torch.cuda`` without initialising CUDA in this process.

    A GPU's properties are queried in a child process. Afterwards everything is as before, also where the functions were
    imported by name.
    """
    # By this variable is_available() asks the driver's management library, which starts nothing; see
    # https://docs.pytorch.org/docs/stable/cuda_environment_variables.html.
    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    # A list, which all replaced functions share, also those that were imported by name: once empty, they pass through.
    active = [True]
    cuda: Any = None
    with contextlib.suppress(Exception):  # importing torch raises the same error later
        cuda = importlib.import_module("torch").cuda
    functions = {} if cuda is None else {name: getattr(cuda, name) for name in _QUERIES}
    try:
        for name, function in functions.items():
            setattr(cuda, name, _in_another_process(function, active))
        yield
    finally:
        active.clear()
        for name, function in functions.items():
            setattr(cuda, name, function)
        if before is None:
            del os.environ[_NVML_CHECK]
        else:
            os.environ[_NVML_CHECK] = before


def _in_another_process(function: Callable[..., Any], active: list[bool]) -> Callable[..., Any]:
    def direct(*args: Any, **kwargs: Any) -> Any:
        # In this process CUDA may start, and its own queries meanwhile must not fork again.
        active.clear()
        return function(*args, **kwargs)

    # DeepSpeed asks the same for each of its operators, and each answer takes a process.
    cached = functools.cache(functools.partial(_in_child, direct))

    @functools.wraps(function)
    def query(*args: Any, **kwargs: Any) -> Any:
        return cached(*args, **kwargs) if active else function(*args, **kwargs)

    return query


def _in_child(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function in a forked process; returns its number, or an object with the same plain attributes.

    Raises:
        RuntimeError: with the text of the function's exception.
    """
    reading, writing = os.pipe()
    # A fork has already imported torch, may initialise CUDA, and takes that along when it ends.
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as stream:
                json.dump(_answer(function, args, kwargs), stream)
        finally:
            # Without exit handlers, which are the parent's.
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        # Before waiting for its end, which does not come while the pipe is full.
        text = stream.read()
    os.waitpid(child, 0)
    answer = json.loads(text or '{"error": "the process that queried CUDA died"}')
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
    return {
        "attributes": {
            name: attribute for name, attribute in attributes.items() if isinstance(attribute, (int, float, str))
        }
    }
