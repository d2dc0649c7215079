"""Cells as tasks of Ray: streaming generators, which Ray places, queues and ends.

Runs in the driver's environment and on nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import ray
from ray.exceptions import RayError

from pytest_trlcompat.matrix.engines.messages import Cancelled, CellTask, Done, Event, Failed, Lost, TaskEvent
from pytest_trlcompat.matrix.engines.ray_tasks import end_of, placement
from pytest_trlcompat.matrix.engines.task import cell_events

__all__ = ["RayStreams", "RemoteStreams"]


# Ray's own retries would not know what had been sent before, and would not count the nodes that a cell has ended.
@ray.remote(num_returns="streaming", max_retries=0)  # type: ignore[untyped-decorator, unused-ignore]
def _cell(task: CellTask) -> Iterator[Event]:
    yield from cell_events(task, ray.get_runtime_context().get_node_id())


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
        options = {**self._options, "scheduling_strategy": placement(preferred, avoided), "name": task.id}
        self._tasks[_cell.options(**options).remote(task)] = task.id

    def poll(self, seconds: float) -> list[tuple[str, TaskEvent]]:
        """The events that have come, waiting for the first; ends of tasks are the last of theirs."""
        if not self._tasks:
            return []
        # The first may be there already, others as well: as many as are ready, but without waiting for more.
        ready, _ = ray.wait(list(self._tasks), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
        events: list[tuple[str, TaskEvent]] = []
        for stream in ready:
            event = _next(stream)
            cell_id = self._tasks[stream]
            if isinstance(event, (Done, Lost, Failed, Cancelled)):
                del self._tasks[stream]
            events.append((cell_id, event))
        return events

    def cancel(self) -> None:
        """End all tasks; their ends come as events."""
        for stream in self._tasks:
            ray.cancel(stream)


def _next(stream: Any) -> TaskEvent:
    try:
        return ray.get(next(stream))
    except StopIteration:
        return Done()
    except RayError as error:
        return end_of(error)


class RemoteStreams:
    """The same from outside of the cluster: Ray's client has no streams, so an actor on the head node reads them."""

    def __init__(self, cpus: float, memory: int) -> None:
        # A resource that Ray gives the head node alone: any amount of it keeps the actor there.
        head = {"node:__internal_head__": 0.001}
        # It only waits, so it takes no CPU away from cells.
        self._actor: Any = ray.remote(RayStreams).options(num_cpus=0, resources=head).remote(cpus, memory)

    def start(self, task: CellTask, preferred: Collection[str], avoided: Collection[str]) -> None:
        ray.get(self._actor.start.remote(task, tuple(preferred), tuple(avoided)))

    def poll(self, seconds: float) -> list[tuple[str, TaskEvent]]:
        events: list[tuple[str, TaskEvent]] = ray.get(self._actor.poll.remote(seconds))
        return events

    def cancel(self) -> None:
        ray.get(self._actor.cancel.remote())
