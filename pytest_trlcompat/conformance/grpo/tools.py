"""A tool, completions that call it, and what must follow a call: for conformance trainings with ``tools``.

Everything consists of words that a tiny model's tokenizer knows, even names. Completions have several turns: those that
the model samples, and between them the results of the tool, as the chat template writes them.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = [
    "CHAT_TEMPLATE",
    "RESPONSE_SCHEMA",
    "RESPONSE_TEMPLATE",
    "WITHOUT_CALLS",
    "WORDS",
    "answered",
    "called",
    "differing",
    "is_continued",
    "tool",
    "turn",
    "turns",
    "words_of",
]

WORDS = 48
"""How many words prompts and completions use; words with higher numbers have a meaning."""
_CALL, _NAME, _ARGUMENT, _RESULT, _ASSISTANT = 50, 51, 52, 53, 54
_SPECIAL, _EOS = 3, 1

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] + ' ' }}{% endfor %}"
    "{% for message in messages %}"
    f"{{% if message['role'] == 'assistant' %}}{{{{ 'w{_ASSISTANT} ' }}}}{{% endif %}}"
    f"{{% if message['role'] == 'tool' %}}{{{{ 'w{_RESULT} ' }}}}{{% endif %}}"
    "{% if message['content'] %}{{ message['content'] ~ ' ' }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    f"{{{{ 'w{_CALL} ' + call['function']['name'] + ' ' }}}}"
    "{% for name, value in call['function']['arguments'].items() %}{{ name ~ ' ' ~ value ~ ' ' }}{% endfor %}"
    "{% endfor %}{{ eos_token + ' ' }}{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ 'w{_ASSISTANT} ' }}}}{{% endif %}}"
)
WITHOUT_CALLS = CHAT_TEMPLATE.replace("message['tool_calls'] or []", "[]")
"""A template that writes no calls, so that a model sees results that nobody asked for."""
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    # The sampled text follows it without a space.
    "start_anchor": f"w{_ASSISTANT}",
    "fields": {
        "tool_calls": {
            "open_pattern": rf"w{_CALL} (?P<name>w\d+)\s*",
            "close_pattern": r"<eos>\s*|$",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": rf"(?P<key>w{_ARGUMENT}) (?P<value>w\d+)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<eos>\s*|$", "content": "text"},
    },
}
"""How Transformers reads a call in what a model has written: https://huggingface.co/docs/transformers/chat_response_parsing."""
RESPONSE_SCHEMA: dict[str, Any] = {
    "x-regex": rf"^(?P<content>.*?)(?=w{_CALL}|<eos>|$)(?P<tool_calls>w{_CALL} w.*?)?(?:<eos>|$)",
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": rf"w{_CALL} (w[^<]*)",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "x-regex": r"^(w\d+)"},
                            "arguments": {
                                "type": "object",
                                "x-regex-key-value": rf"(?P<key>w{_ARGUMENT}) (?P<value>w\d+)",
                                "additionalProperties": {"type": "string"},
                            },
                        },
                    },
                },
            },
        },
    },
}
"""The same for Transformers until 5.12."""


def w51(w52: str) -> str:
    """Answers with two words, or fails.

    Args:
        w52: A word.

    Returns:
        The words.
    """
    number = int(w52[1:])
    if _fails(number):
        raise ValueError("the tool fails")
    return " ".join(f"w{word}" for word in _answer(number))


def _fails(number: int) -> bool:
    return number % 5 == 0


def _answer(number: int) -> tuple[int, int]:
    return number * 7 % WORDS, number * 11 % WORDS


def tool(keep: Callable[[int], None]) -> Callable[[str], str]:
    """The tool; it calls ``keep`` with the number of the word in each call."""

    @functools.wraps(w51)
    def watched(w52: str) -> str:
        keep(int(w52[1:]))
        return w51(w52)

    return watched


