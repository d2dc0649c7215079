"""What a program may choose of how an NPU works: kept, returned, and without effect, as nothing here is compiled.

Names and meanings are those of Ascend's documentation of ``torch_npu.npu``. LlamaFactory calls ``set_compile_mode`` as
soon as it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_npu._missing import lacking

__all__ = ["config", "conv", "is_jit_compile_false", "matmul", "set_compile_mode", "set_option"]


class _Choices:
    """Attributes that may be set, and no others: otherwise a misspelt name would pass without effect."""

    def __init__(self, owner: str, **defaults: object) -> None:
        self.__dict__.update(defaults, _owner=owner)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dict__:
            lacking(self.__dict__["_owner"])(name)
        self.__dict__[name] = value


config = _Choices("torch.npu.config", allow_internal_format=False)
matmul = _Choices("torch.npu.matmul", allow_hf32=False)
conv = _Choices("torch.npu.conv", allow_hf32=True)
_options: dict[str, object] = {}
_jit_compile = False


def set_compile_mode(jit_compile: bool = False) -> None:
    """Whether operators are compiled for each shape, or taken from those that are there."""
    global _jit_compile
    _jit_compile = bool(jit_compile)


def is_jit_compile_false() -> bool:
    return not _jit_compile


def set_option(option: Mapping[str, object]) -> None:
    """Settings by name, such as ``{"NPU_FUZZY_COMPILE_BLACKLIST": "Tril"}``; raises TypeError for anything else."""
    if not isinstance(option, Mapping):
        raise TypeError(f"npu option must be a dict, not {type(option).__name__}")
    _options.update(option)
