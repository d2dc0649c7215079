"""What the installed TRL can do, seen in its code rather than in its version, and how to lend it what it lacks.

Imports TRL when asked, and nothing of this package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

__all__ = ["AroundGeneration", "class_uses", "function_uses", "grpo_module", "replaced"]


def grpo_module() -> ModuleType:
    """The module that holds TRL's ``GRPOTrainer`` and the global names which its methods look up."""
    return import_module("trl.trainer.grpo_trainer")


def function_uses(function: Callable[..., Any], name: str) -> bool:
    """Whether the code of ``function``, beneath decorators, uses a global, attribute or import called ``name``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and _code_uses(code, name)


def class_uses(cls: type, name: str, but: tuple[str, ...] = ()) -> bool:
    """Whether a method of ``cls`` or of its bases uses ``name``.

    Classes of this package do not count, nor do those of the packages in ``but``.
    """
    left_out = (__name__.rpartition(".")[0], *but)
    return any(
        function_uses(member, name)
        for base in cls.__mro__
        if not base.__module__.startswith(left_out)
        for member in vars(base).values()
        if inspect.isfunction(member)
    )


@contextmanager
def replaced(name: str, make: Callable[[Any], Any], module: ModuleType | type | None = None) -> Iterator[None]:
    """Lend TRL's GRPO module, or another one, or a class, ``make(original)`` in place of its ``name``, for a while.

    Does nothing where what is installed has no such name there. The replacement is seen by all threads.
    """
    module = module or grpo_module()
    original = getattr(module, name, None)
    if original is None:
        yield
        return
    with mock.patch.object(module, name, make(original)):
        yield


def _code_uses(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(
        _code_uses(constant, name) for constant in code.co_consts if isinstance(constant, CodeType)
    )


class AroundGeneration:
    """Lets mixins for ``trl.GRPOTrainer`` change what happens while it generates, wherever its release does so.

    A mixin overrides :meth:`_around_generation` with a context of its own, and enters that of ``super()`` within it.
    """

    def _around_generation(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _prepare_inputs(self, inputs: Any) -> Any:
        with self._around_generation():  # trl 0.15.0 and later generate here
            upstream: Any = super()
            return upstream._prepare_inputs(inputs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self._around_generation():  # trl 0.14.0 generates here
            upstream: Any = super()
            return upstream.compute_loss(*args, **kwargs)
