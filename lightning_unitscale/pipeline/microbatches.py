"""Cut a batch into microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_unitscale.pipeline.program import Program, TensorInfo


def split_batch(
    program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_microbatches: int
) -> list[list[Any]]:
    """The flat inputs of each microbatch.

    A tensor whose first dimension is ``num_microbatches`` times the example's is cut along it; one
    of the example's own shape is for all microbatches. Every rank keeps its own copy of all inputs,
    so that none is ever sent.

    Raises:
        ValueError: If a tensor has neither shape.
    """
    flat = program.flatten(args, kwargs)
    microbatches: list[list[Any]] = [[] for _ in range(num_microbatches)]
    for given, one in zip(flat, program.inputs, strict=True):
        if one.tensor is None:
            pieces = [given] * num_microbatches
        else:
            pieces = _pieces(given, one.name, one.tensor, num_microbatches)
        for microbatch, piece in zip(microbatches, pieces, strict=True):
            microbatch.append(piece)
    return microbatches


def split_evenly(batch: Any, num_microbatches: int) -> list[Any]:
    """The batch in equal parts along the first dimension of its tensors.

    Tensors of another first dimension than the first tensor, and what is no tensor, are for all.

    Raises:
        ValueError: If the batch cannot be divided.
    """
    flat, spec = tree_flatten(batch)
    sizes = [len(one) for one in flat if isinstance(one, Tensor) and one.ndim]
    if not sizes or sizes[0] % num_microbatches:
        size = sizes[0] if sizes else 0
        raise ValueError(
            f"num_microbatches={num_microbatches}: a batch of {size} samples cannot be divided "
            "into as many equal parts; expected a multiple; change one of the two, and pass "
            "drop_last=True to the DataLoader if it is the last batch."
        )
    parts: list[list[Any]] = [[] for _ in range(num_microbatches)]
    for one in flat:
        divided = isinstance(one, Tensor) and one.ndim and len(one) == sizes[0]
        pieces = one.chunk(num_microbatches) if divided else [one] * num_microbatches
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [tree_unflatten(part, spec) for part in parts]


def _pieces(given: Any, name: str, example: TensorInfo, count: int) -> list[Tensor]:
    if not isinstance(given, Tensor):
        raise ValueError(f"{name}={given!r}: expected a tensor.")
    shape = tuple(given.shape)
    if given.dtype == example.dtype and shape == example.shape:
        return [given] * count
    size = example.shape[0] if example.shape else 0
    if given.dtype == example.dtype and shape == (count * size, *example.shape[1:]):
        return list(given.split(size))
    raise ValueError(
        f"{name}: a tensor {TensorInfo.of(given)}; expected {count} microbatches of {example}, for "
        "which the pipeline was captured, along the first dimension; make every batch as large "
        "(drop_last=True), or capture another pipeline for it."
    )
