"""KTO: its adapter, completions with labels, and conventions of TRL where documentation leaves something open."""
