"""Completions with labels to train on, and the token ids that they must become, by documentation alone.

Runs inside a rank; imports the stack only inside functions.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.dpo import pairs

if TYPE_CHECKING:
    from pytest_trlcompat import reference
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["KINDS", "dataset", "expected_rows", "rows", "sequence", "tokenizer", "tokens", "unpaired"]

KINDS = (
    *("plain", "ended", "empty", "long", "iterable", "stored", "conversational", "turns", "tools"),
    *("paired", "paired_implicit", "paired_conversational", "paired_conversational_implicit", "paired_column"),
    "template_kwargs",
)
"""Of a completion and a label, or, ``paired``, of two completions, as DPO's; ``paired_column``: and of another column,
which is no matter of the training; ``long``: of a prompt of more than 512 tokens, each other row."""
_LONG = 600
_PAIRS = {"paired": "plain", "paired_implicit": "implicit", "paired_conversational": "conversational"}
_PAIRS |= {"paired_conversational_implicit": "conversational_implicit", "paired_column": "plain"}

tokenizer = pairs.tokenizer


def rows(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> list[dict[str, Any]]:
    """The rows as a user has them, of unequal lengths and with labels in no order, of which more are desirable."""
    kind = str(setting.get("data", "plain"))
    paired_rows = pairs.pairs(model, {**setting, "data": _PAIRS.get(kind, kind)}, seed, part)
    if kind == "long":
        for number, row in enumerate(paired_rows[::2]):
            row["prompt"] = " ".join(f"w{(number + place) % (model.words - 8)}" for place in range(_LONG))
    if kind in _PAIRS:
        beside = {"source": "w1"} if kind == "paired_column" else {}
        return [{**row, **beside} for row in paired_rows[: len(paired_rows) // 2]]
    chosen = random.Random(f"{seed} labels of {part}")
    labelled = []
    for row in paired_rows:
        drawn = chosen.random() < 0.6
        label = setting["labels"] == "desirable" if setting.get("labels") else drawn
        other_columns: dict[str, Any] = {
            name: value for name, value in row.items() if name not in ("chosen", "rejected")
        }
        labelled.append({**other_columns, "completion": row["chosen" if label else "rejected"], "label": label})
    return labelled


def dataset(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> Any:
    """The rows as a dataset."""
    return pairs.as_dataset(rows(model, setting, seed, part), setting)


def unpaired(user_rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A prompt, a completion and a label each; of pairs all that are desirable first.

    Undecided by the documentation: their order, which says what a prompt's mismatched completion is.
    """
    if not user_rows or "label" in user_rows[0]:
        return [dict(row) for row in user_rows]
    labelled: list[dict[str, Any]] = []
    for row in user_rows:
        prompt, *completions = pairs.parts(row)
        labelled += [
            {"prompt": prompt, "completion": completion, "label": number == 0}
            for number, completion in enumerate(completions)
        ]
    return labelled[0::2] + labelled[1::2]


def sequence(words: Any, row: Mapping[str, Any], undecided: reference.KTOUndecided) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its completion.

    A text has the special tokens that its tokenizer adds, and ends with an end of sequence; a conversation has those of
    the chat template alone.

    Args:
        words: of :func:`tokenizer`.
        row: of :func:`unpaired`.
        undecided: see ``text_start``.
    """
    is_text = isinstance(row["prompt"], str)
    if is_text:
        asked = words(row["prompt"], add_special_tokens=undecided.text_start == "tokenizer")["input_ids"]
        answer = words(row["completion"], add_special_tokens=False)["input_ids"]
    else:
        asked, answer = pairs.conversation(words, row["prompt"], [row["completion"]], row)
    start, end = words.bos_token_id, words.eos_token_id
    if undecided.text_start == "missing" and start is not None and asked[:1] != [start]:
        asked = [start, *asked]
    if is_text and answer[-1:] != [end]:
        answer = [*answer, end]
    return asked, answer


def tokens(words: Any, user_rows: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Token ids of the prompt and of the completion of each row, before anything is cut.

    Args:
        user_rows: of :func:`rows`.
    """
    from pytest_trlcompat import reference

    return [sequence(words, row, reference.KTOUndecided()) for row in unpaired(user_rows)]


def expected_rows(
    words: Any,
    user_rows: Sequence[Mapping[str, Any]],
    settings: reference.KTOSettings,
    size: int,
    max_length: int | None,
) -> list[dict[str, tuple[float, ...]]]:
    """What the rows must become, for :class:`pytest_trlcompat.reference.KTOObjective`.

    A row of whose completion no token is left teaches nothing, and is none: it would only be counted in means.

    Args:
        user_rows: of :func:`rows`.
        size: rows of a micro-batch on a rank, among which completions are exchanged.
        max_length: sequences are cut on the right.
    """
    from pytest_trlcompat import reference

    labelled = [(float(row["label"]), *sequence(words, row, settings.undecided)) for row in unpaired(user_rows)]
    labelled = [row for row in labelled if max_length is None or len(row[1]) < max_length]
    expected = []
    for start in range(0, len(labelled), size):
        batch = labelled[start : start + size]
        others = reference.mismatched([answer for _, _, answer in batch], settings)
        for (label, asked, answer), other in zip(batch, others, strict=True):
            row = {"label": (label,), **_columns("", asked, answer, max_length)}
            expected.append(row | (_columns("kl_", asked, other, max_length) if settings.estimates_kl else {}))
    return expected


def _columns(
    prefix: str, asked: Sequence[int], answer: Sequence[int], most: int | None
) -> dict[str, tuple[float, ...]]:
    ids, mask = [*asked, *answer][:most], ([0] * len(asked) + [1] * len(answer))[:most]
    return {f"{prefix}ids": tuple(map(float, ids)), f"{prefix}mask": tuple(map(float, mask))}
