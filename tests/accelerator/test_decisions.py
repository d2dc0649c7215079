"""The table of what is done about branches for NPUs, and the program that lists those which it does not know."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pytest_trlcompat.accelerator import branches, decision_table, decisions
from pytest_trlcompat.accelerator.decision_table import Decision, DecisionError, Entry, LocatedBranch
from pytest_trlcompat.accelerator.decisions_page import page

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "pytest_trlcompat" / "accelerator" / "standin" / "torch_npu"
ENTRY = """
[[branch]]
package = "trl"
versions = ">=0.27,<2"
at = ["trainer/*_trainer.py::*.__init__"]
condition = ["*distributed_type in ['MULTI_GPU', *"]
decision = "harmless"
reason = "It is a test."
"""


def adaptations() -> set[str]:
    """The functions that the stand-in's table of adaptations names."""
    module = ast.parse((STANDIN / "_as_cuda.py").read_text())
    (table,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "ADAPTATIONS"
    )
    assert isinstance(table, ast.Dict)
    return {item.id for value in table.values if isinstance(value, ast.Tuple) for item in value.elts}  # type: ignore[attr-defined]


def found(version: str = "1.0.0", file: str = "trainer/sft_trainer.py", condition: str | None = None) -> LocatedBranch:
    text = "args.distributed_state.distributed_type in ['MULTI_GPU', 'DEEPSPEED']" if condition is None else condition
    branch = branches.Branch(branches.Kind.CUDA, text, "SFTTrainer.__init__", 7, 8, 8, "body")
    return LocatedBranch("trl", version, file, branch)


def test_the_table_names_every_adaptation_and_no_other() -> None:
    assert {name for entry in decision_table.load() for name in entry.by} == adaptations()
    assert len(adaptations()) == 8


def test_the_page_has_a_row_for_every_entry_in_the_section_of_its_decision() -> None:
    entries = list(decision_table.load())
    text = page(entries)
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles == ["Limits", "As on CUDA", "Supplied", "Harmless"]
    decisions = (Decision.LIMIT, Decision.AS_CUDA, Decision.SUPPLIED, Decision.HARMLESS)
    for section, decision in zip(re.split(r"^## .+$", text, flags=re.MULTILINE)[1:], decisions, strict=True):
        rows = [line for line in section.splitlines() if re.match(r"\| (?!versions|---)", line)]
        reasons = [
            entry.reason.replace("|", "\\|").replace("\n", " ") for entry in entries if entry.decision is decision
        ]
        assert len(rows) == len(reasons) > 0
        assert [reason for reason in reasons if not any(reason in row for row in rows)] == []


def test_every_package_and_every_decision_has_entries() -> None:
    entries = decision_table.load()
    assert {entry.package for entry in entries} == set(decision_table.PACKAGES)
    assert {entry.decision for entry in entries} == set(Decision)
    assert all(entry.reason.endswith(".") and len(entry.reason) > 15 for entry in entries)


@pytest.mark.parametrize(
    ("branch", "holds"),
    [
        (found(), True),
        (found("0.27.0"), True),
        (found("0.26.2"), False),
        (found("2.0"), False),
        (found("1.17.0.dev0"), True),
        (found(file="experimental/sft_trainer.py"), False),
        (found(condition="not (distributed_type in ['MULTI_GPU', 'DEEPSPEED'])"), True),
        (found(condition="not (not (distributed_type in ['MULTI_GPU', 'DEEPSPEED']))"), True),
        (found(condition="distributed_type in ['MULTI_XPU']"), False),
    ],
)
def test_an_entry_holds_for_its_releases_places_and_conditions(
    tmp_path: Path, branch: LocatedBranch, holds: bool
) -> None:
    (tmp_path / "table.toml").write_text(ENTRY)
    (entry,) = entries = decision_table.load(tmp_path / "table.toml")
    assert entry.holds_for(branch) is holds
    assert decision_table.decide(branch, entries) is (entry if holds else None)


def test_dots_and_brackets_are_no_patterns() -> None:
    entry = Entry("trl", "", ("a.py::f",), ("x in ['npu']",), Decision.HARMLESS, "")
    branch = branches.Branch(branches.Kind.NPU, "x in 'n'", "f", 1, 1, 1, "body")
    assert not entry.holds_for(LocatedBranch("trl", "1.0", "a.py", branch))
    assert not entry.holds_for(LocatedBranch("trl", "1.0", "axpy", branch))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("decision", "lucky"), "'lucky' is not a valid Decision"),
        (("versions", "about 3"), "Invalid specifier: 'about 3'"),
        (("package", "torch"), "unknown package; known are transformers, accelerate, trl, deepspeed, peft, datasets"),
        (("decision", "as cuda"), "'by' names adaptations, and is only for the decision 'as cuda'"),
    ],
)
def test_a_wrong_entry_is_one_clear_error(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    key, value = change
    lines = [f'{key} = "{value}"' if line.startswith(f"{key} ") else line for line in ENTRY.splitlines()]
    (tmp_path / "table.toml").write_text("\n".join(lines))
    with pytest.raises(DecisionError) as caught:
        decision_table.load(tmp_path / "table.toml")
    assert str(caught.value).startswith("entry 1 (")
    assert message in str(caught.value)


def test_an_entry_that_lacks_something_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text(ENTRY.replace("reason", "because"))
    with pytest.raises(DecisionError, match=r"entry 1 \(trl, trainer/.*missing or unknown: because, reason"):
        decision_table.load(tmp_path / "table.toml")
    (tmp_path / "table.toml").write_text("[[branch]\n")
    with pytest.raises(DecisionError, match="table.toml cannot be read"):
        decision_table.load(tmp_path / "table.toml")


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """A release of TRL's that nobody has seen: it bears a branch that is decided, and one that is not."""
    folder = tmp_path / "site-packages"
    (folder / "trl" / "trainer").mkdir(parents=True)
    (folder / "trl-99.0.0.dist-info").mkdir()
    (folder / "trl-99.0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 99.0.0\n")
    (folder / "trl" / "trainer" / "new_trainer.py").write_text(
        "class NewTrainer:\n"
        "    def __init__(self, args):\n"
        "        if args.distributed_state.distributed_type in ['MULTI_GPU', 'DEEPSPEED']:\n"
        "            self.device_map = None\n"
        "        if is_torch_npu_available():\n"
        "            self.loss = self.loss_for_npus\n"
    )
    (folder / "trl" / "template.py").write_text("{{ npu }} is no Python\n")
    return folder


def test_a_new_branch_is_listed(site_packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decisions.main([str(site_packages)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "undecided: trl 99.0.0 trainer/new_trainer.py:5 in NewTrainer.__init__: "
        "body for npu alone where is_torch_npu_available()",
        "2 branches, 1 of them undecided",
    ]


def test_a_release_without_new_branches_passes(site_packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = site_packages / "trl" / "trainer" / "new_trainer.py"
    module.write_text(module.read_text().rpartition("        if is_torch_npu")[0])
    assert decisions.main([str(site_packages)]) == 0
    assert capsys.readouterr().out == "1 branches, 0 of them undecided\n"
    assert decisions.main(["--unused", str(site_packages)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == len(decision_table.load())  # all but one, and the count


def test_where_there_is_nothing_to_look_at_nothing_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decisions.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "0 branches, 0 of them undecided\n"
