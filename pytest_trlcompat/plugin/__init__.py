"""The pytest plugin ``trlcompat``, thin over the other rooms: pytest finds its hooks and fixtures here.

pytest loads this package at every start, so it must import neither torch nor transformers, nor a room that is needed
only by some tests: those are imported inside the fixtures.
"""

from __future__ import annotations

from pytest_trlcompat.plugin.fixtures import (
    _trlcompat_folder,
    ddp_launcher,
    deepspeed_launcher,
    fsdp_launcher,
    judge,
    launcher,
    prompts,
    tiny_mistral,
    tiny_qwen2,
    version_matrix,
)
from pytest_trlcompat.plugin.hooks import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_make_collect_report,
    pytest_report_header,
)

__all__ = [
    "_trlcompat_folder",
    "ddp_launcher",
    "deepspeed_launcher",
    "fsdp_launcher",
    "judge",
    "launcher",
    "prompts",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_report_header",
    "tiny_mistral",
    "tiny_qwen2",
    "version_matrix",
]
