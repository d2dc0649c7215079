"""Engines: what runs the cells of a sweep elsewhere than in nox's own processes. The one that there is: Ray.

A cell is the same job for every engine (:mod:`..job`). ``cluster.py`` and ``ray_streams.py`` import ``ray``, and run in
an environment of their own; the rest imports only the standard library and the matrix. None of it runs in the cells'
environments, and the sessions of nox do not import ``ray``.
"""
