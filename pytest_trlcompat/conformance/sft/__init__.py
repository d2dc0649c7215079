"""SFT held against the reference: its rows of settings, and what it does that documentation leaves open."""
