"""The options of engines: what they mean, and one error for each that makes no sense."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from pytest_trlcompat.matrix.arguments import parse_arguments
from pytest_trlcompat.matrix.engines.options import RayOptions, node_task, of_runner, requested_ray
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout


def test_nox_alone_is_the_default() -> None:
    assert parse_arguments("matrix", []).ray is None
    assert parse_arguments("matrix", ["--engine", "local"]).ray is None
    assert not requested_ray(["--", "--issue", "ray"])


def test_ray_and_what_a_cell_needs() -> None:
    assert parse_arguments("matrix", ["--engine", "ray"]).ray == RayOptions(None, None, None, 1.0, 2.0, None)
    words = "--engine=ray --address ray://head:10001 --ray-version 2.58.1 --ray-python 3.12 --cell-cpus 2"
    chosen = parse_arguments("cell", [*words.split(), "--cell-memory", "3.5", "--node-cache", "/scratch"]).ray
    assert chosen == RayOptions("ray://head:10001", "2.58.1", "3.12", 2.0, 3.5, "/scratch")
    assert requested_ray(words.split())
    assert requested_ray(["--", "--engine", "ray"])


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[::1]:6379", "ray://head:10001"])
def test_addresses(address: str) -> None:
    chosen = parse_arguments("matrix", ["--engine", "ray", "--address", address]).ray
    assert chosen is not None
    assert chosen.address == address


@pytest.mark.parametrize(
    "words, wrong",
    [
        ("--engine slurm", "argument --engine: invalid choice: 'slurm'"),
        ("--address auto", "are for --engine ray; add that, or leave them out"),
        ("--cell-cpus 2", "are for --engine ray; add that, or leave them out"),
        ("--engine ray --address http://head", "--address 'http://head' is none of: auto, HOST:PORT"),
        ("--engine ray --cell-cpus 0", "--cell-cpus 0 and --cell-memory 2 must be above 0"),
        ("--engine ray --cell-memory -1", "--cell-cpus 1 and --cell-memory -1 must be above 0"),
        ("--engine ray --cell-memory nan", "--cell-cpus 1 and --cell-memory nan must be above 0"),
        ("--engine ray --cell-cpus many", "argument --cell-cpus: invalid float value: 'many'"),
        ("--engine ray --ray-version latest", "--ray-version 'latest' is no version"),
        ("--engine ray --ray-python python3", "--ray-python 'python3' is no version"),
        ("--engine ray --node-cache scratch", "--node-cache 'scratch' must be an absolute path"),
    ],
)
def test_what_makes_no_sense_is_one_error(words: str, wrong: str) -> None:
    with pytest.raises(MatrixError, match=wrong.replace("(", "\\(")):
        parse_arguments("matrix", words.split())


def test_what_a_node_installs_keeps_its_markers_but_for_that_of_an_extra() -> None:
    requirements = [
        "cloudpickle>=3.0",
        "packaging>=23.2",
        "tomli>=2.0; python_version < '3.11'",
        "uv>=0.9; extra == 'ray'",
        "uv>=0.8; (python_version < '3.11') and extra == \"ray\"",
    ]
    assert of_runner(requirements) == (
        "packaging>=23.2",
        "tomli>=2.0; python_version < '3.11'",
        "uv>=0.9",
        "uv>=0.8; (python_version < '3.11')",
    )


def test_a_node_installs_the_versions_that_the_driver_has(tmp_path: Path) -> None:
    """The driver's environment has a lock; a node that lacks uv took the newest of the day."""
    needed = ("packaging>=23.2", "uv>=0.9", "no-such-package-of-ours>=2.0; python_version < '3.11'")
    task = node_task(Layout(tmp_path), RayOptions(address="head:6379"), needed)
    assert task.requirements == (f"packaging=={version('packaging')}", f"uv=={version('uv')}", needed[2])
    marked = node_task(Layout(tmp_path), RayOptions(), ["packaging>=23.2; python_version > '3.9'"])
    assert marked.requirements == (f"packaging=={version('packaging')}; python_version > '3.9'",)
