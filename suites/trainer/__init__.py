"""Known issues of what every trainer rests on: imports, arguments, resuming."""
