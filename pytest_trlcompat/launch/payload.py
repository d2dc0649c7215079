"""Pickles a function and its arguments: also closures and lambdas, and functions of test modules by value.

Runs in the test process and must not import the stack.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from pytest_trlcompat.launch.result import LaunchError

__all__ = ["dump"]


def dump(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle ``(function, args, kwargs)``.

    Raises:
        LaunchError: one of them cannot be pickled, with the reason.
    """
    try:
        with _by_value(function):
            return bytes(cloudpickle.dumps((function, args, kwargs)))
    except Exception as error:
        raise LaunchError(
            f"{getattr(function, '__qualname__', function)} or its arguments cannot be sent to the ranks: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Pickle functions of test modules by value: ranks then do not import the test module, and often could not."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or not _is_test_module(module):
        yield
        return
    registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if not registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if not registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_test_module(module: ModuleType) -> bool:
    """A module that is not part of an installed package; this package's own suites count as test modules."""
    file = getattr(module, "__file__", None)
    top = module.__name__.partition(".")[0]
    if file is None or top == "__main__" or top in sys.stdlib_module_names:
        return False
    stem = Path(file).stem
    if stem.startswith("test_") or stem.endswith("_test"):
        return True
    return top != "pytest_trlcompat" and "site-packages" not in Path(file).parts
