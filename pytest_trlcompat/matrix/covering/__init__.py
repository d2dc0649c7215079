"""Chooses the cells of ``nox -s matrix -- --pairwise`` by covering arrays over the releases on the registry.

``python -m pytest_trlcompat.matrix.covering`` writes ``fixtures/releases.toml`` and ``fixtures/pairwise.toml``. Its
modules may import ``covertable``, ``pypi_simple`` and ``remotezip``; the rest of the matrix reads what it wrote.
"""
