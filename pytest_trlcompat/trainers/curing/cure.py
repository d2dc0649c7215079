"""What mixins have in common: they say what they need of upstream, whether they are at work, and where they stand."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.known import issues_of
from pytest_trlcompat.trainers.curing.patching import PatchPoint, owner_of
from pytest_trlcompat.training import begin

__all__ = ["Activity", "Condition", "Cure", "CureStatus", "check_order", "check_points", "is_ours", "status_of"]

LOGGER = "transformers.trainer.pytest_trlcompat"
"""Below Transformers' own, whose level ``TrainingArguments.log_level`` sets, and which has a handler."""

_PACKAGE = "pytest_trlcompat.trainers"


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
class Condition:
    """What must be true of a training.

    Attributes:
        where: as it follows "depends: " or stands before a colon: ``"under ZeRO-3"``.
        otherwise: why nothing is changed where it is not: ``"not under ZeRO-3"``.
        holds: asked of a trainer that was built.
        needs: the package without which it never holds.
    """

    where: str
    otherwise: str
    holds: Callable[[Any], bool]
    needs: str = ""


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


def is_ours(cls: type) -> bool:
    """Whether a class is one of this package, and not upstream's or a user's."""
    return f"{cls.__module__}.".startswith(f"{_PACKAGE}.")


def check_order(cls: type) -> None:
    """Refuse a class in which a mixin stands behind one that it must stand before.

    Raises:
        TypeError: with both, and the reason.
    """
    behind = {base.__name__: number for number, base in enumerate(cls.__mro__) if is_ours(base)}
    for number, base in enumerate(cls.__mro__):
        # Only what the class itself declares: the class that it inherits from is in the MRO as well.
        for other, reason in vars(base).get("_stands_before", {}).items():
            if behind.get(other, number) < number:
                raise TypeError(
                    f"{cls.__name__}: {base.__name__} must stand before {other} among the bases, and stands behind it; "
                    f"{reason}"
                )


def check_points(cls: type, trainer: Any = None) -> None:
    """Refuse a trainer if one of its cures changes something that the installed releases should have but do not.

    What is not imported yet (DeepSpeed, PEFT) is looked at when it is used.

    Args:
        trainer: that was built, and may need what some trainings alone need; by default those are left out.

    Raises:
        CureError: naming the cure, the place and the release.
    """
    for base in cls.__mro__:
        conditions = vars(base).get("_needed", ())
        if is_ours(base) and (trainer is not None or not conditions):
            try:
                _check_points_of(base, cls)
            except CureError:
                if all(condition.holds(trainer) for condition in conditions):
                    raise


def _check_points_of(mixin: type, cls: type) -> None:
    for point in vars(mixin).get("_points", ()):
        if _is_looked_at(point, cls):
            owner_of(point, mixin.__name__)


def _is_looked_at(point: PatchPoint, cls: type) -> bool:
    """Whether a class of trainers may need a point; a trainer's module is not imported for those that are others."""
    if point.module in {base.__module__ for base in cls.__mro__}:
        return True
    if point.module.startswith("trl.") and point.module.endswith("_trainer"):
        return False
    # To import one of these imports vLLM, which takes seconds; a trainer that uses it has it imported already.
    if point.module.startswith("trl.generation."):
        return point.module in sys.modules
    bases = {base.__module__.partition(".")[0] for base in cls.__mro__}
    # Every Trainer of Transformers imports Accelerate, though none of its bases is a class of Accelerate's.
    return point.package in {*bases, "accelerate"} or point.module in sys.modules


class _Cures:
    """``Trainer.cures`` of a class, and of a trainer, which knows more."""

    def __get__(self, trainer: Any, cls: type) -> tuple[CureStatus, ...]:
        return tuple(status_of(base, cls, trainer) for base in cls.__mro__ if _is_cure(base))


def _in_words(activities: Mapping[str, Activity]) -> str:
    names = {
        state: [name for name, activity in activities.items() if activity.active is state] for state in (True, None)
    }
    depends = f"; depending on what it meets: {', '.join(names[None])}" if names[None] else ""
    return f"{', '.join(names[True]) or 'none for certain'}{depends}"


def _is_cure(base: type) -> bool:
    return is_ours(base) and issubclass(base, Cure) and base.__name__.endswith("Mixin")


def status_of(cure: type[Cure], cls: type, trainer: Any = None) -> CureStatus:
    """What a cure does for a trainer, or for a class of trainers; a point that is missing is told, not raised."""
    activity = _activity_of(cure, cls, trainer)
    issues = issues_of(cure.__name__)
    links = tuple(dict.fromkeys(link for issue in issues for link in issue.upstream))
    return CureStatus(cure.__name__, activity.active, activity.reason, tuple(issue.id for issue in issues), links)


def _activity_of(cure: type[Cure], cls: type, trainer: Any = None) -> Activity:
    try:
        _check_points_of(cure, cls)
        return cure._activity(cls, trainer)
    except CureError as error:
        return Activity(False, str(error))
    except AttributeError as error:
        # A trainer that was not made by our constructor lacks attributes; a list of cures must not end its training.
        if trainer is None:
            raise
        return Activity(None, f"cannot be seen: {error}")


class Cure:
    """A mixin that cures known issues of the trainer that it is put in front of.

    Attributes:
        cures: what each cure of this trainer does on this stack, and in this training if asked of a trainer.
        _kinds: kinds of trainers that get it, each with the cure behind which it stands there, ``""`` for one in front,
            and the reason.
        _points: names of upstream's that it changes, overrides, or calls although they are not public, with the
            releases that have them.
        _stands_before: names of the mixins that must stand behind it, each with the reason.
        _needed: conditions without which nothing is changed: what upstream has taken away is an error only where all
            of them hold. They hold, or do not, from a trainer's construction on.
    """

    cures: ClassVar[tuple[CureStatus, ...]] = _Cures()  # type: ignore[assignment] # a descriptor
    _kinds: ClassVar[Mapping[str, tuple[str, str]]] = {}
    _points: ClassVar[patch_points.Points] = (patch_points.TRAIN,)
    _stands_before: ClassVar[Mapping[str, str]] = {}
    _needed: ClassVar[tuple[Condition, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_order(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # First what every training needs, before anything is built; then what depends on the trainer that was built.
        check_points(type(self))
        super().__init__(*args, **kwargs)
        check_points(type(self), self)
        begin.prepare(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._log_cures()
        begin.tell(self)
        upstream: Any = super()
        return upstream.train(*args, **kwargs)

    def _log_cures(self) -> None:
        """One line on the main process, where and as loud as Transformers logs that a training begins."""
        try:
            from transformers.utils.logging import get_logger

            if self.is_world_process_zero():  # type: ignore[attr-defined] # of transformers.Trainer
                # Without the known issues that each cures, for which the whole catalogue may have to be read.
                cls = type(self)
                at_work = {base.__name__: _activity_of(base, cls, self) for base in cls.__mro__ if _is_cure(base)}
                get_logger(LOGGER).info("%s: cures at work: %s", cls.__name__, _in_words(at_work))
        except Exception as error:  # a line in the log must not end a training
            logging.getLogger(__name__).warning("cures at work: not known, %s: %s", type(error).__name__, error)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        """Whether it changes anything: by what is installed, and, where there is a ``trainer``, by that."""
        return Activity(None, "seen while it trains")
