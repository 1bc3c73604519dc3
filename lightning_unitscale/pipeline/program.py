"""Describe a graph of flat inputs and outputs, its microbatches and its loss."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)
from typing_extensions import override

# The output that is the loss: its key, or the output's structure with ``True`` there.
LossSpec = Any


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """Describe a tensor, which may be fake."""
        return cls(tuple(map(int, tensor.shape)), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the elements, each counted once."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class ProgramInput:
    """One leaf of a program's arguments."""

    name: str  # its position in the arguments, such as ``input_ids`` or ``batch[0]``
    # The tensor, or the other value, for which the graph was captured.
    tensor: TensorInfo | None = None
    value: Any = None

    @classmethod
    def of(cls, name: str, value: Any) -> ProgramInput:
        """Describe an argument."""
        if isinstance(value, Tensor):
            return cls(name, tensor=TensorInfo.of(value))
        return cls(name, value=value)


@dataclass(frozen=True)
class Program:
    """One graph with flat inputs and outputs."""

    # Its placeholders are the inputs in their order. Its output is a tuple. Parameters, buffers and
    # constants are ``get_attr`` nodes under their names.
    graph_module: fx.GraphModule
    inputs: tuple[ProgramInput, ...]
    # The structures of ``(args, kwargs)`` and of the result.
    in_spec: TreeSpec
    out_spec: TreeSpec
    loss: int | None  # the position of the loss among the flat outputs
    left_out: tuple[str, ...] = ()  # outputs of the module that a graph cannot return

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Return the nodes and constants that the graph returns."""
        returned: Any = self.graph_module.graph.output_node().args[0]
        return tuple(returned)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flatten the arguments of a call."""
        # The order of keyword arguments does not matter.
        template = tree_unflatten(list(range(len(self.inputs))), self.in_spec)
        names = list(template[1])
        ordered = {name: kwargs[name] for name in names if name in kwargs}
        ordered |= {name: value for name, value in kwargs.items() if name not in ordered}
        flat, spec = tree_flatten((tuple(args), ordered))
        if spec != self.in_spec:
            expected = [example.name for example in self.inputs]
            raise ValueError(
                f"arguments: {len(args)} positional and {list(kwargs)} by name do not match the "
                f"example with which the pipeline was captured. Expected {expected} in the same "
                "places. Call it as in pipeline(...)."
            )
        for value, example in zip(flat, self.inputs, strict=True):
            if example.tensor is None and (isinstance(value, Tensor) or value != example.value):
                raise ValueError(
                    f"{example.name}={value!r}: the pipeline was captured for {example.value!r}, "
                    "which is part of its graph. Expected the same value. Capture another pipeline "
                    "for other values."
                )
        return flat

    def unflatten(self, outputs: list[Any]) -> Any:
        """Return the result in the module's own structure."""
        return tree_unflatten(outputs, self.out_spec)


