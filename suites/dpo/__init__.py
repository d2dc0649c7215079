"""Known issues of DPO."""
