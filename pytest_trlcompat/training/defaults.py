"""The defaults of arguments by release of TRL, where conditions ask for them.

``defaults.json`` has what configs of measured releases said, a line for each trainer and argument: from which
release on it ``is`` what, is ``absent``, or is ``unknown`` since Transformers decides. Between two measured releases
that differ nothing is known. ``tests/stack/test_defaults.py`` compares it with the release that is installed. Imports
the standard library alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_trlcompat.training.aliases import names_of
from pytest_trlcompat.training.training import UNKNOWN

__all__ = ["RESOLVED_LATER", "Default", "of"]

Default = Callable[[str], Any]
RESOLVED_LATER = frozenset({"activation_checkpointing", "bf16", "router_aux_loss_coef"})
"""Arguments whose default is none at first: what they are then is decided by the device, the model or the trainer."""
_Steps = Sequence[Sequence[Any]]


def _key(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])


@functools.lru_cache
def _table() -> tuple[tuple[str, ...], Mapping[tuple[str, str], _Steps]]:
    document = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return tuple(document["releases"]), {(trainer, name): steps for trainer, name, steps in document["defaults"]}


def of(trainer: str, release: str) -> Default:
    """What arguments of a trainer are where nobody gives them.

    Args:
        release: of TRL; a text that is no release knows no default.
    """
    releases, steps = _table()
    around: tuple[str, ...] = ()
    if re.fullmatch(r"\d+(\.\d+)*", release):
        before = [measured for measured in releases if _key(measured) <= _key(release)]
        after = [measured for measured in releases if _key(measured) >= _key(release)]
        around = (*before[-1:], *after[:1]) if before else ()

    @functools.cache
    def default(name: str) -> Any:
        known = steps.get((trainer, names_of(name)[0]))
        if known is None or not around:
            return UNKNOWN
        kind, *value = _at(known, around[0])
        if any(_at(known, measured) != [kind, *value] for measured in around[1:]):
            return UNKNOWN
        if kind == "unknown" or (value == [None] and name in RESOLVED_LATER):
            return UNKNOWN
        return value[0] if value else None

    return default


def _at(steps: _Steps, release: str) -> Sequence[Any]:
    """What holds with a measured release."""
    *_, last = (step for step in steps if _key(step[0]) <= _key(release))
    return last[1:]
