"""What travels to the nodes, and what stays where it is: Ray is part of the driver's environment alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pytest_trlcompat import __version__
from pytest_trlcompat.matrix.engines.messages import CellTask, NodeTask
from pytest_trlcompat.matrix.engines.options import RayOptions
from pytest_trlcompat.matrix.engines.payload import copy_project, digest
from pytest_trlcompat.matrix.engines.request import Request
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.suite_run import code_digest
from tests.test_imports import read_imports

from .made_up_node import ROOT, cell

RAY = {f"pytest_trlcompat.matrix.engines.{name}" for name in ("__main__", "cluster", "ray_streams", "ray_tasks")}


def test_the_copy_has_the_same_digest_so_that_a_cell_goes_on_with_either_engine(tmp_path: Path) -> None:
    copy_project(Layout(ROOT), tmp_path)
    assert code_digest(Layout(tmp_path)) == code_digest(Layout(ROOT))
    assert digest(Layout(tmp_path)) == digest(Layout(ROOT))
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == [
        "fixtures",
        "pytest_trlcompat",
        "pytest_trlcompat",
        "suites",
    ]
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_file_that_has_arrived_otherwise_is_noticed_also_one_on_which_no_verdict_depends(tmp_path: Path) -> None:
    copy_project(Layout(ROOT), tmp_path)
    (tmp_path / "pytest_trlcompat" / "__pycache__").mkdir()
    (tmp_path / "pytest_trlcompat" / "__pycache__" / "cli.pyc").write_bytes(b"of this machine")
    (tmp_path / "pytest_trlcompat" / "trainers" / "__init__.pyi").write_text("of an installation here")
    assert digest(Layout(tmp_path)) == digest(Layout(ROOT))
    with (tmp_path / "pytest_trlcompat" / "bisect" / "node_program.py").open("a") as program:
        program.write("# of another release\n")
    assert code_digest(Layout(tmp_path)) == code_digest(Layout(ROOT))
    assert digest(Layout(tmp_path)) != digest(Layout(ROOT))


def test_pytest_finds_the_plugin_in_the_copy_by_its_path_alone(tmp_path: Path) -> None:
    copy_project(Layout(ROOT), tmp_path)
    code = (
        f"import sys; sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if 'site-packages' not in p)];"
        "import importlib.metadata as m; (e,) = [e for e in m.entry_points(group='pytest11') if e.name == 'trlcompat'];"
        "print(e.value, m.version('pytest-trlcompat'))"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["pytest_trlcompat.plugin", __version__], done.stderr


def test_messages_survive_the_way() -> None:
    common = NodeTask(variables={"TRLCOMPAT_A": "b"}, requirements=("uv",), cache="/c", files="0123", own_caches=False)
    task = CellTask("c", {"trl": "1"}, None, "3.12", "s", ("i",), ("-x",), **vars(common))
    assert CellTask.from_json(task.to_json()) == task
    request = Request(
        *(ROOT, "s", (cell(),), RayOptions(address="auto"), ("i",), True, ("-x",), ("uv>=0.9",)),
        tests={"c": "not on_demand"},
    )
    assert Request.from_json(request.to_json()) == request
    assert json.loads(request.to_json())["cells"][0]["pins"] == {"trl": "0.15.2", "transformers": "4.48.3"}


def test_neither_sessions_nor_plugin_nor_the_cells_process_import_ray() -> None:
    importing = {
        path
        for path in (ROOT / "pytest_trlcompat").rglob("*.py")
        if any(line.lstrip().startswith(("import ray", "from ray")) for line in path.read_text().splitlines())
    }
    assert {path.stem for path in importing} == {"cluster", "ray_streams", "ray_tasks"}
    imports = read_imports(ROOT, "pytest_trlcompat")
    for start in ("matrix.sessions", "plugin", "matrix.engines.cell_process", "matrix.engines.task", "cli"):
        reached, todo = set(), {f"pytest_trlcompat.{start}"}
        while todo:
            name = todo.pop()
            reached.add(name)
            todo |= imports[name] - reached
        assert not reached & RAY, start


def test_no_cell_has_ray() -> None:
    locks = list((ROOT / "fixtures" / "locks").glob("*.txt"))
    assert len(locks) > 100
    assert not [path.name for path in locks if "\nray==" in path.read_text()]
