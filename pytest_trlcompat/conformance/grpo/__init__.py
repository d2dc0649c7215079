"""GRPO: :mod:`.recording` trains and records inside a rank, :mod:`.expected` computes what the training must give, and
:mod:`.quantities` lists what is compared, in the order in which a step computes it."""
