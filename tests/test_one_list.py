"""Names of strategies, trainers and packages are listed once: no literal in the sources lists three or more of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat._issue_ids import TRAINERS as WITH_ISSUES
from pytest_trlcompat.strategies import NAMES
from pytest_trlcompat.trainers.curing.kinds import KINDS, TRAINERS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pytest_trlcompat", "suites", "benchmarks", "noxfile.py")
LISTED = 3
"""So many names of one sort in a literal are a list of them."""

SORTS: Mapping[str, frozenset[str]] = {
    "strategies": frozenset(NAMES),
    "trainers": frozenset((*WITH_ISSUES, *TRAINERS, *KINDS)) - {"trainer"},
    "packages": frozenset((*stack.PACKAGES, "liger_kernel")),
}

STATED: Mapping[tuple[str, str], str] = {
    ("pytest_trlcompat/stack.py", "REQUIRED"): "the packages of a stack",
    ("pytest_trlcompat/stack.py", "TELLING"): "their order",
    ("pytest_trlcompat/stack.py", "OPTIONAL"): "the packages that most stacks do not have",
    ("pytest_trlcompat/training/axes.py", "TRAINERS"): "the classes of trainers, of any release",
    ("pytest_trlcompat/trainers", "_EXTENDED"): "the kinds of trainers that cures are for",
    ("pytest_trlcompat/strategies/deepspeed.py", "names"): "the strategies of a family",
}
"""Where lists are that others take. A path is a file or a folder; then comes what the literal is assigned to, or else
the function or the argument that has it."""

OTHER_FACTS: Mapping[tuple[str, str], str] = {
    ("pytest_trlcompat/accelerator/decision_table.py", "PACKAGES"): "the order of the page's sections",
    ("pytest_trlcompat/catalog/cures_page.py", "_SECTIONS"): "titles and texts, in the order of the page",
    ("pytest_trlcompat/conformance/fields.py", "TRAINERS"): "whose config has a field, two older trainers among them",
    ("pytest_trlcompat/conformance/fields.py", "SHARED"): "the trainers that share a part of the table of fields",
    ("pytest_trlcompat/conformance/fields_page.py", "_PARTS"): "titles and texts, in the order of the page",
    ("pytest_trlcompat/launch/executables.py", "_STACK"): "whose commands start trainings, Lightning's among them",
    ("pytest_trlcompat/launch/preload.py", "_MODULES"): "modules, in the order in which they are imported",
    ("pytest_trlcompat/matrix/covering/releases.py", "PACKAGES"): "the columns of the arrays, in their order",
    ("pytest_trlcompat/strategies/fsdp.py", "except_for"): "the trainers that prepare model and optimizer together",
    ("pytest_trlcompat/training/reading/commands.py", "_LAUNCHERS"): "programs that start trainings",
    ("pytest_trlcompat/training/reading/configs.py", "_AXOLOTL_TRAINERS"): "what axolotl calls its methods",
    ("pytest_trlcompat/training/reading/configs.py", "_STAGES"): "what LLaMA-Factory calls its stages",
    ("pytest_trlcompat/trainers", "_TITLES"): "how people write the packages of conditions",
    ("pytest_trlcompat/trainers", "_STACK"): "what `trlcompat cures` says of a stack",
    ("pytest_trlcompat/trainers", "packages"): "the packages that an error of one cure is about",
    ("pytest_trlcompat/trainers", "_kinds"): "behind which cure one stands in each kind",
    ("suites/vllm/trainings.py", "TRAINERS"): "the trainers that generate with vLLM, and what people call them",
    ("benchmarks/doctor_answers.py", "STRATEGIES"): "what two commits are both asked",
    ("benchmarks/doctor_answers.py", "TRAINERS"): "what two commits are both asked",
    ("suites/in_rank/adapters.py", "VARIANTS"): "the variants of each label",
    ("suites", "test_memory"): "strategies that have bounds",
    ("suites", "test_equivalence"): "strategies that are compared with one process",
    ("suites", "test_synchronisation"): "labels: what shards parameters, and a variant that does not",
    ("suites/sharding/memory.py", "STRATEGIES"): "the options of each label",
    ("suites/sharding/memory.py", "_BETWEEN_STEPS"): "how many copies each strategy holds",
    ("suites/sharding/memory.py", "_GRADIENTS"): "how many copies each strategy holds",
    ("suites/sharding/memory.py", "_WITHIN_A_STEP"): "how many copies each strategy holds",
    ("suites/sharding/trainings.py", "_MEASURED"): "what is measured in addition, by label",
    ("suites/vllm/trainings.py", "LABELS"): "labels with their variants",
    ("benchmarks/launch.py", "STRATEGIES"): "one of each engine, in the order of the report",
    ("benchmarks/loss_memory.py", "versions"): "the packages that this benchmark compares",
    ("benchmarks/upstream_fixes", "result"): "the packages that a fix of upstream's is in",
    ("noxfile.py", "releases"): "the packages that cures change",
}
"""Literals that say something else of these names, and what."""


class Literal:
    """A list of names in a source: where it is, what it is assigned to, and which names it has."""

    def __init__(self, path: str, line: int, place: str, sort: str, names: tuple[str, ...]) -> None:
        self.path, self.line, self.place, self.sort, self.names = path, line, place, sort, names

    def is_at(self, path: str, place: str) -> bool:
        return self.place == place and (self.path == path or self.path.startswith(f"{path}/"))

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.place} lists {self.sort}: {', '.join(self.names)}"


def literals(root: Path) -> Iterator[Literal]:
    for source in SOURCES:
        for path in sorted((root / source).rglob("*.py")) if (root / source).is_dir() else [root / source]:
            if path.is_file():
                tree = ast.parse(path.read_text(encoding="utf-8"))
                yield from _literals(tree, path.relative_to(root).as_posix(), "the module")


def _literals(node: ast.AST, path: str, place: str) -> Iterator[Literal]:
    place = _place(node) or place
    texts = _texts(node)
    for sort, known in SORTS.items():
        names = tuple(dict.fromkeys(text for text in texts if text in known))
        if len(names) >= LISTED:
            yield Literal(path, getattr(node, "lineno", 0), place, sort, names)
    for child in ast.iter_child_nodes(node):
        yield from _literals(child, path, place)


def _texts(node: ast.AST) -> list[str]:
    """The texts that a tuple, a list or a set has, or the keys of a dictionary, those unpacked into it included."""
    if isinstance(node, ast.Dict):
        elements = [key for key in node.keys if key is not None]
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        elements = node.elts
    else:
        return []
    texts = []
    for element in elements:
        if isinstance(element, ast.Starred):
            texts += _texts(element.value)
        elif isinstance(element, ast.Constant) and isinstance(element.value, str):
            texts.append(element.value)
    return texts


def _place(node: ast.AST) -> str:
    """What a node gives its literals as their place; empty where that is what the node around it gives."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.keyword) and node.arg:
        return node.arg
    return node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""


