"""Cure of logits that a trainer computes by itself, and otherwise than the model.

Issues: ``sft-logits``, ``dpo-logits``, ``kto-logits``, ``grpo-logits``, ``rloo-logits``; of heads that it cannot read
``sft-tied-tokens``, ``dpo-tied-tokens``, ``kto-tied-tokens``, ``grpo-tied-tokens``, ``rloo-tied-tokens``; and of
those that FSDP shards by themselves ``sft-saved-head``, ``dpo-saved-head``, ``grpo-saved-head``.

TRL gives models a fused head: it multiplies the last hidden state by the output head's weight, part by part, adds a
bias, and applies a scale and a bound that it knows by the names of their settings. A model that does anything else, by
a layer before its head or with a setting of another name, gets other logits than its own. A head whose weight is not at
hand as a matrix ends the training: one of PEFT's with rows of its own, or one that is a unit of FSDP1's by itself. And
one that is a unit of FSDP2's by itself, as of ``modules_to_save``, gets a gradient in which each part is one rank's.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import modules_held
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced_in
from pytest_trlcompat.trainers.curing.upstream import class_uses, points_of

if TYPE_CHECKING:
    import torch

__all__ = ["OwnLogitsMixin"]

_HEAD = "add_fused_lm_head"
_STATE = "_trlcompat_own_logits"


class OwnLogitsMixin(Cure):
    """Lets a trainer take the logits of a model's own forward pass where TRL's fused head gives others.

    Of a model whose forward pass is seen to be the output head alone nothing is changed. Of any other the first batch
    is computed both ways, without dropout; where log-probabilities are the same but for rounding the fused head stays.
    Otherwise the model's own logits are used from then on: they are held as a whole, as without a fused head. They are,
    too, where the output head has no matrix that could be read, or is a trained unit of FSDP's by itself.
    """

    _kinds: ClassVar = {
        "trainer": ("AbsolutePositionsMixin", "its __init__ calls this one's"),
        "grpo": ("AbsolutePositionsMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.ADD_FUSED_HEAD,
        PatchPoint("trl.trainer.utils:FusedCausalLMOutput", ">=1.15"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not class_uses(type(self), _HEAD):
            super().__init__(*args, **kwargs)
            return
        points = points_of(type(self), patch_points.ADD_FUSED_HEAD)
        with replaced_in(points, _checking, OwnLogitsMixin.__name__):
            super().__init__(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not class_uses(trainer_class, _HEAD):
            return Activity(False, "logits are the model's own")
        if trainer is None:
            return Activity(None, "depends on the model: its logits may be more than the output head")
        states = [vars(module)[_STATE] for module in modules_held(trainer) if _STATE in vars(module)]
        if any(state.is_unread for state in states):
            return Activity(
                True, "the output head's weight is none that TRL's fused head could use without a call of the head"
            )
        if any(state.differs for state in states):
            return Activity(True, "the model's logits are others than those of TRL's fused head")
        if any(state.differs is None for state in states):
            return Activity(None, "seen at the first batch: the model's logits are more than the output head")
        return Activity(False, "TRL's fused head gives the model's own logits")


class _State:
    """What is known of a model.

    Attributes:
        differs: whether its logits are others than the fused head's; ``None`` before the first batch.
        is_unread: whether its head's weight could not be read, in a forward pass so far.
    """

    def __init__(self, differs: bool | None) -> None:
        self.differs = differs
        self.is_unread = False


def _checking(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def add_fused_lm_head(
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
        **more: Any,
    ) -> None:
        unfused = model.forward
        upstream(model, temperature, cast_lm_head_to_fp32, outputs, **more)
        # RoBERTa's ``lm_head`` has layers, and its output embeddings are the last of them.
        is_plain = _is_head_alone(type(model)) and getattr(model, "lm_head", None) is model.get_output_embeddings()
        fused, state = model.forward, _State(False if is_plain else None)
        setattr(model, _STATE, state)

        @_with_signature_of(type(model).forward)
        def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            if fused_lm_head and not _is_at_hand(self.get_output_embeddings()):
                state.is_unread = True
                return _from_logits(unfused, temperature, cast_lm_head_to_fp32, outputs, args, kwargs)
            if not fused_lm_head or state.differs is False:
                return fused(*args, fused_lm_head=fused_lm_head, **kwargs)
            if state.differs is None:
                with _without_dropout(self):
                    both = [
                        fused(*args, fused_lm_head=True, **kwargs).log_probs,
                        _from_logits(unfused, temperature, cast_lm_head_to_fp32, outputs, args, kwargs).log_probs,
                    ]
                state.differs = not _same(*both)
                return self.forward(*args, fused_lm_head=True, **kwargs)
            return _from_logits(unfused, temperature, cast_lm_head_to_fp32, outputs, args, kwargs)

        model.forward = types.MethodType(forward, model)

    return add_fused_lm_head


def _with_signature_of(function: Any) -> Callable[[Any], Any]:
    """``generate`` holds what it passes against the signature of a model's forward pass."""

    def with_signature(forward: Any) -> Any:
        forward.__signature__ = inspect.signature(function)
        return forward

    return with_signature


