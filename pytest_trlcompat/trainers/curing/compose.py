"""``cured(Trainer)``: any subclass of ``transformers.Trainer`` with the cures that fit it.

from pytest_trlcompat.trainers import cured

Trainer = cured(MyTrainer)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any, TypeVar

from pytest_trlcompat.trainers.curing.cure import is_ours
from pytest_trlcompat.trainers.curing.kinds import KINDS
from pytest_trlcompat.trainers.curing.names import MODULES
from pytest_trlcompat.trainers.curing.trl_ppo import is_first_rloo_trainer, is_ppo_trainer

__all__ = ["cured", "kind_of"]

T = TypeVar("T", bound=type)

_MARK = "_trlcompat_cured_with"
"""The attribute of a class that was made here: the names of the mixins in front of the trainer's own class."""
_LEFT_OUT = "_trlcompat_cured_without"
"""The attribute of a class that was made here: the names of the mixins that were not to be there."""
_SIGNED = ("__init__", "compute_loss", "evaluate", "train")
"""Methods whose parameters others look at, to know what a trainer takes."""


def cured(trainer: T, *, without: Collection[str] = ()) -> T:
    """The subclass of a trainer's class in which the known issues of its kind are cured.

    The cures stand in front of it, so that they also reach what it has copied from upstream. Each changes something
    only where the installed releases need it; ``cured(trainer).cures`` lists them with what each does. What is cured
    already is not cured twice: ``cured(cured(T))`` is ``cured(T)``; and what was left out stays out. The class and its
    trainers can be pickled where those of ``trainer`` can.

    Args:
        trainer: a subclass of ``transformers.Trainer``: TRL's, Transformers' own, or a user's.
        without: names of mixins to leave out, such as ``"FSDPSaveMixin"``.

    Raises:
        TypeError: ``trainer`` is no subclass of ``transformers.Trainer``; or it has a mixin already that must stand in
            front of another one, with the reason.
        ValueError: ``without`` names a mixin that this kind of trainer does not get, or that this one has already.
    """
    kind = kind_of(trainer)
    if unknown := sorted(set(without) - set(KINDS[kind])):
        raise ValueError(
            f"without={', '.join(unknown)}: a {trainer.__name__} has no such cure; it has {', '.join(KINDS[kind])}"
        )
    have = {base.__name__ for base in trainer.__mro__ if is_ours(base)}
    if too_late := sorted(have & set(without)):
        raise ValueError(
            f"without={', '.join(too_late)}: this {trainer.__name__} has it already; leave it out where it was put in, "
            "or give cured() the trainer that was cured"
        )
    left_out = {*without, *getattr(trainer, _LEFT_OUT, ())}
    chosen = tuple(mixin for mixin in KINDS[kind] if mixin not in {*left_out, *have})
    if not chosen:
        return trainer
    # The same class for the same question; it is kept by whoever uses it, and by nothing here.
    subclasses: list[type] = trainer.__subclasses__()
    existing = next((subclass for subclass in subclasses if vars(subclass).get(_MARK) == chosen), None)
    return existing or _make(trainer, chosen, left_out)  # type: ignore[return-value] # a subclass of it


def kind_of(trainer: type) -> str:
    """The kind of a trainer's class, a key of ``KINDS``.

    Raises:
        TypeError: it is no subclass of ``transformers.Trainer``.
    """
    from transformers import Trainer

    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise TypeError(
            f"asked to cure {trainer!r}, which is no subclass of transformers.Trainer; give the class of a trainer, "
            "such as cured(trl.DPOTrainer)"
        )
    if _is_subclass_of(trainer, "trl.trainer.grpo_trainer", "GRPOTrainer"):
        return "grpo"
    if is_first_rloo_trainer(trainer):
        return "first_rloo"
    if _is_subclass_of(trainer, "trl.trainer.rloo_trainer", "RLOOTrainer"):
        return "rloo"
    if _is_subclass_of(trainer, "trl.trainer.distillation_trainer", "DistillationTrainer"):
        return "distillation"
    return "ppo" if is_ppo_trainer(trainer) else "trainer"


def _is_subclass_of(trainer: type, module: str, name: str) -> bool:
    """Whether TRL's class of that name is among the bases: that which TRL has made, whoever has taken its place."""
    return any(base.__module__ == module and base.__name__ == name for base in trainer.__mro__)


def _make(trainer: type, mixins: tuple[str, ...], left_out: Collection[str]) -> type:
    kit = [getattr(import_module(f"pytest_trlcompat.trainers.{MODULES[mixin]}"), mixin) for mixin in mixins]
    described = {
        "__module__": __name__,
        "__qualname__": _qualified_name(trainer, left_out),
        "__doc__": trainer.__doc__,
        _MARK: mixins,
        _LEFT_OUT: frozenset(left_out),
    }
    cured_class = type(trainer)(trainer.__name__, (*kit, trainer), described)
    for name in _SIGNED:
        if getattr(cured_class, name, None) is not getattr(trainer, name, None):
            setattr(cured_class, name, _with_the_signature_of(trainer, name, cured_class))
    return cured_class


def _with_the_signature_of(trainer: type, name: str, cured_class: type) -> Callable[..., Any]:
    """The method of the mixins, which take any arguments, with the parameters of the trainer's own."""

    @functools.wraps(getattr(trainer, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # With arguments, since a function that no class body holds has no `__class__` for a bare super().
        return getattr(super(cured_class, self), name)(*args, **kwargs)

    return method


def _qualified_name(trainer: type, left_out: Collection[str]) -> str:
    """What pickle looks a made class up by; without a dot, at which it would split it."""
    place = f"{trainer.__module__}:{trainer.__qualname__}".replace(".", "/")
    return f"cured({','.join((place, *sorted(left_out)))})"


def __getattr__(name: str) -> Any:
    """A made class by its qualified name, which pickle asks for, also in a process that has not made it yet."""
    parts = re.fullmatch(r"cured\(([^:]+):([^,]+)((?:,\w+)*)\)", name)
    if parts is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, qualified, left_out = parts.groups()
    trainer: Any = import_module(module.replace("/", "."))
    for part in qualified.split("/"):
        trainer = getattr(trainer, part)
    return cured(trainer, without=[mixin for mixin in left_out.split(",") if mixin])
