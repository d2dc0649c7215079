"""One test module per known issue of the catalogue; each runs for TRL's own trainer and for the corrected one."""
