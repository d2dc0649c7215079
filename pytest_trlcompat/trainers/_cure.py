"""What the mixins have in common: they say what they need of upstream, whether they are at work, and where they stand.

Imports the standard library and packaging, and of this package ``_patching``, ``patch_points``, ``errors``, ``known``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pytest_trlcompat.trainers import patch_points
from pytest_trlcompat.trainers._patching import owner_of
from pytest_trlcompat.trainers.errors import CureError
from pytest_trlcompat.trainers.known import issues_of

__all__ = ["Activity", "Cure", "CureStatus", "check_order", "check_points", "own", "status_of"]

LOGGER = logging.getLogger("pytest_trlcompat.trainers")

_PACKAGE = __name__.rpartition(".")[0]
UPSTREAM = ("transformers", "trl")
"""The packages whose classes a cure stands in front of."""


@dataclass(frozen=True)
class Activity:
    """Whether a cure changes anything.

    Attributes:
        active: ``None`` where it depends on a training that is not there yet, or is seen only while it runs.
        reason: what was seen, as half a sentence.
    """

    active: bool | None
    reason: str


@dataclass(frozen=True)
class CureStatus:
    """One cure of a trainer, as ``Trainer.cures`` lists it.

    Attributes:
        name: of the mixin.
        active: whether it changes anything; ``None`` where that depends on the training, or is seen while it runs.
        reason: what was seen.
        issues: the known issues that it cures, by their ids.
        upstream: links to reports and fixes of these.
    """

    name: str
    active: bool | None
    reason: str
    issues: tuple[str, ...]
    upstream: tuple[str, ...]


def own(cls: type) -> bool:
    """Whether a class is one of this package, and not upstream's or a user's."""
    return f"{cls.__module__}.".startswith(f"{_PACKAGE}.")


def check_order(cls: type) -> None:
    """Refuse a class in which a mixin stands behind one that it must stand before.

    Raises:
        TypeError: with both, and the reason.
    """
    behind = {base.__name__: number for number, base in enumerate(cls.__mro__) if own(base)}
    for number, base in enumerate(cls.__mro__):
        for other, reason in vars(base).get("_stands_before", {}).items():
            if behind.get(other, number) < number:
                raise TypeError(
                    f"{cls.__name__}: {base.__name__} must stand before {other} among the bases, and stands behind it; "
                    f"{reason}"
                )


def check_points(cls: type) -> None:
    """Refuse a trainer whose cures change what the installed releases should have, and have not.

    What is not imported yet (DeepSpeed, PEFT) is looked at when it is used.

    Raises:
        CureError: naming the cure, the place and the release.
    """
    for base in cls.__mro__:
        if own(base):
            _check_points_of(base.__name__)


def _check_points_of(mixin: str) -> None:
    for point in patch_points.of(mixin):
        if point.package in (*UPSTREAM, "accelerate") or point.module in sys.modules:
            owner_of(point, mixin)


class _Cures:
    """``Trainer.cures`` of a class, and of a trainer, which knows more."""

    def __get__(self, trainer: Any, cls: type) -> tuple[CureStatus, ...]:
        return tuple(status_of(base, cls, trainer) for base in cls.__mro__ if _is_cure(base))


def _is_cure(base: type) -> bool:
    return own(base) and issubclass(base, Cure) and base.__name__.endswith("Mixin")


def status_of(cure: type[Cure], cls: type, trainer: Any = None) -> CureStatus:
    """What a cure does for a trainer, or for a class of trainers; a point that is missing is told, not raised."""
    try:
        _check_points_of(cure.__name__)
        activity = cure._activity(cls, trainer)
    except CureError as error:
        activity = Activity(False, str(error))
    except AttributeError as error:  # a trainer made otherwise; a list of cures must not end its training
        if trainer is None:
            raise
        activity = Activity(None, f"cannot be seen: {error}")
    issues = issues_of(cure.__name__)
    links = tuple(dict.fromkeys(link for issue in issues for link in issue.upstream))
    return CureStatus(cure.__name__, activity.active, activity.reason, tuple(issue.id for issue in issues), links)


class Cure:
    """A mixin that cures known issues of the trainer that it is put in front of.

    Attributes:
        cures: what each cure of this trainer does on this stack, and in this training if asked of a trainer.
        _stands_before: names of the mixins that must stand behind it, each with the reason.
    """

    cures: ClassVar[tuple[CureStatus, ...]] = _Cures()  # type: ignore[assignment] # a descriptor
    _stands_before: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_points(type(self))
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            active = ", ".join(cure.name for cure in self.cures if cure.active) or "none on this stack"
        except Exception as error:  # a line in the log must not end a training
            active = f"not known, {type(error).__name__}: {error}"
        LOGGER.info("%s: cures at work: %s", type(self).__name__, active)
        upstream: Any = super()
        return upstream.train(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        """Whether it changes anything: by what is installed, and, where there is a ``trainer``, by that."""
        return Activity(None, "seen while it trains")
