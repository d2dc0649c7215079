"""Cures of which model a policy is compared with, under any strategy."""
