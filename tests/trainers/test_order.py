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
from pytest_trlcompat.trainers.curing.names import MODULES, NEEDS, PLACES

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


def _places() -> dict[str, dict[str, str]]:
    """Mixin to kinds of trainers, each with the mixin that it stands behind there."""
    return {
        name: {kind: behind for kind, (behind, _) in ast.literal_eval(text).items()} for name, text in PLACES.items()
    }


def _needs() -> dict[str, list[str]]:
    return {name: list(ast.literal_eval(text)) for name, text in NEEDS.items()}


def test_the_order_of_a_kind_is_that_of_the_places_in_whichever_order_mixins_are_read() -> None:
    shuffled, needs = list(_places().items()), list(_needs().items())
    for seed in range(5):
        random.Random(seed).shuffle(shuffled)
        random.Random(seed).shuffle(needs)
        assert {kind: kinds.in_order(kind, dict(shuffled), dict(needs)) for kind in KINDS} == dict(KINDS)
    assert len(KINDS["trainer"]) >= 40
    assert len(KINDS["grpo"]) >= 55
    assert KINDS["rloo"][:2] == ("FSDPAdapterGenerationMixin", "DeepSpeedHooksMixin")
    assert KINDS["rloo"][2:] == KINDS["trainer"]
    assert list(KINDS) == ["trainer", "grpo", "ppo", "rloo", "distillation", "first_rloo"]
    assert ("grpo" in KINDS, "sft" in KINDS, KINDS.get("sft", ())) == (True, False, ())


def test_each_mixin_stands_directly_behind_the_one_that_it_names() -> None:
    for mixin, declared in _places().items():
        for kind, behind in declared.items():
            number = KINDS[kind].index(mixin)
            assert (KINDS[kind][number - 1] if number else "") == behind, (mixin, kind)


def test_a_reason_that_names_a_method_is_one_of_both_and_others_say_that_there_is_none() -> None:
    methods: dict[str, dict[str, ast.FunctionDef]] = {}
    for path in FOLDER.glob("*/*.py"):
        for cls in (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)):
            methods[cls.name] = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    calling = 0
    for mixin, text in PLACES.items():
        for other, reason in ast.literal_eval(text).values():
            shared = {
                name
                for name, function in methods.get(other, {}).items()
                if name in methods[mixin] and name != "_activity" and "super()" in ast.unparse(function)
            }
            if reason.startswith("its ") and other:
                calling += 1
                assert reason.removeprefix("its ").removesuffix(" calls this one's") in shared, (mixin, other)
            elif other:
                assert reason.startswith("neither calls the other; "), (mixin, other)
                assert not shared, (mixin, other)
    assert calling > 40


def test_a_new_mixin_stands_directly_behind_the_one_that_it_names() -> None:
    named = {"AMixin": "", "BMixin": "AMixin", "CMixin": "BMixin", "DMixin": "CMixin"}
    places = {mixin: {"trainer": behind} for mixin, behind in named.items()}
    for new in ("AaMixin", "ZMixin"):
        for behind, number in (("", 0), ("AMixin", 1), ("BMixin", 2), ("DMixin", 4)):
            order = kinds.in_order("trainer", {**places, new: {"trainer": behind}}, {})
            assert order.index(new) == number
            assert [mixin for mixin in order if mixin != new] == list(named)
    both = {"ZMixin": {"trainer": "AMixin"}, **places, "YMixin": {"trainer": "AMixin"}}
    assert kinds.in_order("trainer", both, {}) == (
        "AMixin",
        "YMixin",
        "ZMixin",
        "BMixin",
        "CMixin",
        "DMixin",
    )


def test_a_kind_has_its_own_mixins_and_those_of_the_kind_that_it_extends() -> None:
    places = {"AMixin": {"trainer": ""}, "BMixin": {"rloo": "AMixin", "grpo": ""}, "CMixin": {"trainer": "AMixin"}}
    assert kinds.in_order("trainer", places, {}) == ("AMixin", "CMixin")
    assert kinds.in_order("grpo", places, {}) == ("BMixin",)
    assert kinds.in_order("rloo", places, {}) == ("AMixin", "BMixin", "CMixin")


def test_what_must_stand_behind_a_mixin_does_so_where_a_kind_has_both() -> None:
    places = {"AMixin": {"grpo": ""}, "BMixin": {"grpo": "", "ppo": ""}, "CMixin": {"grpo": "BMixin"}}
    assert kinds.in_order("grpo", places, {}) == ("AMixin", "BMixin", "CMixin")
    assert kinds.in_order("grpo", places, {"BMixin": ["AMixin", "DMixin"]}) == ("BMixin", "AMixin", "CMixin")
    assert kinds.in_order("ppo", places, {"BMixin": ["AMixin"], "AMixin": ["BMixin"]}) == ("BMixin",)


def test_mixins_in_a_circle_are_refused_with_the_circle() -> None:
    places = {"AMixin": {"ppo": "CMixin"}, "BMixin": {"ppo": "AMixin"}, "CMixin": {"ppo": "BMixin"}}
    places |= {"A0Mixin": {"ppo": "CMixin"}, "EMixin": {"ppo": ""}}
    circle = "CMixin behind BMixin behind AMixin behind CMixin"
    for seed in range(5):
        shuffled = random.Random(seed).sample(list(places.items()), len(places))
        with pytest.raises(ValueError, match=f"^the cures of ppo stand in a circle: {circle}$"):
            kinds.in_order("ppo", dict(shuffled), {})
    places = {"AMixin": {"grpo": ""}, "BMixin": {"grpo": "AMixin"}}
    with pytest.raises(ValueError, match="^the cures of grpo stand in a circle: AMixin behind BMixin behind AMixin$"):
        kinds.in_order("grpo", places, {"BMixin": ["AMixin"]})


def test_a_mixin_stands_behind_one_that_its_kind_of_trainer_gets() -> None:
    places = {"AMixin": {"trainer": ""}, "BMixin": {"grpo": "AMixin"}}
    with pytest.raises(ValueError, match=r"^BMixin is to stand behind AMixin in grpo, which has no such cure$"):
        kinds.in_order("grpo", places, {})


def test_a_mixin_is_declared_for_kinds_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "PLACES", {"AMixin": '{"trainers": ("", "a reason")}'})
    with pytest.raises(ValueError, match=r"^mixins are declared for kinds of trainers that there are not: trainers$"):
        kinds._sorted.__wrapped__("trainer")


def test_the_declared_places_are_those_of_the_syntax_trees() -> None:
    """They are read by their text, since parsing whole modules takes too long when a training begins."""
    trees: dict[str, dict[str, tuple[str, str]]] = {}
    needs = {}
    for path in FOLDER.glob("*/*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and path.parent.name != "curing"):
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_kinds" and node.value:
                    trees[cls.name] = ast.literal_eval(node.value)
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_stands_before" and node.value:
                    needs[cls.name] = ast.literal_eval(node.value)
    assert {name: ast.literal_eval(text) for name, text in PLACES.items()} == trees
    assert {name: ast.literal_eval(text) for name, text in NEEDS.items()} == needs
    # They are taken apart at their quotes.
    assert {name: text.split('"')[1::2] for name, text in PLACES.items()} == {
        name: [word for kind, (behind, why) in declared.items() for word in (kind, behind, why)]
        for name, declared in trees.items()
    }
    assert {name: text.split('"')[1::2] for name, text in NEEDS.items()} == {
        name: [word for pair in declared.items() for word in pair] for name, declared in needs.items()
    }
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
