"""The marker ``strategies`` and the fixture ``strategy_launcher``, as a user meets them."""

from __future__ import annotations

import pytest

from .running import Run
from .test_plugin_launchers import RecordingLauncher, launchers

__all__ = ["launchers"]


def test_a_test_runs_under_each_strategy_and_is_skipped_under_an_absent_one(
    run: Run, pytester: pytest.Pytester, launchers: list[RecordingLauncher]
) -> None:
    """The stack of these tests has Accelerate 1.4.0, which does not know FSDP2."""
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.strategies("ddp", "zero3", "fsdp1", "fsdp2")
        @pytest.mark.parametrize("number", [1])
        def test_some(strategy_launcher, number):
            assert strategy_launcher.strategy in ("ddp", "zero3", "fsdp1")
            assert strategy_launcher(print, number, world_size=4) == "launched"
            assert strategy_launcher.command(["trl", "sft"], world_size=4) == "commanded"

        @pytest.mark.strategies("ddp", "zero1")
        class TestClass:
            @pytest.mark.strategies("single")
            def test_closest(self, strategy_launcher):
                strategy_launcher(print)

            def test_without(self):
                pass

        def test_all(strategy_launcher):
            strategy_launcher(print)
        """
    )
    result = run("--trlcompat-device=cpu", "-v", "-rs", "test_it.py")
    result.assert_outcomes(passed=11, skipped=2)
    lines = result.outlines
    names = [line.split("[")[1].split("]")[0] for line in lines if line.startswith("test_it.py::test_some[")]
    assert names == ["ddp-1", "zero3-1", "fsdp1-1", "fsdp2-1"]
    others = [line.split(" ")[0] for line in lines if "::test_closest" in line or "::test_all" in line]
    assert others == [
        "test_it.py::TestClass::test_closest[single]",
        *(f"test_it.py::test_all[{name}]" for name in ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")),
    ]
    assert "this stack has accelerate 1.4.0: Accelerate knows FSDP2 from 1.6.0 on" in result.stdout.str()
    (launcher,) = launchers
    assert [kwargs["strategy"] for _, kwargs in launcher.calls] == [
        *("ddp", "zero3", "fsdp1", "single"),
        *("single", "ddp", "zero1", "zero2", "zero3", "fsdp1"),
    ]
    assert launcher.calls[0] == ((1,), {"strategy": "ddp", "world_size": 4})
    assert launcher.commands[0] == (["trl", "sft"], {"strategy": "ddp", "world_size": 4})


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        ("('ddp', 'zero4')", "marker strategies: unknown strategy 'zero4'; known are single, ddp"),
        ("()", "marker strategies: name strategies, like strategies('ddp', 'zero3'); known are single, ddp"),
        ("(['ddp'])", "marker strategies: unknown strategy ['ddp']; known are single, ddp"),
        ("('ddp', 'ddp')", "marker strategies: a strategy stands there twice: ddp, ddp"),
    ],
)
def test_a_marker_that_makes_no_sense_is_refused_at_collection(
    run: Run, pytester: pytest.Pytester, marker: str, text: str
) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.strategies{marker}\ndef test_it(strategy_launcher): pass")
    result = run("--trlcompat-device=cpu")
    result.assert_outcomes(errors=1)
    assert text in result.stdout.str()


def test_a_marker_that_does_nothing_is_refused(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.strategies('ddp')\ndef test_it(launcher): pass")
    result = run("--trlcompat-device=cpu")
    result.assert_outcomes(errors=1)
    assert "test_it: marker strategies: it does nothing, since the test does not use strategy_launcher" in (
        result.stdout.str()
    )


def test_the_marker_is_registered(run: Run) -> None:
    assert any(line.startswith("@pytest.mark.strategies('ddp', 'zero3', ...): ") for line in run("--markers").outlines)
