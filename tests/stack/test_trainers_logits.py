"""The cure of ``grpo-logits-to-keep``: which keyword it chooses, what it computes with it, and when it keeps still."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import stack, tiny

torch = pytest.importorskip("torch")
Module: Any = torch.nn.Module

from pytest_trlcompat.trainers.curing.errors import CureError  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.logprobs.logits_to_keep import (  # noqa: E402 - needs torch
    LogitsShapeError,
    LogitsToKeepMixin,
    completion_logits,
    logits_keyword,
    per_token_logps,
)

VOCABULARY, WIDTH = 11, 6
ROWS, PROMPT, COMPLETION = 4, 5, 3
LENGTH = PROMPT + COMPLETION


class Fake(Module):
    """A causal language model of one layer; subclasses decide what their forward makes of which keyword."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.dropout = torch.nn.Dropout(0.5)
        torch.nn.init.normal_(self.head.weight, generator=generator)
        self.calls: list[dict[str, Any]] = []
        self.head_lengths: list[int] = []

    def compute(self, input_ids: Any, attention_mask: Any, keep: int, **seen: Any) -> Any:
        self.calls.append({"shape": tuple(input_ids.shape), "keep": keep, "training": self.dropout.training, **seen})
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        embedded = self.embedding[input_ids] * mask.unsqueeze(-1)
        hidden = self.dropout(embedded.cumsum(1) / mask.cumsum(1).clamp(min=1).unsqueeze(-1))
        kept = hidden[:, -keep:] if keep else hidden
        self.head_lengths.append(kept.size(1))
        return SimpleNamespace(logits=self.head(kept))


class HonoursNew(Fake):
    def forward(self, input_ids: Any, attention_mask: Any = None, logits_to_keep: int = 0) -> Any:
        return self.compute(input_ids, attention_mask, logits_to_keep)


class HonoursOldSwallowsNew(Fake):
    """Qwen2 in Transformers 4.46 to 4.48."""

    def forward(self, input_ids: Any, attention_mask: Any = None, num_logits_to_keep: int = 0, **kwargs: Any) -> Any:
        return self.compute(input_ids, attention_mask, num_logits_to_keep)


class HonoursOldRefusesNew(Fake):
    """Qwen2 in Transformers 4.45."""

    def forward(self, input_ids: Any, attention_mask: Any = None, num_logits_to_keep: int = 0) -> Any:
        return self.compute(input_ids, attention_mask, num_logits_to_keep)


