"""From the token ids of a prompt and its two completions to what a model is given."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["common_prompt", "preference_row", "shared_messages"]


def preference_row(
    prompt: Sequence[int],
    chosen: Sequence[int],
    rejected: Sequence[int],
    *,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    max_prompt_length: int | None = None,
    max_completion_length: int | None = None,
) -> dict[str, tuple[float, ...]]:
    """A row for :class:`~pytest_trlcompat.reference.PreferenceObjective`: both sequences, and which tokens count.

    Prompts are cut on the left, so that they lead to their completion, and completions on the right; that is what
    TRL's documentation says of ``max_prompt_length`` for other trainers ("truncated left"), and nothing for this one.
    The whole sequence is cut last: ``"keep_start"`` keeps its first ``max_length`` tokens, ``"keep_end"`` its last.

    Args:
        prompt, chosen, rejected: token ids, with the end of sequence where there shall be one.
        max_prompt_length, max_completion_length: of releases until 0.28.

    Raises:
        ValueError: for another ``truncation_mode``.
    """
    if truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(f"truncation_mode={truncation_mode!r}; choose one of 'keep_start', 'keep_end'")
    before = list(prompt)
    if max_prompt_length is not None:
        before = before[max(0, len(before) - max_prompt_length) :]
    columns = {}
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        after = list(completion)[:max_completion_length]
        ids, mask = [*before, *after], [0] * len(before) + [1] * len(after)
        within_length = slice(None)
        if max_length is not None and len(ids) > max_length:
            within_length = slice(max_length) if truncation_mode == "keep_start" else slice(len(ids) - max_length, None)
        columns[name] = tuple(map(float, ids[within_length]))
        columns[f"{name}_mask"] = tuple(map(float, mask[within_length]))
    return columns


def common_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The prompt that two texts begin with, and both completions.

    ``"The sky is blue."`` and ``"The sky is green."`` have the prompt ``"The sky is"``: a space before the first word
    that differs belongs to the completions. Source: the example of ``extract_prompt`` in TRL's documentation.
    """
    length = 0
    while length < min(len(chosen), len(rejected)) and chosen[length] == rejected[length]:
        length += 1
    if chosen[:length].endswith(" "):
        length -= 1
    return chosen[:length], chosen[length:], rejected[length:]


def shared_messages(
    chosen: Sequence[dict[str, str]], rejected: Sequence[dict[str, str]]
) -> tuple[list[dict[str, str]], list[dict[str, str]], list[dict[str, str]]]:
    """The same of conversations: the messages that both begin with, and the others."""
    length = 0
    while length < min(len(chosen), len(rejected)) and chosen[length] == rejected[length]:
        length += 1
    return list(chosen[:length]), list(chosen[length:]), list(rejected[length:])
