"""The project's own tests, one folder per package.

Packages, so that a folder may bear the name of another module (``bisect``).
"""
