"""What a launch is given: the function's own arguments, and configuration files by their path."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError, LaunchWarning, StrategyError


def own_seed(seed: int, timeout: float = 5.0) -> tuple[int, float]:
    return seed, timeout


def test_an_argument_that_the_launch_has_too_goes_to_the_function_by_kwargs(launch: Launcher) -> None:
    assert launch(own_seed, strategy="single", kwargs={"seed": 7, "timeout": 2.5}).values == [(7, 2.5)]
    assert launch(own_seed, 7, strategy="single", seed=3).values == [(7, 5.0)]


def test_an_argument_that_the_launch_took_is_refused_or_said(launch: Launcher) -> None:
    text = (
        "seed=7 is an argument of the launch, and own_seed has one of the same name; to give the function its own, "
        "pass kwargs={'seed': 7}"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        launch(own_seed, strategy="single", seed=7)
    with pytest.warns(LaunchWarning, match=r"kwargs=\{'timeout': 19\}. It keeps its default, 5.0$") as warned:
        assert launch(own_seed, 7, strategy="single", timeout=19).values == [(7, 5.0)]
    assert [Path(each.filename).name for each in warned] == ["test_arguments.py"]


def test_an_argument_may_not_be_given_twice(launch: Launcher) -> None:
    with pytest.raises(TypeError, match="^b: given by name and in kwargs=$"):
        launch(dict, strategy="single", b=1, kwargs={"b": 2})


@pytest.mark.parametrize("kind", [str, Path])
def test_a_configuration_file_is_given_by_its_path(launch: Launcher, tmp_path: Path, kind: type) -> None:
    config = tmp_path / "accelerate.json"
    config.write_text(json.dumps({"distributed_type": "NO", "mixed_precision": "bf16"}))

    def precision() -> str:
        import os

        return os.environ["ACCELERATE_MIXED_PRECISION"]

    result = launch(precision, strategy=kind(config))
    assert (result.strategy, result.values) == ("single", ["bf16"])


def test_a_configuration_file_that_is_not_there_is_named(launch: Launcher) -> None:
    with pytest.raises(StrategyError, match="the Accelerate configuration my.yaml cannot be read: .*No such file"):
        launch(dict, strategy="my.yaml")


def test_a_failure_is_shown_without_the_launchers_frames(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_trlcompat.launch import Launcher

        def fail():
            raise LookupError("no such thing")

        def refuse(seed):
            pass

        def test_a_rank_fails():
            with Launcher(device="cpu") as launch:
                launch(fail, strategy="single")

        def test_a_mistake():
            Launcher(device="cpu")(refuse, strategy="single", seed=3)

        def test_what_cannot_be_sent():
            Launcher(device="cpu")(fail, (letter for letter in "ab"), strategy="single")
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:trlcompat")
    result.assert_outcomes(failed=3)
    text = result.stdout.str()
    assert "first observed failure: rank 0 raised LookupError" in text
    assert re.findall(r"^\S+\.py:\d+: \w+$", text, re.MULTILINE) == [
        "test_a_failure_is_shown_without_the_launchers_frames.py:11: LaunchError",
        "test_a_failure_is_shown_without_the_launchers_frames.py:14: TypeError",
        "test_a_failure_is_shown_without_the_launchers_frames.py:17: LaunchError",
    ]
    assert "Launcher.__call__" not in text
    assert "own = locals()" not in text


LOCK = threading.Lock()


class Holder:
    def __init__(self) -> None:
        self.parts = {"lock": LOCK}

    def hold(self) -> None:
        pass


def closing(value: object) -> Callable[[], object]:
    def inner() -> object:
        return value

    return inner


def use_the_global() -> object:
    return [LOCK for _ in range(3)]


def default(value: object = LOCK) -> object:
    return value


@pytest.mark.parametrize(
    ("function", "args", "where"),
    [
        (closing(LOCK), (), "the closure variable 'value' of the function is a _thread.lock"),
        (closing([1, LOCK]), (), "item 1 of the closure variable 'value' of the function is a _thread.lock"),
        (
            closing(closing(LOCK)),
            (),
            "the closure variable 'value' of the closure variable 'value' of the function is a _thread.lock",
        ),
        (use_the_global, (), "the global 'LOCK' of the function is a _thread.lock"),
        (default, (), "a default of the function is a _thread.lock"),
        (Holder().hold, (), "entry 'lock' of attribute 'parts' of the object of the function is a _thread.lock"),
        (print, (1, LOCK), "argument 2 is a _thread.lock"),
        (functools.partial(print, end=LOCK), (), "argument 'end' of the function is a _thread.lock"),
    ],
    ids=["closure", "in a list", "two closures", "global", "default", "method", "argument", "partial"],
)
def test_what_cannot_be_sent_is_named(
    launch: Launcher, function: Callable[..., object], args: tuple[object, ...], where: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(function, *args, strategy="single")
    assert f" cannot be sent to the ranks: {where}: TypeError: cannot pickle '_thread.lock' object. " in str(
        caught.value
    )


async def wait() -> None:
    print("run")


def give() -> Iterator[int]:
    yield 1


class Asynchronous:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (wait, r"^wait is an async def, .* such as: lambda: asyncio\.run\(wait\(\)\)$"),
        (functools.partial(wait), "is an async def, "),
        (Asynchronous(), "is an async def, "),
        (give, "^give is a generator, of which nothing runs when it is called; return a list instead$"),
    ],
    ids=["async def", "partial", "object", "generator"],
)
def test_a_function_that_would_not_run_is_refused_at_once(function: Callable[..., object], text: str) -> None:
    launcher = Launcher(device="cpu")
    with pytest.raises(LaunchError, match=text):
        launcher(function, strategy="single")
    assert not launcher._servers


def test_an_async_def_runs_by_asyncio(launch: Launcher) -> None:
    assert launch(lambda: asyncio.run(wait()), strategy="single").ranks[0].stdout == "run\n"
