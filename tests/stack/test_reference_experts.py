"""The auxiliary loss of a mixture of experts: by hand, against Transformers' own, and in a step."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from pytest_trlcompat import reference, tiny
from pytest_trlcompat.tiny import ArchitectureAbsent

from .reference_models import settings_of

ROWS = reference.Rollout(
    prompts=[[5, 6]] * 4, completions=[[7, 8, 1], [9, 1], [10, 11, 12, 13], [1]], rewards=[[1.0], [0.0], [2.0], [1.0]]
)


def experts(**sizes: int) -> torch.nn.Module:
    model = tiny.moe(initializer_range=0.3, **sizes)
    try:
        return model.new_model().double()
    except ArchitectureAbsent as error:
        pytest.skip(str(error))


def test_by_hand() -> None:
    third = math.log(3.0)
    logits = torch.tensor([[third, 0.0], [third, 0.0], [0.0, third], [third, 0.0]])
    # Three of four tokens go to the first expert, whose probabilities are 3/4, 3/4, 1/4 and 3/4.
    expected = 2 * (3 / 4 * (2.5 / 4) + 1 / 4 * (1.5 / 4))
    assert float(reference.load_balancing_loss(logits, 1)) == pytest.approx(expected)
    assert float(reference.load_balancing_loss(logits, 2)) == pytest.approx(2.0)  # each token has both


def test_no_gradient_goes_through_the_choice_of_experts() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.5, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(reference.load_balancing_loss(logits, 1), logits)
    probabilities = torch.softmax(logits.detach(), -1)
    by_hand = probabilities[:, 0] * probabilities[:, 1]  # f = (1, 0), so that the loss is 2 * mean(p_0)
    assert torch.allclose(gradient, torch.stack([by_hand, -by_hand], 1))


def test_the_model_gives_the_same_of_rows_without_padding() -> None:
    model = experts(num_hidden_layers=2)
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 10]])
    found = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_router_logits=True).aux_loss
    tokens = reference.tokens_of([[5, 6], [5, 6]], [[7, 8], [9, 10]], pad_token_id=0, eos_token_id=1)
    logits = reference.router_logits(model, tokens)
    assert logits.shape == (2 * 2 * 4, model.config.num_experts)
    assert reference.load_balancing_loss(logits, 2).item() == pytest.approx(found.item(), rel=1e-6)


def test_a_step_adds_the_mean_over_micro_batches() -> None:
    model = experts()
    plain = reference.grpo_step(model, ROWS, settings_of(gradient_accumulation_steps=2))
    step = reference.grpo_step(model, ROWS, settings_of(gradient_accumulation_steps=2, router_aux_loss_coef=0.1))
    each = [float(one.aux_loss) for one in step.micro_batches if one.aux_loss is not None]
    assert len(each) == 2
    assert each[0] != pytest.approx(each[1])
    assert float(step.loss - plain.loss) == pytest.approx(0.1 * sum(each) / 2)
    assert step.logs["aux_loss"] == pytest.approx(sum(each) / 2)
    assert "aux_loss" not in plain.logs
    assert all(one.aux_loss is None for one in plain.micro_batches)
    router = next(name for name in step.gradients if name.endswith("mlp.gate.weight"))
    assert float((step.gradients[router] - plain.gradients[router]).abs().max()) > 1e-4


def test_an_evaluation_adds_it_as_well() -> None:
    model = experts()
    plain = reference.grpo_evaluate(copy.deepcopy(model), [ROWS], settings_of())
    found = reference.grpo_evaluate(model, [ROWS], settings_of(router_aux_loss_coef=0.1))
    difference = found.logs["eval_loss"] - plain.logs["eval_loss"]
    assert difference == pytest.approx(0.1 * found.logs["eval_aux_loss"])
    assert found.logs["eval_aux_loss"] > 1.0
