"""Sphinx: how the site is built. ``nox -s docs`` builds it, and ends with an error for any warning.

Nothing of the stack is installed where the site is built: autodoc replaces it, since no page shows what it holds.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
# Pages show the help of programs, which are those of this environment.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

from pytest_trlcompat import __version__
from pytest_trlcompat.stack import PACKAGES

project = "pytest-trlcompat"
copyright = "the authors of pytest-trlcompat, Apache-2.0"
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.programoutput",
    "made_pages",
    "faults_table",
    "held_trainings",
    "from_source",
    "settings_list",
]
exclude_patterns = ["_ext", "explore"]

html_theme = "furo"
html_title = project

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_mock_imports = [*PACKAGES, "safetensors", "tokenizers", "torch_npu", "yaml"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"


def leave_out_of_navigation(app: Sphinx, doctree: nodes.document) -> None:
    """Let the pages of issues stand in no table of contents: each page would repeat hundreds of links to them."""
    if app.env.docname.startswith("issues/") and app.env.docname != "issues/index":
        app.env.metadata[app.env.docname]["orphan"] = True


def copy_explorable_report(app: Sphinx, error: Exception | None) -> None:
    """Make the report that one explores a part of the site, as it is."""
    if error is None:
        shutil.copytree(Path(app.srcdir) / "explore", Path(app.outdir) / "explore", dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", leave_out_of_navigation)
    app.connect("build-finished", copy_explorable_report)
