"""Does a model really return only the last logits, and are the log-probabilities computed from them correct?

Catches trl 2770: Transformers accepts and ignores a keyword, so that a trainer reads wrong positions, or computes all
logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_trlcompat.checks._models import unwrapped
from pytest_trlcompat.checks._ranks import CheckError, OddError, together
from pytest_trlcompat.trainers.logprobs.logits_to_keep import KEYWORDS, dropout_off, logits_keyword

__all__ = ["LogitsCalls", "check_logits"]

_ADVICE = (
    "Transformers calls it num_logits_to_keep from 4.45 to 4.51 and logits_to_keep from 4.49 on, and ignores the other "
    "name; pytest_trlcompat.trainers.logits_keyword(model) returns the one that works"
)


def check_logits(
    model: nn.Module,
    logits_to_keep: int,
    *,
    keyword: str | None = None,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """A model returns the logits of the last K positions when requested, and they are correct.

    Runs two forward passes, without gradients and in eval mode; collective with a sharded model (FSDP, ZeRO-3).

    Args:
        model: a causal language model, wrapped or not.
        logits_to_keep: K, at least 2 and less than S.
        keyword: the keyword that the trainer uses; by default the one that works, if any.
        input_ids: ``(B, S)``; by default two rows of K + 4 positions with the first token ids.
        attention_mask: ``(B, S)``; by default all ones.
        tolerance: for the log-probabilities; by default two units in the last place of the largest logit, in the
            precision in which logits were computed, and at least 1e-4.

    Returns:
        ``keyword``, ``length`` (of the returned logits), ``max_abs_error`` and ``tolerance``.

    Raises:
        CheckError: on every rank: the logits have another length, or their log-probabilities differ.
    """
    device = next(model.parameters()).device
    if input_ids is None:
        input_ids = _default_ids(model, logits_to_keep + 4).to(device)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    chosen = keyword or logits_keyword(model, device=input_ids.device)
    with together("the length of logits"):
        if chosen is None:
            raise CheckError(
                f"expected the logits of {logits_to_keep} positions, but {_name(model)} supports none of "
                f"{', '.join(KEYWORDS)}: it always computes all of them"
            )
    short, full = _short_and_full(model, input_ids, mask, chosen, logits_to_keep)
    off, allowed = _compare(short, full, input_ids, tolerance)
    with together("log-probabilities"):
        if not off <= allowed:
            raise CheckError(
                f"log-probabilities computed from the {logits_to_keep} logits that {_name(model)} returns for {chosen} "
                f"are off by {off:.3g} from those of a full forward; rounding explains at most {allowed:.3g}. Do they "
                "belong to other positions?"
            )
    return {"keyword": chosen, "length": short.size(1), "max_abs_error": off, "tolerance": allowed}


def _short_and_full(
    model: nn.Module, input_ids: Tensor, mask: Tensor, keyword: str, logits_to_keep: int
) -> tuple[Tensor, Tensor]:
    """The logits with and without ``keyword``.

    Raises:
        CheckError: on every rank: the model rejects the keyword, or returns another number of logits.
    """
    with torch.no_grad(), dropout_off(model):
        full, rejected = _forward(model, input_ids, mask, {}), None
        try:
            short = _forward(model, input_ids, mask, {keyword: logits_to_keep})
        except TypeError as error:
            short, rejected = full, error
    with together("the length of logits"):
        if rejected is not None:
            raise CheckError(f"called {_name(model)} with {keyword}={logits_to_keep}, but: {rejected}. {_ADVICE}")
        _right_length(model, keyword, logits_to_keep, input_ids.size(1), short.size(1))
    return short, full


class LogitsCalls:
    """Records which forward passes of a model request only the last logits, and what they return.

    Args:
        model: wrapped or not; its outermost Transformers modules are observed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls = 0
        """Forward passes that requested only the last logits."""
        self._wrong: _Call | None = None
        self._request: tuple[str, int] | None = None
        watched = _language_models(model)
        self._handles: list[Any] = [
            module.register_forward_pre_hook(self._before, with_kwargs=True) for module in watched
        ]
        self._handles += [module.register_forward_hook(self._after) for module in watched]

    def _before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        requests = [(keyword, kwargs[keyword]) for keyword in KEYWORDS if keyword in kwargs]
        self._request = requests[0] if requests and isinstance(requests[0][1], int) and requests[0][1] > 0 else None

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        request, self._request = self._request, None
        logits = getattr(output, "logits", None)
        if request is None or not isinstance(logits, Tensor) or logits.dim() != 3:
            return
        self.calls += 1
        keyword, length = request
        # A sequence shorter than the request is returned whole.
        if logits.size(1) > length and self._wrong is None:
            self._wrong = _Call(_name(model), keyword, length, logits.size(1))

    def close(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check(self) -> int:
        """Check the recorded calls; collective if there are several ranks.

        Returns:
            Number of calls that requested only the last logits. If it is 0, the model was not judged.

        Raises:
            OddError: on every rank: a call got more logits than requested. A trainer that trims them trains correctly,
                at the cost of memory and time.
        """
        with together("the length of logits"):
            if self._wrong is not None:
                call = self._wrong
                raise OddError(_wrong_length(call.model, call.keyword, call.requested, call.returned))
        return self.calls


@dataclass(frozen=True)
class _Call:
    model: str
    keyword: str
    requested: int
    returned: int


def _wrong_length(model: str, keyword: str, requested: int, returned: int) -> str:
    return (
        f"requested from {model} the logits of the last {requested} positions by {keyword}={requested}, "
        f"but it returned {returned}: it ignores the keyword, so all logits are computed, and code that does not "
        "trim them reads wrong positions. "
        f"{_ADVICE}"
    )


def _right_length(model: nn.Module, keyword: str, requested: int, sequence: int, returned: int) -> None:
    if returned > requested:
        raise CheckError(_wrong_length(_name(model), keyword, requested, returned))
    if returned != min(requested, sequence):
        raise CheckError(
            f"called {_name(model)} with {keyword}={requested} and {sequence} positions, but it returned {returned}"
        )


def _default_ids(model: nn.Module, length: int) -> Tensor:
    vocabulary = int(unwrapped(model).config.vocab_size)
    return (torch.arange(2 * length) % vocabulary).reshape(2, length)


def _forward(model: nn.Module, input_ids: Tensor, mask: Tensor, keywords: dict[str, int]) -> Tensor:
    logits: Tensor = model(input_ids=input_ids, attention_mask=mask, **keywords).logits
    return logits


def _compare(short: Tensor, full: Tensor, input_ids: Tensor, tolerance: float | None) -> tuple[float, float]:
    """The largest error of log-probabilities, and the largest that rounding explains."""
    length = short.size(1)
    # The token that the last position predicts is unknown.
    ids = input_ids[:, -length + 1 :].unsqueeze(-1)
    logps = [logits[:, -length:-1].float().log_softmax(-1).gather(-1, ids) for logits in (short, full)]
    error = (logps[0] - logps[1]).abs().max().item()
    if tolerance is not None:
        return error, tolerance
    largest = max(1.0, full.float().abs().max().item())
    # One unit in the last place in the logit, and one in the logarithm of the sum.
    return error, max(1e-4, 2 * _precision(full) * largest)


def _precision(logits: Tensor) -> float:
    """Machine epsilon of the type in which logits were computed, even if they were cast afterwards."""
    for narrow in (torch.bfloat16, torch.float16):
        if bool((logits.to(narrow).to(logits.dtype) == logits).all()):
            return float(torch.finfo(narrow).eps)
    if logits.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        # TF32 has a mantissa of 10 bits.
        return 2.0**-10
    return float(torch.finfo(logits.dtype).eps)


def _language_models(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of Transformers within ``model`` that have an output head: two for policy and value."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model] if model.get_output_embeddings() is not None else []
    return [language_model for child in model.children() for language_model in _language_models(child)]


def _name(model: nn.Module) -> str:
    # FSDP2 puts this before the name of the class.
    return type(unwrapped(model)).__name__.removeprefix("FSDP")
