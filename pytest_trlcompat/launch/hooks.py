"""Functions of the stack that start ranks in the process that calls them, replaced while a command runs.

A module that is not imported yet is waited for, so that nothing is imported for this alone. Runs in ranks.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Hook", "hooked"]

Hook = Callable[..., Any]
"""Called in the place of a function, with the function's arguments."""


@contextlib.contextmanager
def hooked(hooks: Mapping[tuple[str, str], Hook]) -> Iterator[None]:
    """Within the block, the functions, by module and name, are replaced, for all who have imported them.

    A function that a release does not have is left out.
    """
    with contextlib.ExitStack() as exits:
        by_module: dict[str, dict[str, Hook]] = {}
        for (module, name), hook in hooks.items():
            by_module.setdefault(module, {})[name] = hook
        finder = _AfterImport(lambda module: _replace_all(module, by_module[module.__name__], exits), set(by_module))
        for name in sorted(by_module):
            # Something else may stand in a module's place there: None, or an object that loads it later.
            if isinstance(sys.modules.get(name), types.ModuleType):
                finder.names.discard(name)
                _replace_all(sys.modules[name], by_module[name], exits)
        # First, since the first finder that knows a module decides.
        sys.meta_path.insert(0, finder)
        exits.callback(finder.remove)
        yield


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as everybody else does, and calls a function with each of some when it has been imported."""

    def __init__(self, imported: Callable[[types.ModuleType], None], names: set[str]) -> None:
        self.imported, self.names = imported, names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.names:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                # Not when the command has ended, and not a private copy that somebody makes of the module.
                if name in self.names and sys.modules.get(name) is module:
                    self.names.discard(name)
                    self.imported(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        self.names.clear()
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


def _replace_all(module: types.ModuleType, hooks: Mapping[str, Hook], exits: contextlib.ExitStack) -> None:
    for name, hook in hooks.items():
        function = getattr(module, name, None)
        # A function that the module has imported from another one is replaced where it is defined.
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            _replace(module, name, function, hook, exits)


def _stub(*args: Any, **kwargs: Any) -> Any:
    """The code of a replaced function, which finds the hook in that function's module."""
    return _trlcompat_hook(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _replace(
    module: types.ModuleType, name: str, function: types.FunctionType, hook: Hook, exits: contextlib.ExitStack
) -> None:
    # Code with free variables cannot be exchanged for code without: Python requires the same number of them.
    if function.__closure__:
        exits.callback(setattr, module, name, function)
        setattr(module, name, hook)
        return
    # Its code, since another module may have imported the function by its name.
    hook_name = f"_trlcompat_{name}"
    for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
        exits.callback(setattr, function, attribute, getattr(function, attribute))
    exits.callback(module.__dict__.pop, hook_name, None)
    setattr(module, hook_name, hook)
    # They are of parameters that the stub's code does not have: it takes whatever it is called with.
    function.__defaults__ = function.__kwdefaults__ = None
    names = tuple(hook_name if used == "_trlcompat_hook" else used for used in _stub.__code__.co_names)
    function.__code__ = _stub.__code__.replace(co_names=names)