def turn(seed: int, prompt: Sequence[int], member: int, call: int, number: int) -> list[int]:
    """Token ids of one turn of a completion, to its end of sequence.

    Of four members of a group, one calls the tool in its first two turns, one in its first, one with a word for which
    the tool fails, and one never.

    Args:
        prompt: of the completion, without padding; ``member``: its place in its group.
        call: how often completions were sampled before.
        number: of the turn, 0 for the first.
    """
    order = ["twice", "once", "fails", "never"]
    random.Random(f"{seed}/{tuple(prompt)}/{call}/tools").shuffle(order)
    kind = order[member % len(order)]
    dice = random.Random(f"{seed}/{tuple(prompt)}/{call}/{member}/{number}")
    spoken = [dice.randrange(WORDS) for _ in range(dice.randint(1, 3))]
    calls: list[int] = []
    if number < {"twice": 2, "never": 0}.get(kind, 1):
        words = [word for word in range(WORDS) if _fails(word) == (kind == "fails")]
        calls = [_CALL, _NAME, _ARGUMENT, dice.choice(words)]
    return [*(_SPECIAL + word for word in (*spoken, *calls)), _EOS]


def is_continued(prompt: Sequence[int]) -> bool:
    """Whether a prompt holds the result of a tool."""
    return _SPECIAL + _RESULT in prompt


def turns(completion: Sequence[int], sampled: Sequence[bool]) -> Iterator[tuple[bool, list[int]]]:
    """The parts of a completion one after the other, and whether the model sampled them."""
    for is_sampled, part in itertools.groupby(zip(sampled, completion, strict=True), key=lambda pair: pair[0]):
        yield is_sampled, [token for _, token in part]


def words_of(completion: Sequence[int], sampled: Sequence[bool]) -> list[int]:
    """Token ids that the model has sampled itself, without calls."""
    spoken: list[int] = []
    for is_sampled, part in turns(completion, sampled):
        if is_sampled:
            end = part.index(_SPECIAL + _CALL) if _SPECIAL + _CALL in part else len(part)
            spoken += [token for token in part[:end] if token != _EOS]
    return spoken


def called(completion: Sequence[int], sampled: Sequence[bool]) -> list[int]:
    """The number of the word in each complete call of a completion."""
    return [number for is_sampled, part in turns(completion, sampled) if is_sampled for number in _calls(part)]


def answered(completion: Sequence[int], sampled: Sequence[bool]) -> list[int]:
    """The same for calls that are followed by a result."""
    parts = list(turns(completion, sampled))
    return [number for (_, part), _ in zip(parts[::2], parts[1::2], strict=False) for number in _calls(part)]


def _calls(part: Sequence[int]) -> list[int]:
    begin = [_SPECIAL + word for word in (_CALL, _NAME, _ARGUMENT)]
    places = [place for place in range(len(part) - 3) if list(part[place : place + 3]) == begin]
    return [part[place + 3] - _SPECIAL for place in places]


def differing(
    completion: Sequence[int], sampled: Sequence[bool], limit: int, iterations: int | None
) -> tuple[list[int], list[int]] | None:
    """The token ids that should follow a turn, and those that do, for the first turn where they differ.

    A call should be followed by its result, as the chat template writes it, and the beginning of another turn, as long
    as ``max_completion_length`` and ``max_tool_calling_iterations`` allow it; a turn without a call by nothing. It is
    not documented how the model is told of a failure.

    Args:
        limit: ``max_completion_length``.
        iterations: ``max_tool_calling_iterations``.
    """
    parts = list(turns(completion, sampled))
    length = 0
    for index in range(0, len(parts), 2):
        length += len(parts[index][1])
        follows = parts[index + 1][1] if index + 1 < len(parts) else []
        numbers = _calls(parts[index][1]) if index + 1 < len(parts) or length < limit else []
        expected = _written(numbers[0]) if numbers and (iterations is None or index // 2 < iterations) else []
        if follows and expected and _fails(numbers[0]):
            is_written = follows[0] == expected[0] and follows[-2:] == expected[-2:]
        elif not follows and expected:
            # It is not documented whether a result may fill a completion to its end, nor how long that of a failure is.
            is_written = length + (_LONGEST_FAILURE if _fails(numbers[0]) else len(expected)) >= limit
        else:
            is_written = follows == expected
        if not is_written:
            return expected, follows
        length += len(follows)
    return None


_LONGEST_FAILURE = 12


def _written(number: int) -> list[int]:
    return [*(_SPECIAL + word for word in (_RESULT, *_answer(number))), _EOS, _SPECIAL + _ASSISTANT]
