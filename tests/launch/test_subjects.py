"""What collectives are said to be of: names of parameters in few words. What the engines say: tests/stack."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from pytest_trlcompat.launch.subjects import Subjects, listed


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["weight"], "weight"),
        (["norm.weight"], "norm.weight"),
        (["layers.0.up.weight", "layers.0.down.weight"], "layers.0: up.weight, down.weight"),
        (["layers.0.up.weight", "layers.1.up.weight", "head"], "layers.0.up.weight; layers.1.up.weight; head"),
    ],
)
def test_names_of_one_module_stand_together(names: list[str], text: str) -> None:
    assert listed(names) == text


def test_nothing_is_told_where_nobody_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert Subjects.of_this_process() is None
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))  # Ascend's own
    assert Subjects.of_this_process() is None


class Group:
    """As FSDP2's group of parameters."""

    def __init__(self, name: str | None) -> None:
        self._module_fqn = name

    def unshard(self) -> str:
        told.append(current[0])
        if self._module_fqn == "fails":
            raise RuntimeError
        return "gathered"

    def post_backward(self) -> str:
        told.append(current[0])
        return "reduced"


told: list[str] = []
current = [""]


def tell(subject: str) -> str:
    before, current[0] = current[0], subject
    return before


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> type[Group]:
    class Own(Group):
        unshard, post_backward = Group.unshard, Group.post_backward

    told.clear()
    module = SimpleNamespace(FSDPParamGroup=Own)
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp._fully_shard._fsdp_param_group", module)
    Subjects(tell).install()
    return Own


def test_a_subject_is_told_while_the_engine_works_and_no_longer(group: type[Group]) -> None:
    assert group("layers.0").unshard() == "gathered"
    assert (told, current) == (["the parameters of FSDP2's group layers.0"], [""])
    with pytest.raises(RuntimeError):
        group("fails").unshard()
    assert current == [""]


def test_an_engine_that_keeps_its_names_elsewhere_works_on(group: type[Group]) -> None:
    unnamed = group("layers.0")
    del unnamed._module_fqn
    assert unnamed.post_backward() == "reduced"
    assert (told, current) == ([""], [""])
