"""Whether a stack's torch is one with which the published sweep was measured. Imports no package of the stack."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.version import Version

from pytest_trlcompat.catalog.ranges import parse
from pytest_trlcompat.doctor.given import Given

__all__ = ["other_torch"]


def other_torch(given: Given, measured: Sequence[str]) -> str:
    """``measured with torch 2.13.0, yours is 2.6.0``; empty where one of its minor release was, or nothing is known.

    Args:
        measured: releases of torch.
    """
    wanted = given.versions.get("torch")
    if wanted is None or not measured:
        return ""
    releases = sorted(set(map(Version, measured)))
    if any(wanted & parse(f"=={release.major}.{release.minor}.*") for release in releases):
        return ""
    named = str(releases[0]) if len(releases) == 1 else f"{', '.join(map(str, releases[:-1]))} and {releases[-1]}"
    return f"measured with torch {named}, yours is {given.texts.get('torch', '')}"
