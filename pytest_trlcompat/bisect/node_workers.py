"""Workers on the nodes of a cluster: candidates are resolved here, and observed there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import requires
from typing import Protocol

from pytest_trlcompat.bisect.candidates import PreparedCandidate
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.node_program import MODULE, NodeTest
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.predicate import IssuePredicate
from pytest_trlcompat.bisect.session import CandidateTest, Evaluation
from pytest_trlcompat.matrix.engines import own_cluster
from pytest_trlcompat.matrix.engines.messages import Cancelled, Failed, Lost, ProgramEnd
from pytest_trlcompat.matrix.engines.nodes import Nodes, Troubles
from pytest_trlcompat.matrix.engines.options import RayOptions, node_task, of_runner
from pytest_trlcompat.matrix.environments import name_of
from pytest_trlcompat.matrix.layout import Layout

__all__ = ["NodeWorkers", "Programs", "workers_on_ray"]


class Programs(Protocol):
    """Runs programs of this project on nodes; see :class:`..matrix.engines.ray_tasks.RayPrograms`."""

    def start(
        self, key: int, module: str, text: str, preferred: Collection[str] = (), avoided: Collection[str] = ()
    ) -> None: ...

    def next(self) -> tuple[int, str, ProgramEnd | Lost | Failed | Cancelled]: ...

    def stop(self, keys: Iterable[int]) -> None: ...


@dataclass
class _Run:
    """A candidate that a node observes."""

    test: CandidateTest
    prepared: PreparedCandidate
    troubles: Troubles = field(default_factory=Troubles)


class NodeWorkers:
    """Tests candidates on nodes, as many at a time as these have room for.

    A candidate that loses its node, or the process that runs it, twice is untestable. A node that cannot run one, for
    a reason of its own, gets no more.
    """

    def __init__(self, programs: Programs, layout: Layout, nodes: Nodes, say: Callable[[str], None]) -> None:
        self._programs, self._layout, self._nodes, self._say = programs, layout, nodes, say
        self._runs: dict[int, _Run] = {}
        self._known: dict[int, Evaluation] = {}

    def running(self) -> set[int]:
        return {*self._runs, *self._known}

    def start(self, key: int, test: CandidateTest, /) -> None:
        """
        Raises:
            BisectError: when the registry cannot be reached from here.
        """
        # Here, and not on the node: the journal with the observations of equal locks is on this machine.
        prepared = test.prepare()
        if isinstance(prepared, Evaluation):
            self._known[key] = prepared
            return
        self._runs[key] = _Run(test, prepared)
        self._submit(key)

    def next(self) -> tuple[int, Evaluation]:
        """
        Raises:
            BisectError: when a candidate can be run on no node, for a reason that says nothing of the candidate.
        """
        while True:
            for key in self._known:
                return key, self._known.pop(key)
            key, node, end = self._programs.next()
            evaluation = self._ended(self._runs[key], node, end)
            if evaluation is None:
                self._submit(key)
            else:
                del self._runs[key]
                return key, evaluation

    def stop(self, keys: Iterable[int]) -> None:
        stopped = set(keys)
        self._programs.stop(stopped & set(self._runs))
        for key in stopped:
            self._runs.pop(key, None)
            self._known.pop(key, None)

    def _submit(self, key: int) -> None:
        run = self._runs[key]
        predicate, lock = run.test.predicate, run.prepared.lock
        assert isinstance(predicate, IssuePredicate)
        assert lock is not None
        task = NodeTest(lock.to_text(), predicate.issue, predicate.timeout, predicate.doubt)
        environment = name_of(lock, self._layout)
        self._programs.start(key, MODULE, task.to_json(), self._nodes.having(environment), self._nodes.avoided)

    def _ended(self, run: _Run, node: str, end: ProgramEnd | Lost | Failed | Cancelled) -> Evaluation | None:
        """What came of a run; ``None``: it has to run once more."""
        if isinstance(end, Lost):
            return self._lost(run, node, end.why)
        if isinstance(end, Failed):
            return self._failed(run, node, end.why)
        if isinstance(end, Cancelled):
            return self._failed(run, node, "it was cancelled")
        if end.status < 0:
            return self._lost(run, node, f"its process was killed by signal {-end.status}")
        result = json.loads(end.result) if end.result is not None else {}
        if "observation" in result:
            return Evaluation(run.prepared.identity, Observation.from_json(result["observation"]))
        last = "".join(end.output.strip().splitlines()[-1:])
        why = result.get("error") or f"its process ended with exit status {end.status}: {last}"
        return self._failed(run, node, str(why))

    def _lost(self, run: _Run, node: str, why: str) -> Evaluation | None:
        if run.troubles.add(self._nodes.host(node), why):
            self._say(f"{run.test.candidate.label}: lost ({run.troubles.last}); tried once more")
            return None
        reason = f"untestable: what tested it was lost each time: {run.troubles}"
        return Evaluation(run.prepared.identity, Observation(reason=reason))

    def _failed(self, run: _Run, node: str, why: str) -> Evaluation | None:
        """No fault of the candidate: the node, if it is known, gets no more of them."""
        more = run.troubles.add(self._nodes.host(node), why)
        self._nodes.avoid(node)
        if more and self._nodes.usable:
            self._say(f"{run.test.candidate.label}: not run ({run.troubles.last}); tried elsewhere")
            return None
        raise BisectError(
            f"{run.test.candidate.label} could be tested on no node. Every finished step is kept: mend the nodes, and "
            f"run the same command again.\n{run.troubles}"
        )


@contextlib.contextmanager
def workers_on_ray(options: RayOptions, layout: Layout, say: Callable[[str], None]) -> Iterator[NodeWorkers]:
    """Workers of a cluster of Ray, which is connected for the block.

    Raises:
        MatrixError: there is no such cluster, no node can run anything, or Ray is not installed here.
    """
    if not (layout.root / "suites").is_dir():
        raise BisectError("--engine ray sends this project's files to the nodes, so it needs a checkout of it")
    os.environ.update(own_cluster.token_variables(options, os.environ))  # Ray reads them when it is imported
    try:
        from pytest_trlcompat.matrix.engines.cluster import connected, programs
        from pytest_trlcompat.matrix.engines.ray_tasks import node_reports
    except ModuleNotFoundError as error:
        raise BisectError(
            f"--engine ray: {error}; run it as `nox -s bisect -- ...`, which installs Ray for it, or install the extra "
            "`ray`"
        ) from error
    with connected(options, layout):
        task = node_task(layout, options, of_runner(requires("pytest-trlcompat") or ()))
        nodes = Nodes(node_reports(task), "candidates")
        say(str(nodes))
        nodes.check(say)
        yield NodeWorkers(programs(options, task), layout, nodes, say)
