"""The driver of a sweep on Ray: ``python -m pytest_trlcompat.matrix.engines REQUEST``, as the sessions of nox start it.

Runs in an environment with ``ray``. Returns 0 when every cell has ended, however; 1 for an error, which it prints.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_trlcompat._escaping import printable
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.matrix.engines.cluster import connected, places, streams
from pytest_trlcompat.matrix.engines.driver import Driver
from pytest_trlcompat.matrix.engines.messages import CellTask, NodeTask
from pytest_trlcompat.matrix.engines.nodes import Nodes
from pytest_trlcompat.matrix.engines.options import node_task
from pytest_trlcompat.matrix.engines.ray_tasks import node_reports
from pytest_trlcompat.matrix.engines.request import Request
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors, locked
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.process import signals_as_ctrl_c
from pytest_trlcompat.matrix.shards import costs
from pytest_trlcompat.matrix.sweep import Sweep

__all__ = ["main"]


def main(path: str) -> int:
    """Run the request in a file."""
    try:
        with explained_os_errors(), signals_as_ctrl_c():
            _run(Request.from_json(Path(path).read_text(encoding="utf-8")))
    except MatrixError as error:
        print(printable(redacted(str(error))), file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _say(text: str) -> None:
    print(printable(redacted(text)), flush=True)


def _run(request: Request) -> None:
    layout = Layout(request.root)
    sweep = Sweep(layout, {Sweep.VARIABLE: request.sweep})
    waiting = "another sweep on Ray writes to the same folder; waiting for its end"
    with locked(layout.results / ".engine.lock", lambda: _say(waiting)), connected(request.options, layout):
        template = _template(request, node_task(layout, request.options, request.requirements))
        tasks = streams(request.options)
        nodes = Nodes(node_reports(template), "cells")
        _say(str(nodes))
        driver = Driver(
            read_matrix(layout.matrix),
            sweep,
            tasks,
            template,
            costs(layout),
            nodes,
            _say,
            limit=places(request.options),
            tests=request.tests,
        )
        driver.run(request.cells, fresh=request.fresh)


def _template(request: Request, common: NodeTask) -> CellTask:
    """What all tasks have in common."""
    return CellTask(
        id="",
        pins={},
        date=None,
        python=None,
        sweep=request.sweep,
        issues=request.issues,
        pytest_arguments=request.pytest_arguments,
        **vars(common),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
