"""The published pages: made from the evidence and the catalogue alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.issue import TRAINERS
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report.changes import Changes
from pytest_trlcompat.matrix.report.command import main
from pytest_trlcompat.matrix.report.publish import report_of, write_pages
from pytest_trlcompat.matrix.report.site import pages

ROOT = Path(__file__).resolve().parents[2]
ISSUE = "grpo-logits-to-keep"
STACK = {"torch": "2.13.0", "transformers": "4.48.3", "trl": "0.15.2", "accelerate": "1.4.0"}
UPSTREAM, OURS = (ISSUE, "upstream", "single"), (ISSUE, "corrected", "single")


def cell(transformers: str, upstream: Verdict, ours: Verdict = Verdict.OK, **versions: str) -> MeasuredCell:
    stack = {**STACK, "transformers": transformers, **versions}
    name = f"trl{stack['trl']}-tf{transformers}" + "".join(
        f"-{package}{version}" for package, version in versions.items() if package != "trl"
    )
    return MeasuredCell(name, stack, {UPSTREAM: upstream, OURS: ours}, "2025-02-28")


WASTEFUL, FINE = cell("4.48.3", Verdict.WASTEFUL), cell("4.49.0", Verdict.OK)


def made(*cells: MeasuredCell) -> Mapping[str, list[str]]:
    """The lines of each Markdown page by its name."""
    found = Evidence("2026-11-23", cells)
    layout = Layout(Path("/checkout"))
    written = pages(report_of(found), found, layout, Changes())
    assert layout.explorer in written
    return {str(path.relative_to(layout.root / "docs")): text.splitlines() for path, text in written.items()}


def section(lines: list[str], title: str) -> list[str]:
    start = lines.index(f"## {title}") + 2
    end = next((n for n in range(start, len(lines)) if lines[n].startswith("## ")), len(lines))
    return lines[start:end]


def test_the_overview_counts_issues_by_release() -> None:
    lines = made(WASTEFUL, FINE, cell("4.48.3", Verdict.OK, trl="1.0.0"))["compatibility.md"]
    assert lines[0] == "# Compatibility, as measured"
    assert lines[4].startswith("Measured until 2026-11-23: 3 cells, 6 verdicts, ")
    assert section(lines, "Releases of TRL")[3:7] == [
        "| trl | cells | transformers | torch | wasteful | corrected |",
        "| --- | --: | --- | --- | --: | --- |",
        "| 1.0.0 | 1 | 4.48.3 | 2.13.0 | 0 | 1 ok |",
        "| 0.15.2 | 2 | 4.48.3 to 4.49.0 | 2.13.0 | 0-1 | 2 ok |",
    ]


def test_every_known_issue_has_a_page_and_the_index_links_it() -> None:
    found = made(WASTEFUL, FINE)
    known = known_issues.load()
    names = {name.removeprefix("issues/").removesuffix(".md") for name in found if name.startswith("issues/")}
    assert names == {*known, "index"}
    index = found["issues/index.md"]
    (row,) = (line for line in index if line.startswith(f"| [{ISSUE}]"))
    assert row == (
        f"| [{ISSUE}]({ISSUE}.md) | {known[ISSUE].title} | wasteful | 0.15.2 | "
        "trl 0.15 with transformers 4.49, trl 0.20 (single-neither) |"
    )
    assert {line[3:] for line in index if line.startswith("## ")} == {*map(str.upper, TRAINERS), "Any trainer"}


def test_the_page_of_an_issue_says_who_is_affected_how_it_shows_and_what_cures_it() -> None:
    page = made(WASTEFUL, FINE)[f"issues/{ISSUE}.md"]
    known = known_issues.load()[ISSUE]
    assert page[0] == f"# {ISSUE}"
    assert page[4] == f"{known.title}."
    affected = section(page, "Who is affected")
    assert affected[2].startswith("| **silent** | every strategy | transformers >=4.52 and trl >=0.14,&lt;0.15 | ")
    assert "| **broken** | single-neither | trl >=0.14,&lt;0.20 | the keyword is passed to every model |" in affected
    assert [line.split(" | ")[0] for line in affected[2:-1]] == sorted(
        (line.split(" | ")[0] for line in affected[2:-1]),
        key=["| **silent**", "| **broken**", "| **wasteful**", "| **error**", "| **blocked**"].index,
    )
    shows = section(page, "How it shows")
    assert shows[0] == (
        "- A `TypeError` whose text matches `got an unexpected keyword argument '(num_)?logits_to_keep'`"
    )
    assert (
        f"- In the newest cell where it was measured: `nox -s cell -- trl=0.15.2 transformers=4.48.3 --issue {ISSUE}`"
        in shows
    )
    cures = section(page, "What cures it")
    assert cures[:3] == [
        "- In this package: `pytest_trlcompat.trainers.logprobs.logits_to_keep`",
        "- Not needed from: trl 0.15 with transformers 4.49, trl 0.20 (single-neither)",
        "- Measured with the corrected trainers: 2 ok",
    ]
    assert section(page, "What was measured")[2:6] == [
        "| trl | transformers | cells | upstream single | corrected single |",
        "| --- | --- | --: | --- | --- |",
        "| 0.15.2 | 4.48.3 | 1 | **wasteful** | ok |",
        "| 0.15.2 | 4.49.0 | 1 | ok | ok |",
    ]
    boundaries = section(page, "Boundaries")
    assert re.fullmatch(r"Versions at which .* a verdict changes: 1 of \d+ measured on both sides\.", boundaries[0])
    measured = boundaries.index("### Measured on both sides")
    assert boundaries[measured + 4 :][:2] == [
        "| upstream | single | wasteful becomes ok at transformers >=4.49 with trl >=0.15,&lt;1.15 or >=1.16 "
        "| 4.48.3 (1 cell) | 4.49.0 (1 cell) |",
        "",
    ]
    assert any(line.endswith("| not measured | not measured |") for line in boundaries)


def test_a_cell_that_another_issue_keeps_from_showing_it_counts_for_neither_the_index_nor_the_command() -> None:
    stopped = [
        cell("4.48.3", verdict, trl=trl) for verdict, trl in ((Verdict.ERROR, "1.1.0"), (Verdict.BLOCKED, "1.2.0"))
    ]
    found = made(WASTEFUL, *stopped)
    (row,) = (line for line in found["issues/index.md"] if line.startswith(f"| [{ISSUE}]"))
    assert "| wasteful | 0.15.2 |" in row
    assert any("nox -s cell -- trl=0.15.2 " in line for line in found[f"issues/{ISSUE}.md"])
    nobody = made(*stopped)
    assert "| - | - |" in next(line for line in nobody["issues/index.md"] if line.startswith(f"| [{ISSUE}]"))
    assert not any("nox -s cell" in line for line in nobody[f"issues/{ISSUE}.md"])


def test_releases_with_which_most_fails_are_marked_as_the_doctor_marks_them() -> None:
    failing = [cell("4.50.3", Verdict.BLOCKED), cell("4.51.3", Verdict.ERROR)]
    for cells, mark in ((failing, " (most of what was measured there fails for another reason)"), ([], "")):
        (line,) = (line for line in made(WASTEFUL, FINE, *cells)[f"issues/{ISSUE}.md"] if "What to do" in line)
        assert f" take trl >=0.15 with transformers >=4.49{mark}, or transformers " in line


def test_failures_of_before_they_were_attributed_are_counted_apart_and_blockers_are_linked() -> None:
    stack = {**STACK, "trl": "0.15.2", "transformers": "4.52.4"}
    old = MeasuredCell("old", stack, {UPSTREAM: Verdict.ERROR}, "2025-05-30", attributed=False)
    for found, number in ((made(WASTEFUL, old), 1), (made(WASTEFUL, dataclasses.replace(old, attributed=True)), 0)):
        said = [line for line in found["compatibility.md"] if "before failures were attributed" in line]
        assert len(said) == number
        assert all(line.startswith("1 of the verdicts error were measured before ") for line in said)
    row = next(line for line in found[f"issues/{ISSUE}.md"] if line.startswith("| **blocked** | single |"))
    assert "| blocked by [grpo-train-sampler](grpo-train-sampler.md): " in row


def test_an_issue_that_nothing_cures_and_nobody_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dataclasses.replace(known_issues.load()[ISSUE], id="grpo-new", cure="", upstream=(), predictions=())
    monkeypatch.setattr(known_issues, "load", lambda: Catalog({plain.id: plain}))
    page = made(WASTEFUL)["issues/grpo-new.md"]
    assert "- **Upstream:** not reported" in page
    assert section(page, "Who is affected")[0] == "The catalogue predicts no problem for any version."
    assert section(page, "What cures it")[:2] == [
        "- Nothing in this package cures it.",
        "- No release has cured it yet.",
    ]
    assert section(page, "What was measured")[0] == "Nothing has been published."


def test_neighbours_that_agree_share_a_row_and_cells_with_other_pins_come_last() -> None:
    alike = [cell("4.48.3", Verdict.WASTEFUL, trl=f"1.{minor}.0") for minor in range(12)]
    extra = cell("4.48.3", Verdict.WASTEFUL, trl="1.5.0", accelerate="1.3.0")
    assert section(made(*alike, extra)[f"issues/{ISSUE}.md"], "What was measured")[4:6] == [
        "| 1.0.0 to 1.11.0 | 4.48.3 | 12 | **wasteful** | ok |",
        "| trl1.5.0-tf4.48.3-accelerate1.3.0 |  | 1 | **wasteful** | ok |",
    ]


def test_what_torch_alone_changes_stands_with_its_issue() -> None:
    found = made(WASTEFUL, cell("4.48.3", Verdict.OK, torch="2.6.0"))
    assert (
        "- With another torch alone: upstream, single (trl 0.15.2, transformers 4.48.3): "
        "ok with torch 2.6.0, wasteful with torch 2.13.0"
    ) in found[f"issues/{ISSUE}.md"]
    assert (
        "- Torch alone changes 1 of 2 verdicts that were measured with more than one torch; the pages of the issues "
        "name each."
    ) in found["compatibility.md"]


def test_what_could_not_be_tested_is_published_as_such() -> None:
    page = made(cell("4.48.3", Verdict.UNTESTABLE, Verdict.UNTESTABLE))[f"issues/{ISSUE}.md"]
    assert "| 0.15.2 | 4.48.3 | 1 | untestable | untestable |" in page
    assert "- Measured with the corrected trainers: 1 untestable" in page


def test_the_pages_are_written_without_a_sweep_and_those_of_no_issue_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(tmp_path)
    with pytest.raises(MatrixError, match=r"nothing was published yet: .*evidence\.json"):
        write_pages(layout)
    layout.evidence.parent.mkdir()
    layout.evidence.write_text(Evidence("2026-11-23", (WASTEFUL, FINE)).to_json())
    layout.issues.mkdir(parents=True)
    (layout.issues / "of-another-day.md").touch()
    assert main([str(layout.results), "--pages", str(tmp_path)]) == 0
    assert not (layout.issues / "of-another-day.md").exists()
    assert (layout.issues / f"{ISSUE}.md").is_file()
    assert not layout.results.exists()
    assert capsys.readouterr().out.splitlines()[0] == f"published: {layout.page}"
