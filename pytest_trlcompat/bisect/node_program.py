"""Observes one candidate on a node of a cluster: ``python -m pytest_trlcompat.bisect.node_program CACHE``.

It runs in the folder of the run, whose files it reads and writes, without Ray.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pytest_trlcompat.bisect.candidates import PreparedCandidate, environment_context
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.predicate import IssuePredicate
from pytest_trlcompat.bisect.session import observe
from pytest_trlcompat.matrix import disk
from pytest_trlcompat.matrix.engines.cell_process import TASK, NodeSweep
from pytest_trlcompat.matrix.engines.node import PROJECT, NodeLayout
from pytest_trlcompat.matrix.engines.task import RESULT
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors, in_use, write_whole
from pytest_trlcompat.matrix.locks import read_lock
from pytest_trlcompat.matrix.process import signals_as_ctrl_c

__all__ = ["MODULE", "NodeTest", "main"]

MODULE = "pytest_trlcompat.bisect.node_program"


@dataclass(frozen=True)
class NodeTest:
    """What a node is told of a candidate.

    Attributes:
        lock: the text of its lock, which names every version.
        issue, timeout, doubt: of the predicate.
    """

    lock: str
    issue: str
    timeout: float | None = None
    doubt: float = 0.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeTest:
        return cls(**json.loads(text))


def main(arguments: list[str] | None = None) -> int:
    """Observe the candidate; returns the exit status."""
    (cache,) = sys.argv[1:] if arguments is None else arguments
    run = Path.cwd()
    test = NodeTest.from_json((run / TASK).read_text(encoding="utf-8"))
    # The mark tells others that the folder is in use, also where the process that started this one was killed.
    with in_use(run.with_suffix(".used")):
        try:
            with explained_os_errors(), signals_as_ctrl_c():
                observation = _observed(test, NodeLayout(PROJECT, Path(cache), run), print)
            result: dict[str, object] = {"observation": observation.to_json()}
        except MatrixError as error:
            result = {"error": str(error)}
        except KeyboardInterrupt:
            return 130
        write_whole(run / RESULT, json.dumps(result))
    return 0


def _observed(test: NodeTest, layout: NodeLayout, say: Callable[[str], None]) -> Observation:
    path = layout.run / "lock.txt"
    write_whole(path, test.lock)
    lock = read_lock(path)
    started = time.monotonic()
    disk.free_space(lock, layout, NodeSweep(layout, "bisect").finished(lock.python), (), say)
    context = partial(environment_context, lock, layout, layout.root)
    predicate = IssuePredicate(layout, test.issue, test.timeout, test.doubt)
    observation = observe(PreparedCandidate(lock.digest, lock, context), predicate, layout.run, started)
    write_whole(layout.used_locks / f"{lock.digest}.txt", lock.to_text())
    return observation


if __name__ == "__main__":
    sys.exit(main())
