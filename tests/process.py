"""What every process that runs tests does first, so that they do not take longer than they must."""

import gc
import importlib

import torch

# Thresholds of the three generations: garbage is collected rarely.
COLLECTIONS = (100_000, 20, 100)


def spare_time() -> None:
    """Collects garbage rarely, lets Dynamo not time what it makes, seeds what there is.

    A capture makes many objects that stay, and each collection would go through all of them. The
    guards of every frame would be timed for a line of Dynamo's log, with the caches of the
    processor flushed before. For the seed of a device that has not started torch formats the stack
    of whoever sets it, once for each kind of device.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    guards = importlib.import_module("torch._dynamo.guards")
    guards.profile_guard_manager = lambda *_: 0.0
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None
