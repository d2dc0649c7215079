"""The doctor's promises, held against inputs that nobody has thought of.

A small number of them here; ``nox -s fuzz`` tries 50,000 others.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_trlcompat import cli
from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.known_issues import Catalog

from .made_up import cell
from .mutated import FORMS, STACK, Written, damaged, issues

INPUTS = int(os.environ.get("TRLCOMPAT_FUZZ_INPUTS", "0"))
"""How many all tests here try together; 0 for the few, always the same, of a run of the unit tests."""
EACH = -(-INPUTS // (2 * len(FORMS))) or 60
TRIED: Counter[str] = Counter()
ANSWERED: Counter[str] = Counter()

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
limited = settings(
    max_examples=EACH,
    derandomize=not INPUTS,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A catalogue in which each version of the stack has an issue of its own, and a folder for the files."""
    with pytest.MonkeyPatch.context() as patch:
        catalog = Catalog({each.id: each for each in issues()})
        patch.setattr(known_issues, "load", lambda: catalog)
        patch.setattr(evidence, "published", lambda: Evidence("2026-11-21", (cell("1.0.0", single="ok"),)))
        where = tmp_path_factory.mktemp("fuzz")
        (where / "sub").mkdir()
        patch.chdir(where)
        yield where
    tried = ", ".join(f"{number} {name}" for name, number in sorted(TRIED.items()))
    answered = ", ".join(f"{number} {name}" for name, number in sorted(ANSWERED.items()))
    print(f"\n{sum(TRIED.values())} inputs: {tried}; of the mutated were answered: {answered}")


def answer(written: Written, *more: str) -> tuple[int, str, str]:
    for name, data in written.beside.items():
        Path(name).write_bytes(data)
    if written.name != "-":
        Path(written.name).write_bytes(written.data)
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(written.data)))
        status = cli.main(
            ["doctor", "--strategy", "single", *more, *(["-"] if written.name == "-" else ["-r", written.name])]
        )
    return status, out.getvalue(), err.getvalue()


def is_plain(text: str) -> bool:
    return not any(unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") for sign in text if sign != "\n")


def test_the_unmutated_stack_has_every_issue() -> None:
    plain = "".join(f"{name}=={version}\n" for name, version in STACK.items())
    status, out, _ = answer(Written("-", plain.encode()), "--json")
    assert (status, len(json.loads(out)["issues"])) == (1, len(STACK) + 1)


@pytest.mark.parametrize("form", FORMS)
def test_what_hides_or_repeats_a_stack_never_makes_it_safe(form: str) -> None:
    """The answer names every issue of the plain stack, or is that there is none."""
    names = {each.id for each in issues()}

    @limited
    @given(FORMS[form]())
    def check(written: Written) -> None:
        TRIED[f"{form} mutated"] += 1
        status, out, err = answer(written, "--json")
        assert status in (1, 2), out
        assert "a fault of the doctor" not in err
        assert is_plain(out + err)
        if status == 1:
            assert names == {each["id"] for each in json.loads(out)["issues"]}
            ANSWERED[form] += 1

    check()
    # Of what contradicts itself there is no answer; conda's lists are not read.
    assert ANSWERED[form] > EACH // 4 or form == "conda"


@pytest.mark.parametrize("form", FORMS)
def test_whatever_it_reads_it_answers_or_refuses(form: str) -> None:
    @limited
    @given(damaged(form), st.sampled_from([(), ("--json",), ("--python", "3.12"), ("--platform", "linux")]))
    def check(written: Written, more: tuple[str, ...]) -> None:
        TRIED[f"{form} damaged"] += 1
        status, out, err = answer(written, *more)
        assert status in (0, 1, 2)
        assert "a fault of the doctor" not in err
        assert is_plain(out + err)
        assert (status == 2) == bool(err) == (not out)

    check()
