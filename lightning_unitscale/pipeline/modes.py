"""Modes that a graph switches on and off: autocast, and whether gradients are recorded.

A stage that begins inside such a region enters it again. Private names of torch (checked on 2.13
and 2.11): ``_enter_autocast``, ``_exit_autocast``, ``_set_grad_enabled``.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

_outer_grad_mode = contextvars.ContextVar("outer_grad_mode", default=True)


@contextlib.contextmanager
def outer_grad_mode() -> Iterator[None]:
    """Within this context a graph's switches never record gradients that the caller switched off.

    The caller's mode is back afterwards.
    """
    enabled = torch.is_grad_enabled()
    token = _outer_grad_mode.set(enabled)
    try:
        yield
    finally:
        _outer_grad_mode.reset(token)
        torch.set_grad_enabled(enabled)


def switch_grad(enabled: bool) -> None:
    """Stands for a captured switch: the end of ``no_grad`` brings back the caller's mode."""
    torch.set_grad_enabled(enabled and _outer_grad_mode.get())


@dataclass(frozen=True)
class Modes:
    """The modes in front of a node of a graph.

    Attributes:
        autocasts: Nodes that entered the autocast regions, outermost first.
        grad: Whether gradients are recorded.
    """

    autocasts: tuple[fx.Node, ...] = ()
    grad: bool = True

    def after(self, node: fx.Node) -> Modes:
        """The modes behind a node."""
        if node.target is _enter_autocast:
            return Modes((*self.autocasts, node), self.grad)
        if node.target is _exit_autocast:
            return Modes(
                tuple(region for region in self.autocasts if region is not node.args[0]), self.grad
            )
        if node.target is torch._C._set_grad_enabled:
            return Modes(self.autocasts, bool(node.args[0]))
        return self


def is_switch(node: fx.Node) -> bool:
    """Whether the node only switches a mode."""
    return node.op == "call_function" and node.target in (
        _enter_autocast,
        _exit_autocast,
        torch._C._set_grad_enabled,
    )


def enter(graph: fx.Graph, modes: Modes) -> dict[fx.Node, fx.Node]:
    """Append what enters the modes; returns the new node of each region's entrance."""
    entered = {
        region: graph.call_function(_enter_autocast, region.args) for region in modes.autocasts
    }
    if not modes.grad:
        graph.call_function(switch_grad, (False,))
    return entered


def leave(graph: fx.Graph, modes: Modes, entered: dict[fx.Node, fx.Node]) -> None:
    """Append what leaves the modes that are still on at the end of a stage.

    Args:
        graph: The stage's graph.
        modes: The modes at its end.
        entered: The stage's own node for each autocast region that it entered.
    """
    if not modes.grad:
        graph.call_function(switch_grad, (True,))
    for region in reversed(modes.autocasts):
        graph.call_function(_exit_autocast, (entered[region],))


def respect_outer_grad_mode(graph: fx.Graph) -> None:
    """Let the gradient switches of a graph respect the caller's mode."""
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            node.target = switch_grad
