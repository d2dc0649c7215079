"""The version matrix: cells, their locks and environments, the sweep over them, and its report.

Runs outside the environments, in the interpreter of nox. Imports only the standard library and ``packaging``;
``matrix/report/`` also imports ``rich`` and ``jinja2``. Must not import the stack.
"""
