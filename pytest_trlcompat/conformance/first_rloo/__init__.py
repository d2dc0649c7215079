"""The legacy RLOO of TRL until 0.21, which labels and evidence call ``first_rloo``: :mod:`.expected` computes what a
recorded training must give, and :mod:`.quantities` lists what is compared, in the order in which a step computes it."""
