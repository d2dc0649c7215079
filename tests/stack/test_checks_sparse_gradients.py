"""Gradients of sparse embeddings: as seen as any other."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from pytest_trlcompat.checks import gradients  # noqa: E402 - needs torch


@pytest.mark.parametrize(
    ("used", "scale", "kind"),
    [([], 1.0, "zero"), ([1], 1.0, "reached"), ([1], 0.0, "zero"), ([1], math.nan, "not_finite")],
)
def test_a_sparse_gradient_is_judged_by_its_entries(used: list[int], scale: float, kind: str) -> None:
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    (embedding(torch.tensor(used, dtype=torch.long)).sum() * scale).backward()
    report = gradients._report(["weight"], gradients._judged([embedding.weight.grad]))
    assert getattr(report, kind) == ("weight",)
