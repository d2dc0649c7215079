"""Known issues by the words of their ids, titles, symptoms, error texts and links, and by an id that is misspelt."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_trlcompat.catalog.issue import KnownIssue

__all__ = ["Match", "find", "nearest_ids"]

_WORD = re.compile(r"\w+")
_WEIGHTS = {"id": 4.0, "title": 3.0, "symptom": 2.0, "error": 2.0, "upstream": 1.0}
_IN_A_WORD = 0.5
"""What a word counts that is a part of another: ``accumul`` in ``accumulation``."""
_LEAST = 0.5
"""The part of what was asked, rare words counting more, that an issue must have."""
_MOST_CHARACTERS = 20_000
"""Of what was asked, its end: in a log that is where the error stands."""


@dataclass(frozen=True)
class Match:
    """An issue that was found.

    Attributes:
        is_error: what was asked contains the text of its error.
    """

    issue: KnownIssue
    score: float
    is_error: bool = False


def find(asked: str, issues: Iterable[KnownIssue]) -> list[Match]:
    """The issues that have most of the words, the best first; those whose error was asked about before all others.

    Args:
        asked: words, or an error's text as it was printed.
    """
    asked = asked[-_MOST_CHARACTERS:]
    issues = [issue for issue in issues if not issue.is_search]
    texts = {issue.id: _texts(issue) for issue in issues}
    words = list(dict.fromkeys(_WORD.findall(asked.lower())))
    shares = {issue_id: _shares(words, parts) for issue_id, parts in texts.items()}
    rarity = {word: _rarity(sum(word in share for share in shares.values()), len(issues)) for word in words}
    total = sum(rarity.values())
    matches = []
    for issue in issues:
        share = shares[issue.id]
        covered = sum(rarity[word] for word in share)
        is_error = any(symptom.pattern.search(asked) for symptom in issue.symptoms)
        if is_error or (share and covered >= _LEAST * total):
            score = sum(rarity[word] * weight for word, weight in share.items())
            matches.append(Match(issue, score, is_error))
    return sorted(matches, key=lambda match: (not match.is_error, -match.score, match.issue.id))


def _texts(issue: KnownIssue) -> Mapping[str, str]:
    return {
        "id": issue.id.lower(),
        "title": issue.title.lower(),
        "symptom": issue.wrong.lower(),
        "error": " ".join(f"{symptom.type_name} {symptom.pattern.pattern}" for symptom in issue.symptoms).lower(),
        "upstream": " ".join(issue.upstream).lower(),
    }


def _shares(words: Sequence[str], texts: Mapping[str, str]) -> dict[str, float]:
    """The words that an issue has, with the weight of the best place where they are."""
    whole = {name: set(_WORD.findall(text)) for name, text in texts.items()}
    shares = {}
    for word in words:
        weights = [
            _WEIGHTS[name] * (1.0 if word in whole[name] else _IN_A_WORD)
            for name, text in texts.items()
            # One or two letters are a part of almost any text.
            if word in text and (word in whole[name] or len(word) > 2)
        ]
        if weights:
            shares[word] = max(weights)
    return shares


def _rarity(number: int, issues: int) -> float:
    """Little for a word that most issues have; what none has counts as what one has."""
    return math.log(1 + issues / max(number, 1))


def nearest_ids(misspelt: str, ids: Iterable[str], most: int = 3) -> list[str]:
    """The ids that somebody may have meant."""
    ids = sorted(ids)
    asked = misspelt.lower().replace("_", "-")
    near = difflib.get_close_matches(asked, ids, n=most, cutoff=0.7)
    containing = [issue_id for issue_id in ids if len(asked) > 2 and asked in issue_id]
    return list(dict.fromkeys([*near, *containing]))[:most]
