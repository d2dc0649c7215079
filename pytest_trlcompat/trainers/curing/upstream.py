"""What upstream can do, and where a trainer finds it, seen in the code that really runs rather than in a version."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Cure, is_ours
from pytest_trlcompat.trainers.curing.patching import PatchPoint, original, replaced_in

__all__ = [
    "AroundGeneration",
    "class_uses",
    "codes_of",
    "definitions",
    "function_uses",
    "generation_uses",
    "loss_uses",
    "method_uses",
    "path_uses",
    "points_of",
    "uses_parameter",
]


def function_uses(function: Callable[..., Any], name: str) -> bool:
    """Whether the code of ``function`` uses a global, attribute, import or string called ``name``.

    Looks beneath decorators too: at what they keep as ``__wrapped__``, in a closure, or as a partial function.
    """
    return any(_code_uses(code, name) for code in codes_of(function))


def points_of(trainer_class: type, known: PatchPoint) -> tuple[PatchPoint, ...]:
    """Where a trainer's classes find what ``known`` names: each module imports it for itself.

    Imports nothing: a trainer that does not derive from TRL's class there has no need of its module. Whether a release
    has what it should have is not asked here, but when a trainer is built.
    """
    modules = dict.fromkeys((known.module, *(base.__module__ for base in trainer_class.__mro__ if not is_ours(base))))
    having = (module for module in modules if hasattr(sys.modules.get(module), known.name))
    return tuple(known if module == known.module else PatchPoint(f"{module}:{known.name}") for module in having)


def generation_uses(trainer_class: type, name: str) -> bool:
    """Whether each ``unwrap_model_for_generation`` of a trainer, or what it calls in its own module, uses ``name``.

    Also where it has none.
    """
    return all(_unwrapping_uses(original(point), name) for point in points_of(trainer_class, patch_points.GENERATION))


def _unwrapping_uses(unwrap: Callable[..., Any], name: str) -> bool:
    own_module = vars(import_module(inspect.unwrap(unwrap).__module__))
    called = (
        function
        for called, function in own_module.items()
        if inspect.isfunction(function) and function_uses(unwrap, called)
    )
    return function_uses(unwrap, name) or any(function_uses(function, name) for function in called)


def class_uses(cls: type, name: str, but: tuple[str, ...] = ()) -> bool:
    """Whether a method of ``cls`` or of its bases uses ``name``.

    Classes of this package do not count, nor do those of the packages in ``but``.
    """
    return any(
        function_uses(member, name)
        for base in cls.__mro__
        if not is_ours(base) and not base.__module__.startswith(but)
        for member in vars(base).values()
        if inspect.isfunction(member)
    )


def method_uses(cls: type, method: str, name: str) -> bool:
    """Whether what runs when ``method`` is called on a trainer uses ``name``, in whichever class.

    Looks along the whole MRO: at the first definition that is not of this package, and at the next ones as long as each
    may call them by ``super``.
    """
    return any(function_uses(defined, name) for _, defined, _ in definitions(cls, method))


def definitions(cls: type, method: str) -> Iterator[tuple[str, Any, bool]]:
    """What runs when ``method`` is called on a trainer, classes of this package aside.

    Yields:
        The package of a class, what it defines, and whether that goes on to the next class's, by ``super`` or by name.
        Those behind one that does not go on are never reached.
    """
    for base in cls.__mro__:
        defined = vars(base).get(method)
        if defined is None or is_ours(base):
            continue
        goes_on = function_uses(defined, "super") or function_uses(defined, method)
        yield base.__module__.partition(".")[0], defined, goes_on
        if not goes_on:
            return


def path_uses(cls: type, name: str, *methods: str, then: tuple[str, ...] = ()) -> bool | None:
    """Whether what runs when one of ``methods`` is called uses ``name``: in a function of TRL's, or one in its place.

    A function of a user's that goes on to the next class's is no evidence: what it mentions it may only log.

    Args:
        then: other methods, looked at as well where what runs calls them.

    Returns:
        ``None`` where only such a function of a user's uses it, so that it cannot be seen.
    """
    doubt, waiting = False, list(methods)
    for method in waiting:  # grows
        for package, defined, goes_on in definitions(cls, method):
            if package == "transformers":
                continue
            uses = function_uses(defined, name)
            if uses and (package == "trl" or not goes_on):
                return True
            doubt |= uses
            waiting.extend(
                method_name
                for method_name in then
                if method_name not in waiting and function_uses(defined, method_name)
            )
    return None if doubt else False


def loss_uses(cls: type, name: str) -> bool | None:
    """Whether the loss of a subclass of ``trl.GRPOTrainer`` uses ``name``; see :func:`path_uses`."""
    return path_uses(cls, name, "compute_loss", then=("_compute_loss", "compute_liger_loss"))


def uses_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` reads its parameter called ``name``, or takes it in a way that does not show it.

    Looks beneath decorators too, which pass on what they are given.
    """
    named = [
        code for code in codes_of(function) if name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    ]
    return not named or any(_reads(code, name) for code in named)


