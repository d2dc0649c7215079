"""Ways of launching that launch.py and soak.py measure."""
