"""Cells as tasks of Ray: streaming generators, which Ray places, queues and ends.

Runs in the driver's environment and on nodes; the only module, beside :mod:`.cluster`, that imports ``ray``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

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

from pytest_trlcompat.matrix.engines.messages import (
    Cancelled,
    CellTask,
    Done,
    Event,
    Failed,
    Lost,
    NodeReport,
    TaskEvent,
)
from pytest_trlcompat.matrix.engines.node import report
from pytest_trlcompat.matrix.engines.task import NodeLost, cell_events
from pytest_trlcompat.matrix.errors import MatrixError

__all__ = ["RayStreams", "RemoteStreams", "node_reports"]

_LOST = (NodeDiedError, WorkerCrashedError, OutOfMemoryError, LocalRayletDiedError, OwnerDiedError)
_NODE = "ray.io/node-id"
"""The label that Ray gives each node."""
_PROBE_TIMEOUT = 180.0
"""Seconds within which a node says what it is; it may install what runs cells meanwhile."""


# Ray's own retries would not know what had been sent before, and would not count the nodes that a cell has ended.
@ray.remote(num_returns="streaming", max_retries=0)  # type: ignore[untyped-decorator, unused-ignore]
def _cell(task: CellTask) -> Iterator[Event]:
    yield from cell_events(task, ray.get_runtime_context().get_node_id())


@ray.remote(num_cpus=0, max_retries=1)  # type: ignore[untyped-decorator, unused-ignore]
def _report(cache: str | None, requirements: Sequence[str], files: str | None) -> NodeReport:
    return report(ray.get_runtime_context().get_node_id(), cache, requirements, files)


class RayStreams:
    """The tasks that have been submitted, and their events as they come.

    Args:
        cpus, memory: of each task; memory in bytes.
    """

    def __init__(self, cpus: float, memory: int) -> None:
        self._options = {"num_cpus": cpus, "memory": memory}
        self._tasks: dict[Any, str] = {}

    def start(self, task: CellTask, preferred: Collection[str], avoided: Collection[str]) -> None:
        """Submit a cell.

        Args:
            preferred: nodes that have its environment, of which it gets one that is free.
            avoided: nodes that it does not get.
        """
        hard = {_NODE: NotIn(*avoided)} if avoided else {}
        soft = {_NODE: In(*preferred)} if preferred else {}
        strategy = NodeLabelSchedulingStrategy(hard=hard, soft=soft) if hard or soft else "DEFAULT"
        options = {**self._options, "scheduling_strategy": strategy, "name": task.id}
        self._tasks[_cell.options(**options).remote(task)] = task.id

    def poll(self, seconds: float) -> list[tuple[str, TaskEvent]]:
        """The events that have come, waiting for the first; ends of tasks are the last of theirs."""
        if not self._tasks:
            return []
        # The first may be there already, others as well: as many as are ready, but without waiting for more.
        ready, _ = ray.wait(list(self._tasks), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
        found: list[tuple[str, TaskEvent]] = []
        for stream in ready:
            event = _next(stream)
            cell_id = self._tasks[stream]
            if isinstance(event, (Done, Lost, Failed, Cancelled)):
                del self._tasks[stream]
            found.append((cell_id, event))
        return found

    def cancel(self) -> None:
        """End all tasks; their ends come as events."""
        for stream in self._tasks:
            ray.cancel(stream)


def _next(stream: Any) -> TaskEvent:
    try:
        return ray.get(next(stream))
    except StopIteration:
        return Done()
    except TaskCancelledError:
        return Cancelled()
    except RayTaskError as error:
        cause = error.cause
        if isinstance(error, TaskCancelledError) or isinstance(cause, (TaskCancelledError, KeyboardInterrupt)):
            return Cancelled()
        why = f"{type(cause).__name__}: {cause}"
        return Lost(why) if isinstance(cause, NodeLost) else Failed(why)
    except _LOST as error:
        return Lost(f"{type(error).__name__}: {_first_sentence(error)}")
    except RuntimeEnvSetupError as error:
        return Failed(str(error))
    except RayError as error:
        return Failed(f"{type(error).__name__}: {error}")


def _first_sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0].partition(". ")[0]


class RemoteStreams:
    """The same from outside of the cluster: Ray's client has no streams, so an actor on the head node reads them."""

    def __init__(self, cpus: float, memory: int) -> None:
        head = {"node:__internal_head__": 0.001}
        self._actor: Any = ray.remote(RayStreams).options(num_cpus=0, resources=head).remote(cpus, memory)

    def start(self, task: CellTask, preferred: Collection[str], avoided: Collection[str]) -> None:
        ray.get(self._actor.start.remote(task, tuple(preferred), tuple(avoided)))

    def poll(self, seconds: float) -> list[tuple[str, TaskEvent]]:
        found: list[tuple[str, TaskEvent]] = ray.get(self._actor.poll.remote(seconds))
        return found

    def cancel(self) -> None:
        ray.get(self._actor.cancel.remote())


def node_reports(template: CellTask) -> list[NodeReport]:
    """What the nodes that have CPUs say of themselves; one that does not answer in time is not listed.

    Those of one machine one after the other: they share a folder, into which each would unpack this project's files.
    """
    machines: dict[str, list[str]] = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            machines.setdefault(node["NodeManagerHostname"], []).append(node["NodeID"])
    rounds = itertools.zip_longest(*machines.values())
    return [report for nodes in rounds for report in _ask([node for node in nodes if node], template)]


def _ask(nodes: Sequence[str], template: CellTask) -> Iterator[NodeReport]:
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    given = (template.cache, template.requirements, template.files)
    asked = [_report.options(scheduling_strategy=strategy).remote(*given) for strategy in strategies]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_PROBE_TIMEOUT)
    for answer in answered:
        try:
            yield ray.get(answer)
        except RuntimeEnvSetupError as error:
            raise MatrixError(f"this project's files cannot be sent to a node: {error}") from error
        except RayError:  # the node has gone meanwhile
            continue
