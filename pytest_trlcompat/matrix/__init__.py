"""The version matrix: cells, their locks, the environments that hold them, the sweep over them, its report.

Runs outside the environments, in the interpreter of nox. Must not import the stack, nor anything beyond the standard
library and ``packaging``; ``rich`` and ``jinja2`` are imported by ``matrix/report/`` alone.
"""
