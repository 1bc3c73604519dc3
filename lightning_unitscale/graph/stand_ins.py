"""Tensors without numbers for running one operation of a captured graph by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from lightning_unitscale.dynamo.graphs import fake_mode_in_numbers
from lightning_unitscale.functional.rules import hint_of

_Number = Callable[[Any], Any]


def stand_ins(mode: Any, arguments: list[fx.Node]) -> tuple[Any, dict[fx.Node, Any]]:
    """What stands in for arguments, with memory of its own, and the fake mode to run it in.

    Symbolic sizes are the numbers that they were in the capture, as long as these are known: with
    symbols an operator takes up to a hundred times as long.

    Args:
        mode: The fake mode of the graph.
        arguments: Nodes with example values.
    """
    examples = {node: node.meta.get("example_value") for node in arguments}
    in_numbers = fake_mode_in_numbers(mode)
    try:
        return in_numbers, _made(in_numbers, examples, _known_number)
    except LookupError:
        return mode, _made(mode, examples, lambda symbol: symbol)


def _known_number(value: Any) -> Any:
    number = hint_of(value)
    if number is None and value is not None:
        raise LookupError(f"{value} depends on the values of a tensor")
    return number


def _made(mode: Any, examples: Mapping[fx.Node, Any], number: _Number) -> dict[fx.Node, Any]:
    def stand_in(example: Any) -> Any:
        if not isinstance(example, Tensor):
            return number(example)
        if example.layout is not torch.strided or example.is_nested:
            if example.fake_mode is not mode:  # type: ignore[attr-defined]
                raise LookupError("only its own mode has such a tensor")
            return example.detach()
        size, stride = map(number, example.size()), map(number, example.stride())
        options: Any = {"dtype": example.dtype, "device": example.device}
        return torch.empty_strided(tuple(size), tuple(stride), **options)

    with mode:
        return {node: tree_map(stand_in, example) for node, example in examples.items()}
