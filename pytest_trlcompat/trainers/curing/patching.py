"""Changing a function of upstream for one trainer alone, at a place that the table of patch points names.

A changed function is a *dispatcher*: it stands where upstream's stood, for good, and calls upstream's own, except in a
context that has asked for another one. Contexts are those of :mod:`contextvars`: another trainer in the same process,
also in another thread, calls upstream's. The backward pass on an accelerator runs in threads of its own, which have no
such context: what must work there decides by the objects that it is given, see :func:`extended`.

What somebody else puts in the place of a dispatcher is upstream's from then on: another one is put in front of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pytest_trlcompat.trainers.curing.errors import CureError, installed_version, leaving_out

__all__ = ["PatchPoint", "expected", "extended", "original", "owner_of", "replaced", "replaced_in"]

_LOCK = threading.RLock()


@dataclass(frozen=True)
class PatchPoint:
    """One name in upstream's code that a cure changes, overrides or calls although it is not public.

    Attributes:
        where: module, colon, qualified name: ``"trl.trainer.grpo_trainer:GRPOTrainer.compute_loss"``. The package that
            decides about releases is the first part of the module.
        releases: in which releases of that package it exists and matters: a specifier such as ``">=0.14,<0.26"``, all
            by default. Open at the end where it must be in every later release as well: there its absence is an error.
    """

    where: str
    releases: str = ""

    @property
    def package(self) -> str:
        return self.where.partition(".")[0].partition(":")[0]

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        """The last part, by which it is changed."""
        return self.where.rpartition(":")[2].rpartition(".")[2]

    def exists_in(self, version: str) -> bool:
        """Whether the table says that this release of its package has it."""
        # TRL's main branch calls itself 1.17.0.dev0, which no specifier contains by default.
        return SpecifierSet(self.releases).contains(Version(version), prereleases=True)


def expected(point: PatchPoint) -> bool:
    """Whether the table says that the installed release of its package has ``point``."""
    version = installed_version(point.package)
    return version is not None and point.exists_in(version)


def owner_of(point: PatchPoint, cure: str = "") -> ModuleType | type | None:
    """The module or class that holds ``point`` in the installed release; ``None`` where it has none, as is right.

    Args:
        cure: the mixin that depends on it, for the message.

    Raises:
        CureError: it is not there, and the table says that it should be; or its module cannot be imported, which is the
            error's cause then.
    """
    cause: ImportError | None = None
    try:
        owner: Any = import_module(point.module)
        *path, name = point.where.rpartition(":")[2].split(".")
        for part in path:
            owner = getattr(owner, part)
            # A subclass may have taken the class's place in upstream's module, as patching libraries do.
            if isinstance(owner, type):
                known = (base for base in owner.__mro__ if (base.__module__, base.__name__) == (point.module, part))
                owner = next(known, owner)
        if hasattr(owner, name):
            holder: ModuleType | type = owner
            return holder
    except ImportError as error:
        cause = None if _is_missing(error, point.module) else error
    except AttributeError:
        # A class on the way to the name is not there: the same as a missing name.
        pass
    if expected(point):
        why = f"its module cannot be imported: {type(cause).__name__}: {cause}" if cause else "it is not there"
        raise CureError(
            cure,
            expected=point.where,
            seen=f"{why}, although {_releases(point)} should have it",
            packages=(point.package,),
            remedy="" if cause is None else f"See to it that `import {point.module}` works{leaving_out(cure)}",
        ) from cause
    return None


def _is_missing(error: ImportError, module: str) -> bool:
    """Whether there is no such module; otherwise it is there, and something that it imports is not."""
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _releases(point: PatchPoint) -> str:
    return f"releases {point.releases}" if point.releases else "every release"


def original(point: PatchPoint, cure: str = "") -> Any:
    """Upstream's function at a point, beneath what this module has put in its place; ``None`` if there is none."""
    owner = owner_of(point, cure)
    if owner is None:
        return None
    function = getattr(owner, point.name)
    for layer in _layers(function):
        function = layer.beneath
    return function


_LAYER = "__trlcompat_layer__"


