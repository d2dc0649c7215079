"""DPO: :mod:`.pairs` makes pairs of completions and says what they must become, :mod:`.adapter` how a trainer is built,
how its batches are read, and what :mod:`pytest_trlcompat.reference` is asked for."""
