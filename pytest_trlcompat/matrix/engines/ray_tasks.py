"""Tasks of Ray: on which node one runs, how it ends, and programs of this project as such tasks.

Runs in the driver's environment and on nodes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    OwnerDiedError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import (
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
)

from pytest_trlcompat.matrix.engines.messages import Cancelled, Failed, Lost, NodeReport, NodeTask, ProgramEnd
from pytest_trlcompat.matrix.engines.node import report
from pytest_trlcompat.matrix.engines.task import NodeLost, run_program
from pytest_trlcompat.matrix.errors import MatrixError

__all__ = ["RayPrograms", "end_of", "node_reports", "placement"]

Key = TypeVar("Key", bound=Hashable)

_LOST = (NodeDiedError, WorkerCrashedError, OutOfMemoryError, LocalRayletDiedError, OwnerDiedError)
_NODE = "ray.io/node-id"
"""The label that Ray gives each node."""
_PROBE_TIMEOUT = 180.0
"""Seconds within which a node says what it is; it may install what runs cells meanwhile."""


def placement(preferred: Collection[str], avoided: Collection[str]) -> Any:
    """How Ray chooses a task's node.

    Args:
        preferred: of these it gets one that is free, if there is one.
        avoided: nodes that it does not get.
    """
    hard = {_NODE: NotIn(*avoided)} if avoided else {}
    soft = {_NODE: In(*preferred)} if preferred else {}
    return NodeLabelSchedulingStrategy(hard=hard, soft=soft) if hard or soft else "DEFAULT"


def end_of(error: RayError) -> Lost | Failed | Cancelled:
    """How a task has ended that gave no result."""
    if isinstance(error, TaskCancelledError):
        return Cancelled()
    if isinstance(error, RayTaskError):
        cause = error.cause
        # ray.cancel raises KeyboardInterrupt within a task that runs.
        if isinstance(cause, (TaskCancelledError, KeyboardInterrupt)):
            return Cancelled()
        why = f"{type(cause).__name__}: {cause}"
        return Lost(why) if isinstance(cause, NodeLost) else Failed(why)
    if isinstance(error, _LOST):
        return Lost(f"{type(error).__name__}: {_first_sentence(error)}")
    if isinstance(error, RuntimeEnvSetupError):
        return Failed(str(error))
    return Failed(f"{type(error).__name__}: {error}")


def _first_sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0].partition(". ")[0]


# Ray's own retries would not know that the command counts the nodes that a program has ended.
@ray.remote(max_retries=0)  # type: ignore[untyped-decorator, unused-ignore]
def _program(task: NodeTask, module: str, text: str) -> tuple[str, ProgramEnd | Failed]:
    node = ray.get_runtime_context().get_node_id()
    try:
        return node, run_program(task, module, text)
    # A MatrixError as well, but one after which the program is run elsewhere.
    except NodeLost:
        raise
    except MatrixError as error:
        # A result and no exception, from which the command would not learn which node it was.
        return node, Failed(str(error))


class RayPrograms(Generic[Key]):
    """Programs of this project on nodes, each of which is told apart by a key.

    Args:
        cpus, memory: of each; memory in bytes.
        task: what they have in common.
    """

    def __init__(self, cpus: float, memory: int, task: NodeTask) -> None:
        self._options = {"num_cpus": cpus, "memory": memory}
        self._task = task
        self._running: dict[Any, Key] = {}

    def start(
        self, key: Key, module: str, text: str, preferred: Collection[str] = (), avoided: Collection[str] = ()
    ) -> None:
        """Submit a program; see :func:`.task.run_program` and :func:`placement`."""
        options = {**self._options, "scheduling_strategy": placement(preferred, avoided), "name": str(key)}
        self._running[_program.options(**options).remote(self._task, module, text)] = key

    def next(self) -> tuple[Key, str, ProgramEnd | Lost | Failed | Cancelled]:
        """Wait for the end of one; with its key and the node that it had, as far as that is known."""
        ready: list[Any] = []
        # For a moment each time, so that Ctrl-C is seen.
        while not ready:
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=1.0)
        (reference,) = ready
        key = self._running.pop(reference)
        try:
            node, end = ray.get(reference)
        except RayError as error:
            return key, "", end_of(error)
        return key, node, end

    def stop(self, keys: Iterable[Key]) -> None:
        """End some, whose ends nobody waits for any more."""
        stopped = set(keys)
        for reference in [reference for reference, key in self._running.items() if key in stopped]:
            ray.cancel(reference)
            del self._running[reference]


# Without CPUs it need not wait until cells have ended.
@ray.remote(num_cpus=0, max_retries=1)  # type: ignore[untyped-decorator, unused-ignore]
def _report(cache: str | None, requirements: Sequence[str], files: str | None, of_its_own: bool) -> NodeReport:
    node = ray.get_runtime_context().get_node_id()
    return report(node, cache, requirements, files, of_its_own=of_its_own)


def node_reports(task: NodeTask) -> list[NodeReport]:
    """What the nodes that have CPUs say of themselves; of one that does not, why, as its problem.

    Raises:
        MatrixError: this project's files cannot be sent.
    """
    machines: dict[str, list[NodeReport]] = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            host = node["NodeManagerHostname"]
            machines.setdefault(host, []).append(NodeReport(node["NodeID"], host, cache=""))
    # Those of one machine one after the other: they share a folder, into which each would unpack this project's files.
    rounds = itertools.zip_longest(*machines.values())
    return [report for nodes in rounds for report in _ask([node for node in nodes if node], task)]


def _ask(nodes: Sequence[NodeReport], task: NodeTask) -> Iterator[NodeReport]:
    """
    Args:
        nodes: at most one of each machine, of which no more than its name is known.
    """
    arguments = (task.cache, task.requirements, task.files, task.own_caches)
    asked = {_on(node.node).remote(*arguments): node for node in nodes}
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_PROBE_TIMEOUT)
    for answer in answered:
        try:
            yield ray.get(answer)
        except RuntimeEnvSetupError as error:
            raise MatrixError(f"this project's files cannot be sent to a node: {error}") from error
        except RayError as error:
            yield dataclasses.replace(asked[answer], problem=f"it could not say what it has: {error}")
    for answer in silent:
        ray.cancel(answer)
        problem = f"it did not say within {_PROBE_TIMEOUT:g} seconds what it has"
        yield dataclasses.replace(asked[answer], problem=problem)


def _on(node: str) -> Any:
    """The task that asks a node."""
    # Not softly: on another node the answer would be about that one.
    return _report.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
