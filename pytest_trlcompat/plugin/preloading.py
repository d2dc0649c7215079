"""What the header says of ``trlcompat_preload``: the packages, and what importing them cost when it was last done."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_trlcompat.plugin import settings

__all__ = ["lines", "remember"]

_KEY = "trlcompat/preload"


def lines(config: pytest.Config) -> list[str]:
    """``trlcompat: preloads axolotl (2.1 s in the last run)``; none if nothing is preloaded."""
    names = config.stash[settings.KEY].preload.value
    if not names:
        return []
    seconds = _remembered(config)
    parts = (f"{name} ({f'{seconds[name]:.1f} s in the last run' if name in seconds else 'new'})" for name in names)
    return [f"trlcompat: preloads {', '.join(parts)}"]


def remember(config: pytest.Config, seconds: Mapping[str, float]) -> None:
    """Keep for the next header what each package took."""
    cache = getattr(config, "cache", None)
    if cache is not None and seconds:
        cache.set(_KEY, {**_remembered(config), **seconds})


def _remembered(config: pytest.Config) -> dict[str, float]:
    cache = getattr(config, "cache", None)
    seconds = None if cache is None else cache.get(_KEY, None)
    return seconds if isinstance(seconds, dict) else {}
