"""The data of a conformance training."""

from __future__ import annotations

import pytest

from pytest_trlcompat.conformance.grpo.sampling import Data, content, name_of, reward_functions, target_of

DATA = Data(seed=3, words=61)


def test_the_same_seed_gives_the_same_data_and_another_one_other() -> None:
    assert DATA.texts(8, "training") == Data(seed=3, words=61).texts(8, "training")
    assert DATA.texts(8, "training") != Data(seed=4, words=61).texts(8, "training")
    assert DATA.completion([4, 5], 1, 0) == Data(seed=3, words=61).completion([4, 5], 1, 0)
    assert DATA.completion([4, 5], 1, 0) != DATA.completion([4, 5], 1, 1)


def test_prompts_are_of_unequal_lengths_and_each_is_another() -> None:
    texts = DATA.texts(24, "training")
    assert len({text.split()[0] + text.split()[1] for text in texts}) == 24
    assert {len(text.split()) for text in texts} == {3, 4, 5, 6}


def test_a_group_has_completions_with_and_without_an_end_and_one_of_the_end_alone() -> None:
    found = [DATA.completion([4, 5, number], member, 0) for number in range(8) for member in range(8)]
    assert max(map(len, found)) == 5
    assert any(1 not in completion for completion in found)
    assert any(completion == [1] for completion in found)
    assert all(1 not in completion[:-1] for completion in found)  # nothing follows an end


def test_several_ends_are_used_by_turns() -> None:
    data = Data(seed=3, words=61, ends=(1, 2))
    last = {data.completion([4, 5], member, 0)[-1] for member in range(16)}
    assert {1, 2} <= last


@pytest.mark.parametrize("name", ["letters", "target", "prompt", "two", "sometimes", "nowhere", "partial", "object"])
def test_rewards_depend_on_the_completion(name: str) -> None:
    texts = ["w1 w2", "w3", "w50 w7 w8"]
    for function in reward_functions(name):
        found = function(completions=texts, target=[0, 1, 2])
        assert len(found) == 3
        assert len(set(found)) > 1
        assert found == function(
            completions=[[{"role": "assistant", "content": text}] for text in texts], target=[0, 1, 2]
        )


def test_rewards_may_be_missing() -> None:
    texts = [f"w{number}" for number in range(30)]
    (sometimes,) = reward_functions("nowhere")
    missing = [reward is None for reward in sometimes(completions=texts)]
    assert any(missing)
    assert not all(missing)


def test_a_function_is_named_as_logs_name_it() -> None:
    assert [name_of(each) for each in reward_functions("two")] == ["reward_letters", "reward_target"]
    assert name_of(reward_functions("partial")[0]) == "reward_letters_plus"
    assert name_of(reward_functions("object")[0]) == "RewardObject"


def test_an_unknown_kind_of_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards='none'; choose one of letters, "):
        reward_functions("none")


def test_the_column_belongs_to_the_prompt() -> None:
    text = DATA.texts(1, "training")[0]
    assert target_of(text) == sum(map(ord, text)) % 5
    assert content([{"role": "user", "content": text}, {"role": "assistant", "content": "w1"}]) == text
