"""Clip gradients by other functions than a Trainer's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.patching import shadowed

Clip = Callable[[Sequence[Tensor], float], Any]


@contextlib.contextmanager
def clipping_with(plugin: Any, by_norm: Clip, by_value: Clip | None = None) -> Iterator[None]:
    """Within this context a Trainer clips gradients by other functions.

    ``clip_gradients`` of the precision plugin leads to the two methods that are replaced here
    (Lightning 2.6).

    Args:
        plugin: The Trainer's precision plugin.
        by_norm: Takes an optimizer's parameters and the limit of their gradients' norm.
        by_value: Takes the parameters and the limit of each value; by default the plugin's own.
    """

    def method(clip: Clip) -> Callable[[Optimizer, float], None]:
        return lambda optimizer, clip_val: clip(list(plugin.main_params(optimizer)), clip_val)

    methods = {"clip_grad_by_norm": method(by_norm)}
    if by_value is not None:
        methods["clip_grad_by_value"] = method(by_value)
    with shadowed(plugin, **methods):
        yield