def _reads(code: CodeType, name: str) -> bool:
    # From Python 3.13 on one instruction may load two variables.
    return any(
        instruction.opname.startswith("LOAD") and name in (instruction.argval, *_several(instruction.argval))
        for instruction in dis.get_instructions(code)
    )


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def codes_of(function: Any) -> Iterator[CodeType]:
    """The code of a function and of what it wraps, each once."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        if isinstance(layer, (staticmethod, classmethod, functools.partial)):
            waiting.append(layer.func if isinstance(layer, functools.partial) else layer.__func__)
        elif inspect.ismethod(layer):
            waiting.append(layer.__func__)
        elif isinstance(layer, FunctionType):
            yield layer.__code__
            waiting.append(getattr(layer, "__wrapped__", None))
            cells = (cell for cell in layer.__closure__ or () if _is_filled(cell))
            waiting.extend(cell.cell_contents for cell in cells if callable(cell.cell_contents))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where the cell is empty
    except ValueError:
        return False
    return True


def _code_uses(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(
        _code_uses(constant, name) if isinstance(constant, CodeType) else constant == name
        for constant in code.co_consts
    )


class AroundGeneration(Cure):
    """Lets mixins for ``trl.GRPOTrainer`` change what happens while it generates, wherever its release does so.

    A mixin overrides :meth:`_around_generation` with a context of its own, and enters that of ``super()`` within it.
    """

    _points: ClassVar[patch_points.Points] = (patch_points.PREPARE_INPUTS, patch_points.COMPUTE_LOSS)
    accelerator: Any

    def _around_generation(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _unwrapping(self, make: Callable[[Any], Any], cure: str) -> AbstractContextManager[None]:
        """Let ``unwrap_model_for_generation`` be ``make(upstream)`` for this trainer while the context lasts.

        In each module in which one of its classes finds it. A trainer that is trained meanwhile, by a reward function
        or a callback, has an accelerator of its own, and gets upstream's.
        """

        def for_this_trainer(upstream: Callable[..., Any]) -> Callable[..., Any]:
            changed = make(upstream)

            def unwrap_model_for_generation(*args: Any, **kwargs: Any) -> Any:
                # TRL passes it second, by position or by name.
                accelerator = kwargs.get("accelerator", args[1] if len(args) > 1 else None)
                is_ours = accelerator is None or accelerator is self.accelerator
                return (changed if is_ours else upstream)(*args, **kwargs)

            return unwrap_model_for_generation

        return replaced_in(points_of(type(self), patch_points.GENERATION), for_this_trainer, cure)

    def _prepare_inputs(self, inputs: Any) -> Any:
        with self._around_generation():  # trl 0.15.0 and later generate here
            upstream: Any = super()
            return upstream._prepare_inputs(inputs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self._around_generation():  # trl 0.14.0 generates here
            upstream: Any = super()
            return upstream.compute_loss(*args, **kwargs)
