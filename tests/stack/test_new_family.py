"""A family of strategies that one more file adds is launched, proved and refused as those of this package are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.strategies.new_family import copy_with_family

LAUNCHES = """
from pytest_trlcompat.launch import Launcher, LaunchError
from tests.stack.launch_bodies import train_step

def mirrors():
    import os

    return train_step()["losses"], os.environ.get("ACCELERATE_MIRRORS")

with Launcher(device="software") as launch:
    (losses, mirrored), _ = launch(mirrors, strategy="mirrored").values
    plain, _ = launch(mirrors, strategy="ddp").values
    cold, _ = launch(mirrors, strategy="mirrored", mode="cold", command="torchrun").values
    assert (mirrored, plain) == ("2", (losses, None))
    assert cold == (losses, "2")
    try:
        launch(len, (), strategy="mirrored")
    except LaunchError as error:
        text = str(error)
        assert "did not run under strategy 'mirrored' as requested" in text
        assert "no ddp engine was built (built: none)" in text
    else:
        raise AssertionError("nothing was built, and it passed")
print("launched")
"""


def test_launches_of_a_family_that_one_file_adds(tmp_path: Path) -> None:
    folder = copy_with_family(tmp_path)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    program = tmp_path / "launches.py"
    program.write_text(LAUNCHES)
    process = subprocess.run(
        [sys.executable, str(program)], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    assert (process.stdout, process.returncode) == ("launched\n", 0), process.stderr
