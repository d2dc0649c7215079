"""Variables that libraries read when they are imported reach a warm launch as they reach a process of its own."""

from __future__ import annotations

import importlib
import os

import pytest

from pytest_trlcompat.launch import Launcher
from pytest_trlcompat.launch.servers import MAX_OTHER_SERVERS

OTHERS = [{"HF_HOME": "/models", "HF_HUB_OFFLINE": "0"}, {"HF_HOME": "/others"}, {"HF_HOME": "/further"}]
"""Variables with which a server of its own is started, which takes the time of its imports."""


def constants() -> tuple[str, bool, int]:
    """What three libraries have made of their variables when they were imported; the last, whose server it is."""
    hub = importlib.import_module("huggingface_hub.constants")
    return hub.HF_HOME, hub.HF_HUB_OFFLINE, os.getppid()


def test_a_variable_that_is_read_at_import_has_effect(launch: Launcher) -> None:
    plain_home, plain_offline, plain_server = launch(constants, strategy="single").values[0]
    assert plain_offline is True
    home, offline, server = launch(constants, strategy="single", env=OTHERS[0]).values[0]
    assert (home, offline) == ("/models", False)
    assert server != plain_server
    # The first one is still there, and so is the other.
    assert launch(constants, strategy="single").values[0] == (plain_home, plain_offline, plain_server)
    again = launch(constants, strategy="single", env={"HF_HUB_OFFLINE": "0", "HF_HOME": "/models"}).values[0]
    assert again == ("/models", False, server)


def test_a_variable_of_the_test_process_has_effect_too(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    before = launch(constants, strategy="single").values[0]
    monkeypatch.setenv("HF_HOME", OTHERS[1]["HF_HOME"])
    assert launch(constants, strategy="single").values[0][0] == "/others"
    monkeypatch.undo()
    assert launch(constants, strategy="single").values[0] == before


def test_a_variable_that_nobody_has_read_starts_no_server(launch: Launcher) -> None:
    def seen() -> tuple[str | None, int]:
        return os.environ.get("MY_OWN"), os.getppid()

    (_, server), (value, same) = (launch(seen, strategy="single", env=env).values[0] for env in ({}, {"MY_OWN": "1"}))
    assert (value, same) == ("1", server)


def test_there_are_few_servers(launch: Launcher) -> None:
    """The first two are there from the tests above, where these have been run."""
    assert len(OTHERS) == MAX_OTHER_SERVERS + 1
    servers = {launch(constants, strategy="single", env=env).values[0][2] for env in OTHERS}
    assert len(servers) == MAX_OTHER_SERVERS + 1
    assert len(launch._servers) == MAX_OTHER_SERVERS + 1
