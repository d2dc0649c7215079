"""Functions that are replaced for a while, in modules that are imported before, meanwhile and afterwards."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch.hooks import hooked

MODULE = """
import functools
def plain(value, *, more=1, **rest):
    return ["plain", value, more, rest]
def with_default(args=None):
    return ["with_default", args]
@functools.wraps(plain)
def closed(value):
    return plain(value)
def make():
    hidden = "hidden"
    def within():
        return hidden
    return within
closed_over = make()
from os.path import join
"""


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Of a module that nobody has imported."""
    name = f"hooked_module_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def hook(*args: Any, **kwargs: Any) -> Any:
    return ("hook", args, kwargs)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_functions_are_replaced_for_all_who_have_them(name: str, when: str) -> None:
    module = importlib.import_module(name) if when == "before" else None
    functions = [module.plain, module.with_default] if module else []
    with hooked({(name, "plain"): hook, (name, "with_default"): lambda args=7: args}):
        module = importlib.import_module(name)
        functions = functions or [module.plain, module.with_default]
        assert functions[0](1, more=2, x=3) == ("hook", (1,), {"more": 2, "x": 3})
        assert (functions[1](), functions[1](5)) == (7, 5)
        assert module.plain is functions[0]
    assert functions[0](1, x=3) == ["plain", 1, 1, {"x": 3}]
    assert (functions[1](), functions[1](5)) == (["with_default", None], ["with_default", 5])
    assert not [attribute for attribute in vars(module) if "trlcompat" in attribute]


def test_a_module_that_is_imported_afterwards_is_itself(name: str) -> None:
    before = list(sys.meta_path)
    with hooked({(name, "plain"): hook}):
        assert len(sys.meta_path) == len(before) + 1
    assert sys.meta_path == before
    assert importlib.import_module(name).plain(1)[0] == "plain"


def test_a_private_copy_is_itself_and_the_module_is_still_waited_for(name: str) -> None:
    with hooked({(name, "plain"): hook}):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        assert copy.plain(1)[0] == "plain"
        assert importlib.import_module(name).plain(1)[0] == "hook"


def test_a_function_with_a_closure_is_replaced_in_its_module(name: str) -> None:
    module = importlib.import_module(name)
    with hooked({(name, "closed_over"): hook, (name, "missing"): hook, (name, "join"): hook}):
        assert module.closed_over() == ("hook", (), {})
        assert module.join("a", "b") == "a/b"  # which is not this module's
    assert module.closed_over() == "hidden"


def test_an_error_in_a_hook_is_the_callers(name: str) -> None:
    def refuse() -> None:
        raise LookupError("refused")

    with hooked({(name, "with_default"): refuse}), pytest.raises(LookupError, match="refused"):
        importlib.import_module(name).with_default()
    assert importlib.import_module(name).with_default() == ["with_default", None]
