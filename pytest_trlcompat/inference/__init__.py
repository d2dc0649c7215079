"""vLLM's engine on a CPU, for trainers that generate with it: what ranks need so that it runs and takes new weights.

The engine is real. :mod:`.cpu_engine` says what is changed in it, and why.
"""
