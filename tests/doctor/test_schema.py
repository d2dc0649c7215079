"""``docs/reference/doctor.schema.json`` describes all that ``--json`` prints, and nothing else passes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.catalog.issue import SEVERITIES
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor import diagnosis, training_diagnosis
from pytest_trlcompat.doctor.confidence import Level
from pytest_trlcompat.training.axes import PARTS

from .made_up import Run

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "doctor.schema.json").read_text("utf-8"))
DEFINED = SCHEMA["$defs"]
TYPES = {"string": str, "boolean": bool, "integer": int, "object": dict, "array": list, "null": type(None)}
WORDS = {"$ref", "additionalProperties", "anyOf", "const", "description", "enum", "items", "minimum", "properties"}
WORDS |= {"required", "type"}
"""The words of JSON Schema that :func:`wrong` knows, and the schema uses."""


def wrong(value: Any, schema: Mapping[str, Any], place: str = "$") -> Iterator[str]:
    """Where a value is not as a schema says."""
    assert set(schema) <= WORDS, f"{place}: {set(schema) - WORDS}"
    if "$ref" in schema:
        yield from wrong(value, DEFINED[schema["$ref"].removeprefix("#/$defs/")], place)
    if "anyOf" in schema and all(list(wrong(value, choice, place)) for choice in schema["anyOf"]):
        yield f"{place}: none of the choices"
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(type(value) is TYPES[name] for name in types):
        yield f"{place}: {value!r} is no {' or '.join(types)}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{place}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is none of {schema['enum']}"
    if isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{place}: {value} is too small"
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            yield from wrong(item, schema["items"], f"{place}[{number}]")
    if isinstance(value, dict):
        yield from (f"{place}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            known = schema.get("properties", {}).get(name, schema.get("additionalProperties", True))
            if known is False:
                yield f"{place}: {name} is not described"
            elif known is not True:
                yield from wrong(item, known, f"{place}.{name}")


PINS = ["trl==1.16.0", "transformers==5.23.0", "torch==2.13.0", "accelerate==1.15.0"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["trl==0.15.2", "transformers==4.48.3"], "stack_answer"),
        (["trl==1.12.0"], "stack_answer"),
        ([*PINS, "deepspeed==0.19.8", "peft==0.21.2"], "stack_answer"),
        ([*PINS, "--trainer", "orpo", "--strategy", "zero3"], "stack_answer"),
        ([*PINS, "--trainer", "cpo"], "stack_answer"),
        (["trl>=0.14", "--strategy", "fsdp2"], "stack_answer"),
        ([*PINS, "--training", "trl sft --use_peft --accelerate_config fsdp1"], "training_answer"),
        (["trl==0.17.0", "--training", "trl dpo --model_name_or_path m"], "training_answer"),
    ],
)
def test_what_is_printed_is_as_described(doctor: Run, words: list[str], name: str) -> None:
    document = json.loads(doctor(*words, "--json")[1])
    assert list(wrong(document, DEFINED[name])) == []
    assert list(wrong(document, {"anyOf": SCHEMA["anyOf"]})) == []


def test_what_is_not_described_or_missing_or_of_another_type_is_seen(doctor: Run) -> None:
    document = json.loads(doctor("trl==0.15.2", "transformers==4.48.3", "--json")[1])
    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda changed: changed.update(more=1), "$: more is not described"),
        (lambda changed: changed.pop("clear"), "$: clear is missing"),
        (lambda changed: changed["issues"][0].update(severity="bad"), "$.issues[0].severity: 'bad' is none of "),
        (
            lambda changed: changed["issues"][0]["when"][0].update(cells="a"),
            "$.issues[0].when[0].cells: 'a' is no array",
        ),
        (lambda changed: changed["counts"].update(affect=-1), "$.counts.affect: -1 is too small"),
    ]
    for change, expected in changes:
        changed = copy.deepcopy(document)
        change(changed)
        (found,) = wrong(changed, DEFINED["stack_answer"])
        assert found.startswith(expected)


def test_the_words_of_the_schema_are_those_of_the_code() -> None:
    assert DEFINED["severity"]["enum"] == list(SEVERITIES)
    assert DEFINED["verdict"]["enum"] == [verdict.value for verdict in Verdict]
    assert DEFINED["effect"]["properties"]["confidence"]["enum"] == [level.value for level in Level]
    assert DEFINED["stack_answer"]["properties"]["schema"]["const"] == diagnosis.SCHEMA
    assert DEFINED["training_answer"]["properties"]["schema"]["const"] == training_diagnosis.SCHEMA
    parts = DEFINED["training_answer"]["properties"]["training"]["properties"]
    assert set(PARTS) <= set(parts)