def _is_at_hand(head: Any) -> bool:
    """Whether a head has a matrix that the fused one can multiply by, and whose gradient is then right.

    What ZeRO-3 has of a parameter TRL gathers. Of a head that is a unit of FSDP2's by itself it gathers shards, too,
    but takes each rank's gradient for that of all: see ``full_tensor`` of PyTorch's ``DTensor``.
    """
    weight: Any = getattr(head, "weight", None)
    if hasattr(weight, "full_tensor") and weight.requires_grad:
        return False
    return hasattr(head, "bias") and (hasattr(weight, "ds_id") or getattr(weight, "ndim", 0) == 2)


@contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _same(fused: torch.Tensor, unfused: torch.Tensor) -> bool:
    """But for rounding of logits, in the precision that the model computes in, or in that of an autocast."""
    import torch

    kind = (
        torch.get_autocast_dtype(unfused.device.type)
        if torch.is_autocast_enabled(unfused.device.type)
        else unfused.dtype
    )
    allowed = 4 * torch.finfo(kind).eps * max(1.0, float(unfused.abs().max()))
    return float((fused - unfused).abs().max()) <= allowed


def _from_logits(
    forward: Callable[..., Any],
    temperature: float,
    cast_to_fp32: bool,
    outputs: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What the fused head returns, of the logits of the model's own forward pass."""
    import torch

    inputs = dict(kwargs)
    labels, shifted, count = (inputs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
    output = forward(*args, **{**inputs, "use_cache": False})
    logits = output.logits if shifted is not None else output.logits[:, :-1]
    labels = labels[:, 1:] if shifted is None else shifted
    labels = labels.to(logits.device)
    mask = labels != -100
    logits = (logits.float() if cast_to_fp32 or logits.dtype is not torch.float64 else logits) / temperature
    # -100 is no place in the vocabulary; what is gathered there is masked below.
    targets = labels.clamp(min=0)[..., None]
    logps = logits.log_softmax(-1)
    values: dict[str, Callable[[], torch.Tensor]] = {
        "log_probs": lambda: logps.gather(-1, targets).squeeze(-1),
        "entropy": lambda: -(logps.exp() * logps).sum(-1),
        "log_sum_sq_probs": lambda: (2 * logps.detach()).logsumexp(-1),
        "mean_logits": lambda: logits.detach().mean(-1),
        "is_top1": lambda: logits.detach().argmax(-1) == targets.squeeze(-1),
    }
    results = {
        name: value().masked_fill(~mask, 0) for name, value in values.items() if name in outputs or name == "log_probs"
    }
    loss = -results["log_probs"].sum() / (mask.sum().clamp(min=1) if count is None else count)
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is not None:
        config = forward.__self__.config.get_text_config()  # type: ignore[attr-defined]
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    kind = import_module("trl.trainer.utils").FusedCausalLMOutput
    return kind(loss=loss, label_mask=mask, aux_loss=aux_loss, **results)


def _is_head_alone(model_class: type) -> bool:
    """Whether the logits of a forward pass are seen to be the output head of a hidden state, and nothing else.

    Where its source cannot be read, they are not.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(model_class.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return False
    assigned = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if any(isinstance(name, ast.Name) and name.id == "logits" for name in ast.walk(target))
    ]
    if (
        len(assigned) != 1
        or not isinstance(assigned[0], ast.Call)
        or len(assigned[0].args) != 1
        or assigned[0].keywords
    ):
        return False
    called, (hidden,) = assigned[0].func, assigned[0].args
    return (
        isinstance(called, ast.Attribute)
        and called.attr == "lm_head"
        and isinstance(called.value, ast.Name)
        and isinstance(hidden.value if isinstance(hidden, ast.Subscript) else hidden, ast.Name)
    )
