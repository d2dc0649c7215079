"""What those who list strategies say where there is a family of the name ``mirrored``; prints it as JSON."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat import launch, strategies
from pytest_trlcompat.catalog import existence, issue
from pytest_trlcompat.doctor import command
from pytest_trlcompat.launch import cold, proof
from pytest_trlcompat.launch.strategy import check_present
from pytest_trlcompat.matrix.report import model
from pytest_trlcompat.plugin import strategies as marker


def text_of(refused: Callable[[], None]) -> str:
    try:
        refused()
    except (launch.StrategyAbsent, proof.NotProved) as error:
        return str(error)
    return ""


def help_of_the_doctor() -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        command.main(["--help"])
    return output.getvalue()


chosen = launch.strategy("mirrored")
expected = proof.expectation(chosen, 2, "software", True)
built_nothing = {"initialized": True, "world_size": 2, "built": []}
print(
    json.dumps(
        {
            "names": strategies.NAMES,
            "catalogue": issue.STRATEGIES,
            "doctor": " ".join(help_of_the_doctor().split()),
            "marker": marker.check_mark(pytest.mark.strategies("mirrored", "ddp").mark),
            "report": [model._position(name, strategies.NAMES)[0] for name in ("ddp", "mirrored-wide", "zero1")],
            "ranges": [[row.when, row.instead] for row in existence.STRATEGIES if row.strategy == "mirrored"],
            "environment": chosen.environment(Path()),
            "cold": cold.accelerate_settings(chosen, "cuda", 2, Path())["distributed_type"],
            "engine": expected.engine,
            "absent": text_of(lambda: check_present(chosen, {"accelerate": "1.0.1"})),
            "not proved": text_of(lambda: proof.check(expected, built_nothing, rank=1)),
        }
    )
)
