"""What the first forwards of a training show: batches, losses, which modules took part, and in which precision.

Listens to the trainer's own ``compute_loss``. PPO has its own loop and calls none, so that only its modules are seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._models import clean_name, is_engine, unwrapped
from pytest_trlcompat.checks._prints import fingerprint_of_batch
from pytest_trlcompat.checks.gradients import Owners

__all__ = ["BATCHES", "Forwards"]

BATCHES = 4
"""How many of the first batches are compared."""
_LEFTOVERS = 16
"""How many gradients are read when a backward begins."""


_SIGNALS = ("labels", "advantages")
"""Parts of batches that say why nothing moves."""


class Forwards:
    """Listens to a trainer until it is closed.

    Args:
        trainer: whose ``compute_loss`` is called for each batch.
        model: as it trains.
        modules: listen to modules, too; not for a compiled model, which would compile again.
        on_first: called once, with the arguments of the first forward of the model in a call of ``compute_loss``.

    Attributes:
        batches: fingerprints of the first :data:`BATCHES` batches of this rank.
        losses: number of losses since :meth:`next_step`.
        informative: whether a batch since then had advantages that differ from zero, or no batch had advantages.
        used: owners (:class:`~pytest_trlcompat.checks.gradients.Owners`) of parameters that took part since then.
        in_eval_mode: whether the model was in eval mode for a loss.
        precisions: types of what linear layers returned.
        reuses_batches: whether batches had advantages: one generation may serve several steps.
        error: the exception with which listening itself failed, which ends it.
        left_over: for each first backward after a step, how many parameters still had a gradient.
    """

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        *,
        modules: bool = True,
        on_first: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> None:
        self.batches: list[int | None] = []
        self.losses = 0
        self.used: set[str] | None = set() if modules else None
        self.in_eval_mode = False
        self.precisions: set[torch.dtype] = set()
        self.left_over: list[int] = []
        self.reuses_batches = False
        self.error: Exception | None = None
        self._model = model
        self._trainer = trainer
        self._on_first = on_first
        self._inside = False
        self._heard = False
        self._stepped = False
        self._with_advantages = False
        # Tensors until somebody asks for them: to read a number makes the host wait for the accelerator.
        self._not_zero: list[Tensor] = []
        self._not_finite: list[Tensor] = []
        self._label: Tensor | None = None
        self._advantage: Tensor | None = None
        self._handles: list[Any] = self._listen(model) if modules else []
        self._replaced = "compute_loss" in vars(trainer)
        self._original = trainer.compute_loss
        self._installed = self._listening()
        trainer.compute_loss = self._installed
        if on_first is not None:
            self._handles.append(model.register_forward_pre_hook(self._first, with_kwargs=True))

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        # Unless somebody else has replaced it since.
        if vars(self._trainer).get("compute_loss") is self._installed:
            if self._replaced:
                self._trainer.compute_loss = self._original
            else:
                del self._trainer.compute_loss  # uncovers the method of the class

    def stepped(self) -> None:
        """The optimizer is about to make a step."""
        self._stepped = True

    def next_step(self) -> None:
        """Forget what holds for one step."""
        self.losses = 0
        self._with_advantages = False
        self._not_zero, self._not_finite = [], []
        if self.used is not None:
            self.used = set()

    @property
    def informative(self) -> bool:
        return not self._with_advantages or any(bool(not_zero) for not_zero in self._not_zero)

    @property
    def counts_a_label(self) -> bool | None:
        """Whether a label of any batch counts (is not -100); ``None`` where no batch had labels."""
        return None if self._label is None else bool(self._label)

    @property
    def has_an_advantage(self) -> bool | None:
        """Whether an advantage of any batch differs from zero; ``None`` where no batch had any."""
        return None if self._advantage is None else bool(self._advantage)

    @property
    def not_finite(self) -> int:
        """Losses since :meth:`next_step` that are NaN or infinite."""
        return sum(bool(not_finite) for not_finite in self._not_finite)

    # ---- what is heard

    def _listening(self) -> Callable[..., Any]:
        """The trainer's ``compute_loss`` with the same signature, which some releases look at."""

        @functools.wraps(self._original)
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            return self._compute_loss(*args, **kwargs)

        return compute_loss

    def _compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation
            return self._original(model, inputs, *args, **kwargs)
        self._hear(self._before, model, inputs)
        self._inside = True
        try:
            result = self._original(model, inputs, *args, **kwargs)
        finally:
            self._inside = False
        self._hear(self._after, result[0] if isinstance(result, tuple) else result)
        return result

    def _hear(self, call: Callable[..., None], *args: Any) -> None:
        """A failure here must not end the training, nor be reported on one rank alone: see :attr:`error`."""
        if self.error is None:
            try:
                call(*args)
            except Exception as error:
                self.error = error

    def _before(self, model: nn.Module, inputs: Any) -> None:
        if not self._heard and self.used is not None:
            # What generated before the first loss does not count.
            self.used = set()
        self._heard = True
        self.losses += 1
        self.in_eval_mode |= not unwrapped(model).training
        if len(self.batches) < BATCHES:
            self.batches.append(fingerprint_of_batch(inputs))
        labels, advantages = (inputs.get(name) if isinstance(inputs, Mapping) else None for name in _SIGNALS)
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            counts = (labels != -100).any()
            self._label = counts if self._label is None else self._label | counts
        if isinstance(advantages, Tensor):
            self._with_advantages = self.reuses_batches = True
            not_zero = (advantages != 0).any()
            self._not_zero.append(not_zero)
            self._advantage = not_zero if self._advantage is None else self._advantage | not_zero

    def _after(self, loss: Any) -> None:
        if not isinstance(loss, Tensor):
            return
        self._not_finite.append((~loss.detach().isfinite()).any())
        if loss.requires_grad and not is_engine(self._model):
            loss.register_hook(self._backward_begins)

    def _backward_begins(self, _: Tensor) -> None:
        self._hear(self._count_left_over)

    def _count_left_over(self) -> None:
        """Count gradients that were not cleared after the step. DeepSpeed keeps its gradients elsewhere."""
        if not self._stepped:
            return
        self._stepped = False
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None][
            :_LEFTOVERS
        ]
        self.left_over.append(sum(bool(gradient.detach().any()) for gradient in gradients))

    def _listen(self, model: nn.Module) -> list[Any]:
        owners = Owners(model)
        handles = []
        for name, module in unwrapped(model).named_modules():
            parameters = module._parameters
            trainable = [
                f"{clean_name(name)}.{parameter_name}"
                for parameter_name, parameter in parameters.items()
                if parameter is not None
            ]
            if trainable and any(
                parameter is not None and parameter.requires_grad for parameter in parameters.values()
            ):
                mark = functools.partial(self._mark, owners.of(trainable[0].removeprefix(".")))
                handles.append(module.register_forward_pre_hook(mark, with_kwargs=True))
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_hook(self._note_precision))
        return handles

    def _mark(self, owner: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._hear(self._mark_used, owner, args, kwargs)

    def _mark_used(self, owner: str, args: Any, kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if (
            self.used is not None
            # Until a loss was heard, everything counts: PPO's loop calls no compute_loss.
            and (self._inside or not self._heard)
            # Experts that no token chose are called with empty tensors.
            and (not tensors or any(tensor.numel() for tensor in tensors))
        ):
            self.used.add(owner)

    def _note_precision(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside and isinstance(output, Tensor):
            self.precisions.add(output.dtype)

    def _first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside and self._on_first is not None:
            call, self._on_first = self._on_first, None
            call(args, kwargs)
