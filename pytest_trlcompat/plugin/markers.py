"""The marker ``versions``: names the releases of the stack that a test needs; it is skipped on others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trlcompat import stack

if TYPE_CHECKING:
    import pytest

__all__ = [
    "GPU",
    "GPU_LINES",
    "LINES",
    "NAME",
    "MarkerError",
    "Requirement",
    "namespaced",
    "parse_mark",
    "skip_reason",
]

NAME = "versions"
GPU = "gpu"


def namespaced(name: str) -> str:
    """The same marker under a name that no other project has: it acts on any test."""
    return f"trlcompat_{name}"


_PLAIN = "without the prefix only for tests that use fixtures of trlcompat, or where it is loaded with -p trlcompat"
_GPU_TEXT = "this test needs a real GPU; it is skipped if launches use another device"
_TEXT = (
    "(trl='>=0.15', transformers='<4.50', ..., reason=None, issue=None): "
    f"skip unless every range holds for the installed version; packages are {', '.join(stack.PACKAGES)}; "
    "reason and issue are shown when the test is skipped"
)
LINES = (f"{NAME}{_TEXT}", f"{namespaced(NAME)}{_TEXT}; {_PLAIN}")
"""The marker's registration, shown by ``pytest --markers``."""
GPU_LINES = (f"{GPU}: {_GPU_TEXT}.", f"{namespaced(GPU)}: {_GPU_TEXT}; {_PLAIN}.")


class MarkerError(ValueError):
    """An invalid ``versions`` marker."""


@dataclass(frozen=True)
class Requirement:
    """The requirements of one ``versions`` marker."""

    ranges: Mapping[str, str]
    reason: str | None = None
    issue: str | None = None

    def unmet(self, versions: Mapping[str, str]) -> str | None:
        """Why a test with this marker is skipped, or ``None`` when all its ranges hold."""
        missed = {
            package: text for package, text in self.ranges.items() if not stack.satisfied({package: text}, versions)
        }
        if not missed:
            return None
        needs = ", ".join(f"{package}{text}" for package, text in missed.items())
        present = ", ".join(f"{package} {versions[package]}" for package in missed if package in versions)
        absent = ", ".join(f"no {package}" for package in missed if package not in versions)
        text = f"needs {needs}; found {', '.join(filter(None, (present, absent)))}"
        if self.reason:
            text += f": {self.reason}"
        return f"{text} [{self.issue}]" if self.issue else text


def parse_mark(mark: pytest.Mark) -> Requirement:
    """Parse a ``versions`` marker.

    Raises:
        MarkerError: for positional arguments, no range, an unknown package, a malformed range, or a reason or issue
            that is not a string.
    """
    if mark.args:
        raise MarkerError(
            f"takes ranges by package, like versions(trl='>=0.15'), not positional arguments {mark.args!r}"
        )
    texts = {}
    for name in ("reason", "issue"):
        texts[name] = mark.kwargs.get(name)
        if not isinstance(texts[name], (str, type(None))):
            raise MarkerError(f"{name} must be a string, not {texts[name]!r}")
    ranges = {package: text for package, text in mark.kwargs.items() if package not in texts}
    if not ranges:
        raise MarkerError("has no range; write at least one, like versions(trl='>=0.15')")
    try:
        stack.check_ranges(ranges)
    except stack.RangeError as error:
        raise MarkerError(str(error)) from error
    return Requirement(ranges, **texts)


def skip_reason(marks: Iterable[pytest.Mark], versions: Mapping[str, str]) -> str | None:
    """Why a test with these ``versions`` markers is skipped; ``None`` if it runs. The closest marker comes first.

    All markers are checked, even if the first one skips the test.

    Raises:
        MarkerError: see :func:`parse_mark`.
    """
    requirements = [parse_mark(mark) for mark in marks]
    return next(filter(None, (requirement.unmet(versions) for requirement in requirements)), None)
