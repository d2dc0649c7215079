"""An engine in vLLM's place, where no real one can run: releases of TRL whose vLLM is not built for this CPU.

In :mod:`.vllm` is what TRL of those releases imports and calls, under vLLM's names; :mod:`.llm` computes. It stands for
a release of vLLM, whose version it says with the local part ``recording`` (``0.8.5+recording``), so that nobody takes
what it shows for a measurement of vLLM.

What is real: it holds the weights of the checkpoint that it was pointed to, until it is given others, and is as strict
about their names and shapes; it computes from them alone, with Transformers, in its own dtype; it obeys the sampling
parameters; keys and values of whole blocks of tokens are computed once, and used again until the prefix cache is reset,
also if the weights have changed since; a sleeping engine does not answer, and one whose weights were discarded only
after all of them were given again. It records each weight that it was given and each request.

What it cannot show: anything of vLLM's scheduler, paged attention and kernels, of tensor parallelism, quantization,
images, chats, adapters as requests, structured outputs, and of NCCL. A name that it lacks is an ``ImportError`` or an
``AttributeError``; an argument that it would have to ignore, a ``NotImplementedError``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

__all__ = ["DISTRIBUTION", "install", "is_recording", "released", "stands_for"]

DISTRIBUTION = "vllm-recording"
"""Under which cells pin it, by the version of vLLM that it stands for. No package index has it."""
_LOCAL = "recording"
"""Of its version, as ``stack`` says it too."""
_PACKAGE = '''\
"""vLLM's place in this environment: the recording engine of the pytest_trlcompat that this process imports."""

from pytest_trlcompat.inference.recording_engine import vllm as _engine
from pytest_trlcompat.inference.recording_engine.vllm import *

__path__ = _engine.__path__
__version__ = _engine.__version__
'''
"""The package ``vllm`` of an environment, the same text whoever writes it."""


def released(packages: Mapping[str, str]) -> dict[str, str]:
    """Packages with their versions, without this engine, which no package index has."""
    return {name: version for name, version in packages.items() if name != DISTRIBUTION}


def is_recording(versions: Mapping[str, str]) -> bool:
    """Whether the ``vllm`` of these versions is this engine."""
    return "vllm" in versions and Version(versions["vllm"]).local == _LOCAL


def stands_for(version: str) -> str:
    """The version of the engine that stands for this one of vLLM."""
    return f"{version}+{_LOCAL}"


def install(version: str, site_packages: Path) -> None:
    """Put it into an environment, as the distribution ``vllm``, which TRL asks for.

    Environments are shared, so nothing there says whose engine it is: ``vllm`` is a package that has the modules of the
    ``pytest_trlcompat`` that the importing process finds on its own path.

    Args:
        version: of vLLM, for which it stands.

    Raises:
        OSError: the system refused it.
    """
    metadata = site_packages / f"vllm-{stands_for(version)}.dist-info"
    lines = ("Metadata-Version: 2.1", "Name: vllm", f"Version: {stands_for(version)}", "")
    package = site_packages / "vllm"
    for folder in (metadata, package):
        folder.mkdir(exist_ok=True)
    _write_unless_there(metadata / "METADATA", "\n".join(lines))
    _write_unless_there(metadata / "top_level.txt", "vllm\n")
    _write_unless_there(package / "__init__.py", _PACKAGE)
    # An earlier release of this project wrote the path of the last checkout there, for all.
    (site_packages / f"{DISTRIBUTION}.pth").unlink(missing_ok=True)


def _write_unless_there(path: Path, text: str) -> None:
    """Leave a right file alone, and show no part of one: another process may be importing it."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
