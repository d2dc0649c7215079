"""The launchers' fixtures as a user meets them: one launcher for a session, and what is said without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_trlcompat import accelerator, launch
from pytest_trlcompat.launch import Cluster

from .running import Run


class RecordingLauncher:
    """Stands in for the real launcher: records its calls."""

    made: list[RecordingLauncher]

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.commands: list[tuple[list[str], dict[str, Any]]] = []
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.closed = 0
        self.made.append(self)

    def __enter__(self) -> RecordingLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def command(self, words: list[str], /, **kwargs: Any) -> str:
        self.commands.append((words, kwargs))
        return "commanded"

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "launched"


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[RecordingLauncher]:
    """The launchers that an inner run makes."""
    monkeypatch.setattr(RecordingLauncher, "made", [], raising=False)
    monkeypatch.setattr(launch, "Launcher", RecordingLauncher)
    return RecordingLauncher.made


def test_launcher_fixtures_share_one_launcher_and_choose_the_strategy(
    run: Run, pytester: pytest.Pytester, launchers: list[RecordingLauncher]
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_ddp(ddp_launcher):
            assert ddp_launcher(print, 1, world_size=4, timeout=5, x=2) == "launched"

        def test_deepspeed(deepspeed_launcher):
            for stage in (1, 2, 3):
                deepspeed_launcher(print, stage=stage)
            deepspeed_launcher(print)
            with pytest.raises(ValueError, match="^stage=0; choose one of 1, 2, 3$"):
                deepspeed_launcher(print, stage=0)

        def test_fsdp(fsdp_launcher):
            fsdp_launcher(print, version=2, options={"sharding_strategy": "NO_SHARD"})
            fsdp_launcher(print)
            with pytest.raises(ValueError, match="^version=3; choose one of 1, 2$"):
                fsdp_launcher(print, version=3)

        def test_any(launcher):
            launcher(print, strategy="single")
        """
    )
    run("--trlcompat-device=cpu", "--trlcompat-timeout=7").assert_outcomes(passed=4)
    (launcher,) = launchers
    named = {name: launcher.arguments[name] for name in ("device", "timeout", "cluster", "live", "debug")}
    assert named == {"device": "cpu", "timeout": 7.0, "cluster": Cluster(), "live": False, "debug": None}
    assert launcher.calls[0] == ((1,), {"strategy": "ddp", "world_size": 4, "timeout": 5, "x": 2})
    assert [kwargs["strategy"] for _, kwargs in launcher.calls] == [
        *("ddp", "zero1", "zero2", "zero3", "zero3", "fsdp2", "fsdp1", "single"),
    ]
    assert launcher.calls[5][1]["options"] == {"sharding_strategy": "NO_SHARD"}
    assert launcher.closed == 1


@pytest.mark.parametrize("ending", ["KeyboardInterrupt", "SystemExit", "AssertionError"])
def test_the_launcher_is_closed_however_the_session_ends(
    run: Run, pytester: pytest.Pytester, launchers: list[RecordingLauncher], ending: str
) -> None:
    pytester.makepyfile(f"def test_it(launcher): raise {ending}")
    if ending == "KeyboardInterrupt":
        with pytest.raises(KeyboardInterrupt):  # pytester passes it on
            run("--trlcompat-device=cpu")
    else:
        run("--trlcompat-device=cpu")
    assert [launcher.closed for launcher in launchers] == [1]


def test_sessions_without_a_launch_make_no_launcher(
    run: Run, pytester: pytest.Pytester, launchers: list[RecordingLauncher]
) -> None:
    pytester.makepyfile("def test_it(version_matrix): pass")
    run().assert_outcomes(passed=1)
    assert launchers == []


LAUNCHING = """
    def test_one(launcher): pass
    def test_two(ddp_launcher): pass
"""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a machine without one; what the build itself says is tests/accelerator/test_build.py's matter."""

    def build() -> None:
        raise accelerator.AcceleratorError("no C++ compiler was found")

    monkeypatch.setattr(accelerator, "build", build)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_launching_tests_fail_with_the_reason_alone(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(LAUNCHING)
    result = run()
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["trlcompat: no C++ compiler was found"])
    result.stdout.no_fnmatch_line("*During handling*")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_a_run_for_results_ends_at_once(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(LAUNCHING)
    result = run("--trlcompat-results", "out.jsonl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*Exit: trlcompat: no C++ compiler was found*"])
    assert not (pytester.path / "out.jsonl").exists()
