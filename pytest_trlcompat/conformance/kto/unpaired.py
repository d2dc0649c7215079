"""Completions with labels to train on, and the token ids that documentation makes of them.

Runs inside a rank.
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
"""Rows of a completion and a label, or, ``paired``, of two completions, like DPO's; ``paired_column``: with another
column that the training must ignore; ``long``: every other row has a prompt of more than 512 tokens."""
_LONG = 600
_PAIRS = {"paired": "plain", "paired_implicit": "implicit", "paired_conversational": "conversational"}
_PAIRS |= {"paired_conversational_implicit": "conversational_implicit", "paired_column": "plain"}

tokenizer = pairs.tokenizer


def rows(model: TinyModel, setting: Mapping[str, Any], seed: int, part: str) -> list[dict[str, Any]]:
    """The rows as a user has them: of unequal lengths, with unordered labels, most of them desirable."""
    kind = str(setting.get("data", "plain"))
    paired_rows = pairs.pairs(model, {**setting, "data": _PAIRS.get(kind, kind)}, seed, part)
    if kind == "long":
        for number, row in enumerate(paired_rows[::2]):
            row["prompt"] = " ".join(f"w{(number + place) % (model.words - 8)}" for place in range(_LONG))
    if kind in _PAIRS:
        extra_column = {"source": "w1"} if kind == "paired_column" else {}
        # Each pair becomes two rows.
        return [{**row, **extra_column} for row in paired_rows[: len(paired_rows) // 2]]
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
    """Rows of a prompt, a completion and a label; of pairs, all desirable ones come first.

    Documentation leaves open their order, which decides which completion is mismatched with a prompt.
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


def sequence(
    processing_class: Any, row: Mapping[str, Any], undecided: reference.KTOUndecided
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its completion.

    A text has the special tokens that its tokenizer adds, and ends with an end of sequence; a conversation has those of
    the chat template alone.

    Args:
        processing_class: of :func:`tokenizer`.
        row: of :func:`unpaired`.
        undecided: ``text_start`` is used.
    """
    is_text = isinstance(row["prompt"], str)
    if is_text:
        prompt = processing_class(row["prompt"], add_special_tokens=undecided.text_start == "tokenizer")["input_ids"]
        answer = processing_class(row["completion"], add_special_tokens=False)["input_ids"]
    else:
        prompt, answer = pairs.conversation(processing_class, row["prompt"], [row["completion"]], row)
    start, end = processing_class.bos_token_id, processing_class.eos_token_id
    if undecided.text_start == "missing" and start is not None and prompt[:1] != [start]:
        prompt = [start, *prompt]
    if is_text and answer[-1:] != [end]:
        answer = [*answer, end]
    return prompt, answer


def tokens(processing_class: Any, user_rows: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Token ids of the prompt and of the completion of each row, before anything is cut.

    Args:
        user_rows: of :func:`rows`.
    """
    from pytest_trlcompat import reference

    return [sequence(processing_class, row, reference.KTOUndecided()) for row in unpaired(user_rows)]


def expected_rows(
    processing_class: Any,
    user_rows: Sequence[Mapping[str, Any]],
    settings: reference.KTOSettings,
    size: int,
    max_length: int | None,
) -> list[dict[str, tuple[float, ...]]]:
    """What the rows must become, for :class:`pytest_trlcompat.reference.KTOObjective`.

    A row without any token of its completion is left out: it teaches nothing, and would only count in means.

    Args:
        user_rows: of :func:`rows`.
        size: rows of a micro-batch on a rank, among which completions are exchanged.
        max_length: sequences are cut on the right.
    """
    from pytest_trlcompat import reference

    labelled = [
        (float(row["label"]), *sequence(processing_class, row, settings.undecided)) for row in unpaired(user_rows)
    ]
    labelled = [row for row in labelled if max_length is None or len(row[1]) < max_length]
    expected = []
    for start in range(0, len(labelled), size):
        batch = labelled[start : start + size]
        others = reference.mismatched([answer for _, _, answer in batch], settings)
        for (label, prompt, answer), other in zip(batch, others, strict=True):
            row = {"label": (label,), **_columns("", prompt, answer, max_length)}
            expected.append(row | (_columns("kl_", prompt, other, max_length) if settings.estimates_kl else {}))
    return expected


def _columns(
    prefix: str, prompt: Sequence[int], answer: Sequence[int], most: int | None
) -> dict[str, tuple[float, ...]]:
    ids, mask = [*prompt, *answer][:most], ([0] * len(prompt) + [1] * len(answer))[:most]
    return {f"{prefix}ids": tuple(map(float, ids)), f"{prefix}mask": tuple(map(float, mask))}
