"""What an adapter defines for a trainer on the rows of a dataset, so that it can be recorded and compared.

Runs inside a rank.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.requirements import Requirement
from packaging.version import Version

from pytest_trlcompat.conformance import architectures, liger
from pytest_trlcompat.conformance.adapter import exported
from pytest_trlcompat.conformance.comparison import Difference
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.supervised import evaluating
from pytest_trlcompat.conformance.supervised.records import Read, Recording, Row
from pytest_trlcompat.conformance.training import PLAIN, world_size
from pytest_trlcompat.training.aliases import name_in, renamed

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["AXES", "BASE", "SupervisedHooks"]

AXES: Mapping[str, tuple[Any, ...]] = {
    "model": ("dense", "bfloat16", "changed", "experts", "name", "tied"),
    "adapter": ("", "peft_config", "peft_model", "saved_head", "trained_tokens", "both"),
    "evaluation": ("", "after", "before", "during", "best", "given"),
    "resumed": ("", "between_steps"),
    "refused": (False, True, "allowed"),
    "refused_naming": ("", "train_dataset", "peft_config", "precompute_ref_log_probs"),
    "refused_in": ("", "evaluation", "training"),
    "liger": liger.AXIS,
}
"""What a setting may have in addition to fields of the config, for every such trainer; the default is first. Adapters
add more. ``evaluation="best"``: an evaluation after each step, and at the end the best model is loaded; ``"given"``:
``evaluate`` is called with a dataset as a user has it, and the trainer has no other. ``refused``: the training must end
in an error that is raised on purpose before it begins; with ``"allowed"`` it may; with a release it must from that one
on. ``refused_naming``: the error must name this argument. ``refused_in``: the error may come as late as this, because
nothing shows the mistake before. ``liger``: see :mod:`~pytest_trlcompat.conformance.liger`."""
SINCE: Mapping[tuple[str, Any], str] = {
    ("model", "experts"): "transformers>=4.51",
    ("adapter", "trained_tokens"): "peft>=0.15",
    # Before, experts are separate modules, and not stacked.
    ("adapter", "peft_parameters"): "transformers>=5",
    **architectures.SINCE,
    **evaluating.SINCE,
}
"""The releases that have a value of an axis, as requirements; for every adapter."""
BASE: Mapping[str, Any] = {**PLAIN, "max_steps": 2}


class SupervisedHooks(abc.ABC):
    """A trainer on the rows of a dataset, as the shared recording, expected values and comparison see it.

    Attributes:
        trainer: the name of its folder.
        names: of the classes of the trainer and of its config in ``trl``.
        axes: of this trainer, in addition to :data:`AXES`.
        since: the releases that have, or document, a value of an axis or of a field, ``("loss_type", "dft")``, as
            requirements.
        choices: fields that got more values from release to release: a value is known where their documentation
            names it.
        base: fields of the config, in addition to :data:`BASE` or in place of its values.
        rows: number in a micro-batch, over all ranks.
        only_in_training: what a training logs and an evaluation, rightly, does not.
    """

    trainer: ClassVar[str]
    names: ClassVar[tuple[str, str]]
    axes: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    since: ClassVar[Mapping[tuple[str, Any], str]] = {}
    choices: ClassVar[tuple[str, ...]] = ()
    base: ClassVar[Mapping[str, Any]] = {}
    rows: ClassVar[int] = 4
    only_in_training: ClassVar[frozenset[str]] = frozenset(
        {"epoch", "grad_norm", "learning_rate", "loss", "num_tokens", "step"}
    )

    @abc.abstractmethod
    def build(
        self, trainer_class: type, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, fill: bool
    ) -> Any:
        """The trainer, as a user would build it.

        Args:
            trainer_class: a subclass of the trainer that records.
            config: of :meth:`config`.
            seed: of the data.
            fill: give an adapter that the trainer makes weights that change the model's output.
        """

    @abc.abstractmethod
    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        """The rows of a batch as the loss gets it, without padding, and problems of its padding.

        Args:
            arguments: fields of the config as the trainer has them.
        """

    @abc.abstractmethod
    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        """The rows that the dataset of ``training`` or ``evaluation`` must become, in order, by documentation alone."""

    @abc.abstractmethod
    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        """The policy as the trainer has it before training, adapters included, and the other models that the loss
        needs, such as a reference model; all in evaluation mode. Tolerances are measured by changing the weights of all
        of them."""

    @abc.abstractmethod
    def settings(
        self,
        arguments: Mapping[str, Any],
        conventions: Conventions,
        world_size: int,
        models: tuple[torch.nn.Module, ...],
    ) -> reference.SupervisedSettings:
        """The reference's settings, see :func:`~pytest_trlcompat.conformance.supervised.settings.settings_from`.

        Args:
            models: of :meth:`models`; a setting may depend on their config.
        """

    def compared(self, row: Row) -> Row:
        """The part of a row of :meth:`read` that must be equal to one of :meth:`expected_rows`."""
        return row

    def expected_size(self, rows: list[Row], arguments: Mapping[str, Any], part: str) -> int:
        """How many rows the trainer's dataset has: fewer than :meth:`expected_rows` where it packs them."""
        return len(rows)

    @abc.abstractmethod
    def objective(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> reference.Objective:
        """The loss of batches of rows of :meth:`read`, as a function of a copy of the first model as trained so far."""

    def after_step(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> Callable[[Any, int], None] | None:
        """What each step changes in addition to the policy, by the policy and the number of steps made so far."""
        return None

    def evaluate(self, trainer: Any, model: TinyModel, setting: Mapping[str, Any], seed: int) -> None:
        """Evaluate after the training, on the trainer's data, or on data that is passed now."""
        trainer.evaluate()

    def surrounding(
        self, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, recording: Recording
    ) -> AbstractContextManager[None]:
        """A context in which the trainer is built, trains and evaluates, such as one that fixes sampled completions."""
        return nullcontext()

    def extra_differences(
        self,
        recordings: Sequence[Recording],
        models: tuple[torch.nn.Module, ...],
        model: TinyModel,
        setting: Mapping[str, Any],
        seed: int,
    ) -> Iterator[Difference]:
        """What differs before a model has computed anything, such as in :attr:`Recording.extras`.

        Args:
            recordings: of all ranks.
            models: of :meth:`models`.
        """
        return iter(())

    def watched(self, trainer_class: type, recording: Recording) -> type:
        """The trainer, or a subclass that records more, in ``values`` of the newest micro-batch or in ``extras``."""
        return trainer_class

    def is_known(self, trl: Any, name: str, value: Any) -> bool:
        """Whether the release has the field and, where its value is one of several names, documents this name."""
        # Lists and dictionaries cannot be keys, and no release is stated for one.
        since = {**SINCE, **self.since}.get((name, value) if not isinstance(value, (list, dict)) else ("", ""))
        if name == "refused" and str(value)[0].isdigit():
            since = f"trl>={value}"
        if since is not None:
            requirement = Requirement(since)
            if not requirement.specifier.contains(Version(metadata.version(requirement.name)), prereleases=True):
                return False
        if name in AXES or name in self.axes:
            return True
        described = {
            field.name: str(field.metadata.get("help", "")) for field in dataclasses.fields(self.config_class(trl))
        }
        if name in self.choices and isinstance(value, str):
            documented = described.get(name, "") + "".join(str(base.__doc__) for base in self.config_class(trl).__mro__)
            return name in described and re.search(f"['\"`]{re.escape(value)}['\"`]", documented) is not None
        return name in described

    @staticmethod
    def words_argument(trainer_class: type) -> str:
        """The argument that takes the tokenizer; a class may only pass its arguments on, so its bases are asked too."""
        parameters = [
            set(inspect.signature(vars(base)["__init__"]).parameters)
            for base in trainer_class.__mro__
            if "__init__" in vars(base) and base is not object
        ]
        return next(name for names in parameters if (name := name_in(names, "processing_class")) is not None)

    def known_part(self, trl: Any, setting: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a setting that this release knows."""
        return {name: value for name, value in setting.items() if self.is_known(trl, name, value)}

    def config_class(self, trl: Any) -> Any:
        return exported(trl, self.names[1])

    def config(self, trl: Any, setting: Mapping[str, Any]) -> Any:
        """The config of a setting, without fields that this release does not know. The text ``None`` means None."""
        rows = self.rows // world_size()
        values: dict[str, Any] = {
            "output_dir": tempfile.mkdtemp(prefix="trlcompat-"),
            "per_device_train_batch_size": rows,
            "per_device_eval_batch_size": rows,
            **BASE,
            **self.base,
        }
        if setting.get("evaluation") in ("during", "best"):
            values |= renamed(self.config_class(trl), {"eval_strategy": "steps", "eval_steps": 1})
        if setting.get("evaluation") == "best":
            values |= {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
        if setting.get("resumed"):
            values |= {"save_strategy": "steps", "save_steps": 1}
        values |= liger.fields(setting, {field.name for field in dataclasses.fields(self.config_class(trl))})
        fields = {name: value for name, value in setting.items() if name not in AXES and name not in self.axes}
        values |= {name: None if value == "None" else value for name, value in fields.items()}
        return self.config_class(trl)(**self.known_part(trl, values))
