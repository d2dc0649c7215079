"""``python -m pytest_trlcompat.matrix.covering``: writes the releases on the registry and the cells that cover them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from pytest_trlcompat.matrix.covering import registry
from pytest_trlcompat.matrix.covering.choose import choose, written_down
from pytest_trlcompat.matrix.covering.releases import read_listing
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import lock_for
from pytest_trlcompat.matrix.parsing import read_matrix


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nox -s pairwise --", description="Choose the cells of `--pairwise` anew.")
    parser.add_argument("--listed", action="store_true", help="from the releases in fixtures/releases.toml as they are")
    parser.add_argument("--checkout", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    layout = Layout(parsed.checkout)
    try:
        matrix = read_matrix(layout.matrix)
        if not parsed.listed:
            first = min((cell.pins["trl"] for cell in matrix.full()), key=Version)
            write_whole(layout.releases, registry.ask(first, matrix.python).to_text())
        locks = [lock_for(matrix, cell, layout).packages for cell in written_down(matrix)]
        choice = choose(matrix, read_listing(layout.releases), locks)
        write_whole(layout.pairwise, choice.to_text())
    except MatrixError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join([*choice.notes(), "Now: nox -s lock -- --missing"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
