"""Cure of ``grpo-logits-to-keep``, ``grpo-prompt-mask`` and ``grpo-temperature``: right and short log-probabilities.

- ``grpo-logits-to-keep``: GRPO needs the logits of the last K positions alone, of shape ``(B, K, V)`` instead of
  ``(B, S, V)``. Transformers has had two names for the keyword of that; a release that does not know a name mostly
  ignores it. TRL then reads the wrong positions and trains on, or the right ones, out of full logits.
- ``grpo-prompt-mask``: padded prompts are masked.
- ``grpo-temperature``: logits are divided by the temperature at which tokens were sampled.
- ``grpo-bf16-logprobs``: the log-softmax is taken in float32.

Signatures mislead here: a name can be taken by ``**kwargs`` and ignored, or be missing and honoured by a decorator. So
the model itself is asked, once, with two tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import beneath_compile

__all__ = [
    "KEYWORDS",
    "LogitsShapeError",
    "LogitsToKeepMixin",
    "completion_logits",
    "dropout_off",
    "logits_keyword",
    "per_token_logps",
]

KEYWORDS = ("logits_to_keep", "num_logits_to_keep")
"""What Transformers calls, or called, the number of last positions to compute logits for."""

_answers: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


class LogitsShapeError(RuntimeError):
    """A model returned logits in which the completion cannot be found."""


def logits_keyword(model: nn.Module, *, device: torch.device | str | None = None) -> str | None:
    """Find out which keyword really shortens the logits of ``model``, by asking it.

    Asking is a forward of two tokens, without gradients and with dropout off, for at most two keywords; the answer is
    remembered for as long as the model lives. The forward of a sharded model (FSDP, ZeRO-3) is collective: every rank
    must ask at the same point.

    Args:
        model: a causal language model, wrapped or not.
        device: of the tokens; by default that of the model's first parameter.

    Returns:
        One of :data:`KEYWORDS`, or ``None`` when the model returns logits for all positions with either.
    """
    if model not in _answers:
        # Two tokens, since of one the short logits and the full ones have the same shape.
        ids = torch.zeros((1, 2), dtype=torch.long, device=device or next(model.parameters()).device)
        _answers[model] = next((keyword for keyword in KEYWORDS if _honours(model, keyword, ids)), None)
    return _answers[model]


def completion_logits(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **inputs: Any
) -> Tensor:
    """Logits that predict the last ``logits_to_keep`` tokens, computed for no other position where the model can.

    Args:
        model: a causal language model, wrapped or not.
        input_ids: ``(B, S)``.
        attention_mask: ``(B, S)``.
        logits_to_keep: K, with ``K < S``.
        inputs: what else the model takes, such as ``pixel_values``.

    Returns:
        ``(B, K, V)``; position ``k`` predicts ``input_ids[:, S - K + k]``.

    Raises:
        LogitsShapeError: the model returned fewer than K + 1 positions, or something that is not ``(B, L, V)``.
    """
    # One more, because the logits at the last position predict a token beyond the sequence.
    length = logits_to_keep + 1
    keyword = logits_keyword(model, device=input_ids.device)
    keywords = {} if keyword is None else {keyword: length}
    logits = model(input_ids=input_ids, attention_mask=attention_mask, **inputs, **keywords).logits
    return _last_positions(logits, input_ids, length)[:, :-1]


def per_token_logps(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *,
    temperature: float = 1.0,
    batch_size: int | None = None,
    **inputs: Any,
) -> Tensor:
    """Log-probabilities of the last ``logits_to_keep`` tokens under the policy that sampled at ``temperature``.

    Args:
        model: a causal language model, wrapped or not.
        input_ids: ``(B, S)``.
        attention_mask: ``(B, S)``.
        logits_to_keep: K, with ``K < S``.
        temperature: of sampling; logits are divided by it, as TRL does from 0.16.0 on.
        batch_size: rows per forward; by default all at once.
        inputs: what else the model takes, such as ``pixel_values``; tensors of B rows are split as the tokens are.

    Returns:
        ``(B, K)``, in float32 at least: it is computed so, in whatever dtype the model returns its logits.

    Raises:
        LogitsShapeError: see :func:`completion_logits`.
        CureError: rows are to be split, and one of ``inputs`` has other rows than there are sequences.
    """
    step = batch_size or len(input_ids)
    if step < len(input_ids):
        _can_be_split(inputs, len(input_ids))
    parts = []
    for start in range(0, len(input_ids), step):
        chunk = slice(start, start + step)
        more = inputs if step >= len(input_ids) else _rows(inputs, chunk)
        logits = completion_logits(model, input_ids[chunk], attention_mask[chunk], logits_to_keep, **more)
        parts.append(_selected_log_softmax(logits, input_ids[chunk, -logits_to_keep:], temperature))
    return torch.cat(parts)


def _rows(inputs: Mapping[str, Any], chunk: slice) -> dict[str, Any]:
    return {name: None if value is None else value[chunk] for name, value in inputs.items()}


def _can_be_split(inputs: Mapping[str, Any], rows: int) -> None:
    """Refuse inputs of which nobody here knows which rows belong to which sequence, such as patches of images."""
    for name, value in inputs.items():
        if value is not None and not (isinstance(value, Tensor) and value.dim() and len(value) == rows):
            description = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise CureError(
                "LogitsToKeepMixin",
                expected=f"{rows} rows of {name}, to split them as the sequences are",
                seen=f"it has {description}",
                packages=("trl", "transformers"),
                remedy="Give no batch_size, so that all sequences are computed at once",
            )


class LogitsToKeepMixin(Cure):
    """Gives a subclass of ``trl.GRPOTrainer`` right and short log-probabilities.

    Where TRL's own method gives them, with a model that honours ``logits_to_keep``, that runs, and its numbers stay
    bitwise the same. It knows by the methods that TRL has and by asking the model.

    Log-probabilities are those of the policy that the tokens were sampled from: logits are divided by
    ``args.temperature``, and padded prompts are masked.
    """

    _kinds: ClassVar = {
        "grpo": ("PlainLogProbsMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.PER_TOKEN_LOGPS,
        patch_points.COMPUTE_LOSS,
        patch_points.trainer_method("_prepare_input"),
    )
    args: Any
    accelerator: Any
    _prompt_mask: Tensor | None = None
    _awaits_prompt: bool = False

    def _get_per_token_logps(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        # The method of trl 0.15.0 to 0.19.1; it takes a batch size from 0.17.0 on.
        upstream: Any = super()
        keyword = logits_keyword(model, device=input_ids.device)
        splits = batch_size is None or _takes_batch_size(upstream._get_per_token_logps)
        if keyword == "logits_to_keep" and self._upstream_divides_by_temperature() and splits:
            more = kwargs if batch_size is None else {"batch_size": batch_size, **kwargs}
            return upstream._get_per_token_logps(model, input_ids, attention_mask, logits_to_keep, **more)
        return per_token_logps(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            temperature=self.args.temperature,
            batch_size=batch_size,
            **kwargs,
        )

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if _has_logps_method(upstream):
            return upstream.compute_loss(model, inputs, *args, **kwargs)
        # trl 0.14.0 computes log-probabilities in a closure, which only the models that it calls can correct.
        self._prompt_mask, self._awaits_prompt = None, True
        models = [model] if self._reference() is None else [model, self._reference()]
        with ExitStack() as stack:
            for called in models:
                # Asked here and not within a hook, where FSDP2 has gathered the parameters and would free them again.
                keyword = logits_keyword(called, device=self.accelerator.device)
                # The mask by a function, since TRL prepares the prompts only within compute_loss.
                calls = _ClosureCalls(keyword, self.args.temperature, lambda: self._prompt_mask)
                stack.enter_context(calls.corrected(called))
            return upstream.compute_loss(model, inputs, *args, **kwargs)

    def _prepare_input(self, data: Any) -> Any:
        # What compute_loss of trl 0.14.0 prepares first are its tokenized prompts.
        upstream: Any = super()
        prepared = upstream._prepare_input(data)
        if self._awaits_prompt and isinstance(prepared, Mapping) and "attention_mask" in prepared:
            self._prompt_mask, self._awaits_prompt = prepared["attention_mask"], False
        return prepared

    def _upstream_divides_by_temperature(self) -> bool:
        # TRL keeps the temperature in an attribute since it divides by it.
        return hasattr(self, "temperature") or self.args.temperature == 1.0

    def _reference(self) -> Any:
        return getattr(self, "ref_model", None)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        upstream: Any = super(LogitsToKeepMixin, trainer_class)
        if not _has_logps_method(upstream):
            return Activity(True, "TRL computes log-probabilities in its loss, without a mask")
        if not hasattr(upstream, "_get_per_token_logps"):
            return Activity(False, "TRL asks the model's forward for its keyword, and divides by the temperature")
        if trainer is None:
            return Activity(None, "by the model and the temperature: TRL knows one keyword alone")
        if not trainer._upstream_divides_by_temperature():
            return Activity(True, "TRL does not divide by the temperature")
        model = next((candidate for candidate in (trainer.model_wrapped, trainer.model) if candidate in _answers), None)
        if model is None:
            return Activity(None, "the model is asked for its keyword at the first loss")
        if _answers[model] == "logits_to_keep":
            return Activity(False, "the model knows the keyword that TRL passes")
        return Activity(True, f"the model's keyword is {_answers[model] or 'not there'}, and TRL passes logits_to_keep")


class _ClosureCalls:
    """Corrects the calls ``model(input_ids, num_logits_to_keep=K + 1)`` that ``compute_loss`` of trl 0.14.0 makes.

    Args:
        keyword: which really shortens the logits, or ``None``.
        temperature: what to divide the logits by.
        prompt_mask: returns the prompts' attention mask, ``(prompts, P)`` or longer, or ``None`` for no padding.
    """

    def __init__(self, keyword: str | None, temperature: float, prompt_mask: Callable[[], Tensor | None]) -> None:
        self.keyword = keyword
        self.temperature = temperature
        self.prompt_mask = prompt_mask
        self._asked: tuple[Tensor, int] | None = None

    @contextmanager
    def corrected(self, model: nn.Module) -> Iterator[None]:
        """Correct the calls of ``model``, wrapped or not, while the context lasts."""
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        after = model.register_forward_hook(self._after)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # Generation calls the same model, but passes its tokens by name.
        if len(args) != 1 or "num_logits_to_keep" not in kwargs:
            return None
        (input_ids,) = args
        length = kwargs["num_logits_to_keep"]
        others = {name: value for name, value in kwargs.items() if name != "num_logits_to_keep"}
        if self.keyword is not None:
            others[self.keyword] = length
        self._asked = (input_ids, length)
        mask = _sequence_mask(self.prompt_mask(), input_ids, length - 1)
        return (), {"input_ids": input_ids, "attention_mask": mask, **others}

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        if self._asked is None:
            return None
        (input_ids, length), self._asked = self._asked, None
        output.logits = _precise(_last_positions(output.logits, input_ids, length)) / self.temperature
        return output


def _takes_batch_size(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(
        parameter.name == "batch_size" or parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters
    )


def _has_logps_method(upstream: Any) -> bool:
    return hasattr(upstream, "_get_per_token_logps") or hasattr(upstream, "_get_per_token_logps_and_entropies")


def _honours(model: nn.Module, keyword: str, ids: Tensor) -> bool:
    try:
        with torch.no_grad(), dropout_off(model):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **{keyword: 1}).logits
    except TypeError as error:
        if keyword not in str(error):
            raise
        if isinstance(beneath_compile(model), FullyShardedDataParallel):
            # The error has left FSDP1's root in the midst of a forward pass; a whole one ends it.
            with torch.no_grad(), dropout_off(model):
                model(input_ids=ids, attention_mask=torch.ones_like(ids))
        return False
    return bool(logits.size(1) == 1)


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode for a while, so that a forward draws no random numbers."""
    # One by one: `train()` would also switch modules that somebody keeps in eval mode.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _last_positions(logits: Tensor, input_ids: Tensor, length: int) -> Tensor:
    if logits.dim() != 3 or logits.size(0) != input_ids.size(0) or logits.size(1) < length:
        raise LogitsShapeError(
            f"asked for the logits of the last {length} positions of {tuple(input_ids.shape)} tokens, got logits of "
            f"shape {tuple(logits.shape)} instead of ({input_ids.size(0)}, {length} or more, vocabulary); "
            "is this a causal language model, and does something in its forward cut the logits as well?"
        )
    return logits[:, -length:]


def _sequence_mask(prompt_mask: Tensor | None, input_ids: Tensor, completion_length: int) -> Tensor:
    """Attention mask ``(B, S)`` of prompts, each repeated for its completions and cut on the left, and completions.

    Tokens after a completion's end stay unmasked: no earlier position attends to them, and the loss leaves them out.
    """
    mask = torch.ones_like(input_ids)
    if prompt_mask is not None:
        prompt_length = input_ids.size(1) - completion_length
        repeats = input_ids.size(0) // prompt_mask.size(0)
        mask[:, :prompt_length] = prompt_mask[:, -prompt_length:].repeat_interleave(repeats, dim=0)
    return mask


def _selected_log_softmax(logits: Tensor, index: Tensor, temperature: float) -> Tensor:
    """``log_softmax(logits / temperature)`` at ``index``: ``(B, K, V)`` and ``(B, K)`` to ``(B, K)``.

    In float32 at least, row by row to save memory.
    """
    rows = [
        (_precise(row) / temperature).log_softmax(dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        for row, ids in zip(logits, index, strict=True)
    ]
    return torch.stack(rows)


def _precise(logits: Tensor) -> Tensor:
    """In float32 where they are in less: of a log-probability of -4 bfloat16 keeps steps of 1/64."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
