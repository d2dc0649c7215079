"""vLLM's engine on a CPU, for trainers that generate with it: what ranks need so that it runs and takes new weights.

The engine is real, in a rank's own process or in a server (:mod:`.server`). :mod:`.cpu_engine` says what is changed in
it, and why; :mod:`.gloo_transfer`, how weights reach a server.
"""
