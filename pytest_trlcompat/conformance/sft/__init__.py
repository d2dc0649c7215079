"""SFT: its adapter, rows of settings, and conventions of TRL where documentation leaves something open."""
