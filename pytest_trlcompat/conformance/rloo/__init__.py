"""RLOO, from the release on in which it samples and trains as GRPO does: what it is tried with. Its trainings are
recorded and compared by :mod:`pytest_trlcompat.conformance.grpo`."""
