"""An observation: what one run of the predicate in one environment showed, and what its failures look like.

A release may fail for a reason of its own: a search that took that for "bad" would drift to an unrelated error. Two
failures are the same when the exception, its message without what changes from run to run, and the location where it
was raised are the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

__all__ = ["Fingerprint", "Observation", "fingerprint_of", "normalise", "same_failure"]

_T = TypeVar("_T")

_FRAMES = 3
"""Innermost frames that are kept, without this package's and pytest's own."""

_IRRELEVANT = (
    "pytest_trlcompat/launch/",
    "pytest_trlcompat/plugin/judging.py",
    "_pytest/",
    "pluggy/",
    "runpy.py",
    "importlib/",
)
_DISTINCTIVE_WORDS = 3
"""A message of so many words is enough to recognise a failure; a shorter one (a bare assert) needs the location too."""

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line \d+, in (?P<function>.+)$')
_PYTEST_FRAME = re.compile(r"^(?P<path>\S+):\d+: in (?P<function>.+)$")
_RAISED = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (?P<message>.*))?$")
_COMMIT_FOLDER = re.compile(r"/(?:tree|installed)-[0-9a-f]{12}-[0-9a-f]+/")
_HEADER = "Traceback (most recent call last):"
# What torch's launcher, pytest and exception groups put before each line.
_PREFIX = re.compile(r"^(?:\[?rank\s*\d+\]?:|E {1,3}|\|)\s?")

_REPLACEMENTS = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0xN"),
    (re.compile(r"\b[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b"), "UUID"),
    # Paths differ from environment to environment; the last part identifies the file.
    (re.compile(r"(?<![\w.])(?:file://)?/(?:[^\s/'\"`:,)]+/)+"), ""),
    # Before the numbers: which device it was depends on the machine and the rank.
    (re.compile(r"\b(?:cuda|npu|cpu):\d+"), "DEVICE"),
    (re.compile(r"(?<!\w)[-+]?\d+(?:\.\d+)*(?:[eE][-+]?\d+)?(?!\w)"), "N"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True)
class Fingerprint:
    """How a failure is recognised.

    Attributes:
        kind: the exception's class name; a verdict (``silent``) or ``exit status 3`` where nothing was raised.
        message: normalised; numbers are ``N``.
        frames: ``file:function``, innermost first.
    """

    kind: str
    message: str = ""
    frames: tuple[str, ...] = ()

    def __str__(self) -> str:
        location = f" in {self.frames[0]}" if self.frames else ""
        return f"{self.kind}{': ' + self.message if self.message else ''}{location}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": self.message, "frames": list(self.frames)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Fingerprint:
        return cls(raw["kind"], raw["message"], tuple(raw["frames"]))


@dataclass(frozen=True)
class Observation:
    """What was seen, check by check.

    A check is one strategy of a suite, one pytest test, or the command.

    Attributes:
        passed: checks that passed, with what each reported: a verdict, an exit status.
        failed: checks that failed.
        inconclusive: checks that neither passed nor failed (a trainer that this release does not have, a skipped
            test), with the reason.
        reason: why no check ran at all (the environment cannot be built); empty otherwise.
        evidence: per check, numbers and texts that were measured.
        doubt: probability that a second run shows the opposite.
        seconds: wall-clock time of the run.
        build_seconds: of resolving and building the environment.
        reused: the environment was there already.
    """

    passed: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, Fingerprint] = field(default_factory=dict)
    inconclusive: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    doubt: float = 0.0
    seconds: float = 0.0
    build_seconds: float = 0.0
    reused: bool = False

    @property
    def conclusive(self) -> bool:
        """Whether any check passed or failed."""
        return bool(self.passed or self.failed)

    def only(self, pattern: str) -> Observation:
        """What was seen of the checks whose names match a shell pattern."""
        if pattern == "*" or not (self.conclusive or self.inconclusive):
            return self

        def matching(checks: Mapping[str, _T]) -> dict[str, _T]:
            return {check: value for check, value in checks.items() if fnmatchcase(check, pattern)}

        matched = dataclasses.replace(
            self, passed=matching(self.passed), failed=matching(self.failed), inconclusive=matching(self.inconclusive)
        )
        if matched.conclusive or matched.inconclusive:
            return matched
        measured = ", ".join(sorted({*self.passed, *self.failed, *self.inconclusive}))
        return dataclasses.replace(matched, reason=f"nothing was measured under {pattern!r}, only under {measured}")

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": dict(self.passed),
            "failed": {check: failure.to_json() for check, failure in self.failed.items()},
            "inconclusive": dict(self.inconclusive),
            "reason": self.reason,
            "evidence": dict(self.evidence),
            "doubt": self.doubt,
            "seconds": round(self.seconds, 2),
            "build_seconds": round(self.build_seconds, 2),
            "reused": self.reused,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Observation:
        """
        Raises:
            KeyError, TypeError: when it is no observation.
        """
        # Older journals call inconclusive checks "untold".
        fields = {"inconclusive" if name == "untold" else name: value for name, value in raw.items()}
        fields["failed"] = {check: Fingerprint.from_json(failure) for check, failure in raw["failed"].items()}
        return cls(**fields)


def same_failure(failure: Fingerprint, other: Fingerprint) -> bool:
    """Whether two failures are the same one."""
    if (failure.kind, failure.message) != (other.kind, other.message):
        return False
    # Functions are renamed and moved from release to release: the location decides only where the message is short.
    if len(failure.message.split()) >= _DISTINCTIVE_WORDS or not failure.frames or not other.frames:
        return True
    return failure.frames[0] == other.frames[0]


def normalise(message: str) -> str:
    """A message's first paragraph without addresses, paths, numbers and line breaks."""
    text = message.strip().split("\n\n")[0]
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text.strip()[:300]


