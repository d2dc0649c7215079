"""Which of the known issues that suites have just shown bite a trainer of the user's: ``--trlcompat-trainer``.

Asked of ``trlcompat cures`` in a process of its own, since the test process imports no package of the stack.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pytest_trlcompat.catalog.issue import measured_with
from pytest_trlcompat.catalog.verdict import Record, Verdict

__all__ = ["lines", "shown"]

_TIMEOUT = 300.0
_BAD = (Verdict.BROKEN, Verdict.SILENT, Verdict.WASTEFUL, Verdict.HANG)


def shown(records: Collection[Record]) -> list[str]:
    """The ids of the issues by which TRL's own trainer was broken, silently wrong or wasteful, sorted."""
    return sorted({record.issue for record in records if record.subject == "upstream" and record.verdict in _BAD})


def lines(trainer: str, issues: Sequence[str]) -> Iterator[str]:
    """What to say of a trainer, ``package.module:Class``.

    An issue bites it where a cure of its kind is at work in this class on this stack, may where that depends on the
    strategy, the model or the arguments, and does not where the cure says so; of an issue without a cure nobody knows.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest_trlcompat", "cures", trainer, "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT,
    )
    if done.returncode != 0:
        # The last line of a traceback, which says what it ended in.
        yield f"{trainer}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}"
        return
    answer = json.loads(done.stdout)
    of_others = [issue for issue in issues if not _is_about(issue, answer["trainers"])]
    by_answer = _sorted(answer, [issue for issue in issues if issue not in of_others])
    yield f"{trainer}, of the {len(issues)} known issues that TRL's own trainers showed here:"
    for text, named in (
        (f"bite it, and cured({trainer.rpartition(':')[2]}) cures them", by_answer[True]),
        ("bite it or not, by strategy, model and arguments; it cures those, too", by_answer[None]),
        ("do not bite it", by_answer[False]),
        ("nobody can say: no cure looks for them", by_answer["unknown"]),
        ("are of other trainers", of_others),
    ):
        if named:
            yield f"  {len(named):>3} {text}: {', '.join(named)}"


def _is_about(issue: str, trainers: Collection[str]) -> bool:
    """Whether an issue is one of these trainers', or of none in particular, such as one of saving under FSDP."""
    trainer = measured_with(issue).removeprefix("first_")
    return not issue.removeprefix("first-").startswith(f"{trainer}-") or trainer in trainers


def _sorted(answer: Mapping[str, Any], issues: Sequence[str]) -> dict[bool | str | None, list[str]]:
    """Issues by whether they bite; where several cures are of one issue, the one that is at work decides."""
    by_answer: dict[bool | str | None, list[str]] = {True: [], None: [], False: [], "unknown": []}
    for issue in issues:
        active = {cure["active"] for cure in answer["cures"] if issue in cure["issues"]}
        by_answer[next((activity for activity in (True, None, False) if activity in active), "unknown")].append(issue)
    return by_answer
