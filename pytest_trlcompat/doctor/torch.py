"""Whether the published sweep was measured with a stack's torch. Imports no package of the stack."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.version import Version

from pytest_trlcompat.catalog.ranges import Range, at, parse
from pytest_trlcompat.doctor.stack_spec import StackSpec

__all__ = ["other_torch"]


def other_torch(spec: StackSpec, measured: Sequence[str]) -> str:
    """``measured with torch 2.13.0, yours is 2.6.0``; empty if its minor release was measured, or is not known.

    Args:
        measured: releases of torch.
    """
    wanted = spec.versions.get("torch")
    if wanted is None or not measured:
        return ""
    releases = sorted(set(map(Version, measured)))
    minors = [parse(f"=={release.major}.{release.minor}.*") for release in releases]
    named = str(releases[0]) if len(releases) == 1 else f"{', '.join(map(str, releases[:-1]))} and {releases[-1]}"
    if not any(wanted.meets(minor) for minor in minors):
        return f"measured with torch {named}, yours is {spec.texts.get('torch', '')}"
    # Of the versions of a lock's forks each may be the one that is installed.
    forks = [Range((interval,)).version for interval in wanted.intervals]
    others = [fork for fork in forks if fork is not None and not any(minor.covers(at(str(fork))) for minor in minors)]
    return f"measured with torch {named}, not with {' or '.join(map(str, others))}" if others else ""
