"""Modules of other packages, their training and comparison."""

import os

from .stand_ins import declare_torchvision_operators

# No weights are downloaded, so nothing need ask a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before anything else: Lightning itself imports torchvision where that is installed.
declare_torchvision_operators()
