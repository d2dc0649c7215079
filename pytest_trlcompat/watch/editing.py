"""The catalogue's text with predictions as they were measured, each before the one that was wrong.

Text is inserted and none is changed, so that comments and order stay as a person has written them. Imports the
catalogue alone.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.known_issues import Catalog, CatalogError
from pytest_trlcompat.catalog.ranges import parse
from pytest_trlcompat.catalog.verdict import Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Correction", "NotCorrected", "correct"]

_ISSUE = re.compile(r"^\[\[issue\]\]\s*$")
_PREDICTION = re.compile(r"^\[\[issue\.prediction\]\]\s*$")


class NotCorrected(ValueError):
    """A person must write this prediction; the text says why."""


@dataclass(frozen=True)
class Correction:
    """A verdict that was measured, and from which release on.

    Attributes:
        by: of ``blocked``, the issue that stops the suite first.
        first: the release of ``package`` that brought it.
        versions: of the stack that was measured.
        why: of the prediction.
    """

    issue: str
    subject: str
    strategies: tuple[str, ...]
    verdict: Verdict
    by: str
    package: str
    first: str
    versions: Mapping[str, str]
    why: str


def correct(text: str, correction: Correction) -> str:
    """The text of a catalogue that predicts, for what was measured, what was measured.

    The new prediction holds where the wrong one did, from the first release on; the others stay.

    Raises:
        NotCorrected: where that cannot be written so.
    """
    if correction.verdict in (Verdict.ERROR, Verdict.HANG):
        raise NotCorrected(f"nobody has explained the {correction.verdict}: it needs a known issue of its own first")
    if correction.verdict is Verdict.UNTESTABLE:
        raise NotCorrected("what cannot be tested is no verdict about a release")
    raw = tomllib.loads(text)
    entry = next((each for each in raw["issue"] if each["id"] == correction.issue), None)
    if entry is None:
        raise NotCorrected(f"the catalogue has no issue {correction.issue}")
    wrong = _wrong(text, entry, correction)
    when = _when(wrong, correction)
    lines = text.splitlines(keepends=True)
    place = _place(lines, correction.issue, entry["prediction"].index(wrong) if wrong is not None else None)
    changed = "".join([*lines[:place], *_block(correction, when), *lines[place:]])
    _check(changed, correction)
    return changed


def _wrong(text: str, entry: Mapping[str, Any], correction: Correction) -> Mapping[str, Any] | None:
    """The entry's prediction that was wrong; ``None`` where there was none."""
    issue = _load(text).get_issue(correction.issue)
    strategy = correction.strategies[0]
    decided = next((p for p in issue.predictions if p.applies(correction.subject, strategy, correction.versions)), None)
    if decided is None:
        return None
    for raw in entry["prediction"]:
        same = (raw["verdict"], raw["subject"], raw["when"], tuple(raw.get("strategies", ())), raw["why"])
        if same == (decided.verdict.value, decided.subject, decided.when, decided.strategies, decided.why):
            found: Mapping[str, Any] = raw
            return found
    raise NotCorrected(f"{decided.describe()} follows from another entry, which has to be changed instead")


def _when(wrong: Mapping[str, Any] | None, correction: Correction) -> dict[str, str]:
    when = dict(wrong["when"]) if wrong is not None else {}
    bound = f">={correction.first}"
    both = ",".join(part for part in (bound, when.get(correction.package, "")) if part)
    narrowed = parse(both)
    when[correction.package] = narrowed.describe() if len(narrowed.intervals) == 1 else both
    return when


def _place(lines: Sequence[str], issue: str, position: int | None) -> int:
    """The line before which the new prediction stands: the wrong one's, or the end of the issue."""
    begins = [number for number, line in enumerate(lines) if _ISSUE.match(line)]
    named = re.compile(rf'^id = "{re.escape(issue)}"\s*$')
    for start, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        if any(named.match(line) for line in lines[start:end]):
            predictions = [number for number in range(start, end) if _PREDICTION.match(lines[number])]
            if position is not None:
                return predictions[position]
            while lines[end - 1].startswith("#"):  # of the next issue
                end -= 1
            return end
    raise NotCorrected(f'the catalogue has no line id = "{issue}"')


def _block(correction: Correction, when: Mapping[str, str]) -> Iterable[str]:
    # JSON's strings and lists are TOML's as well.
    ranges = ", ".join(f"{package} = {json.dumps(text)}" for package, text in when.items())
    return [
        "[[issue.prediction]]\n",
        f"verdict = {json.dumps(correction.verdict.value)}\n",
        *([f"by = {json.dumps(correction.by)}\n"] if correction.by else []),
        f"subject = {json.dumps(correction.subject)}\n",
        f"when = {{ {ranges} }}\n",
        f"strategies = {json.dumps(list(correction.strategies))}\n",
        f"why = {json.dumps(correction.why, ensure_ascii=False)}\n",
        "\n",
    ]


def _check(text: str, correction: Correction) -> None:
    try:
        issue = _load(text).get_issue(correction.issue)
    except CatalogError as error:
        raise NotCorrected(f"the catalogue would refuse it: {error}") from error
    for strategy in correction.strategies:
        found = issue.predict(correction.subject, strategy, correction.versions)
        if found is None or found.verdict is not correction.verdict or found.by != correction.by:
            raise NotCorrected(
                f"an earlier prediction decides under {strategy}: {found.describe() if found else 'none at all'}"
            )


def _load(text: str) -> Catalog:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "catalog.toml")
        path.write_text(text, encoding="utf-8")
        return known_issues.load.__wrapped__(path)  # not kept: the file is gone
