"""Warnings and log records of ranks: recorded in the rank, and given again in the test process.

So ``pytest.warns``, ``recwarn``, ``caplog`` and pytest's own lists see them. A rank has the filters and levels of the
test process.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Recorder", "Settings", "Warned", "log_again", "settings_of_this_process", "warn_again"]

_MOST_RECORDS = 10_000
"""Of one rank; further ones stand in its output alone."""
_PLAIN = (str, int, float, bool, type(None))

_registries: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}
"""What was given already, by file, so that a filter like ``default`` shows it once, as it does in one process."""

Names = tuple[tuple[str, str], ...]
"""Module and name of a class and of its bases, the class first."""
Filter = tuple[str, str, Names, str, int]
"""As :func:`warnings.filterwarnings` takes it, the category by its names."""


@dataclass(frozen=True)
class Settings:
    """What warnings and logging of the test process are set to.

    Attributes:
        filters: of warnings, the first that holds decides.
        levels: logger to level, of those that have one; the root logger is ``""``.
    """

    filters: tuple[Filter, ...]
    levels: Mapping[str, int]


@dataclass(frozen=True)
class Warned:
    """A warning of a rank."""

    text: str
    category: Names
    filename: str
    lineno: int


def settings_of_this_process() -> Settings:
    """The filters and levels that ranks get."""
    filters = tuple(
        (
            # Errors are made where the warning is given again: in a rank, one would change what the function does.
            "default" if action == "error" else action,
            _pattern(message),
            _names(category),
            _pattern(module),
            lineno,
        )
        for action, message, categories, module, lineno in warnings.filters
        for category in (categories if isinstance(categories, tuple) else (categories,))
    )
    loggers = logging.root.manager.loggerDict
    levels = {
        name: logger.level for name, logger in loggers.items() if isinstance(logger, logging.Logger) and logger.level
    }
    return Settings(filters, {"": logging.root.level, **levels})


class Recorder:
    """Records, in a rank, the warnings that are shown and the log records that reach the root logger."""

    def __init__(self) -> None:
        # A dict for its order: each warning once, where it was first shown.
        self.warned: dict[Warned, None] = {}
        self.records: list[dict[str, Any]] = []

    def install(self, settings: Settings) -> None:
        """Set filters and levels as in the test process, and record from now on."""
        warnings.resetwarnings()
        for action, message, names, module, lineno in settings.filters:
            category = _category(names[:1])
            if category is not None:
                # append keeps the order of the test process, of which the first filter that holds decides.
                warnings.filterwarnings(action, message, category, module, lineno, append=True)  # type: ignore[arg-type]
        for name, level in settings.levels.items():
            logging.getLogger(name or None).setLevel(level)
        self._record_warnings()
        self._record_logs()

    def _record_warnings(self) -> None:
        show = warnings.showwarning

        def record(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any, **others: Any
        ) -> None:
            self.warned[Warned(str(message), _names(category), filename, lineno)] = None
            show(message, category, filename, lineno, *more, **others)

        warnings.showwarning = record

    def _record_logs(self) -> None:
        # No handler: with one, logging.basicConfig does nothing, and what no handler takes would no longer be printed.
        call = logging.Logger.callHandlers

        def record(logger: logging.Logger, entry: logging.LogRecord) -> None:
            if len(self.records) < _MOST_RECORDS and _reaches_the_root(logger):
                self.records.append(_plain(entry))
            call(logger, entry)

        logging.Logger.callHandlers = record  # type: ignore[method-assign, assignment]


def warn_again(warned: Iterable[Warned]) -> None:
    """Give each warning once, from the line that it came from, by the filters of this process.

    Raises:
        Warning: a filter makes an error of it.
    """
    for warning in dict.fromkeys(warned):
        category = _category(warning.category) or UserWarning
        registry = _registries.setdefault(warning.filename, {})
        warnings.warn_explicit(warning.text, category, warning.filename, warning.lineno, registry=registry)


def log_again(records: Iterable[Mapping[str, Any]]) -> None:
    """Hand log records to the handlers of this process, in the order in which ranks made them."""
    for record in sorted(records, key=lambda record: record["created"]):
        logging.getLogger(record["name"]).handle(logging.makeLogRecord(dict(record)))


def _pattern(filtered: Any) -> str:
    """Of a filter's message or module: a compiled pattern, a text, or none."""
    return str(getattr(filtered, "pattern", filtered) or "")


def _reaches_the_root(logger: logging.Logger) -> bool:
    current: logging.Logger | None = logger
    while current is not None and current.propagate and current.parent is not None:
        current = current.parent
    return current is logging.root


def _plain(entry: logging.LogRecord) -> dict[str, Any]:
    """A record without objects, so that the test process need not import their modules."""
    # Only what is plain; the message has been formatted, so that arguments of other types are not missed.
    values = {name: value for name, value in vars(entry).items() if isinstance(value, _PLAIN)}
    text = values.get("exc_text")
    if entry.exc_info and not text:
        text = logging.Formatter().formatException(entry.exc_info)
    return {**values, "msg": entry.getMessage(), "args": None, "exc_info": None, "exc_text": text}


def _names(category: type) -> Names:
    return tuple((base.__module__, base.__qualname__) for base in category.__mro__ if issubclass(base, Warning))


def _category(names: Names) -> type[Warning] | None:
    """The first of these classes that this process has imported; a rank's own is otherwise taken for its base."""
    for module, name in names:
        category = getattr(sys.modules.get(module), name, None)
        if isinstance(category, type) and issubclass(category, Warning):
            return category
    return None
