"""The report: all that is shown of sweeps. One model, and a module for each form.

Runs in an environment that has ``rich`` and ``jinja2``, unlike the rest of the matrix.
"""
