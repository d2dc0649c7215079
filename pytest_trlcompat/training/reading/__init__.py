"""From what a user has to a :class:`~pytest_trlcompat.training.training.Training`: files, commands, folders, objects.

Nothing is run, unpickled or imported on the way. Imports the standard library alone, and PyYAML where a file is YAML.
"""
