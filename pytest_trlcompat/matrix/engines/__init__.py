"""Engines: what runs the cells of a sweep. Without an option it is this machine (``local.py``), the other one is Ray.

A cell is the same job for every engine (:mod:`..job`). ``cluster.py`` and ``ray_streams.py`` import ``ray``, and run in
an environment of their own; the rest imports only the standard library and the matrix. None of it runs in the cells'
environments, and the sessions of nox do not import ``ray``.
"""
