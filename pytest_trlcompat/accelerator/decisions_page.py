"""The page of branches for NPUs: ``npu_branches.toml`` for people, made when the site is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_trlcompat.accelerator.decision_table import PACKAGES, Decision, Entry

__all__ = ["page"]

_HEAD = """\
# Branches for NPUs

<!-- Made by `python -m pytest_trlcompat.accelerator.decisions --page docs/npu-branches.md`; do not edit. -->

The software accelerator goes by the name `npu`, since Transformers, Accelerate and DeepSpeed then take it for a real
accelerator, unpatched. So each of their branches for NPUs is taken, which no user of a GPU takes, and none of those for
CUDA alone. This page says for each of them what is done about it, so that what a launch shows is true of GPUs.

`versions` are those that have the branch: of each package the releases in the locks of the matrix were looked at, and
those between two of them are counted in; where the newest has it, the range is open upwards. In places and conditions
`*` stands for any text; a branch for the opposite of a condition belongs to it. A branch of an installed release that
stands in no line fails the project's tests; how to list those of another release is described in CONTRIBUTING.md.
"""

_SECTIONS = {
    Decision.LIMIT: (
        "Limits",
        "What a GPU does there cannot be shown here. Test it on one (`--trlcompat-device cuda`).",
    ),
    Decision.AS_CUDA: (
        "As on CUDA",
        "In processes that have the software accelerator, and there alone, an attribute of the library is changed "
        "as it is\n"
        "imported, so that it goes as it goes on CUDA: `pytest_trlcompat/accelerator/standin/torch_npu/_as_cuda.py`.",
    ),
    Decision.SUPPLIED: (
        "Supplied",
        "The branch for NPUs is taken, and does on the software accelerator what that for CUDA does on a GPU: "
        "the stand-in\n"
        "for `torch_npu` has all that is called there.",
    ),
    Decision.HARMLESS: (
        "Harmless",
        "It makes no difference to a training of a tiny model, or no training comes there.",
    ),
}


def page(entries: Iterable[Entry]) -> str:
    """The table as Markdown, what matters most to a user first."""
    entries = list(entries)
    parts = [_HEAD]
    for decision, (title, text) in _SECTIONS.items():
        parts.append(f"\n## {title}\n\n{text}\n")
        for package in PACKAGES:
            chosen = [entry for entry in entries if entry.decision is decision and entry.package == package]
            if chosen:
                parts.append(_table(package, chosen))
    return "".join(parts)


def _table(package: str, entries: Sequence[Entry]) -> str:
    rows = [f"\n### {package}\n\n| versions | where | condition | why |\n| --- | --- | --- | --- |\n"]
    for entry in entries:
        by = f" ({', '.join(f'`{name}`' for name in entry.by)})" if entry.by else ""
        cells = (entry.versions or "all", _codes(entry.at), _codes(entry.condition), _escape(entry.reason) + by)
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def _codes(texts: Iterable[str]) -> str:
    """Each as code, one below the other; a module's own body is known by its file."""
    return "<br>".join(f"`{_escape(text.removesuffix('::'))}`" for text in texts)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
