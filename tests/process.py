"""What every process that runs tests does first, so that they do not take longer than they must."""

import gc
import importlib

# Thresholds of the three generations: garbage is collected rarely.
COLLECTIONS = (100_000, 20, 100)


def spare_time() -> None:
    """Collects garbage rarely, and lets Dynamo not time what it makes.

    A capture makes many objects that stay, and each collection would go through all of them. The
    guards of every frame would be timed for a line of Dynamo's log, with the caches of the
    processor flushed before.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    guards = importlib.import_module("torch._dynamo.guards")
    guards.profile_guard_manager = lambda *_: 0.0
