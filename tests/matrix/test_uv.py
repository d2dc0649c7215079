"""uv: which one, pip's settings handed on, its refusals as one reason, and the network only where it is needed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from pytest_trlcompat.matrix import uv as uv_module
from pytest_trlcompat.matrix.errors import MatrixError, Untestable

NO_NETWORK = "Failed to fetch: `https://example.invalid/simple/trl/`\ndns error"


@pytest.fixture(autouse=True)
def no_pip_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uv_module, "_pip_config", dict)


class Answers:
    """Stands for :func:`uv_module.uv`; a text is a refusal, ``None`` is success."""

    def __init__(self, offline: str | None, online: str | None) -> None:
        self.refusals = {True: offline, False: online}
        self.calls: list[bool] = []

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        stdin: str | None = None,
        offline: bool = False,
        index_alone: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        self.calls.append(offline)
        refusal = self.refusals[offline]
        if refusal is not None:
            raise Untestable(refusal)
        return "offline" if offline else "online"


def test_pips_settings_are_handed_on() -> None:
    environ = {"PIP_FIND_LINKS": "/a  https://b.example/w", "PIP_INDEX_URL": "https://c.example", "HOME": "/h"}
    child = uv_module.settings(environ)
    assert child["UV_FIND_LINKS"] == "/a,https://b.example/w"
    assert child["UV_DEFAULT_INDEX"] == "https://c.example"
    assert (child["HOME"], child["DS_BUILD_OPS"]) == ("/h", "0")


def test_uvs_own_settings_win_and_the_callers_python_is_not_handed_on() -> None:
    child = uv_module.settings({"PIP_FIND_LINKS": "/a", "UV_FIND_LINKS": "/u", "VIRTUAL_ENV": "/v", "PYTHONPATH": "/p"})
    assert child["UV_FIND_LINKS"] == "/u"
    assert "VIRTUAL_ENV" not in child
    assert "PYTHONPATH" not in child
    assert "UV_DEFAULT_INDEX" not in child


def test_pips_configuration_file_counts_where_its_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uv_module, "_pip_config", lambda: {"find-links": "/from/file"})
    assert uv_module.settings({})["UV_FIND_LINKS"] == "/from/file"
    assert uv_module.settings({"PIP_FIND_LINKS": "/a"})["UV_FIND_LINKS"] == "/a"


def test_pips_configuration_is_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    pip = tmp_path / "pip.py"
    pip.write_text("print(\"global.find-links='/a /b'\\n:env:.find-links='/env'\\nfreeze.timeout='10'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    uv_module._pip_config.cache_clear()
    try:
        assert uv_module._pip_config() == {"find-links": "/a /b"}
    finally:
        uv_module._pip_config.cache_clear()


def test_the_cpu_backend_is_requested_unless_a_wheel_folder_has_torch(tmp_path: Path) -> None:
    assert uv_module.torch_backend({}) == ["--torch-backend", "cpu"]
    assert uv_module.torch_backend({"PIP_FIND_LINKS": str(tmp_path)}) == ["--torch-backend", "cpu"]
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert uv_module.torch_backend({"PIP_FIND_LINKS": str(tmp_path)}) == []
    assert uv_module.torch_backend({"PIP_FIND_LINKS": tmp_path.as_uri()}) == []
    assert uv_module.torch_backend({"PIP_FIND_LINKS": "https://wheels.example"}) == []
    assert uv_module.torch_backend({"UV_TORCH_BACKEND": "cu130"}) == []


def test_what_is_locked_comes_from_the_cache_and_only_else_from_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(offline=None, online=None)
    monkeypatch.setattr(uv_module, "uv", answers)
    assert uv_module.uv_cached_first([]) == "offline"
    answers = Answers(offline="not in the cache", online=None)
    monkeypatch.setattr(uv_module, "uv", answers)
    assert uv_module.uv_cached_first([]) == "online"
    assert answers.calls == [True, False]


def test_without_network_and_cache_both_reasons_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uv_module, "uv", Answers(offline="trl==1 was not found in the cache", online=NO_NETWORK))
    for policy in (uv_module.uv_cached_first, uv_module.uv_network_first):
        with pytest.raises(Untestable) as caught:
            policy([])
        assert str(caught.value) == f"{NO_NETWORK}\nand without the network: trl==1 was not found in the cache"


def test_what_is_resolved_comes_from_the_cache_only_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uv_module, "uv", Answers(offline=None, online=NO_NETWORK))
    assert uv_module.uv_network_first([]) == "offline"
    answers = Answers(offline=None, online="there is no version of trl==9.9.9")
    monkeypatch.setattr(uv_module, "uv", answers)
    with pytest.raises(Untestable, match=r"^there is no version of trl==9\.9\.9$"):
        uv_module.uv_network_first([])
    assert answers.calls == [False]


def test_of_a_long_reason_the_beginning_and_the_end_are_kept() -> None:
    told = uv_module._reason("\n".join(f"line {number}" for number in range(100))).splitlines()
    assert (told[0], told[-1]) == ("line 0", "line 99")
    assert len(told) == 31
    assert uv_module._reason("one\ntwo") == "one\ntwo"


def test_an_unknown_version_gives_the_resolvers_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    with pytest.raises(Untestable) as caught:
        uv_module.uv(["pip", "compile", "-", "--quiet"], stdin="trl==9.9.9")
    reason = str(caught.value)
    assert reason.startswith("No solution found when resolving dependencies")
    assert "trl" in reason
    assert not any(
        ornament in reason
        for ornament in (
            "\N{MULTIPLICATION SIGN}",
            "\N{BOX DRAWINGS LIGHT ARC UP AND RIGHT}",
            "error:",
            "cause:",
            "\x1b",
        )
    )


def test_the_error_for_a_missing_uv_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        MatrixError, match=r"uv is neither installed for .+ nor on PATH; install it with: pip install uv"
    ):
        uv_module.find_uv()
    monkeypatch.setattr(shutil, "which", lambda name: "/somewhere/uv")
    assert uv_module.find_uv() == "/somewhere/uv"


def test_a_full_disk_is_no_cells_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\necho 'error: failed to write: No space left on device (os error 28)' >&2; exit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(uv_module, "find_uv", lambda: str(program))
    with pytest.raises(MatrixError, match=r"^the disk is full \(while uv wrote to it\): free some space") as caught:
        uv_module.uv(["pip"])
    assert not isinstance(caught.value, Untestable)