@pytest.fixture(scope="module")
def present() -> list[Literal]:
    return list(literals(ROOT))


def test_nothing_lists_names_a_second_time(present: list[Literal]) -> None:
    allowed = (*STATED, *OTHER_FACTS)
    second = [str(literal) for literal in present if not any(literal.is_at(*place) for place in allowed)]
    advice = "import NAMES, DISTINCT, TRAINERS or PACKAGES, or say in OTHER_FACTS what else it says"
    assert not second, "\n".join([advice, *second])


def test_what_is_allowed_is_there(present: list[Literal]) -> None:
    gone = [place for place in (*STATED, *OTHER_FACTS) if not any(literal.is_at(*place) for literal in present)]
    assert not gone


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('ORDER = ("zero2", "ddp", "fsdp1")', "ORDER"),
        ('ORDER: list[str] = ["zero2", "ddp", "own", "fsdp1"]', "ORDER"),
        ('def f(name):\n    return name in {"zero2", "ddp", "fsdp1"}', "f"),
        ('parser.add_argument("--trainer", choices=["sft", "dpo", "kto"])', "choices"),
        ('SIZES = {"torch": 1, "trl": 2, "peft": 3}', "SIZES"),
        ('NAMED = (*("torch", "trl"), "peft")', "NAMED"),
        ('@parametrize("strategy", ["single", "ddp", "zero3"])\ndef test_it(): ...', "test_it"),
        ('call(["single", "ddp", "zero3"])', "the module"),
    ],
)
def test_a_second_list_is_found_however_it_is_written(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "new.py").write_text(text)
    assert [literal.place for literal in literals(tmp_path)] == [place]


def test_two_names_are_no_list(tmp_path: Path) -> None:
    (tmp_path / "noxfile.py").write_text('WHOLE = ("single", "ddp", "single")\nSHORT = {"torch": "ddp", "trl": "kto"}')
    assert list(literals(tmp_path)) == []
