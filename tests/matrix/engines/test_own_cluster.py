"""Which cluster of Ray a command uses, and which folder a node: no other user's, and none that another could enter."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from pytest_trlcompat.matrix.engines import node, own_cluster
from pytest_trlcompat.matrix.engines.options import RayOptions
from pytest_trlcompat.matrix.engines.session import RaySession
from pytest_trlcompat.matrix.engines.task import cell_events
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from tests.matrix.engines.made_up_node import task
from tests.stranger import STRANGER, needs_root, open_folder

AUTO = RayOptions(address="auto")


def write_address(folder: Path, text: str = "10.0.0.1:6379\n") -> Path:
    path = folder / "ray" / "ray_current_cluster"
    path.parent.mkdir()
    path.parent.chmod(0o777)  # as Ray makes it
    path.write_text(text)
    path.chmod(0o644)
    return path


def test_auto_is_the_cluster_that_this_user_has_started(tmp_path: Path) -> None:
    write_address(tmp_path)
    assert own_cluster.address_of(AUTO, {"RAY_TMPDIR": str(tmp_path)}) == "10.0.0.1:6379"
    assert own_cluster.address_of(AUTO, {"RAY_ADDRESS": "head:1", "RAY_TMPDIR": str(tmp_path)}) == "auto"
    assert own_cluster.address_of(RayOptions(address="head:6379"), {}) == "head:6379"
    assert own_cluster.address_of(RayOptions(), {}) is None


@needs_root
def test_auto_is_not_the_cluster_of_another_user() -> None:
    """Whoever wrote the file in /tmp/ray had a sweep send them its files, and unpickle what they answer."""
    with open_folder() as folder:
        path = write_address(folder)
        os.chown(path, STRANGER, STRANGER)
        with pytest.raises(MatrixError) as raised:
            own_cluster.address_of(AUTO, {"RAY_TMPDIR": str(folder)})
    assert str(raised.value) == (
        f"--address auto: {path} belongs to the user with the id {STRANGER} (mode 0644), who would decide to which "
        "cluster this command connects; start one on this machine, or give --address HOST:PORT"
    )


@pytest.mark.parametrize("what", ["none", "link", "writable"])
def test_auto_without_a_cluster_of_this_user_is_one_clear_error(tmp_path: Path, what: str) -> None:
    """Ray would look for the processes of any user's cluster."""
    path = write_address(tmp_path)
    if what == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
    if what == "link":
        (tmp_path / "elsewhere").write_text("10.0.0.1:6379\n")
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MatrixError, match=rf"^--address auto: {path} .*; start one on this machine, or give --address"):
        own_cluster.address_of(AUTO, {"RAY_TMPDIR": str(tmp_path)})


def test_a_cluster_that_is_started_asks_for_a_secret() -> None:
    first, second = (own_cluster.token_variables(RayOptions(), {}) for _ in range(2))
    assert first["RAY_AUTH_MODE"] == second["RAY_AUTH_MODE"] == "token"
    assert re.fullmatch("[0-9a-f]{64}", first["RAY_AUTH_TOKEN"])
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert own_cluster.token_variables(AUTO, {}) == {}  # it has one, or none
    assert own_cluster.token_variables(RayOptions(), {"RAY_AUTH_MODE": "disabled"}) == {}


def test_the_driver_is_started_with_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reads it when it is imported, and its processes inherit it; other users cannot read a process's variables."""
    seen: list[dict[str, str]] = []
    module = sys.modules[RaySession.__module__]
    monkeypatch.setattr(module.process, "run", lambda command, *, env, **_: seen.append(dict(env)) or 0)  # type: ignore[func-returns-value]
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    session = RaySession(Layout(tmp_path), MagicMock(), MagicMock(), lambda environment: {"HOME": "/home/me"})
    for options in (RayOptions(), RayOptions(address="head:6379")):
        session._drive(MagicMock(options=options, to_json=lambda: "{}"), Environment(tmp_path / "env"))
    assert [sorted(variables) for variables in seen] == [["HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"], ["HOME"]]


def test_a_cluster_that_is_started_listens_on_the_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ray", "ray.exceptions", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    engines = "pytest_trlcompat.matrix.engines"
    for name in ("cluster", "ray_tasks", "ray_streams"):
        monkeypatch.delitem(sys.modules, f"{engines}.{name}", raising=False)
    cluster = importlib.import_module(f"{engines}.cluster")
    arguments = cluster._arguments(RayOptions(), tmp_path, str(tmp_path))
    assert (arguments["address"], arguments["_node_ip_address"]) == ("local", "127.0.0.1")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(MatrixError, match="--address auto"):
        cluster._arguments(AUTO, tmp_path, str(tmp_path))
    for name in ("cluster", "ray_tasks", "ray_streams"):  # which hold what stands for Ray
        sys.modules.pop(f"{engines}.{name}", None)
        vars(sys.modules[engines]).pop(name, None)


WRONG = {
    "of another user": "belongs to user",
    "for all to write": "every user can write to",
}


@needs_root
@pytest.mark.parametrize("how", WRONG)
def test_a_node_runs_nothing_from_a_folder_that_another_user_could_change(how: str) -> None:
    """In /tmp, say: an environment of theirs stood there already, and cells ran its Python."""
    with open_folder() as folder:
        cache = folder / "nodes"
        cache.mkdir()
        cache.chmod(0o755)
        if how == "of another user":
            os.chown(cache, STRANGER, STRANGER)
        else:
            cache.chmod(0o777)
        before = sorted(cache.iterdir())
        problem = node.report("node-1", str(cache), (), None).problem
        assert problem is not None
        assert problem.startswith(f"{cache} {WRONG[how]}" if how == "of another user" else WRONG[how])
        assert f"so another user could change what cells run in {cache}; let TRLCOMPAT_NODE_CACHE" in problem
        with pytest.raises(MatrixError, match="so another user could change what cells run in"):
            list(cell_events(task(cache, own_caches=True), "node-1"))
        assert sorted(cache.iterdir()) == before


def test_a_nodes_folder_is_made_for_this_user_and_links_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = os.umask(0)
    try:
        cache = node.checked_cache(str(tmp_path / "link" / "nodes"))
    finally:
        os.umask(before)
    assert cache == tmp_path / "real" / "nodes"
    assert cache.stat().st_mode & 0o777 == 0o755
