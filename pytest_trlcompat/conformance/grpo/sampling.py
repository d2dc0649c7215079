"""The data of a conformance training: prompts, completions and rewards, the same on both sides of a comparison.

Everything follows from a seed. A completion depends on its prompt and on its place in the group, so that it is the same
on however many ranks a group is sampled.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import images
from pytest_trlcompat.conformance.grpo import environments, tools

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "COMPLETION_LENGTH",
    "LOGGED",
    "Data",
    "content",
    "logged_numbers",
    "name_of",
    "reward_functions",
    "target_of",
]

COMPLETION_LENGTH = 5
BEGUN = "w60 w60 w60"
"""The beginning of an assistant's message that a completion continues."""
_SPECIAL, _EOS = 3, 1
_SHORTEST, _LONGEST = 3, 6
"""Numbers of words of the shortest and of the longest prompt."""


@dataclass(frozen=True)
class Data:
    """Prompts and completions of words that a tiny model's tokenizer knows.

    Attributes:
        words: how many the tokenizer knows; word ``i`` is token ``i + 3``.
        conversational: prompts are messages.
        assistant_last: the last message of a prompt is the beginning of an assistant's answer.
        length: tokens of the longest completions.
        ends: token ids that end a completion.
        tools: the value of the axis ``tools``: completions call one, see
            :mod:`~pytest_trlcompat.conformance.grpo.tools`; empty: they call none.
        images: the values of the axes ``images`` and ``model``; ``None``: prompts have no images.
    """

    seed: int
    words: int
    conversational: bool = False
    assistant_last: bool = False
    length: int = COMPLETION_LENGTH
    ends: tuple[int, ...] = (_EOS,)
    tools: str = ""
    images: Mapping[str, Any] | None = None

    def texts(self, rows: int, part: str) -> list[str]:
        """Prompts of unequal lengths, each with other first two words than all others."""
        # A text as seed gives every process the same numbers, where hash() of one would not.
        dice = random.Random(f"{self.seed}/{part}")
        first = dice.sample(range(self.words**2), rows)
        texts = []
        for number in first:
            rest = [dice.randrange(self.words) for _ in range(dice.randint(_SHORTEST, _LONGEST) - 2)]
            texts.append(" ".join(f"w{word}" for word in (*divmod(number, self.words), *rest)))
        return texts

    def prompts(self, rows: int, part: str = "training") -> list[Any]:
        """The prompts of a dataset: texts or messages."""
        texts = self.texts(rows, part)
        if not self.conversational:
            return [*texts]
        last = [{"role": "assistant", "content": BEGUN}] if self.assistant_last else []
        if self.images is not None and self.images["images"] == "placeholders":
            return [[{"role": "user", "content": images.placed(text)}, *last] for text in texts]
        return [[{"role": "user", "content": text}, *last] for text in texts]

    def dataset(self, rows: int, part: str = "training") -> Dataset:
        """A dataset with the columns ``prompt`` and ``target``, a number that a reward function may ask for, and those
        of environments and images."""
        from datasets import Dataset

        targets = [target_of(text) for text in self.texts(rows, part)]
        more = environments.column(self.tools, targets)
        without_images = Dataset.from_dict({"prompt": self.prompts(rows, part), "target": targets, **more})
        with_images: Dataset = images.added(without_images, self.images or {}, self.seed, part)
        return with_images

    def completion(self, prompt: Sequence[int], member: int, call: int) -> list[int]:
        """Token ids of one completion; it ends with an end of sequence unless it is as long as it may be.

        Of four members of a group, one is only an end of sequence, and one has none. With tools it is the first turn.

        Args:
            prompt: its token ids without padding.
            member: its place in its group.
            call: how often completions were sampled before.
        """
        if self.tools:
            return tools.turn(self.seed, prompt, member, call, 0)
        dice = random.Random(f"{self.seed}/{tuple(prompt)}/{call}")
        first = dice.sample(range(self.words), min(self.words, 64))
        lengths = [0, self.length, dice.randint(1, self.length), dice.randint(1, self.length)]
        dice.shuffle(lengths)
        length = lengths[member % 4]
        member_dice = random.Random(f"{self.seed}/{tuple(prompt)}/{call}/{member}")
        # Each member has another first word, so that the completions of a group differ.
        words = [first[member % len(first)], *(member_dice.randrange(self.words) for _ in range(self.length))][:length]
        return [*(_SPECIAL + word for word in words), self.ends[member % len(self.ends)]][: self.length]


