"""One bad cell costs no report, and nothing that a library said breaks out of one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_trlcompat.matrix.report.command import main

from .made_up_report import FINE, NEW, OLD, PREDICTED

DAMAGES: dict[str, tuple[str, bytes, str]] = {
    "line": (".jsonl", b"not a verdict\n{}\n", "{path}, line 1: not a verdict line"),
    "utf-8": (".jsonl", b"\xff\xfe\n", "{path}: 'utf-8' codec can't decode byte 0xff"),
    "sidecar": (".cell.json", b"{}", "cannot be read: {path}: damaged"),
    "version": (".cell.json", NEW.to_json().replace("4.57.6", "\\u001b[2J").encode(), "Invalid version"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cell_is_named_and_the_others_are_shown_all_the_same(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder = results((OLD, (FINE,)), (dataclasses.replace(NEW, id="trl0.15.2-tf4.48.3"), (FINE, PREDICTED)))
    ending, content, message = DAMAGES[damage]
    path = folder / f"{OLD.id}{ending}"
    path.write_bytes(content)
    assert main([str(folder)]) == 1
    said = capsys.readouterr()
    assert message.format(path=path) in said.err
    assert "2 cells, 2 verdicts: all as predicted, 1 cell not finished" in said.out
    assert f"  not finished  {OLD.id}: damaged, " in said.out
    cells = {cell["id"]: cell for cell in json.loads((folder / "compat.json").read_text())["cells"]}
    assert (cells[OLD.id]["state"], cells[OLD.id]["verdicts"]) == ("damaged", [])
    assert len(cells["trl0.15.2-tf4.48.3"]["verdicts"]) == 2
    for name in ("compat.md", "compat.html"):
        assert f"{OLD.id}" in (folder / name).read_text(encoding="utf-8")


EVIL = "````\n</pre><img src=x onerror=alert(1)>\n| a [x](javascript:alert(1)) \x00\x1b[2J \ud800"


def test_evidence_and_locks_that_no_file_can_hold_cost_no_report_and_break_out_of_none(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    record = dataclasses.replace(PREDICTED, evidence={"text": EVIL, "more": "`````"})
    hostile = dataclasses.replace(NEW, lock={"torch": "2.13.0", "peft": EVIL}, reason=EVIL, state="interrupted")
    folder = results((hostile, (record,)), (OLD, (FINE,)))
    assert main([str(folder)]) == 0
    assert main([str(folder), "--tables"]) == 0
    assert not re.search("[\x00-\x08\x1b]", capsys.readouterr().out)
    for name in ("compat.md", "compat.html", "compat.xml", "compat.json"):
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.search("[\x00-\x08\x1b\ud800-\udfff]", text), name
    ElementTree.parse(folder / "compat.xml")
    markdown = (folder / "compat.md").read_text(encoding="utf-8")
    (fenced,) = re.findall(r"^``````text\n.*?^``````$", markdown, re.DOTALL | re.MULTILINE)
    assert "<img" in fenced
    assert "<img" not in markdown.replace(fenced, "")
    assert "\\[x\\](javascript" in markdown
    assert "[x](" not in markdown.replace(fenced, "")
    (written,) = (c for c in json.loads((folder / "compat.json").read_text())["cells"] if c["id"] == NEW.id)
    assert written["verdicts"][0]["evidence"]["text"] == EVIL
