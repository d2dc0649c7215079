"""What a family of strategies says of itself: one class, from its names to how it is proved inside a rank.

Rooms from the catalogue to the launch read it, so this and the families import only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

__all__ = [
    "DISTRIBUTED_TYPES",
    "Family",
    "Need",
    "Settings",
    "StrategyAbsent",
    "StrategyError",
    "families",
    "family_of",
]

Settings = dict[str, Any]
"""What options make of a family's defaults; what it means is the family's own."""

DISTRIBUTED_TYPES = {"software": "MULTI_NPU", "cuda": "MULTI_GPU", "cpu": "MULTI_CPU"}
"""The distributed type that Accelerate has for several ranks on a launch's device, where no engine decides."""


NO_ENGINE = "no engine"


class StrategyError(ValueError):
    """The name or the options of a strategy are invalid."""


class StrategyAbsent(StrategyError):
    """The installed stack does not have this strategy, on any device."""


class Need:
    """A release without which the stack does not have the strategy, on any device.

    A plain class: the others that have fields take half a millisecond of each start of pytest.

    Args:
        package: of the stack.
        since: the first release that is enough.
        reason: what happens before it.
        except_for: trainers that this is not about. A launch does not know its trainer, so it refuses nothing then.
        is_assumed: whether a stack that does not name the package is taken to have a release that is enough.
    """

    def __init__(
        self, package: str, since: str, reason: str, except_for: tuple[str, ...] = (), is_assumed: bool = False
    ) -> None:
        self.package, self.since, self.reason = package, since, reason
        self.except_for, self.is_assumed = except_for, is_assumed

    @property
    def requirement(self) -> str:
        """``accelerate>=1.6``."""
        return f"{self.package}>={self.since}"


class Family:
    """Strategies that one engine serves. A new family is a class with ``names`` in a module of this package.

    Attributes:
        names: of its strategies.
        alike: those of them that train as another does, so that long measurements leave them out.
        position: where they stand in lists of strategies, the smallest first.
        packages: without which none of them can run.
        needs: releases that they need.
        kind: how proofs call its engine; empty where it builds none.
        engine: module and class of the engine.
        applied_by: for an engine without a wrapper, module and class whose ``init`` gets the modules that it is
            applied to.
        is_made_of_parts: whether an engine holds a part of a model, so that several make one.
        is_loaded_on_request: whether importing the engine takes so long that only a launch under it does.
        accelerate_type: Accelerate's distributed type; empty where the device decides.
        has_type_at_first: whether Accelerate knows that type before there is an ``Accelerator``.
        section: of Accelerate's configuration files; ``flag``: the option of ``accelerate launch`` that turns it on.
    """

    names: ClassVar[tuple[str, ...]] = ()
    alike: ClassVar[tuple[str, ...]] = ()
    position: ClassVar[int]
    packages: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[Need, ...]] = ()
    kind: ClassVar[str] = ""
    engine: ClassVar[tuple[str, str]]
    applied_by: ClassVar[tuple[str, str] | None] = None
    is_made_of_parts: ClassVar[bool] = False
    is_loaded_on_request: ClassVar[bool] = False
    accelerate_type: ClassVar[str] = ""
    has_type_at_first: ClassVar[bool] = True
    section: ClassVar[str] = ""
    flag: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        # A base of several families, as FSDP is, names no strategy.
        if "names" in vars(cls):
            _FAMILIES.append(cls())

    # What a launch is told.

    def settings(self, name: str, options: Mapping[str, Any]) -> Settings | None:
        """The defaults of a strategy with options merged into them; ``None`` where there are no settings.

        Raises:
            StrategyError: an option is unknown, or contradicts the strategy.
        """
        if options:
            raise StrategyError(f"strategy {name!r} has no options, but got {', '.join(sorted(options))}")
        return None

    def variables(self, name: str, settings: Settings | None, folder: Path) -> dict[str, str]:
        """What ``accelerate launch`` sets for ranks; files that they name are written into ``folder``.

        Source: ``accelerate/utils/launch.py``, ``prepare_multi_gpu_env`` and ``prepare_deepspeed_cmd_env``.
        """
        return {}

    def launcher_section(self, name: str, settings: Settings | None, folder: Path) -> dict[str, Any]:
        """Its :attr:`section` of a configuration file of Accelerate's; :meth:`variables` has written its files."""
        raise NotImplementedError

    def read_section(self, section: Mapping[str, Any], path: Path, folder: Path) -> tuple[str, Settings]:
        """The strategy that a user's :attr:`section` asks for, and its settings.

        Args:
            path: of the configuration file, for messages.
            folder: the working directory, from which paths in it are meant.

        Raises:
            StrategyError: it cannot be launched.
        """
        raise NotImplementedError

    def describe(self, name: str, settings: Settings | None) -> str:
        """What Accelerate must read in a user's file as well."""
        return NO_ENGINE

    def describe_variables(self, variables: Mapping[str, str]) -> str | None:
        """The same from what Accelerate's launcher sets; ``None`` where that is of no strategy of this family."""
        return None

    # What ranks must prove.

    def shards_parameters(self, name: str, settings: Settings | None) -> bool:
        """Whether each rank keeps only its part of every parameter, so that a full copy would be a downgrade."""
        return False

    def distributed_type(self, device: str) -> str:
        """Accelerate's, on a launch's device."""
        return self.accelerate_type or DISTRIBUTED_TYPES[device]

    def builds_engine(self, world_size: int) -> bool:
        """Whether a training builds an engine."""
        return bool(self.kind)

    def required(self, name: str, settings: Settings | None, world_size: int) -> dict[str, Any]:
        """What :meth:`differences` requires of engines, by names of its own."""
        return {}

    def measure(self, engine: Any, entry: dict[str, Any]) -> None:
        """Add to ``entry`` what an engine holds.

        ``local`` and ``total`` count parameter elements: on this rank, and of the whole model; ``device_type`` is
        torch's. What :meth:`differences` looks at comes in addition.
        """
        raise NotImplementedError

    def differences(self, required: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[str]:
        """How a measured engine differs from :meth:`required`, as it follows the engine's name."""
        return iter(())

    def module_of(self, engine: Any) -> Any:
        """The module that an engine is, or that a part of one is of."""
        return engine

    def model_of(self, engine: Any) -> Any:
        """The model itself, which engines wrap."""
        return engine.module

    def is_trainable(self, engine: Any) -> bool:
        """Whether an engine can train what it holds."""
        return any(parameter.requires_grad for parameter in engine.parameters())


_FAMILIES: list[Family] = []


def families() -> tuple[Family, ...]:
    """All, in the order of their positions."""
    return tuple(sorted(_FAMILIES, key=lambda family: family.position))


def family_of(name: str) -> Family:
    """The family of a strategy.

    Raises:
        KeyError: there is no strategy of this name.
    """
    for family in _FAMILIES:
        if name in family.names:
            return family
    raise KeyError(name)
