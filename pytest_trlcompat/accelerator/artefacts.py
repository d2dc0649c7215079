"""Which failures say nothing about a library: those of the software accelerator, and of libraries' branches for NPUs.

A harness that blames a library for its own limits is worse than none, so everything that judges a failure uses this
module: a launch, the judge, bisection. A failure is an artefact if

- it says so: an operator without a kernel for this device, a name that the stand-in for ``torch_npu`` lacks, a feature
  of torch that does not know the device;
- or the process died in the device's native code, which every operator passes through;
- or it was raised in a body of a library that only an NPU takes (:mod:`pytest_trlcompat.accelerator.branches`). Only
  the innermost frame counts, without the frames of torch, of Python and of the stand-in: what such a body merely calls
  also runs on a GPU, and may be wrong there.

An exception that was raised while an artefact was handled, or because of one, is an artefact too, since it would not
have occurred otherwise. Check for a known issue's symptom first, which takes precedence.

It is used in ranks, in the test process, and where torch is not installed.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat import _location
from pytest_trlcompat.accelerator.artefact_words import AMBIGUOUS, PLAIN, What, Words
from pytest_trlcompat.accelerator.branches import Branch, Kind, npu_branches
from pytest_trlcompat.accelerator.tracebacks import Raised, exceptions, led_to, without_prefixes

__all__ = [
    "Artefact",
    "What",
    "error_text",
    "in_force",
    "in_text",
    "met",
    "of_crash",
    "of_exception",
    "of_failure",
    "of_program",
    "printed_in",
    "text_of",
]


@dataclass(frozen=True)
class Artefact:
    """A failure that is no verdict about a library.

    Attributes:
        name: of the operator, the attribute, the branch or the feature.
        reason: what is missing, as the rest of a sentence.
        torch: the version of torch, where it is known.
    """

    what: What
    name: str
    reason: str
    torch: str = ""

    def describe(self) -> str:
        """For people: whose limit it is, and what to do. :func:`in_text` reads it back."""
        torch = f", torch {self.torch}" if self.torch else ""
        return f"{_WHOSE} ({self.what} {self.name}{torch}), not of the library: {self.reason}. {_ADVICE}"


_WHOSE = "This is a limit of the software accelerator"
_ADVICE = "Report it to pytest-trlcompat, or test on a GPU with --trlcompat-device cuda."
_OWN_WORDS = re.compile(
    rf"{_WHOSE} \((?P<what>{'|'.join(What)}) (?P<name>.+?)(?:, torch (?P<torch>[\w.+]+))?\), not of the library: "
    rf"(?P<reason>.+?)\. {re.escape(_ADVICE)}"
)

_WRAPPERS = frozenset({"ChildFailedError", "ProcessRaisedException", "CalledProcessError", "RemoteTraceback"})
"""What a launcher raises after its children have printed what happened."""
_OWN_FRAME = re.compile(r"^ ?frame #\d+: [^\n]*(?:\btrlcompat::|/torch_npu/_C)", re.MULTILINE)
_PYTHONS_OWN = re.compile(r"/lib/python3(?:\.\d+)?/(?!.*(?:site|dist)-packages)|^<")
_TORCHS_OWN = re.compile(r"(?:site|dist)-packages/torch/|/torch_npu/")


def in_force() -> bool:
    """Whether this process has the software accelerator: elsewhere nothing is an artefact of it."""
    return bool(getattr(sys.modules.get("torch_npu"), "IS_SOFTWARE_ACCELERATOR", False))


def of_exception(error: BaseException) -> Artefact | None:
    """The artefact behind an exception that was raised in this process.

    Returns:
        ``None`` if the failure may be the fault of a library, or this process has no software accelerator.
    """
    if not in_force():
        return None
    return of_failure(
        type(error).__name__,
        text_of(error),
        "".join(traceback.format_exception(error)),
        torch=str(getattr(sys.modules.get("torch"), "__version__", "")),
    )


def of_failure(type_name: str, message: str, traceback: str, *, torch: str = "") -> Artefact | None:
    """The artefact behind a failure on the software accelerator that is known as text.

    Args:
        traceback: as Python formats it, with what it was raised from. The source files that it names are read, as
            far as they are here.

    Returns:
        ``None`` if the failure may be the fault of a library.
    """
    stated = _own_words(message)
    if stated is not None:
        return stated
    *before, last = led_to(exceptions(traceback)) or [Raised((), "")]
    chain = [Raised(last.frames, f"{type_name}: {message}"), *reversed(before)]
    # Along the whole chain first what this device alone says, and only then what others say too.
    for words in (PLAIN, AMBIGUOUS):
        for raised in chain:
            artefact = _by_words(raised.text, words, torch)
            if artefact is not None:
                return artefact
    # Last, since it reads the source files of the library.
    return next(filter(None, (_by_place(raised, torch) for raised in chain)), None)


def of_crash(how: str, stderr: str) -> Artefact | None:
    """The artefact behind a process that died, by the native stack that torch prints on a fatal signal.

    Args:
        how: the end in words, such as ``was killed by SIGSEGV``.

    Returns:
        ``None`` if no frame of that stack is the software accelerator's.
    """
    if _OWN_FRAME.search(stderr) is None:
        return None
    return Artefact(What.CRASH, how, "it died in an operator or a collective of its own")


def in_text(text: str) -> Artefact | None:
    """The artefact in a short text about a failure: from :meth:`Artefact.describe`, or an exception's message."""
    return _own_words(text) or _by_words(text, PLAIN, "")


