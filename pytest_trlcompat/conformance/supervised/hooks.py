"""What an adapter says of a trainer on the rows of a dataset, for what records, computes and compares.

Runs inside a rank; imports the stack only inside functions.
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
from pytest_trlcompat.conformance.adapter import TrainerAdapter, exported
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
"""What is chosen beside the fields of a config, with the default first, for every such trainer. An adapter has more.
``evaluation="best"``: an evaluation after each step, and at the end the best model is loaded; ``"given"``:
``evaluate`` is called with a dataset as a user has it, and the trainer has no other; ``refused``: the
training must end in an error that is raised on purpose before it begins, or, ``"allowed"``, may; a release: must from
that one on; ``refused_naming``: and the error must name this argument; ``refused_in``: the error may come as late as
that, since nothing shows before what is wrong; ``liger``: see
:mod:`~pytest_trlcompat.conformance.liger`."""
SINCE: Mapping[tuple[str, Any], str] = {
    ("model", "experts"): "transformers>=4.51",
    ("adapter", "trained_tokens"): "peft>=0.15",
    # Until then experts are modules of their own, and not stacked.
    ("adapter", "peft_parameters"): "transformers>=5",
    **architectures.SINCE,
    **evaluating.SINCE,
}
"""Requirements of the releases that have a value of an axis, for every adapter."""
BASE: Mapping[str, Any] = {**PLAIN, "max_steps": 2}


class SupervisedHooks(TrainerAdapter):
    """A trainer on the rows of a dataset, as shared recording, expected values and comparison see it.

    Attributes:
        names: of the trainer's class and of its config's in ``trl``.
        axes: its own, beside :data:`AXES`.
        since: requirements of the releases that have a value of an axis or of a field, ``("loss_type", "dft")``, or of
            those whose documentation has it.
        choices: fields whose values grew in number from release to release: their documentation must name a value.
        base: fields of its config, beside :data:`BASE` or in place of what stands there.
        rows: of a micro-batch over all ranks.
        only_in_training: what is logged of training and, rightly, of no evaluation.
    """

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
            trainer_class: of this trainer, made to record.
            config: of :meth:`config`.
            seed: of the data.
            fill: give an adapter that the trainer makes weights that do something.
        """

    @abc.abstractmethod
    def read(self, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Read:
        """The rows of a batch as it reaches the loss, without padding, and what is wrong with its padding.

        Args:
            arguments: fields of the config as the trainer has them.
        """

    @abc.abstractmethod
    def expected_rows(
        self, model: TinyModel, setting: Mapping[str, Any], arguments: Mapping[str, Any], seed: int, part: str
    ) -> list[Row]:
        """What the dataset of ``training`` or ``evaluation`` must become, in its order, by documentation alone."""

    @abc.abstractmethod
    def models(self, model: TinyModel, setting: Mapping[str, Any]) -> tuple[torch.nn.Module, ...]:
        """The policy as the trainer has it before training, adapters included, and what else the loss needs, such as
        a reference model. In evaluation mode. What is tolerated is measured by changing the weights of all of them."""

    @abc.abstractmethod
    def settings(
        self,
        arguments: Mapping[str, Any],
        conventions: Conventions,
        world_size: int,
        models: tuple[torch.nn.Module, ...],
    ) -> reference.SupervisedSettings:
        """The reference's, see :func:`~pytest_trlcompat.conformance.supervised.expected.settings_from`.

        Args:
            models: of :meth:`models`, whose config may have a say.
        """

    def compared(self, row: Row) -> Row:
        """What of a row as :meth:`read` gives it must be one of :meth:`expected_rows`."""
        return row

    def expected_size(self, rows: list[Row], arguments: Mapping[str, Any], part: str) -> int:
        """How many rows the trainer's dataset has, of those of :meth:`expected_rows`: fewer where it packs them."""
        return len(rows)

    @abc.abstractmethod
    def objective(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> reference.Objective:
        """The loss of batches of rows as :meth:`read` gives them; it is called with a copy of the first model, trained
        so far."""

    def after_step(
        self, models: tuple[torch.nn.Module, ...], settings: reference.SupervisedSettings
    ) -> Callable[[Any, int], None] | None:
        """What changes with each step beside the policy; see :func:`pytest_trlcompat.reference.supervised_train`."""
        return None

    def evaluate(self, trainer: Any, model: TinyModel, setting: Mapping[str, Any], seed: int) -> None:
        """Evaluate after the training, on the data that the trainer has, or is given now."""
        trainer.evaluate()

    def surrounding(
        self, model: TinyModel, setting: Mapping[str, Any], config: Any, seed: int, found: Recording
    ) -> AbstractContextManager[None]:
        """In which a trainer is built, trains and evaluates: for one that samples what it trains on, say."""
        return nullcontext()

    def extra_differences(
        self,
        recordings: Sequence[Recording],
        models: tuple[torch.nn.Module, ...],
        model: TinyModel,
        setting: Mapping[str, Any],
        seed: int,
    ) -> Iterator[Difference]:
        """What differs of what is kept in :attr:`Recording.beside`, and no model has computed.

        Args:
            recordings: of all ranks.
            models: of :meth:`models`.
        """
        return iter(())

    def watched(self, trainer_class: type, found: Recording) -> type:
        """The trainer, which keeps more of its training: in ``values`` of the newest micro-batch."""
        return trainer_class

    def is_known(self, trl: Any, name: str, value: Any) -> bool:
        """Whether the release has the field, and, of a choice among names, whether its documentation has this one."""
        since = {**SINCE, **self.since}.get((name, value) if not isinstance(value, (list, dict)) else ("", ""))
        if name == "refused" and str(value)[0].isdigit():
            since = f"trl>={value}"
        if since is not None:
            wanted = Requirement(since)
            if not wanted.specifier.contains(Version(metadata.version(wanted.name)), prereleases=True):
                return False
        if name in AXES or name in self.axes:
            return True
        described = {
            each.name: str(each.metadata.get("help", "")) for each in dataclasses.fields(self.config_class(trl))
        }
        if name in self.choices and isinstance(value, str):
            documented = described.get(name, "") + "".join(str(each.__doc__) for each in self.config_class(trl).__mro__)
            return name in described and re.search(f"['\"`]{re.escape(value)}['\"`]", documented) is not None
        return name in described

    @staticmethod
    def words_argument(trainer_class: type) -> str:
        """The argument that takes the tokenizer, of a class that may pass on all that it is given."""
        taken = [
            set(inspect.signature(vars(each)["__init__"]).parameters)
            for each in trainer_class.__mro__
            if "__init__" in vars(each) and each is not object
        ]
        return next(name for each in taken if (name := name_in(each, "processing_class")) is not None)

    def known_part(self, trl: Any, setting: Mapping[str, Any]) -> dict[str, Any]:
        """What of a setting this release knows."""
        return {name: value for name, value in setting.items() if self.is_known(trl, name, value)}

    def config_class(self, trl: Any) -> Any:
        return exported(trl, self.names[1])

    def config(self, trl: Any, setting: Mapping[str, Any]) -> Any:
        """The config of a setting; fields that this release does not know are left out; the text ``None`` is None."""
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
        values |= liger.fields(setting, {each.name for each in dataclasses.fields(self.config_class(trl))})
        given = {name: value for name, value in setting.items() if name not in AXES and name not in self.axes}
        values |= {name: None if value == "None" else value for name, value in given.items()}
        return self.config_class(trl)(**self.known_part(trl, values))
