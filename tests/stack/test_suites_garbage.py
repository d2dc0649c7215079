"""What the suites' ranks leave alone, with the real packages that would look for it."""

from __future__ import annotations

from pytest_trlcompat.launch import Launcher


def test_nobody_looks_for_garbage(launcher: Launcher) -> None:
    def collections() -> list[int]:
        import gc

        from accelerate.utils import release_memory
        from deepspeed.runtime.utils import see_memory_usage

        from suites.in_rank.garbage import leave_garbage

        seen: list[str] = []
        gc.disable()  # Python's own are not meant
        gc.callbacks.append(lambda phase, _: seen.append(phase))

        def asked() -> int:
            seen.clear()
            see_memory_usage("", force=True)
            release_memory()
            return seen.count("start")

        before = asked()
        leave_garbage()
        return [before, asked()]

    assert launcher(collections, strategy="single").values == [[2, 0]]
