"""The cures that depend on a model: of absolute positions, and of a class whose name hides what its loss does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.conformance.architectures import architecture
from pytest_trlcompat.trainers.logprobs.absolute_positions import AbsolutePositionsMixin, _has_table
from pytest_trlcompat.trainers.loss.shifted_count import ShiftedCountMixin, _shifts_labels

ALONE = torch.tensor([[5, 6, 7]])
PADDED, MASK = torch.tensor([[0, 0, 5, 6, 7], [5, 6, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


class Holds:
    """A trainer, for what the cures look at: a model, and one to compare with."""

    def __init__(self, model: Any, compared: Any = None) -> None:
        self.model, self.ref_model = model, compared


def curing(*models: Any) -> Any:
    mine: Any = type("Mine", (AbsolutePositionsMixin, Holds), {})
    return mine(*models)


def gpt2() -> Any:
    return architecture("gpt2", tiny.qwen2())


def test_padding_in_front_is_not_counted_among_absolute_positions() -> None:
    policy, compared = gpt2(), gpt2()
    right = policy(input_ids=ALONE, attention_mask=torch.ones_like(ALONE)).logits[0]
    before = policy(input_ids=PADDED, attention_mask=MASK).logits
    assert not torch.allclose(before[0, 2:], right, atol=0.1)
    trainer = curing(policy, compared)
    for model in (policy, compared):
        after = model(input_ids=PADDED, attention_mask=MASK).logits
        assert torch.allclose(after[0, 2:], right, atol=1e-5)
        assert torch.equal(after[1], before[1])
    assert AbsolutePositionsMixin._activity(type(trainer), trainer).active is True


def test_positions_that_are_given_are_kept() -> None:
    policy = gpt2()
    places = torch.arange(5)[None].expand(2, 5)
    before = policy(input_ids=PADDED, attention_mask=MASK, position_ids=places).logits
    drawn = policy.generate(input_ids=PADDED, attention_mask=MASK, max_new_tokens=3, do_sample=False)
    curing(policy)
    assert torch.equal(policy(input_ids=PADDED, attention_mask=MASK, position_ids=places).logits, before)
    assert torch.equal(policy.generate(input_ids=PADDED, attention_mask=MASK, max_new_tokens=3, do_sample=False), drawn)


def test_a_model_with_relative_positions_is_left_as_it_is() -> None:
    policy = tiny.qwen2().model
    trainer = curing(policy)
    assert not policy._forward_pre_hooks
    assert AbsolutePositionsMixin._activity(type(trainer), trainer).active is False
    assert AbsolutePositionsMixin._activity(type(trainer), None).active is None


def test_a_vocabulary_as_long_as_the_positions_is_no_table_of_them() -> None:
    model = tiny.qwen2().model
    model.config.max_position_embeddings = model.config.vocab_size
    assert not _has_table(model)
    assert _has_table(gpt2())


@pytest.mark.skipif(
    not stack.satisfied({"transformers": ">=5.10.1"}, stack.installed()), reason="until then all labels are counted"
)
def test_labels_are_counted_as_the_loss_of_a_model_shifts_them() -> None:
    class Upstream:
        def __init__(self, model: Any, knows: bool) -> None:
            self.model, self._loss_shifts_labels = model, knows

    mine: Any = type("Mine", (ShiftedCountMixin, Upstream), {})
    for model, knows, active in ((gpt2(), False, True), (tiny.qwen2().model, True, False)):
        trainer = mine(model, knows)
        assert trainer._loss_shifts_labels is True
        assert ShiftedCountMixin._activity(mine, trainer).active is active
    other = gpt2()
    other.loss_function = len
    assert mine(other, False)._loss_shifts_labels is False
    assert not _shifts_labels(SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True)))
