"""An engine of vLLM in a rank compiles nothing, neither while it is made nor while it generates: without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher


def compiled(changed: bool) -> list[str]:
    """During which of an engine's methods a function was compiled that was decorated before."""
    import sys
    from types import ModuleType, SimpleNamespace

    import torch

    from pytest_trlcompat.inference import cpu_engine

    during, found = ["nothing"], []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(during[0])
        return graph.forward

    sample: Any = torch.compile(lambda logits: logits + 1, backend=backend)

    class EngineCore:
        def __init__(self) -> None:
            self._sample("__init__")

        def step(self) -> None:
            self._sample("step")

        def step_with_batch_queue(self) -> None:
            self._sample("step_with_batch_queue")

        def _sample(self, name: str) -> None:
            torch.compiler.reset()
            during[0] = name
            assert sample(torch.zeros(2)).tolist() == [1, 1]

    modules: dict[str, Any] = {
        "vllm.engine.arg_utils": {"EngineArgs": SimpleNamespace(create_engine_config=lambda self: None)},
        "vllm.v1.engine.core": {"EngineCore": EngineCore},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        parents = name.split(".")
        for end in range(1, len(parents)):
            sys.modules.setdefault(".".join(parents[:end]), ModuleType(".".join(parents[:end])))
        sys.modules[name] = module
    if changed:
        cpu_engine._do_not_compile()
    engine = EngineCore()
    engine.step()
    engine.step_with_batch_queue()
    return found


@pytest.mark.parametrize(("changed", "during"), [(False, ["__init__", "step", "step_with_batch_queue"]), (True, [])])
def test_nothing_is_compiled(changed: bool, during: list[str], launcher: Launcher) -> None:
    assert launcher(compiled, changed, strategy="single", device="cpu").values == [during]
