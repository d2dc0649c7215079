"""The reference's batches: padding, the end of a completion, and what counts."""

from __future__ import annotations

import pytest

from pytest_trlcompat import reference


def test_prompts_are_padded_on_the_left_and_completions_on_the_right() -> None:
    tokens = reference.tokens_of([[5], [6, 7]], [[8, 1, 9], [8, 9]], pad_token_id=0, eos_token_id=1)
    assert tokens.prompt_ids.tolist() == [[0, 5], [6, 7]]
    assert tokens.prompt_mask.tolist() == [[False, True], [True, True]]
    assert tokens.completion_ids.tolist() == [[8, 1, 9], [8, 9, 0]]
    # The end of sequence counts, the 9 after it does not.
    assert tokens.completion_mask.tolist() == [[True, True, False], [True, True, False]]
    assert tokens.terminated.tolist() == [True, False]
    assert tokens.lengths.tolist() == [2, 2]
    assert tokens.loss_mask.tolist() == tokens.completion_mask.tolist()
    assert tokens.count() == 1 + 2 + 2 + 2


def test_only_the_first_end_of_sequence_ends_a_completion() -> None:
    tokens = reference.tokens_of([[5]], [[1, 8, 1]], pad_token_id=0, eos_token_id=1)
    assert tokens.completion_mask.tolist() == [[True, False, False]]


def test_a_pad_token_that_is_also_the_end_of_sequence_ends_nothing() -> None:
    tokens = reference.tokens_of([[5], [5]], [[8], [8, 9]], pad_token_id=1, eos_token_id=1)
    assert tokens.completion_ids.tolist() == [[8, 1], [8, 9]]
    assert tokens.completion_mask.tolist() == [[True, False], [True, True]]
    assert tokens.terminated.tolist() == [False, False]


def test_truncated_completions_are_excluded_from_the_loss_alone() -> None:
    tokens = reference.tokens_of(
        [[5], [5]], [[8, 1], [8, 9]], pad_token_id=0, eos_token_id=1, mask_truncated_completions=True
    )
    assert tokens.loss_mask.tolist() == [[True, True], [False, False]]
    assert tokens.completion_mask.tolist() == [[True, True], [True, True]]


def test_results_of_tools_are_seen_and_do_not_count() -> None:
    """Of three turns with an end of sequence each; the second one is a tool's."""
    sampled = [[True, True, False, False, True, True], [True]]
    tokens = reference.tokens_of([[5], [5]], [[8, 1, 7, 1, 9, 1], [8]], pad_token_id=0, eos_token_id=1, sampled=sampled)
    assert tokens.completion_mask.tolist() == [[True] * 6, [True, *[False] * 5]]
    assert tokens.sampled_mask.tolist() == [sampled[0], [True, *[False] * 5]]
    assert tokens.loss_mask.tolist() == tokens.sampled_mask.tolist()
    assert (tokens.lengths.tolist(), tokens.sampled_lengths.tolist()) == ([6, 1], [4, 1])
    assert tokens.terminated.tolist() == [True, False]
    assert tokens.count() == 1 + 4 + 1 + 1


def test_a_completion_that_breaks_off_behind_the_result_of_a_tool_is_truncated() -> None:
    tokens = reference.tokens_of(
        [[5]],
        [[8, 1, 7, 9]],
        pad_token_id=0,
        eos_token_id=1,
        mask_truncated_completions=True,
        sampled=[[True, True, False, True]],
    )
    assert (tokens.terminated.tolist(), tokens.loss_mask.any().item()) == ([False], False)


def test_each_token_is_sampled_or_not() -> None:
    with pytest.raises(ValueError, match=r"completions have \[2\] tokens, sampled says of \[1\]"):
        reference.tokens_of([[5]], [[8, 1]], pad_token_id=0, eos_token_id=1, sampled=[[True]])


def test_widths_are_padded_to_a_multiple() -> None:
    tokens = reference.tokens_of([[5]], [[8, 9, 1]], pad_token_id=0, eos_token_id=1, pad_to_multiple_of=2)
    assert tokens.prompt_ids.tolist() == [[0, 5]]
    assert tokens.completion_ids.tolist() == [[8, 9, 1, 0]]
    assert tokens.completion_mask.tolist() == [[True, True, True, False]]


def test_a_width_that_is_a_multiple_stays() -> None:
    tokens = reference.tokens_of([[5, 6]], [[8, 9]], pad_token_id=0, eos_token_id=1, pad_to_multiple_of=2)
    assert (tokens.prompt_ids.tolist(), tokens.completion_ids.tolist()) == ([[5, 6]], [[8, 9]])


def test_long_prompts_lose_their_beginning() -> None:
    tokens = reference.tokens_of([[5, 6, 7], [8]], [[9], [9]], pad_token_id=0, eos_token_id=1, max_prompt_length=2)
    assert tokens.prompt_ids.tolist() == [[6, 7], [0, 8]]


def test_rows_keep_their_width() -> None:
    tokens = reference.tokens_of([[5], [6]], [[8, 9, 1], [1]], pad_token_id=0, eos_token_id=1).of_rows([1])
    assert tokens.completion_ids.tolist() == [[1, 0, 0]]
    assert tokens.lengths.tolist() == [1]


@pytest.mark.parametrize(
    "prompts, completions, message",
    [
        ([[5]], [[6], [7]], "1 prompts have 2 completions"),
        ([[5], []], [[6], [7]], "the prompt of row 1 is empty"),
        ([[5], [6]], [[], [7]], "the completion of row 0 is empty"),
    ],
)
def test_rows_that_are_no_batch_are_refused(
    prompts: list[list[int]], completions: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        reference.tokens_of(prompts, completions, pad_token_id=0, eos_token_id=1)


def test_padding_needs_rows_and_a_side() -> None:
    with pytest.raises(ValueError, match="there are no rows to pad"):
        reference.pad([], 0, side="left")
    with pytest.raises(ValueError, match="side='top' is neither 'left' nor 'right'"):
        reference.pad([[1]], 0, side="top")
