"""What a cure changes of upstream is changed for one trainer alone, and noticed where it is gone."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest

from pytest_trlcompat.trainers import CureError
from pytest_trlcompat.trainers.curing import patching
from pytest_trlcompat.trainers.curing.patching import PatchPoint, expected, extended, original, owner_of, replaced

VERSION = metadata.version("pytest")


class Upstream(ModuleType):
    """A module of an installed package: pytest stands for TRL, of which only name and version count here."""

    def __init__(self) -> None:
        super().__init__("pytest.made_up")

        def generate(prompt: str = "") -> str:
            return f"upstream {prompt}"

        class Linear:
            @staticmethod
            def backward(gradient: int) -> int:
                return gradient

            def forward(self, value: int) -> int:
                return value

        self.generate, self.Linear = generate, Linear


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = Upstream()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


GENERATE = PatchPoint("pytest.made_up:generate")


def ours(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: f"ours over {function(*args)}"


def test_a_function_is_replaced_while_the_context_lasts(upstream: Any) -> None:
    with replaced(GENERATE, ours):
        assert upstream.generate("a") == "ours over upstream a"
        with replaced(GENERATE, ours):
            assert upstream.generate("a") == "ours over ours over upstream a"
    assert upstream.generate("a") == "upstream a"


def test_it_is_upstreams_again_after_an_error(upstream: Any) -> None:
    with pytest.raises(ValueError, match="failed"), replaced(GENERATE, ours):
        raise ValueError("failed")
    assert upstream.generate() == "upstream "


def test_another_thread_calls_upstreams_meanwhile(upstream: Any) -> None:
    found: list[str] = []
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        entered.wait(10)
        found.append(upstream.generate("other"))
        with replaced(GENERATE, lambda function: lambda *args: f"theirs over {function(*args)}"):
            found.append(upstream.generate("other"))
            left.set()
        found.append(upstream.generate("other"))

    thread = threading.Thread(target=other)
    thread.start()
    with replaced(GENERATE, ours):
        entered.set()
        assert left.wait(10)
        assert upstream.generate("one") == "ours over upstream one"
    thread.join()
    assert found == ["upstream other", "theirs over upstream other", "upstream other"]
    assert upstream.generate("one") == "upstream one"


def test_methods_and_static_methods_are_replaced_as_what_they_are(upstream: Any) -> None:
    backward, forward = (PatchPoint(f"pytest.made_up:Linear.{name}") for name in ("backward", "forward"))
    layer = upstream.Linear()
    with replaced(backward, lambda function: lambda gradient: 10 * function(gradient)):
        assert (layer.backward(1), upstream.Linear.backward(2)) == (10, 20)
    with replaced(forward, lambda function: lambda self, value: (self, 10 * function(self, value))):
        assert layer.forward(1) == (layer, 10)
    assert (layer.backward(1), upstream.Linear.backward(2), layer.forward(1)) == (1, 2, 1)


def test_what_somebody_else_puts_there_is_kept(upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with replaced(GENERATE, ours):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(upstream, "generate", lambda prompt="": f"user's {prompt}")
        with replaced(GENERATE, ours):
            assert upstream.generate("a") == "ours over user's a"
        assert upstream.generate("a") == "user's a"
    with replaced(GENERATE, ours):
        assert upstream.generate("a") == "ours over upstream a"


@pytest.mark.parametrize("calls_it", [True, False], ids=["calls what it wraps", "calls nothing"])
def test_a_wrapper_in_its_place_is_changed_and_seen(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, calls_it: bool
) -> None:
    with replaced(GENERATE, ours):
        pass
    current = upstream.generate

    @functools.wraps(current)  # copies every attribute of the dispatcher
    def mine(prompt: str = "") -> str:
        return f"user's {current(prompt) if calls_it else prompt}"

    monkeypatch.setattr(upstream, "generate", mine)
    said = "user's upstream a" if calls_it else "user's a"
    for _ in range(2):
        with replaced(GENERATE, ours):
            assert upstream.generate("a") == f"ours over {said}"
        assert upstream.generate("a") == said
    assert original(GENERATE) is mine


def test_what_is_extended_is_no_dispatcher(upstream: Any) -> None:
    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        def generate(prompt: str = "") -> str:
            return f"ours over {function(prompt)}"

        return generate

    function = upstream.generate
    extended(GENERATE, made)
    assert upstream.generate.__code__.co_name == "generate"  # nothing that looks at a context is traced with it
    assert original(GENERATE) is function


def test_code_that_looks_at_it_sees_upstreams(upstream: Any) -> None:
    function = upstream.generate
    with replaced(GENERATE, ours):
        assert original(GENERATE) is function
        assert inspect.unwrap(upstream.generate) is function
        assert inspect.signature(upstream.generate) == inspect.signature(function)


def test_what_runs_in_any_thread_is_extended_once(upstream: Any) -> None:
    point = PatchPoint("pytest.made_up:generate")
    for _ in range(2):
        extended(point, ours)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(upstream.generate("a")))
    thread.start()
    thread.join()
    assert found == ["ours over upstream a"]
    with replaced(GENERATE, lambda function: lambda *args: f"lent over {function(*args)}"):
        assert upstream.generate("a") == "lent over ours over upstream a"


@pytest.mark.parametrize("where", ["pytest.made_up:renamed", "pytest.made_up:Linear.renamed", "pytest.moved:generate"])
def test_what_should_be_there_and_is_not_is_an_error(upstream: Any, where: str) -> None:
    point = PatchPoint(where, ">=1")
    found = f"with pytest {VERSION}: looked for {where}, but it is not there, although releases >=1 should have it. "
    remedy = "Take a newer pytest-trlcompat, or releases that it knows"
    uses: list[Callable[[], Any]] = [
        lambda: owner_of(point),
        lambda: replaced(point, ours).__enter__(),
        lambda: extended(point, ours),
    ]
    for use in uses:
        with pytest.raises(CureError) as caught:
            use()
        assert str(caught.value) == f"a cure {found}{remedy}"
    with pytest.raises(CureError) as caught:
        owner_of(point, "SomeMixin")
    way_out = ", or leave this cure out where you do not need it: cured(YourTrainer, without=['SomeMixin'])"
    assert str(caught.value) == f"SomeMixin {found}{remedy}{way_out}"


def test_a_module_that_cannot_be_imported_is_not_one_that_is_missing(
    upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = ModuleNotFoundError("No module named 'vllm.lora'", name="vllm.lora")

    def import_module(name: str) -> Any:
        raise broken

    monkeypatch.setattr(patching, "import_module", import_module)
    for use in (owner_of, original, lambda point, cure: replaced(point, ours, cure).__enter__()):
        with pytest.raises(CureError) as caught:
            use(GENERATE, "SomeMixin")
        assert str(caught.value) == (
            f"SomeMixin with pytest {VERSION}: looked for pytest.made_up:generate, but its module cannot be imported: "
            "ModuleNotFoundError: No module named 'vllm.lora', although every release should have it. See to it that "
            "`import pytest.made_up` works, or leave this cure out where you do not need it: "
            "cured(YourTrainer, without=['SomeMixin'])"
        )
        assert caught.value.__cause__ is broken
    assert owner_of(PatchPoint("pytest.made_up:generate", "<1")) is None


def test_what_need_not_be_there_is_left_out(upstream: Any) -> None:
    point = PatchPoint("pytest.made_up:renamed", "<1")
    assert not expected(point)
    assert owner_of(point) is None
    assert original(point) is None
    extended(point, ours)
    with replaced(point, ours):
        assert not hasattr(upstream, "renamed")


def test_a_package_that_is_not_installed_has_nothing() -> None:
    point = PatchPoint("no_such_package.module:function")
    assert not expected(point)
    assert owner_of(point) is None
