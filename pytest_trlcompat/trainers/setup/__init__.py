"""Cures of what a trainer sets up before its first step: devices, parameter groups, the order of data."""
