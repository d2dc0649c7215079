"""What the installed libraries do on NPUs alone is known: every branch is decided, and all that they call is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from pytest_trlcompat.accelerator import decision_table, decisions
from pytest_trlcompat.launch import Launcher

NOT_SUPPLIED = {
    # graphs, which are for inference, and pinning memory by itself: deepspeed 0.19.8 asks whether there is npurt
    "torch.npu.NPUGraph",
    "torch.npu.graph",
    "torch.npu.npurt",
    # FusedAdam's kernel for NPUs, which one of ours replaces; 1-bit optimizers
    "torch_npu.npu_apply_adam",
    "torch_npu.npu_apply_adam_w",
    "torch_npu.npu_sign_bits_pack",
    "torch_npu.npu_sign_bits_unpack",
    # an optimizer that Transformers uses if it is requested by name
    "torch_npu.optim.NpuFusedAdamW",
}


def test_every_branch_is_decided() -> None:
    """A new one is decided in npu_branches.toml, which says how."""
    entries = decision_table.load()
    found = [each for package in decisions.installed() for each in decisions.scan(*package)]
    undecided = [each.describe() for each in found if decision_table.decide(each, entries) is None]
    assert undecided == []
    assert {each.package for each in found} == set(decision_table.PACKAGES)
    assert len(found) > 300


def names_of(tree: ast.Module) -> Iterator[str]:
    """``torch.npu.X`` and ``torch_npu.X`` as a module names them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith(("torch.npu.", "torch_npu.")) and "(" not in name:
                yield name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch_npu":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def lacking(names: list[str]) -> list[str]:
    import torch
    import torch_npu

    def is_there(name: str) -> bool:
        value = torch_npu if name.startswith("torch_npu.") else torch
        try:
            for part in name.split(".")[1:]:
                value = getattr(value, part)
        except AttributeError:
            return False
        return True

    return [name for name in names if not is_there(name)]


def test_all_that_is_called_is_there(launch: Launcher) -> None:
    names = set()
    for _, _, folder in decisions.installed():
        for path in folder.rglob("*.py"):
            source = path.read_text(encoding="utf-8", errors="replace")
            if "torch.npu" in source or "torch_npu" in source:
                names |= set(names_of(ast.parse(source)))
    assert len(names) > 40
    assert set(launch(lacking, sorted(names), strategy="single").values[0]) <= NOT_SUPPLIED
