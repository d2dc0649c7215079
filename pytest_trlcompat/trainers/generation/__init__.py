"""Cures of prompts, sampling and generation under any strategy."""