def of_program(output: str) -> Artefact | None:
    """The artefact that ended a program, by all that the program printed.

    Only :data:`PLAIN` messages count, and only the last exception and those that led to it.

    Returns:
        ``None`` if no such message is among them.
    """
    stated = _own_words(output)
    if stated is not None:
        return stated
    text = without_prefixes(output)
    raised = exceptions(text)
    if raised and raised[-1].type_name not in _WRAPPERS:
        # A program may have printed other exceptions that it has handled.
        raised = led_to(raised)
    texts = [exception.text for exception in reversed(raised)] or _short_style(output)
    # Not the ambiguous ones, since the program may run on the CPU.
    return next(filter(None, (_by_words(message, PLAIN, "") for message in texts)), None)


def _short_style(output: str) -> list[str]:
    """The exceptions in pytest's own style, which has no traceback of Python's."""
    return [line[1:].strip() for line in output.splitlines() if line.startswith("E  ")]


def met(error: BaseException) -> Artefact | None:
    """As :func:`of_exception`, for callers that go on after the failure.

    The artefact is also printed, for a rank that then hangs or fails in another way: :func:`printed_in`.
    """
    artefact = of_exception(error)
    if artefact is not None:
        print(artefact.describe(), file=sys.stderr, flush=True)
    return artefact


def printed_in(stderr: str) -> Artefact | None:
    """The artefact that a rank has :func:`met` first, by what the rank printed on stderr."""
    return _own_words(stderr)


def error_text(error: BaseException, limit: int = 300) -> str:
    """``Type: message`` and the location; for an artefact also the whole of :meth:`Artefact.describe`.

    For callers that go on after a failure and keep it as a text: :func:`in_text` finds the artefact there, and
    ``_location.apart`` the location.

    Args:
        limit: of the message, in characters.
    """
    artefact = met(error)
    text = _location.with_location(f"{type(error).__name__}: {text_of(error)[:limit]}", _location.of_exception(error))
    return text if artefact is None else f"{text} [{artefact.describe()}]"


def text_of(error: BaseException) -> str:
    """The exception's text. An exception whose ``__str__`` fails has a text that says so."""
    try:
        return str(error)
    except Exception as broken:
        return f"<{type(error).__name__} whose text cannot be had: {type(broken).__name__}>"


def _own_words(text: str) -> Artefact | None:
    # Most texts are long, and not ours. One word is looked for, since the sentence may have been wrapped.
    if _WHOSE.rpartition(" ")[2] not in text:
        return None
    match = _OWN_WORDS.search(" ".join(text.split()))
    if match is None:
        return None
    return Artefact(What(match["what"]), match["name"], match["reason"], match["torch"] or "")


def _by_words(text: str, words: Iterable[Words], torch: str) -> Artefact | None:
    for known in words:
        match = re.search(known.pattern, text)
        if match is not None:
            groups = {name: value or "?" for name, value in match.groupdict().items()}
            return Artefact(known.what, known.name.format(**groups).strip(), known.reason, torch)
    return None


def _by_place(raised: Raised, torch: str) -> Artefact | None:
    """A branch for NPUs whose own line raised."""
    foreign = [frame for frame in raised.frames if not (_PYTHONS_OWN.search(frame[0]) or _TORCHS_OWN.search(frame[0]))]
    if not foreign:
        return None
    path, line = foreign[-1]
    branch = next(
        (
            candidate
            for candidate in _branches(path)
            if line in candidate and candidate.certain and not candidate.shared
        ),
        None,
    )
    if branch is None:
        return None
    inside = f" in {branch.function}" if branch.function else ""
    reason = f"no GPU goes there, only where {branch.condition}{inside}"
    return Artefact(What.BRANCH, f"{_inside(path)}:{line}", reason, torch)


def _branches(path: str) -> tuple[Branch, ...]:
    try:
        return _branches_of(path, os.stat(path).st_mtime_ns)
    except OSError:  # another machine's, or made up as it runs
        return ()


# The time of the change is only part of the cache's key: a file that was edited is read again.
@functools.lru_cache(maxsize=64)
def _branches_of(path: str, _changed: int) -> tuple[Branch, ...]:
    try:
        source = Path(path).read_text(encoding="utf-8", errors="replace")
        return tuple(branch for branch in npu_branches(source, path) if branch.kind is Kind.NPU)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()


def _inside(path: str) -> str:
    """The part of a path from the package on."""
    parts = re.split(r"(?:site|dist)-packages/", path.replace("\\", "/"))
    return parts[-1] if len(parts) > 1 else "/".join(path.replace("\\", "/").split("/")[-3:])
