"""The exception that a failed launch raises in the test process."""

from __future__ import annotations

import sys
from typing import Any

from pytest_trlcompat.launch.result import LaunchError, LaunchResult, RankResult

__all__ = ["RAISES", "error_of", "outcome_of"]

RAISES = ("launch", "original")
"""What ``raises`` of a launch may be: its own error, or the exception of the rank that failed first."""
_OUTCOMES = ("skip", "xfail", "fail")


def outcome_of(error: BaseException) -> str | None:
    """``skip``, ``xfail`` or ``fail`` for an exception by which pytest's function of that name ends a test."""
    pytest = sys.modules.get("pytest")
    if pytest is not None:
        for name in _OUTCOMES:
            if type(error) is getattr(pytest, name).Exception:
                return name
    return None


def error_of(result: LaunchResult, raises: str) -> BaseException:
    """The exception for a failed launch.

    If ``pytest.skip``, ``pytest.xfail`` or ``pytest.fail`` ended every rank that failed by itself, it is the exception
    of the first of these ranks. Otherwise it is a :class:`LaunchError`, or with ``raises="original"`` the exception of
    the first rank that failed, with the :class:`LaunchError` as its cause.
    """
    error = LaunchError(result.describe(), result)
    cause = result.root_cause
    if cause is None or cause.failure is None or result.timed_out:
        return error
    if _only_outcomes(result):
        return _outcome(cause, error)
    if raises == "launch":
        return error
    # A rank that skipped does not hide what another one raised.
    failed = (rank for rank in result.failed_by_themselves if rank.failure is not None and rank.failure.outcome is None)
    return _original(next(failed, cause), error)


def _only_outcomes(result: LaunchResult) -> bool:
    if "pytest" not in sys.modules:
        return False
    failures = [rank.failure for rank in result.failed_by_themselves]
    return all(failure is not None and failure.outcome is not None for failure in failures)


def _outcome(cause: RankResult, error: LaunchError) -> BaseException:
    assert cause.failure is not None
    name, text = str(cause.failure.outcome), cause.failure.message
    exception_class: Any = getattr(sys.modules["pytest"], name).Exception
    if name == "fail":
        # Without the traceback of this process, which only leads to the launcher; the text has the rank's own.
        failed: BaseException = exception_class(f"{text}\n{error}", pytrace=False)
        return failed
    ended: BaseException = exception_class(text)
    ended._use_item_location = True  # type: ignore[attr-defined] # the test's line, not ours, in pytest's summary
    return ended


def _original(cause: RankResult, error: LaunchError) -> BaseException:
    assert cause.failure is not None
    try:
        original = cause.failure.original()
    except ValueError as why:
        text = f"raises='original' asked for the {cause.failure.type_name} of rank {cause.rank}, but {why}\n{error}"
        return LaunchError(text, error.result)
    original.__cause__ = error
    return original
