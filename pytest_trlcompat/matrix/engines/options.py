"""The options of an engine, of the sessions ``matrix``, ``cell`` and ``bisect``, and what follows from them."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from pytest_trlcompat.matrix.engines.messages import NodeTask
from pytest_trlcompat.matrix.engines.payload import digest
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.suite_run import OF_THE_MACHINE

__all__ = [
    "ENGINE",
    "NAMES",
    "RAY",
    "RayOptions",
    "add_arguments",
    "chosen",
    "node_task",
    "of_runner",
    "of_words",
    "requested_ray",
]

ENGINE = "--engine"
"""Option of ``matrix``, ``cell`` and ``bisect``: what runs the cells, or tests the candidates."""

NAMES = (ENGINE, "--address", "--ray-version", "--ray-python", "--cell-cpus", "--cell-memory", "--node-cache")
"""All options, each of which has a value."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_RUNNER = ("packaging", "tomli", "uv")
"""The packages that a node needs to run a cell, or to test a candidate."""

_OF_AN_EXTRA = re.compile(r"(;|\band)\s*extra\s*==\s*(['\"])[\w.-]+\2\s*$")
"""The end of a requirement as an installed package states it; see "Core metadata" in the packaging guide."""

LOCAL, RAY = "local", "ray"

_ADDRESS = re.compile(r"auto|(ray://)?([\w.-]+|\[[0-9a-fA-F:]+\]):\d+")


@dataclass(frozen=True)
class RayOptions:
    """How cells run on Ray.

    Attributes:
        address: of a cluster that runs: ``auto``, ``HOST:PORT`` of its head or ``ray://HOST:PORT``; ``None``: a cluster
            of this machine alone, for this command alone.
        version: the release of Ray, which must be the cluster's; ``None``: the newest that is allowed.
        python: the Python of the cluster, as uv understands it; ``None``: that of nox.
        cpus: logical CPUs of a cell.
        memory: GiB of a cell.
        node_cache: the folder of environments on nodes that do not name their own.
    """

    address: str | None = None
    version: str | None = None
    python: str | None = None
    cpus: float = 1.0
    memory: float = 2.0
    node_cache: str | None = None


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options of engines."""
    parser.add_argument(ENGINE, choices=(LOCAL, RAY), default=LOCAL)
    parser.add_argument("--address")
    parser.add_argument("--ray-version")
    parser.add_argument("--ray-python")
    parser.add_argument("--cell-cpus", type=float, default=RayOptions.cpus)
    parser.add_argument("--cell-memory", type=float, default=RayOptions.memory)
    parser.add_argument("--node-cache")


def chosen(parsed: argparse.Namespace) -> RayOptions | None:
    """The options of Ray; ``None`` for nox alone.

    Raises:
        MatrixError: they make no sense.
    """
    options = RayOptions(
        parsed.address,
        parsed.ray_version,
        parsed.ray_python,
        parsed.cell_cpus,
        parsed.cell_memory,
        parsed.node_cache,
    )
    if parsed.engine == LOCAL:
        if options != RayOptions():
            raise MatrixError(
                f"{', '.join(NAMES[1:-1])} and {NAMES[-1]} are for {ENGINE} {RAY}; add that, or leave them out"
            )
        return None
    if options.address is not None and not _ADDRESS.fullmatch(options.address):
        raise MatrixError(
            f"--address {options.address!r} is none of: auto, HOST:PORT of the cluster's head from one of its nodes, "
            "or ray://HOST:PORT from elsewhere"
        )
    if not (options.cpus > 0 and options.memory > 0):
        raise MatrixError(
            f"a cell needs CPUs and memory; --cell-cpus {options.cpus:g} and --cell-memory {options.memory:g} must be "
            "above 0"
        )
    for option, value in (("--ray-version", options.version), ("--ray-python", options.python)):
        if value is not None and not re.fullmatch(r"\d+(\.\d+)*", value):
            raise MatrixError(f"{option} {value!r} is no version; write for example 2.60.0, or 3.12 for Python")
    if options.node_cache is not None and not options.node_cache.startswith("/"):
        raise MatrixError(f"--node-cache {options.node_cache!r} must be an absolute path, since it is one of each node")
    return options


def requested_ray(arguments: Sequence[str]) -> bool:
    """Whether the arguments of a session choose Ray."""
    return f"{ENGINE}={RAY}" in arguments or any(
        option == ENGINE and other == RAY for option, other in itertools.pairwise(arguments)
    )


def of_words(words: Sequence[str]) -> RayOptions | None:
    """The options among all words of a command line; ``None`` for nox alone, and where they do not make sense, since
    the command itself says so."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_arguments(parser)
    try:
        return chosen(parser.parse_known_args(list(words))[0])
    except (argparse.ArgumentError, MatrixError):
        return None


def of_runner(requirements: Iterable[str]) -> tuple[str, ...]:
    """Those of this project's requirements that a node needs, as pip takes them: with their markers, but for that of
    the extra to which one belongs."""
    return tuple(_OF_AN_EXTRA.sub("", line).strip() for line in requirements if line.startswith(_RUNNER))


def _as_here(requirement: str) -> str:
    """The same with the version that the driver has, whose environment has a lock; a node without uv has none."""
    text, mark, marker = requirement.partition(";")
    name = _NAME.match(text)
    try:
        return f"{name[0]}=={version(name[0])}{mark}{marker}" if name else requirement
    except PackageNotFoundError:  # one for older Pythons than the driver's
        return requirement


def node_task(layout: Layout, options: RayOptions, requirements: Sequence[str]) -> NodeTask:
    """What all programs of a command on nodes have in common.

    A cluster of this machine alone shares the environments of the checkout.

    Args:
        requirements: of what runs on a node.
    """
    local = options.address is None
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("TRLCOMPAT_") and name not in OF_THE_MACHINE
    }
    return NodeTask(
        variables=settings,
        requirements=tuple(map(_as_here, requirements)),
        cache=options.node_cache or (str(layout.root / ".nox") if local else None),
        files=digest(layout),
        own_caches=not local or options.node_cache is not None,
    )
