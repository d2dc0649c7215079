"""The scanner for ways that a library goes on NPUs alone. Samples with a release beside them are lines of it."""

from __future__ import annotations

import textwrap

import pytest

from pytest_trlcompat.accelerator.branches import Branch, Kind, is_npu_file, npu_branches


def found(source: str, path: str = "") -> list[Branch]:
    return npu_branches(textwrap.dedent(source).lstrip("\n"), path)


def places(source: str) -> list[tuple[str, str, int, int]]:
    return [(str(branch.kind), branch.form, branch.first, branch.last) for branch in found(source)]


def test_each_arm_of_a_chain_is_judged_by_what_the_ones_before_it_leave_over() -> None:
    # accelerate 1.15.0, utils/random.py: set_seed
    (npu, cuda) = found(
        """
        def set_seed(seed):
            if is_xpu_available():
                torch.xpu.manual_seed_all(seed)
            elif is_npu_available():
                torch.npu.manual_seed_all(seed)
            elif is_mlu_available():
                torch.mlu.manual_seed_all(seed)
            else:
                torch.cuda.manual_seed_all(seed)
        """
    )
    assert npu == Branch(Kind.NPU, "is_npu_available()", "set_seed", 4, 5, 5, "body")
    assert cuda == Branch(Kind.CUDA, "not (is_npu_available())", "set_seed", 6, 9, 9, "else")


def test_a_list_of_other_devices_is_a_body_that_an_npu_does_not_take() -> None:
    # trl 1.16.0, trainer/grpo_trainer.py: GRPOTrainer.__init__
    (branch,) = found(
        """
        class GRPOTrainer:
            def __init__(self, args):
                if args.distributed_state.distributed_type in ["MULTI_GPU", "DEEPSPEED"]:
                    model_init_kwargs["device_map"] = None
        """
    )
    assert (branch.kind, branch.function, branch.first) == (Kind.CUDA, "GRPOTrainer.__init__", 4)


@pytest.mark.parametrize(
    "condition",
    [
        "device.type in ['cuda', 'xpu', 'npu']",  # transformers 5.23.0, models/recurrent_gemma
        "state.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_NPU, DistributedType.MULTI_MLU)",
        "is_cuda_available() or is_npu_available()",
        "device.type == 'cpu'",
        "device.type != 'mps'",
        "is_xpu_available()",
        "input_ids is not None",
        "self.fbd_cuda_available",  # peft 0.20.0: whether a compiler is there
        "world_size > 1",
        "torch.version.cuda is None",
    ],
)
def test_a_condition_that_treats_both_alike_is_no_branch(condition: str) -> None:
    assert found(f"if {condition}:\n    one()\nelse:\n    other()\n") == []


@pytest.mark.parametrize(
    ("condition", "certain"),
    [
        ("is_torch_npu_available()", True),
        ("_is_torch_npu_available", True),
        ("is_npu_available(check_device=False)", True),
        ("self.accelerator_type == 'npu'", True),
        ("torch.device(device).type == 'npu'", True),
        ("get_accelerator().device_name() == 'npu'", True),
        ("'npu' in devices", True),
        ("device.startswith('npu')", True),
        ("rng_type == RNGType.NPU", True),
        ("state.distributed_type == DistributedType.MULTI_NPU", True),
        ("hasattr(torch, 'npu') and torch.npu.is_available()", True),
        ("getattr(torch, 'npu', None) is not None", True),
        ("importlib.util.find_spec('torch_npu') is not None", True),
        ("torch.npu.device_count() > 1", True),
        ("(is_npu_available() and torch.npu.device_count() > 1) or is_xpu_available()", True),
        ("not torch.cuda.is_available()", True),
        ("not is_torch_cuda_available()", True),
        ("device.type in ('npu', 'cpu')", False),
        ("device.type != 'cuda'", False),
        ("self.backend != 'nccl'", False),
        ("state.distributed_type not in ('MULTI_GPU', 'DEEPSPEED')", False),
    ],
)
def test_what_an_npu_enters_and_a_gpu_does_not(condition: str, certain: bool) -> None:
    branch = next(branch for branch in found(f"if {condition}:\n    one()\n") if branch.form == "body")
    assert (branch.kind, branch.first, branch.certain, branch.shared) == (Kind.NPU, 2, certain, False)


def test_what_comes_after_a_body_that_leaves() -> None:
    assert places(
        """
        def bf16(device):
            if not is_npu_available():
                return False
            prepare()
            return True
        """
    ) == [("cuda", "body", 3, 3), ("npu", "rest", 4, 5)]


def test_what_an_import_of_torch_npu_leads_to_ends_with_its_try() -> None:
    # deepspeed 0.17.5, accelerator/real_accelerator.py: get_accelerator
    assert places(
        """
        try:
            import torch_npu  # noqa: F401
            accelerator_name = "npu"
        except ImportError as e:
            pass
        if accelerator_name is None:
            accelerator_name = "cpu"
        """
    ) == [("npu", "import", 3, 3)]


def test_expressions_share_their_lines() -> None:
    branches = found(
        """
        count = torch.npu.device_count() if is_npu_available() else torch.cuda.device_count()
        ready = is_npu_available() and prepare(count)
        fast = is_npu_available() and count > 2
        """
    )
    assert [(str(branch.kind), branch.form, branch.line, branch.shared) for branch in branches] == [
        ("npu", "expression", 1, True),
        ("cuda", "expression", 1, True),
        ("npu", "operand", 2, True),
    ]


def test_functions_for_npus_but_not_those_that_ask_for_one() -> None:
    assert [
        (branch.condition, branch.form, branch.first, branch.last)
        for branch in found(
            """
            def is_npu_available():
                return hasattr(torch, "npu")

            @cached
            def npu_flash_attn_func(q, k):
                return 1

            class NPU_Accelerator:
                def device(self):
                    if is_npu_available():
                        return torch.npu.device()

            def pad_input(x):
                return x
            """
        )
    ] == [("npu_flash_attn_func", "function", 4, 6), ("NPU_Accelerator", "function", 8, 11)]


def test_a_file_for_npus_is_one_branch() -> None:
    site = "/home/user/.venv/lib/python3.11/site-packages/"
    for inside in (
        "deepspeed/accelerator/npu_accelerator.py",
        "deepspeed/ops/op_builder/npu/fused_adam.py",
        "deepspeed/runtime/comm/hccl.py",
        "transformers/integrations/npu_flash_attention.py",
    ):
        assert is_npu_file(site + inside)
    for inside in ("transformers/tokenization_utils.py", "trl/trainer/inputs.py", "accelerate/state.py"):
        assert not is_npu_file("/home/npu/site-packages/" + inside)
    (branch,) = npu_branches("import torch_npu\n\nx = 1\n", site + "deepspeed/runtime/comm/hccl.py")
    assert (branch.condition, branch.form, branch.first, branch.last) == ("hccl.py", "file", 1, 3)


def test_source_that_is_no_python_is_an_error() -> None:
    with pytest.raises(SyntaxError):
        npu_branches("if npu\n")


def test_a_device_that_only_a_decorator_names_is_found() -> None:
    (branch,) = found(
        """
        @(compiled if is_npu_available() else traced())
        def step(batch):
            return batch
        """
    )
    assert (branch.kind, branch.form, branch.first) == (Kind.CUDA, "expression", 1)