def fingerprint_of(text: str, fallback: str) -> Fingerprint:
    """The fingerprint of the last traceback in a program's output, or in a pytest report made with ``--tb=native``.

    Args:
        fallback: the kind of a failure without a traceback, for example ``exit status 3``.
    """
    lines = [_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.strip() == _HEADER]
    if not starts:
        return _of_collection_error(text) or Fingerprint(fallback)
    frames: list[str] = []
    # The last traceback is the one that was not handled; those above are its causes.
    for number in range(starts[-1] + 1, len(lines)):
        frame = _FRAME.match(lines[number])
        if frame:
            frames.append(f"{_short_path(frame['path'])}:{frame['function']}" if _is_relevant(frame["path"]) else "")
            continue
        raised = _RAISED.match(lines[number])
        if raised:
            message = "\n".join([raised["message"] or "", *_rest_of_message(lines[number + 1 :])])
            innermost = [frame for frame in reversed(frames) if frame][:_FRAMES]
            return Fingerprint(raised["type"].rpartition(".")[2], normalise(message), tuple(innermost))
    return Fingerprint(fallback)


def _of_collection_error(text: str) -> Fingerprint | None:
    """Of a module that pytest could not import, which it reports in a style of its own, whatever ``--tb`` says."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        raised = _RAISED.match(_PREFIX.sub("", line)) if line.startswith("E  ") else None
        if raised:
            frames = [
                frame for frame in map(_PYTEST_FRAME.match, lines[:number]) if frame and _is_relevant(frame["path"])
            ]
            locations = tuple(f"{_short_path(frame['path'])}:{frame['function']}" for frame in reversed(frames))
            message = normalise(raised["message"] or "")
            return Fingerprint(raised["type"].rpartition(".")[2], message, locations[:_FRAMES])
    return None


def _rest_of_message(lines: Sequence[str]) -> list[str]:
    """The further lines of a message of several, up to the first empty one."""
    rest = []
    for line in lines:
        # pytest's rules and its summary may follow a message at once.
        if not line.strip() or line.startswith(("=", "-", "FAILED", "ERROR")):
            break
        rest.append(line)
    return rest[:5]


def _is_relevant(path: str) -> bool:
    return not any(part in path.replace("\\", "/") for part in _IRRELEVANT)


def _short_path(path: str) -> str:
    """A file from its package on (``trl/trainer/grpo_trainer.py``), or from the folder of a commit's files on."""
    parts = _COMMIT_FOLDER.split(path.replace("\\", "/"))[-1].strip("/").split("/")
    for landmark in ("site-packages", "src"):
        if landmark in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(landmark) :])
    return "/".join(parts[-2:])