def named_tensors(module: nn.Module, *, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return parameters and buffers by name: tied ones under the first name, or under each."""
    return {
        **dict(module.named_parameters(remove_duplicate=remove_duplicate)),
        **dict(module.named_buffers(remove_duplicate=remove_duplicate)),
    }


def split_batch(
    program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_microbatches: int
) -> list[list[Any]]:
    """Return the flat inputs of each microbatch."""
    # A tensor whose first dimension is `num_microbatches` times the example's is cut along it. A
    # tensor of the example's shape goes to all microbatches. Every rank keeps its own copy of all
    # inputs, so none is ever sent.
    flat = program.flatten(args, kwargs)
    microbatches: list[list[Any]] = [[] for _ in range(num_microbatches)]
    for value, example in zip(flat, program.inputs, strict=True):
        pieces = _pieces(value, example, num_microbatches)
        for microbatch, piece in zip(microbatches, pieces, strict=True):
            microbatch.append(piece)
    return microbatches


def split_evenly(batch: Any, num_microbatches: int, given: str = "") -> list[Any]:
    """Divide a batch into equal parts along the first dimension of its tensors."""
    # Values whose first dimension is missing or differs from that of the first tensor go to all.
    sizes = [len(leaf) for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes or sizes[0] % num_microbatches:
        size = sizes[0] if sizes else 0
        given = given or f"num_microbatches={num_microbatches}:"
        raise ValueError(
            f"{given} a batch of {size} samples cannot be divided into {num_microbatches} equal "
            f"parts. Expected a number that divides {size}. Pass another num_microbatches or "
            "another batch size, and drop_last=True to the DataLoader if it is the last batch."
        )

    def part(index: int, leaf: Any) -> Any:
        divided = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == sizes[0]
        return leaf.chunk(num_microbatches)[index] if divided else leaf

    return [_map_leaves(partial(part, index), batch) for index in range(num_microbatches)]


def leaves_of(batch: Any) -> list[Any]:
    """Return the tensors and other values of a batch, without its containers."""
    # Dataclasses and mappings such as Hugging Face's `BatchEncoding` are containers too.
    leaves: list[Any] = []
    _map_leaves(leaves.append, batch)
    return leaves


def _map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    def visit(leaf: Any) -> Any:
        if isinstance(leaf, UserDict):
            new = copy.copy(leaf)
            new.data = _map_leaves(function, leaf.data)
            return new
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = (field.name for field in dataclasses.fields(leaf) if field.init)
            return dataclasses.replace(
                leaf, **{name: _map_leaves(function, getattr(leaf, name)) for name in names}
            )
        return function(leaf)

    return tree_map(visit, batch)


def _pieces(value: Any, described: ProgramInput, count: int) -> list[Any]:
    name, example = described.name, described.tensor
    if example is None:
        return [value] * count
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}={value!r}: not a matching tensor. Expected a tensor {example}.")
    given = TensorInfo.of(value)
    if given == example:
        return [value] * count
    size, *others = example.shape or (0,)
    if given == TensorInfo((count * size, *others), example.dtype):
        return list(value.split(size))
    raise ValueError(
        f"{name}: a tensor {given}. Expected {count} microbatches of {example}, for which the "
        "pipeline was captured, along the first dimension. Make every batch as large "
        "(drop_last=True), or capture another pipeline for it."
    )


class LossWrapper(nn.Module):
    """A module and its loss function, captured together.

    Override ``forward(*inputs, targets)`` to call ``self.module`` and ``self.loss_fn``. Its only
    result is the loss. :class:`TrivialLossWrapper` is the common case.

    Args:
        module: The model. Its parameters keep their names below ``module.``.
        loss_fn: Function from the model's output and the targets to the loss.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn


class TrivialLossWrapper(LossWrapper):
    """A module with the loss ``loss_fn(module(x), targets)``."""

    @override
    def forward(self, x: Any, targets: Any) -> Tensor:
        """Return the loss of the model's output for ``x``."""
        return self.loss_fn(self.module(x), targets)


def loss_index(
    outputs: Any, is_scalar: Sequence[bool], spec: LossSpec, *, is_loss: bool = False
) -> int | None:
    """Return the position of the loss among the flattened outputs, or ``None`` without a loss."""
    paths = [_keys(path) for path, _ in tree_flatten_with_path(outputs)[0]]
    keys = [path[-1] if path else None for path in paths]
    if spec is None:
        wanted = [index for index, key in enumerate(keys) if key == "loss" and is_scalar[index]]
        if keys.count("loss") == len(wanted) == 1:
            return wanted[0]
        if len(paths) != 1 or not (is_scalar[0] or is_loss):
            return None
        wanted = [0]
    elif isinstance(spec, str):
        wanted = [index for index, key in enumerate(keys) if key == spec]
        if len(wanted) != 1:
            raise ValueError(
                f"loss_spec={spec!r}: {len(wanted)} outputs have this key. Expected one of {keys}."
            )
    else:
        # A spec may stop above the leaves, and may be a dict for a mapping of another class.
        marked = [_keys(path) for path, value in tree_flatten_with_path(spec)[0] if value]
        wanted = [
            index
            for index, path in enumerate(paths)
            if any(path[: len(above)] == above for above in marked)
        ]
        if len(wanted) != 1:
            raise ValueError(
                f"loss_spec={spec!r}: it marks {len(wanted)} of the {len(paths)} outputs as the "
                "loss. Expected the structure of the module's output with one True in it, or the "
                "key of the loss, such as 'loss'."
            )
    if not is_scalar[wanted[0]]:
        raise ValueError(
            f"loss_spec={spec!r}: output {wanted[0]} is not a tensor of one element with a "
            "gradient. Expected the mean loss of a batch. Reduce the loss in the module."
        )
    return wanted[0]


def _keys(path: Any) -> tuple[Any, ...]:
    """Return the keys, indices and names along a pytree path."""
    return tuple(
        next(getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind))
        for entry in path
    )
