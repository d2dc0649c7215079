"""PPO: :mod:`.expected` computes what a recorded training must give, and :mod:`.quantities` says what of both is
compared, in the order in which a step makes it."""
