"""The messages of failures that the software accelerator causes.

A message that is missing here makes a library look faulty: add it, with an example that was observed.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["AMBIGUOUS", "PLAIN", "What", "Words"]


class What(str, Enum):
    """What is missing."""

    OPERATOR = "operator"
    """A kernel."""
    ATTRIBUTE = "attribute"
    """A name of ``torch_npu`` or ``torch.npu``."""
    BRANCH = "branch"
    """Nothing: a library went a way that only NPUs go."""
    CAPABILITY = "capability"
    """Something else that this device cannot do."""
    CRASH = "crash"
    """The process died in the device's native code."""

    def __str__(self) -> str:
        return self.value


# How torch calls the device: by its name, and before it has one by the dispatch key and the type.
_DEVICE = r"\w*(?:npu|PrivateUse1|privateuseone)\w*"


class Words(NamedTuple):
    """How a message is recognised, and how the artefact is described.

    Attributes:
        pattern: is searched in ``Type: message``.
        name: of the artefact; ``{name}`` and ``{key}`` stand for what the pattern's groups have matched.
        reason: see :class:`pytest_trlcompat.accelerator.artefacts.Artefact`.
    """

    what: What
    pattern: str
    name: str
    reason: str


_NO_KERNEL = "it has no such kernel"
_NO_NAME = "its stand-in for torch_npu has no such name"
_NO_CPU_KERNEL = "it computes with the CPU's kernels, and the CPU has no such one"
_NO_FEATURE = "torch does not know the device there"

PLAIN = (
    Words(
        What.OPERATOR,
        rf"Could not run '(?P<name>[^']+)' (?:with arguments )?from the '(?P<key>{_DEVICE})' backend",
        "{name} for {key}",
        _NO_KERNEL,
    ),
    Words(
        What.OPERATOR, r"(?P<name>\w+) not implemented[.:] This is an operator for privateuse1", "{name}", _NO_KERNEL
    ),
    Words(
        What.OPERATOR,
        r"the software accelerator cannot follow (?P<name>[\w:.]+), which",
        "{name}",
        "it gives an argument another storage, which cannot be followed",
    ),
    Words(
        What.CAPABILITY,
        r"the software accelerator has no (?P<name>[\w ]+) with this torch",
        "{name}",
        "gloo, which its collectives use, has none in this torch",
    ),
    Words(
        What.CAPABILITY,
        r"the software accelerator has no (?P<name>tensors of layout \w+)",
        "{name}",
        "none of its operators knows how these lie in memory",
    ),
    Words(What.ATTRIBUTE, r"stand-in for torch_npu has no '(?P<name>[\w.]+)'", "{name}", _NO_NAME),
    Words(
        What.ATTRIBUTE,
        r"module '(?P<key>torch_npu[\w.]*|torch\.npu[\w.]*)' has no attribute '(?P<name>\w+)'",
        "{key}.{name}",
        _NO_NAME,
    ),
    # Python has its own message for ``from torch_npu import X``, whatever the stand-in raises. A missing submodule
    # keeps Python's as well: libraries look with find_spec, which must answer None and not raise.
    Words(
        What.ATTRIBUTE,
        r"cannot import name '(?P<name>\w+)' from '(?P<key>torch_npu[\w.]*)'",
        "{key}.{name}",
        _NO_NAME,
    ),
    Words(What.ATTRIBUTE, r"No module named '(?P<name>torch_npu\.[\w.]+)'", "{name}", _NO_NAME),
    Words(
        What.ATTRIBUTE,
        r"'_OpNamespace' 'npu' object has no attribute '(?P<name>\w+)'",
        "torch.ops.npu.{name}",
        _NO_NAME,
    ),
    Words(What.CAPABILITY, r"The software accelerator has no (?P<name>\w+)", "{name}", "it has no such function"),
    Words(
        What.BRANCH,
        r"'?NPU_Accelerator'?(?: object has no attribute '|\.)(?P<name>\w+)",
        "NPU_Accelerator.{name}",
        "DeepSpeed has a class of its own for NPUs, and fails in it",
    ),
    Words(
        What.BRANCH,
        r"^KeyError: '(?P<name>npu)'",
        "'{name}'",
        "a table by device lists others, and not the name it bears",
    ),
    Words(
        What.CAPABILITY,
        r"^(?:InductorError|BackendCompilerFailed|LoweringException)\b(?s:.){0,600}?\bnpu\b|Device npu not supported",
        "torch.compile",
        _NO_FEATURE,
    ),
    Words(What.CAPABILITY, r"PyTorch is not linked with support for (?:npu|privateuseone)", "guards", _NO_FEATURE),
    Words(
        What.CAPABILITY,
        r"register `?PrivateUse1HooksInterface`?[^\n]*?(?:implement `(?P<name>\w+)`|first)",
        "{name} of PrivateUse1's hooks",
        "torch asks for it, and it has none",
    ),
    Words(
        What.CAPABILITY,
        r"register a generator to the PrivateUse1 dispatch key",
        "random numbers",
        "torch asks for a generator, and it has none",
    ),
    Words(
        What.CAPABILITY,
        r"Backend '?hccl'? does not (?:support|implement) (?P<name>\w+)",
        "{name}",
        "its process group has no such collective",
    ),
    Words(What.CAPABILITY, r"(?P<name>\w+) (?:is|are) only supported on CUDA[^\n]*\bnpu\b", "{name}", _NO_FEATURE),
    Words(
        What.CAPABILITY,
        r"Tried to use AMP with the `npu` backend|unsupported autocast device_type '?npu",
        "autocast",
        _NO_FEATURE,
    ),
    # The most general, so that it comes last: the first pattern that is found names the artefact.
    Words(
        What.CAPABILITY,
        r"(?P<name>[^\n:.]*?) (?:is |are )?not (?:yet )?(?:supported|implemented|available) (?:on|for|by) "
        r"(?:the )?(?:device )?(?:type )?['\"]?npu\b",
        "{name}",
        "the device is refused by its name",
    ),
)
"""Messages of this device, or of an NPU, only."""

AMBIGUOUS = (
    Words(
        What.OPERATOR,
        # Whether CUDA has one is not to be seen: a build of torch for the CPU does not list CUDA's.
        r"Could not run '(?P<name>[^']+)' (?:with arguments )?from the '\w*CPU' backend",
        "{name}",
        _NO_CPU_KERNEL,
    ),
    Words(What.OPERATOR, r"\"(?P<name>\w+)\" not implemented for '(?P<key>\w+)'", "{name} for {key}", _NO_CPU_KERNEL),
    Words(
        What.CAPABILITY,
        r"(?P<name>Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
        r"|deserialize object on a CUDA device|CUDA_HOME environment variable is not set)",
        "CUDA",
        "the library asks for CUDA by its name",
    ),
    Words(What.CAPABILITY, r"0 active drivers \(\[\]\)", "Triton", "Triton's kernels need a GPU"),
    Words(
        What.CAPABILITY,
        r"Cannot use (?P<name>ReduceOp\.\w+) with Gloo",
        "{name}",
        "its collectives are gloo's, without it",
    ),
    Words(
        What.BRANCH,
        r"'device' object has no attribute '(?P<name>type|index)'",
        "torch.npu.device.{name}",
        "DeepSpeed 0.17.4 and 0.17.5 take torch.npu.device for a torch.device, on NPUs alone",
    ),
)
"""Messages that also occur without the device; in a program that uses it, they say nothing about a GPU."""
