"""Finds what cannot be pickled among all that a function would take along to the ranks, and says where it is."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

__all__ = ["find"]

_DEPTH = 6
"""Steps from the function or an argument to the innermost object that is named."""

_Parts = Iterator[tuple[str, Any]]


def find(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """``the closure variable 'lock' is a _thread.lock``; ``None`` if each part can be pickled by itself."""
    parts: list[tuple[str, Any]] = [("the function", function)]
    parts += [(f"argument {number}", value) for number, value in enumerate(args, 1)]
    parts += [(f"argument {name!r}", value) for name, value in kwargs.items()]
    for where, value in parts:
        if not _can_be_pickled(value):
            return _search(where, value)
    return None


def _search(where: str, value: Any) -> str:
    # By identity, since an object may lead back to itself, and need not be hashable.
    seen = {id(value)}
    for _ in range(_DEPTH):
        for step, part in _parts(value):
            if id(part) not in seen and not _can_be_pickled(part):
                seen.add(id(part))
                where, value = f"{step} of {where}", part
                break
        else:
            break
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{where} is a {module}{kind.__qualname__}"


def _parts(value: Any) -> _Parts:
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield "the object", value.__self__
    elif isinstance(value, functools.partial):
        yield "the function", value.func
        yield from ((f"argument {number}", part) for number, part in enumerate(value.args, 1))
        yield from ((f"argument {name!r}", part) for name, part in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"entry {name!r}", part) for name, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"item {number}", part) for number, part in enumerate(value))
    elif not isinstance(value, (type, types.ModuleType)):
        yield from ((f"attribute {name!r}", part) for name, part in getattr(value, "__dict__", {}).items())


def _parts_of_function(function: types.FunctionType) -> _Parts:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the closure variable {name!r}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (
        (f"the global {name!r}", function.__globals__[name]) for name in _globals_of(function.__code__, function)
    )
    yield from (("a default", part) for part in function.__defaults__ or ())
    yield from ((f"the default of {name!r}", part) for name, part in (function.__kwdefaults__ or {}).items())


def _globals_of(code: types.CodeType, function: types.FunctionType) -> list[str]:
    """Names of globals that a function uses, also in the functions that it defines."""
    names = [name for name in code.co_names if name in function.__globals__]
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return names + [name for part in inner for name in _globals_of(part, function)]


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    # Anything may be raised here, since objects have code of their own that pickles them.
    except Exception:
        return False
    return True
