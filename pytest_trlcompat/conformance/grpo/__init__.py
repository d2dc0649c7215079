"""GRPO: :mod:`.recording` trains and records inside a rank, :mod:`.expected` computes what the training must give, and
:mod:`.quantities` says what of both is compared, in the order in which a step makes it."""
