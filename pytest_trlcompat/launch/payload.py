"""Pickles a function and its arguments: also closures and lambdas, and functions of test modules by value.

Runs in the test process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from pytest_trlcompat.launch import unpicklable
from pytest_trlcompat.launch.result import LaunchError, LaunchWarning

__all__ = ["arguments", "dump"]


def arguments(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    more: Mapping[str, Any],
    taken: Mapping[str, Any],
) -> dict[str, Any]:
    """The keyword arguments that a function is called with.

    Args:
        kwargs: those that the caller passed as the function's.
        more: those for which the launch has no argument of its own.
        taken: arguments that the launch took for itself; warns if the function has one of that name and gets none.

    Raises:
        TypeError: an argument is in ``kwargs`` and in ``more``; or the function needs one that the launch took.
    """
    __tracebackhide__ = True
    if twice := sorted(set(kwargs) & set(more)):
        raise TypeError(f"{', '.join(twice)}: given by name and in kwargs=")
    named = {**kwargs, **more}
    try:
        signature = inspect.signature(function)
        bound = signature.bind_partial(*args, **named).arguments
    except (TypeError, ValueError):  # no signature, or a wrong call: the ranks say so
        return named
    left = [name for name in taken if name in signature.parameters and name not in bound]
    for name in left:
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        text = (
            f"{name}={taken[name]!r} is an argument of the launch, and {_name(function)} has one of the same name; to "
            f"give the function its own, pass kwargs={{{name!r}: {taken[name]!r}}}"
        )
        if parameter.default is parameter.empty:
            raise TypeError(text)
        # By its level it names the line that launches.
        warnings.warn(f"{text}. It keeps its default, {parameter.default!r}", LaunchWarning, stacklevel=3)
    return named


def dump(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle ``(function, args, kwargs)``.

    Raises:
        LaunchError: the function would not run when it is called, since it is an ``async def`` or a generator; or
            something cannot be pickled, with what it is and where.
    """
    _check_runs(function)
    with _by_value(function):
        try:
            file = io.BytesIO()
            _Pickler(file).dump((function, args, kwargs))
            return file.getvalue()
        except Exception as error:
            where = unpicklable.find(function, args, kwargs)
            raise LaunchError(
                f"{_name(function)} cannot be sent to the ranks: {where + ': ' if where else ''}"
                f"{type(error).__name__}: {error}. Make it inside the function, or pass what it is made from."
            ) from None


class _Pickler(cloudpickle.Pickler):
    """Keeps the files of functions, in which tracebacks and warnings of ranks show lines.

    cloudpickle 3.1.3 and later replace them by ``<dynamic-code>``.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            make, arguments = self.dispatch_table[CodeType](value)
            return _code, (make, arguments, value.co_filename)
        return super().reducer_override(value)


def _code(make: Callable[..., CodeType], arguments: tuple[Any, ...], filename: str) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


def _check_runs(function: Callable[..., Any]) -> None:
    called = function.func if isinstance(function, functools.partial) else function
    if not inspect.isroutine(called):
        called = getattr(called, "__call__", called)  # noqa: B004 - of an object, to look at
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise LaunchError(
            f"{_name(function)} is an async def, which does nothing when it is called; launch a function that runs it, "
            f"such as: lambda: asyncio.run({getattr(function, '__name__', 'train')}())"
        )
    if inspect.isgeneratorfunction(called):
        raise LaunchError(
            f"{_name(function)} is a generator, of which nothing runs when it is called; return a list instead"
        )


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
    # cloudpickle takes __main__ by value without being told.
    if file is None or top == "__main__" or top in sys.stdlib_module_names:
        return False
    stem = Path(file).stem
    if stem.startswith("test_") or stem.endswith("_test"):
        return True
    return top != "pytest_trlcompat" and "site-packages" not in Path(file).parts


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))
