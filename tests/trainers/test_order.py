"""Mixins say which others must stand behind them; a class that mixes them wrongly is refused. No stack is needed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pytest_trlcompat import trainers
from pytest_trlcompat.trainers.curing.cure import Cure, check_order
from pytest_trlcompat.trainers.curing.names import MODULES

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


def test_declarations_name_mixins_that_there_are() -> None:
    named = {"AdapterReferenceMixin", "FSDP2OutputsMixin", "LigerNormalizerMixin", "PlainLogProbsMixin"}
    assert set(_declared()) == named
    for behind in _declared().values():
        assert behind <= set(MODULES)


def _declared() -> dict[str, set[str]]:
    """Mixin to what it declares, read from the sources, which import the stack."""
    found = {}
    for path in FOLDER.glob("**/[a-z]*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                for value in (each.value for each in node.body if isinstance(each, ast.AnnAssign)):
                    if value is not None and "Mixin" in ast.unparse(value):
                        names = (each.value for each in ast.walk(value) if isinstance(each, ast.Constant))
                        found[node.name] = {name for name in names if isinstance(name, str) and name.endswith("Mixin")}
    return found
