"""ORPO: its adapter, rows of settings, and what TRL does where documentation leaves it open."""
