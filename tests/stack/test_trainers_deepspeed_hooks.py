"""The cure of ``deepspeed-hook-registration`` and of the stale trace.

Either name, TRL's own way first, a clear error for neither, and what DeepSpeed has recorded dropped once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.trainers.deepspeed.deepspeed_hooks import DeepSpeedHooksMixin, _working, add_hooks, forget_trace

NAMES = ("_register_deepspeed_module", "_register_hooks_recursively")


def offload(name: str) -> Any:
    registered: list[Any] = []
    return SimpleNamespace(**{name: registered.append}, module="module", registered=registered)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_are_added_by_the_name_that_is_there(name: str) -> None:
    held = offload(name)
    add_hooks(SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=held)))
    add_hooks(SimpleNamespace(optimizer=held))  # an engine for inference has no optimizer, but the offload
    assert held.registered == ["module", "module"]


def test_a_third_name_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="SimpleNamespace has none of _register_deepspeed_module, _register_hooks"):
        add_hooks(SimpleNamespace(optimizer=SimpleNamespace(module=None)))


def test_trl_goes_first_and_other_errors_stay() -> None:
    held = offload(NAMES[0])
    engine = SimpleNamespace(optimizer=held)

    def right(engine: Any) -> None:
        held.registered.append("by trl")

    def stale(engine: Any) -> None:
        engine.optimizer._register_hooks_recursively(engine.optimizer.module)

    def wrong(engine: Any) -> None:
        engine.optimizer.something_else()

    _working(right)(engine)
    assert held.registered == ["by trl"]
    _working(stale)(engine)
    assert held.registered == ["by trl", "module"]
    with pytest.raises(AttributeError, match="something_else"):
        _working(wrong)(engine)


@pytest.mark.parametrize("invalid", [False, True])
def test_the_record_of_modules_is_dropped_once(invalid: bool) -> None:
    done: list[str] = []
    coordinator = SimpleNamespace(is_invalid_trace=lambda: invalid, _invalidate_trace=lambda: done.append("dropped"))
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_coordinator=coordinator))
    _working(lambda engine: done.append("registered"))(engine)
    assert done == ["registered", *([] if invalid else ["dropped"])]  # DeepSpeed refuses to drop it twice


def test_there_may_be_no_record() -> None:
    forget_trace(None)
    forget_trace(SimpleNamespace(optimizer=None))
    forget_trace(SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=SimpleNamespace())))


def test_the_mixin_lends_trl_its_function_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("trl.models.utils")
    done: list[str] = []
    monkeypatch.setattr(utils, "add_hooks", lambda engine: done.append("registered"))
    coordinator = SimpleNamespace(
        is_invalid_trace=lambda: False, _invalidate_trace=lambda: done.append("forgot the trace")
    )
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_coordinator=coordinator))

    class Base:
        accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)))

        def _prepare_inputs(self, inputs: Any) -> Any:
            utils.add_hooks(engine)
            return inputs

        def compute_loss(self, *args: Any) -> Any:
            utils.add_hooks(engine)
            return args

    class Mine(DeepSpeedHooksMixin, Base):
        pass

    assert Mine()._prepare_inputs("inputs") == "inputs"
    assert Mine().compute_loss("model", "inputs") == ("model", "inputs")
    assert done == ["registered", "forgot the trace"] * 2
    utils.add_hooks(engine)
    assert done[4:] == ["registered"]
