"""Mixins say where they stand, and which others must stand behind them. No stack is needed."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pytest_trlcompat import trainers
from pytest_trlcompat.trainers.curing import kinds
from pytest_trlcompat.trainers.curing.cure import Cure, check_order
from pytest_trlcompat.trainers.curing.kinds import KINDS
from pytest_trlcompat.trainers.curing.names import MODULES, PLACES

FOLDER = Path(trainers.__file__).parent


class Looking(Cure):
    _stands_before: ClassVar = {"Replacing": "it looks at what that one replaces"}


class Replacing:
    pass


class Base:
    pass


Looking.__module__ = Replacing.__module__ = "pytest_trlcompat.trainers.made_up"


def test_the_right_order_is_accepted() -> None:
    class My(Looking, Replacing, Base):
        pass

    class Mine(My):
        pass

    check_order(Mine)
    check_order(type("Alone", (Looking, Base), {}))


def test_a_wrong_order_is_refused_with_the_reason() -> None:
    with pytest.raises(TypeError) as caught:

        class My(Replacing, Looking, Base):
            pass

    assert str(caught.value) == (
        "My: Looking must stand before Replacing among the bases, and stands behind it; "
        "it looks at what that one replaces"
    )


def test_a_class_of_somebody_else_with_the_same_name_does_not_count() -> None:
    other = type("Replacing", (), {"__module__": "somewhere"})
    check_order(type("My", (other, Looking), {}))


def test_keywords_of_a_class_reach_what_is_mixed_with() -> None:
    class Wants:
        keywords: ClassVar[dict[str, Any]]

        def __init_subclass__(cls, **kwargs: Any) -> None:
            cls.keywords = kwargs

    class My(Looking, Wants, flag=1):
        pass

    assert My.keywords == {"flag": 1}


def test_the_order_of_a_kind_is_that_of_the_places_in_whichever_order_mixins_are_read() -> None:
    places = {name: ast.literal_eval(text) for name, text in PLACES.items()}
    shuffled = list(places.items())
    for seed in range(5):
        random.Random(seed).shuffle(shuffled)
        assert {kind: kinds.in_order(kind, dict(shuffled)) for kind in KINDS} == dict(KINDS)
    assert len(KINDS["trainer"]) >= 40
    assert len(KINDS["grpo"]) >= 55
    assert KINDS["rloo"][:2] == ("FSDPAdapterGenerationMixin", "DeepSpeedHooksMixin")
    assert KINDS["rloo"][2:] == KINDS["trainer"]


def test_two_mixins_at_one_place_are_refused() -> None:
    places = {"AMixin": {"trainer": 10}, "BMixin": {"rloo": 10}, "CMixin": {"grpo": 10}}
    assert kinds.in_order("trainer", places) == ("AMixin",)
    assert kinds.in_order("grpo", places) == ("CMixin",)
    with pytest.raises(ValueError, match=r"^AMixin and BMixin both have the place 10 in rloo$"):
        kinds.in_order("rloo", places)  # which gets those of any trainer as well


def test_a_mixin_is_declared_for_kinds_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "PLACES", {"AMixin": '{"trainers": 10}'})
    with pytest.raises(ValueError, match=r"^mixins are declared for kinds of trainers that there are not: trainers$"):
        kinds._kinds()


def test_the_declared_places_are_those_of_the_syntax_trees() -> None:
    """They are read by their text, since parsing whole modules takes too long when a training begins."""
    trees = {}
    for path in FOLDER.glob("*/*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and path.parent.name != "curing"):
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_kinds" and node.value:
                    trees[cls.name] = ast.literal_eval(node.value)
    assert {name: ast.literal_eval(text) for name, text in PLACES.items()} == trees
    assert set(trees) == {name for name in MODULES if name.endswith("Mixin")}


def test_mixins_that_must_stand_before_others_do_so_in_each_kind() -> None:
    named = {"AdapterReferenceMixin", "FSDP2OutputsMixin", "LigerNormalizerMixin", "PlainLogProbsMixin"}
    assert set(_declared()) >= named
    for mixin, behind in _declared().items():
        assert behind <= set(MODULES)
        for names in KINDS.values():
            both = [name for name in names if name in {mixin, *behind}]
            assert mixin not in both or both[0] == mixin


def _declared() -> dict[str, set[str]]:
    """Mixin to what it declares, read from the sources, which import the stack."""
    found: dict[str, set[str]] = {}
    for path in FOLDER.glob("**/[a-z]*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                for line in (line for line in node.body if isinstance(line, ast.AnnAssign)):
                    if ast.unparse(line.target) == "_stands_before" and isinstance(line.value, ast.Dict):
                        found[node.name] = set(ast.literal_eval(line.value))
    return {mixin: behind for mixin, behind in found.items() if behind}  # the default is empty
