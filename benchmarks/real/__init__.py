"""Modules of other packages, and what it takes to train and compare them."""

from .stand_ins import alias_pytorch_lightning, declare_torchvision_operators

# Before anything else: Lightning itself imports torchvision where that is installed.
alias_pytorch_lightning()
declare_torchvision_operators()
