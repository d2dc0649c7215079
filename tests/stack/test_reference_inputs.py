"""What a model is called with beside tokens: of rows one by one, and of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_trlcompat import reference
from pytest_trlcompat.conformance import images

ONE = {"pixel_values": torch.tensor([[1.0, 2.0]]), "mm_token_type_ids": torch.tensor([[1, 0]])}
TWO = {"pixel_values": torch.tensor([[3.0, 4.0], [5.0, 6.0]]), "mm_token_type_ids": torch.tensor([[0, 1, 1]])}


class Seeing(torch.nn.Module):
    """Its logits are larger, for all tokens but the first, by the sum of the pixel values that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.calls: list[dict[str, Any]] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **inputs: Any) -> Any:
        self.calls.append(inputs)
        seen = inputs["pixel_values"].sum() if "pixel_values" in inputs else torch.tensor(0.0)
        logits = torch.zeros(*input_ids.shape, 16)
        logits[..., 1:] += self.scale * seen / 10
        return SimpleNamespace(logits=logits)


def test_images_of_a_batch_follow_each_other_and_types_of_tokens_stand_where_their_prompt_does() -> None:
    found = reference.joined_inputs([ONE, {}, TWO], [1, 2, 0], 5)
    assert found["pixel_values"].tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert found["mm_token_type_ids"].tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0]]


def test_each_row_is_scored_with_its_own_images() -> None:
    tokens = reference.tokens_of(
        [[5, 6], [7], [5, 6, 7]], [[8, 1], [9], [8]], pad_token_id=0, eos_token_id=1, inputs=[ONE, {}, TWO]
    )
    model = Seeing()
    found = reference.score_tokens(model, tokens)
    expected = [torch.log_softmax(torch.tensor([0.0, *[seen / 10] * 15]), 0)[1] for seen in (3.0, 0.0, 18.0)]
    assert found.logprobs[:, 0].tolist() == pytest.approx([each.item() for each in expected])
    assert [sorted(each) for each in model.calls] == [["mm_token_type_ids", "pixel_values"], [], [*sorted(TWO)]]
    assert model.calls[0]["mm_token_type_ids"].tolist() == [[1, 0, 0, 0]]

    some = tokens.of_rows([2, 1])
    assert [len(each) for each in some.inputs] == [2, 0]
    reference.score_tokens(model, some, padded=True)
    assert model.calls[-1]["pixel_values"].tolist() == TWO["pixel_values"].tolist()
    assert model.calls[-1]["mm_token_type_ids"].tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]


def test_prompts_without_images_are_those_of_a_batch_of_text() -> None:
    tokens = reference.tokens_of([[5], [6]], [[8], [9]], pad_token_id=0, eos_token_id=1, inputs=[{}, {}])
    assert tokens.inputs == ()


def test_a_prompt_with_images_is_not_cut_and_every_prompt_has_inputs() -> None:
    with pytest.raises(ValueError, match="the prompt of row 0, which has images, say, is longer than 1"):
        reference.tokens_of([[5, 6]], [[8]], pad_token_id=0, eos_token_id=1, max_prompt_length=1, inputs=[ONE])
    with pytest.raises(ValueError, match="1 prompts have inputs for 2"):
        reference.tokens_of([[5, 6]], [[8]], pad_token_id=0, eos_token_id=1, inputs=[ONE, ONE])


def test_rows_of_datasets_are_scored_with_their_images() -> None:
    row: dict[str, Any] = {"input_ids": (5, 6, 7), "labels": (-100, 6, 7), "inputs": {"pixel_values": [[1.0, 2.0]]}}
    model = Seeing()
    settings = reference.SFTSettings(optim="sgd", learning_rate=0.0)
    (measured,) = reference.sft_objective(settings)(model, [[[row]]])
    lost = -torch.log_softmax(torch.tensor([0.0, *[0.3] * 15]), 0)[1].item()
    assert measured.loss.item() == pytest.approx(lost)
    scores = reference.score_completions(
        model, [((5, 6, 7), (0, 1, 1)), ((5, 6), (0, 1))], inputs=[row["inputs"], None]
    )
    assert scores.logprobs[0].tolist() == pytest.approx([-lost, -lost])
    assert scores.logprobs[1, 0].item() == pytest.approx(-torch.log(torch.tensor(16.0)).item())


def test_pixel_values_of_a_batch_belong_to_rows_by_their_image_tokens() -> None:
    token = images.IMAGE_ID
    ids = [[64, *[token] * 8, 5], [5, 6], [64, *[token] * 4, 5]]
    pixels = torch.arange(3.0)[:, None, None, None].expand(3, 3, 16, 16)
    found = images.of_rows({"pixel_values": pixels}, ids)
    assert [len(each.get("pixel_values", [])) for each in found] == [2, 0, 1]
    assert found[2]["pixel_values"][0][0][0][0] == 2.0
    assert len(set(images.digests(found[0]))) == 2

    grid = torch.tensor([[1, 2, 4], [1, 4, 4]])
    patches = torch.arange(24.0)[:, None]
    found = images.of_rows({"pixel_values": patches, "image_grid_thw": grid}, [[token] * 2, [5], [token] * 4])
    assert [len(each.get("pixel_values", [])) for each in found] == [8, 0, 16]
    assert found[2]["image_grid_thw"] == [[1, 4, 4]]


def test_other_numbers_of_image_tokens_than_of_images_are_refused() -> None:
    pixels = torch.zeros(1, 3, 16, 16)
    with pytest.raises(ValueError, match="a row has 3 image tokens, of no number of images"):
        images.of_rows({"pixel_values": pixels}, [[images.IMAGE_ID] * 3])
    with pytest.raises(ValueError, match="pixel values have 1 images, of which the tokens of rows stand for 0"):
        images.of_rows({"pixel_values": pixels}, [[5]])


def test_a_row_of_one_token_takes_no_logits_of_the_next() -> None:
    """Nothing predicts its token; the row after it is scored with its own inputs."""
    rows = [((5,), (1,)), ((5, 6, 7), (0, 1, 1))]
    alone = reference.score_completions(Seeing(), rows[1:], inputs=[ONE])
    scores = reference.score_completions(Seeing(), rows, inputs=[None, ONE])
    assert scores.mask.tolist() == [[False, False], [True, True]]
    assert scores.logprobs[1].tolist() == alone.logprobs[0].tolist()
    assert scores.logprobs[0].tolist() == [0.0, 0.0]


def test_routers_are_not_asked_of_rows_with_inputs() -> None:
    with pytest.raises(ValueError, match="routers"):
        reference.score_completions(Seeing(), [((5, 6), (0, 1))], inputs=[ONE], with_routers=True)
