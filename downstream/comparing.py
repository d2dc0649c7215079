"""A project's training, by its own command, compared with the reference of :mod:`pytest_trlcompat.reference`.

Every quantity that differs must be known, by stage, with whether it is the project's on purpose; and what is known must
differ. Rows are those that documentation makes of the data, losses those of the arguments' documentation.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .cases import Case

if TYPE_CHECKING:
    from pytest_trlcompat.conformance.supervised.hooks import SupervisedHooks
    from pytest_trlcompat.conformance.supervised.records import Recording, Row
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["check", "conversation_rows", "conversations", "pair_rows", "pairs_as_messages"]


def check(
    launcher: Any,
    case: Case,
    run: Callable[[], None],
    adapter: SupervisedHooks,
    model: TinyModel,
    rows: Sequence[Row],
) -> None:
    """Train under the case's strategy, and compare the training with the reference.

    Args:
        launcher: the plugin's fixture.
        run: the project's own program, called in each rank.
        rows: what the project's data must become.
    """
    size = 1 if case.strategy == "single" else 2
    result = launcher(
        _compare,
        run,
        adapter,
        model,
        rows,
        dict(case.undecided),
        strategy=case.strategy,
        world_size=size,
        sharded=False,
    )
    found, compared = result.values[0]
    unknown = [text for stage, text in found if not any(each.is_stage(stage) for each in case.known)]
    missing = [each.what for each in case.known if not any(each.is_stage(stage) for stage, _ in found)]
    assert compared > 50, f"only {compared} quantities were compared"
    assert not unknown, "\n".join([f"{len(unknown)} quantities differ:", *unknown[:_SHOWN]])
    assert not missing, f"what is known no longer differs: {missing}"


def _compare(
    run: Callable[[], None],
    adapter: SupervisedHooks,
    model: TinyModel,
    rows: Sequence[Row],
    undecided: Mapping[str, Any],
) -> tuple[list[tuple[str, str]], int]:
    """In each rank: stage and text of each difference, and how many quantities were compared; of the first rank."""
    from pytest_trlcompat.conformance import conventions
    from pytest_trlcompat.conformance.supervised import comparing, recording
    from pytest_trlcompat.conformance.training import of_all_ranks

    recordings: list[Recording] = []
    with recording.recorded(adapter, lambda own: recordings.extend(of_all_ranks(own))):
        run()
    if int(os.environ.get("RANK", "0")):
        return [], 0
    trl = conventions.of_installed(adapter.trainer)
    own = conventions.Unrecorded(_LOGGED_BY_TRL, "a project decides which numbers it logs beside")
    known = dataclasses.replace(trl, undecided={**trl.undecided, **undecided}, unrecorded=(*trl.unrecorded, own))
    models = adapter.models(model, {})
    parts = dict.fromkeys(("training", "evaluation"), (rows, len(rows)))
    comparison = comparing.compare_with_reference(recordings, adapter, models, known, parts)
    unseen = [(stage, f"{stage}: {comparison.shortfall()}") for stage in comparison.unseen]
    return [*unseen, *((each.stage, each.describe()) for each in comparison.differences)], comparison.compared


_LOGGED_BY_TRL = tuple(
    f"{kind}[{prefix}{name}*"
    for kind, prefix in (("logs", ""), ("evaluation", "eval_"), ("evaluate()", "eval_"))
    for name in (
        "aux_loss",
        "entropy",
        "logits/",
        "logps/",
        "mean_token_accuracy",
        "nll_loss",
        "num_tokens",
        "rewards/",
    )
)
ROWS = 8
_SHOWN = 12


def conversations() -> list[list[dict[str, str]]]:
    """Conversations of unequal lengths, of one or two turns, with nothing but words of the tiny models."""
    found = []
    for number in range(ROWS):
        turns = []
        for turn in range(1 + number % 2):
            first = 3 + 2 * number + turn
            turns.append({"role": "user", "content": f"w{first} w2" + " w9" * (number % 3)})
            turns.append({"role": "assistant", "content": f"w{first + 1}" + f" w{first + 2}" * (number % 4)})
        found.append(turns)
    return found


def conversation_rows(words: Any, *, history: bool = True, prompts: bool = False, most: int | None = None) -> list[Row]:
    """What :func:`conversations` must become: by the tokenizer's chat template, labels for what assistants say.

    Args:
        words: the tokenizer.
        history: whether the labels of all turns count, or those of the last turn alone.
        prompts: whether the labels of prompts count.
        most: tokens of a row; the rest is cut off.
    """
    found: list[Row] = []
    for turns in conversations():
        ids: list[int] = []
        labels: list[int] = []
        for number, turn in enumerate(turns):
            own = _encoded(words, turns[: number + 1])[len(ids) :]
            is_last = number == len(turns) - 1
            counts = prompts if turn["role"] == "user" else history or is_last
            ids += own
            labels += own if counts else [-100] * len(own)
        # Nothing predicts the first token.
        found.append({"input_ids": tuple(ids[:most]), "labels": tuple([-100, *labels[1:]][:most])})
    return found


def pairs() -> list[dict[str, str]]:
    """A prompt, a better and a worse completion each, of unequal lengths."""
    return [
        {
            "prompt": f"w{number + 3} w2" + " w9" * (number % 3),
            "chosen": f"w4 w{number + 5}" + " w6" * (number % 4),
            "rejected": f"w7 w{number + 9}" + " w8" * ((number + 1) % 3),
        }
        for number in range(ROWS)
    ]


def pairs_as_messages() -> list[dict[str, Any]]:
    """:func:`pairs` as rows of a dataset: ``messages`` with the prompt, and a message each for both completions."""
    return [
        {
            "messages": [{"role": "user", "content": pair["prompt"]}],
            **{name: {"role": "assistant", "content": pair[name]} for name in ("chosen", "rejected")},
        }
        for pair in pairs()
    ]


def pair_rows(words: Any, **limits: Any) -> list[Row]:
    """What :func:`pairs` must become, as conversations of one turn.

    Args:
        limits: of :func:`pytest_trlcompat.reference.preference_row`.
    """
    from pytest_trlcompat import reference

    found: list[Row] = []
    for pair in pairs_as_messages():
        prompt = _encoded(words, pair["messages"])
        both = [_encoded(words, [*pair["messages"], pair[name]])[len(prompt) :] for name in ("chosen", "rejected")]
        found.append(reference.preference_row(prompt, *both, **limits))
    return found


def _encoded(words: Any, turns: Sequence[Mapping[str, str]]) -> list[int]:
    return list(words(words.apply_chat_template([*turns], tokenize=False), add_special_tokens=False)["input_ids"])
