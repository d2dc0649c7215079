"""KTO: its adapter, completions with labels, and what TRL does where documentation leaves it open."""