def target_of(text: str) -> int:
    """A number that belongs to a prompt: its value in the column ``target``."""
    return sum(map(ord, text)) % 5


def content(message: Any) -> str:
    """The text of a prompt or completion, which is a string or a list of messages.

    Of a prompt's messages it is the first one's text; of a completion's the assistant's, without results of tools. The
    beginning of a message that a completion continues is removed: some releases of TRL pass it, others do not.
    """
    if isinstance(message, str):
        text = message
    elif message[0]["role"] == "assistant":
        text = " ".join(_said(turn["content"]) for turn in message if turn["role"] == "assistant")
    else:
        text = _said(message[0]["content"])
    return " ".join(text.removeprefix(BEGUN).split())


def _said(parts: Any) -> str:
    """The text of a message's content, which is a string, or a list of texts and images."""
    return parts if isinstance(parts, str) else " ".join(str(part["text"]) for part in parts if part["type"] == "text")


def reward_letters(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward that depends on the completion's text alone."""
    return [float(sum(map(ord, content(completion))) % 7) for completion in completions]


def reward_target(completions: Sequence[Any], target: Sequence[int], **_: Any) -> list[float]:
    """A reward that depends on the completion and on a column of the dataset, which must be that of its prompt."""
    return [
        float(len(content(completion).split()) - number) for completion, number in zip(completions, target, strict=True)
    ]


def reward_sometimes(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """No reward for about a third of the completions."""
    letters = [sum(map(ord, content(completion))) for completion in completions]
    return [None if number % 3 == 0 else float(number % 4) for number in letters]


def reward_one_number(completions: Sequence[Any], **_: Any) -> list[float]:
    """A list that is too short."""
    return [1.0]


def reward_equal(completions: Sequence[Any], **_: Any) -> list[float]:
    """The same for all: groups without any spread."""
    return [1.0 for _ in completions]


def reward_prompt(completions: Sequence[Any], target: Sequence[int], **_: Any) -> list[float]:
    """The same for all completions of a prompt: groups without any spread, and a batch with one."""
    return [float(number) for number in target]


def reward_letters_plus(completions: Sequence[Any], plus: float, **_: Any) -> list[float]:
    return [plus + reward for reward in reward_letters(completions)]


class RewardObject:
    """A reward function that is an object, without ``__name__``."""

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        return reward_letters(completions)


class RewardAsyncObject:
    """A reward function that is an object and must be awaited."""

    async def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        return reward_letters(completions)


LOGGED = "letters_of_odd_ones"
"""What :func:`reward_logging` logs."""


def reward_logging(
    completions: Sequence[Any], log_metric: Callable[[str, float], None] | None = None, **_: Any
) -> list[float]:
    """A reward that logs a number for some completions: not equally often on all ranks, and perhaps never on one."""
    rewards = reward_letters(completions)
    if log_metric is not None:
        for number in logged_numbers(rewards):
            log_metric(LOGGED, number)
    return rewards


def logged_numbers(rewards: Sequence[float]) -> list[float]:
    """What :func:`reward_logging` logs for these rewards."""
    return [reward for reward in rewards if reward % 2]


def reward_functions(name: str) -> tuple[Callable[..., Any], ...]:
    """The reward functions for a value of the axis ``rewards`` that is no model.

    Raises:
        ValueError: for an unknown name.
    """
    known: Mapping[str, tuple[Callable[..., Any], ...]] = {
        "letters": (reward_letters,),
        "target": (reward_target,),
        "two": (reward_letters, reward_target),
        "shared_class": (reward_letters, reward_target),
        "sometimes": (reward_letters, reward_sometimes),
        "nowhere": (reward_sometimes,),
        "equal": (reward_equal,),
        "prompt": (reward_prompt,),
        "one_number": (reward_one_number,),
        "partial": (functools.partial(reward_letters_plus, plus=1.0),),
        "object": (RewardObject(),),
        "async_object": (RewardAsyncObject(),),
        "logging": (reward_logging,),
    }
    if name not in known:
        raise ValueError(f"rewards={name!r}; choose one of {', '.join(known)}")
    return known[name]


def name_of(function: Callable[..., Any]) -> str:
    """The name of a reward function in logs."""
    if isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