class _Layer:
    """A function that this module has put in the place of another one."""

    def __init__(self, owner: ModuleType | type, name: str) -> None:
        self.beneath: Callable[..., Any] = getattr(owner, name)
        self.function: Callable[..., Any] | None = None
        self._owner, self._name = owner, name

    def put(self, function: Callable[..., Any]) -> None:
        # Without its wrapper, a static method would be given the instance as first argument.
        static = isinstance(self._owner, type) and isinstance(vars(self._owner).get(self._name), staticmethod)
        self.function = functools.update_wrapper(function, self.beneath)
        # After update_wrapper, which copies the attributes of the function beneath, its layer among them.
        setattr(function, _LAYER, self)
        setattr(self._owner, self._name, staticmethod(function) if static else function)


def _layer_of(function: Any) -> _Layer | None:
    """The layer whose function ``function`` is; ``None`` for a function that somebody else has put there."""
    layer: _Layer | None = getattr(function, _LAYER, None)
    # functools.wraps copies the attribute to functions that need not call what they wrap.
    return layer if layer is not None and layer.function is function else None


class _Slot(_Layer):
    """A dispatcher: calls what stood there, or in some contexts another function."""

    def __init__(self, owner: ModuleType | type, name: str) -> None:
        super().__init__(owner, name)
        self.current: ContextVar[Callable[..., Any] | None] = ContextVar(name, default=None)

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return self.called()(*args, **kwargs)

        self.put(dispatch)

    def called(self) -> Callable[..., Any]:
        return self.current.get() or self.beneath


class _Extension(_Layer):
    """A function for every context. No dispatcher, since ``torch.compile`` cannot trace what looks at contexts."""

    def __init__(self, owner: ModuleType | type, name: str, make: Callable[[Any], Any]) -> None:
        super().__init__(owner, name)
        self.put(make(self.beneath))


def _slot(owner: ModuleType | type, name: str) -> _Slot:
    """The slot of the dispatcher that stands there, which is put there if need be."""
    with _LOCK:
        layer = _layer_of(getattr(owner, name))
        # A dispatcher that a class inherits stands on its base, and serves the other subclasses too.
        return layer if isinstance(layer, _Slot) and name in vars(owner) else _Slot(owner, name)


def replaced(point: PatchPoint, make: Callable[[Any], Any], cure: str = "") -> AbstractContextManager[None]:
    """Let upstream's function be ``make(upstream)`` for whoever calls it in this context; for nobody else.

    Contexts may be nested: what ``make`` is given is what the outer one has made. Does nothing where the installed
    release has no such function, and need not have it.

    Args:
        cure: the mixin that asks for it, for the message.

    Raises:
        CureError: see :func:`owner_of`; when the context is entered.
    """
    return replaced_in((point,), make, cure)


@contextmanager
def replaced_in(points: Iterable[PatchPoint], make: Callable[[Any], Any], cure: str = "") -> Iterator[None]:
    """As :func:`replaced` at each of ``points``; once where several of them hold the same function of ours."""
    owners = ((owner_of(point, cure), point.name) for point in points)
    slots = dict.fromkeys(_slot(owner, name) for owner, name in owners if owner is not None)
    tokens = []
    try:
        for slot in slots:
            # `make` may raise at a later slot: then the earlier ones are reset.
            tokens.append((slot, slot.current.set(make(slot.called()))))
        yield
    finally:
        for slot, token in tokens:
            slot.current.reset(token)


def extended(point: PatchPoint, make: Callable[[Any], Any], cure: str = "") -> None:
    """Let upstream's function be ``make(upstream)`` from now on, in every thread; a second call changes nothing.

    For what runs in a backward pass. What ``make`` returns must do as upstream does for all but its own objects.

    Raises:
        CureError: see :func:`owner_of`.
    """
    owner = owner_of(point, cure)
    if owner is None:
        return
    with _LOCK:
        if not any(isinstance(layer, _Extension) for layer in _layers(getattr(owner, point.name))):
            _Extension(owner, point.name, make)


def _layers(function: Any) -> Iterator[_Layer]:
    """What this module has put there, the outermost first."""
    while (layer := _layer_of(function)) is not None:
        yield layer
        function = layer.beneath