class HonoursNewSwallowsOld(Fake):
    """Qwen2 from Transformers 4.52 on."""

    def forward(self, input_ids: Any, attention_mask: Any = None, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        return self.compute(input_ids, attention_mask, logits_to_keep)


class SwallowsBoth(Fake):
    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return self.compute(input_ids, attention_mask, 0)


class NamesAndIgnores(Fake):
    def forward(self, input_ids: Any, attention_mask: Any = None, logits_to_keep: int = 0) -> Any:
        return self.compute(input_ids, attention_mask, 0)


class RefusesBoth(Fake):
    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return self.compute(input_ids, attention_mask, 0)


def renames_silently(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As ``deprecate_kwarg`` does: the signature shows one name, and another works."""

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "num_logits_to_keep" in kwargs:
            kwargs["keep"] = kwargs.pop("num_logits_to_keep")
        return forward(*args, **kwargs)

    return renamed


class HonoursOldByDecorator(Fake):
    @renames_silently
    def forward(self, input_ids: Any, attention_mask: Any = None, keep: int = 0) -> Any:
        return self.compute(input_ids, attention_mask, keep)


ANSWERS = {
    HonoursNew: "logits_to_keep",
    HonoursNewSwallowsOld: "logits_to_keep",
    HonoursOldSwallowsNew: "num_logits_to_keep",
    HonoursOldRefusesNew: "num_logits_to_keep",
    HonoursOldByDecorator: "num_logits_to_keep",
    SwallowsBoth: None,
    NamesAndIgnores: None,
    RefusesBoth: None,
}


def batch(padding: int = 0) -> tuple[Any, Any]:
    """Ids and mask ``(ROWS, LENGTH)``; the first row's prompt is padded on the left."""
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :padding] = 0
    mask[0, :padding] = 0
    return ids, mask


def reference_logps(model: Fake, ids: Any, mask: Any, temperature: float) -> Any:
    """Log-probabilities ``(ROWS, COMPLETION)`` from a plain full forward pass."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, PROMPT - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


# ---- asking


@pytest.mark.parametrize(("kind", "keyword"), ANSWERS.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_keyword_that_shortens_is_found(kind: type[Fake], keyword: str | None) -> None:
    assert logits_keyword(kind()) == keyword


def test_a_signature_would_have_misled() -> None:
    assert "logits_to_keep" in inspect.signature(NamesAndIgnores.forward).parameters
    assert "num_logits_to_keep" not in inspect.signature(HonoursOldByDecorator.forward).parameters


def test_a_model_is_asked_once_and_with_two_tokens() -> None:
    model = HonoursOldSwallowsNew()
    assert [logits_keyword(model) for _ in range(3)] == ["num_logits_to_keep"] * 3
    assert [(call["shape"], call["keep"]) for call in model.calls] == [((1, 2), 0), ((1, 2), 1)]


def test_asking_draws_no_random_numbers_and_leaves_modes_as_they_were() -> None:
    model = HonoursNew().train()
    model.head.eval()
    before = torch.get_rng_state()
    logits_keyword(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [call["training"] for call in model.calls] == [False]
    assert (model.training, model.dropout.training, model.head.training) == (True, True, False)


def test_asking_records_no_gradient() -> None:
    model = HonoursNew()
    seen: list[Any] = []
    model.head.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    logits_keyword(model)
    assert seen == [False]


def test_another_type_error_is_not_taken_for_an_answer() -> None:
    class Wrong(Fake):
        def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            raise TypeError("unsupported operand type(s)")

    with pytest.raises(TypeError, match="unsupported operand"):
        logits_keyword(Wrong())


def test_the_installed_transformers_is_asked() -> None:
    model = tiny.qwen2().new_model()
    expected = (
        "num_logits_to_keep" if stack.satisfied({"transformers": "<4.49"}, stack.installed()) else "logits_to_keep"
    )
    assert logits_keyword(model) == expected


# ---- computing


@pytest.mark.parametrize("kind", ANSWERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_log_probabilities_are_those_of_a_full_forward(
    kind: type[Fake], temperature: float, batch_size: int | None
) -> None:
    model = kind().eval()
    ids, mask = batch(padding=2)
    found = per_token_logps(model, ids, mask, COMPLETION, temperature=temperature, batch_size=batch_size)
    assert found.shape == (ROWS, COMPLETION)
    torch.testing.assert_close(found, reference_logps(model, ids, mask, temperature), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "keyword"), ANSWERS.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_logits_are_as_short_as_the_model_can_make_them(kind: type[Fake], keyword: str | None) -> None:
    model = kind().eval()
    logits = completion_logits(model, *batch(), COMPLETION)
    assert logits.shape == (ROWS, COMPLETION, VOCABULARY)
    assert model.head_lengths[-1] == (LENGTH if keyword is None else COMPLETION + 1)


def test_gradients_are_those_of_a_full_forward() -> None:
    ids, mask = batch(padding=2)
    found, expected = HonoursNew().eval(), HonoursNew().eval()
    per_token_logps(found, ids, mask, COMPLETION, temperature=0.7).sum().backward()
    reference_logps(expected, ids, mask, 0.7).sum().backward()
    assert expected.embedding.grad.abs().max() > 0.1
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-6)


def test_too_few_logits_are_refused() -> None:
    class CutsTooMuch(Fake):
        def forward(self, input_ids: Any, attention_mask: Any = None, logits_to_keep: int = 0) -> Any:
            return self.compute(input_ids, attention_mask, min(logits_to_keep, 2))

    with pytest.raises(LogitsShapeError) as caught:
        completion_logits(CutsTooMuch(), *batch(), COMPLETION)
    assert "the last 4 positions of (4, 8) tokens, got logits of shape (4, 2, 11)" in str(caught.value)


def test_logits_of_another_shape_are_refused() -> None:
    class Flat(HonoursNew):
        def compute(self, input_ids: Any, attention_mask: Any, keep: int, **seen: Any) -> Any:
            return SimpleNamespace(logits=super().compute(input_ids, attention_mask, keep, **seen).logits.flatten(0, 1))

    with pytest.raises(
        LogitsShapeError, match=r"got logits of shape \(32, 11\) instead of \(4, 4 or more, vocabulary\)"
    ):
        completion_logits(Flat(), *batch(), COMPLETION)


# ---- in front of TRL's trainers


class Trl014:
    """The part of trl 0.14.0 that matters: log-probabilities in a closure, no mask, no temperature."""

    def __init__(self, temperature: float, ref_model: Fake | None) -> None:
        self.args = SimpleNamespace(temperature=temperature)
        self.accelerator = SimpleNamespace(device=torch.device("cpu"))
        self.ref_model = ref_model

    def _prepare_input(self, data: Any) -> Any:
        return data

    def compute_loss(self, model: Fake, inputs: Any) -> Any:
        # generation calls the same model, and passes everything by name
        self._prepare_input({"input_ids": inputs["prompts"], "attention_mask": inputs["prompt_mask"]})
        generated = model(
            input_ids=inputs["prompts"], attention_mask=inputs["prompt_mask"], **inputs.get("generate", {})
        )
        self._prepare_input({"input_ids": inputs["ids"], "attention_mask": "that of a reward model"})

        def get_per_token_logps(model: Fake, input_ids: Any, num_logits_to_keep: int) -> Any:
            logits = model(input_ids, num_logits_to_keep=num_logits_to_keep + 1).logits[:, :-1, :]
            rows = zip(logits, input_ids[:, -num_logits_to_keep:], strict=False)  # as lenient as upstream
            return torch.stack([row.log_softmax(-1).gather(1, ids[:, None]).squeeze(1) for row, ids in rows])

        self.generated = generated.logits
        found = [get_per_token_logps(model, inputs["ids"], COMPLETION)]
        if self.ref_model is not None:
            found.append(get_per_token_logps(self.ref_model, inputs["ids"], COMPLETION))
        return found


class Corrected014(LogitsToKeepMixin, Trl014):
    pass


@pytest.mark.parametrize(("kind", "keyword"), ANSWERS.items(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_closure_of_0_14_is_corrected(kind: type[Fake], keyword: str | None) -> None:
    policy, reference = kind().eval(), kind().eval()
    torch.nn.init.ones_(reference.head.weight[:5])
    ids, mask = batch(padding=2)
    # two prompts, each sampled twice
    ids[1, :PROMPT], mask[1, :PROMPT] = ids[0, :PROMPT], mask[0, :PROMPT]
    inputs = {"ids": ids, "prompts": ids[::2, :PROMPT], "prompt_mask": mask[::2, :PROMPT]}
    found = Corrected014(0.7, reference).compute_loss(policy, inputs)
    for model, logps in zip((policy, reference), found, strict=True):
        assert model.head_lengths[-1] == (LENGTH if keyword is None else COMPLETION + 1)
        torch.testing.assert_close(logps, reference_logps(model, ids, mask, 0.7), rtol=0, atol=1e-6)
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


def test_the_closure_of_0_14_is_corrected_without_a_reference_model() -> None:
    model = HonoursNewSwallowsOld().eval()
    ids, mask = batch()
    inputs = {"ids": ids, "prompts": ids[:, :PROMPT], "prompt_mask": mask[:, :PROMPT]}
    (found,) = Corrected014(1.0, None).compute_loss(model, inputs)
    torch.testing.assert_close(found, reference_logps(model, ids, mask, 1.0), rtol=0, atol=1e-6)


def test_generation_of_0_14_is_left_alone() -> None:
    # Transformers 4.45 to 4.48 generate with the same keyword, on the same model, and expect raw logits.
    model = HonoursOldSwallowsNew().eval()
    ids, mask = batch()
    inputs = {"ids": ids, "prompts": ids[:, :PROMPT], "prompt_mask": mask[:, :PROMPT]}
    trainer = Corrected014(0.7, None)
    trainer.compute_loss(model, {**inputs, "generate": {"num_logits_to_keep": 1}})
    raw = model(ids[:, :PROMPT], mask[:, :PROMPT]).logits[:, -1:]
    # Some processors multiply one row otherwise than several; divided by 0.7 it would be off by a tenth and more.
    torch.testing.assert_close(trainer.generated, raw, rtol=0, atol=1e-6)


class Trl015:
    """The part of trl 0.15 that matters: a method, no temperature."""

    def __init__(self, temperature: float) -> None:
        self.args = SimpleNamespace(temperature=temperature)
        self.upstream_calls: list[tuple[Any, ...]] = []

    def _get_per_token_logps(self, *args: Any, **kwargs: Any) -> Any:
        self.upstream_calls.append((args[-1], kwargs))
        return "upstream"

    def compute_loss(self, model: Fake, inputs: Any) -> Any:
        ids, mask = inputs
        return self._get_per_token_logps(model, ids, mask, COMPLETION)


class Trl017(Trl015):
    """The part of trl 0.16 to 0.19 that matters: it divides by the temperature."""

    def __init__(self, temperature: float) -> None:
        super().__init__(temperature)
        self.temperature = temperature


@pytest.mark.parametrize(
    ("release", "kind", "temperature", "upstream_is_right"),
    [
        (Trl015, HonoursNew, 1.0, True),
        (Trl015, HonoursNew, 0.7, False),
        (Trl015, HonoursOldSwallowsNew, 1.0, False),
        (Trl015, SwallowsBoth, 1.0, False),
        (Trl017, HonoursNew, 0.7, True),
        (Trl017, HonoursOldSwallowsNew, 0.7, False),
        (Trl017, RefusesBoth, 0.7, False),
    ],
)
def test_upstream_is_left_alone_where_it_is_right(
    release: type[Trl015], kind: type[Fake], temperature: float, upstream_is_right: bool
) -> None:
    trainer = type("Corrected", (LogitsToKeepMixin, release), {})(temperature)
    model = kind().eval()
    ids, mask = batch(padding=2)
    found = trainer.compute_loss(model, (ids, mask))
    if upstream_is_right:
        assert found == "upstream"
        assert trainer.upstream_calls == [(COMPLETION, {})]
    else:
        assert trainer.upstream_calls == []
        torch.testing.assert_close(found, reference_logps(model, ids, mask, temperature), rtol=0, atol=1e-6)


def test_a_batch_size_reaches_upstream_and_the_cure() -> None:
    trainer: Any = type("Corrected", (LogitsToKeepMixin, Trl017), {})(1.0)
    ids, mask = batch()
    trainer._get_per_token_logps(HonoursNew().eval(), ids, mask, COMPLETION, 2)
    assert trainer.upstream_calls == [(COMPLETION, {"batch_size": 2})]
    model = SwallowsBoth().eval()
    trainer._get_per_token_logps(model, ids, mask, COMPLETION, batch_size=3)
    assert [call["shape"][0] for call in model.calls[-2:]] == [3, 1]


def test_a_release_without_batch_sizes_is_not_given_one() -> None:
    class Trl016(Trl017):
        def _get_per_token_logps(self, model: Any, ids: Any, mask: Any, logits_to_keep: int) -> Any:
            return super()._get_per_token_logps(model, ids, mask, logits_to_keep)

    trainer: Any = type("Corrected", (LogitsToKeepMixin, Trl016), {})(1.0)
    ids, mask = batch()
    model = HonoursNew().eval()
    split = trainer._get_per_token_logps(model, ids, mask, COMPLETION, batch_size=3)
    assert trainer.upstream_calls == []
    assert torch.equal(split, per_token_logps(model, ids, mask, COMPLETION))


class Pictures(SwallowsBoth):
    """Adds a number for each row's pixels to the logits, so that one sees whether they reached it."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, pixel_values: Any = None, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if pixel_values is not None:
            output.logits = output.logits * pixel_values.mean(dim=1)[:, None, None]
        return output


def test_what_else_the_model_takes_reaches_it() -> None:
    trainer: Any = type("Corrected", (LogitsToKeepMixin, Trl017), {})(1.0)
    ids, mask = batch()
    pixels = torch.arange(1.0, 1 + len(ids))[:, None].repeat(1, 6)
    model = Pictures().eval()
    whole = trainer._get_per_token_logps(model, ids, mask, COMPLETION, pixel_values=pixels)
    other = trainer._get_per_token_logps(model, ids, mask, COMPLETION, pixel_values=2 * pixels)
    split = trainer._get_per_token_logps(model, ids, mask, COMPLETION, batch_size=3, pixel_values=pixels)
    assert not torch.equal(whole, other)
    torch.testing.assert_close(split, whole)


def test_what_cannot_be_split_with_the_sequences_is_refused() -> None:
    trainer: Any = type("Corrected", (LogitsToKeepMixin, Trl017), {})(1.0)
    ids, mask = batch()
    with pytest.raises(CureError, match=rf"looked for {len(ids)} rows of pixel_values.*but it has shape \(9, 6\)"):
        trainer._get_per_token_logps(
            Pictures().eval(), ids, mask, COMPLETION, batch_size=3, pixel_values=torch.ones(9, 6)
        )
