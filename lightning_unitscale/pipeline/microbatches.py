"""Cut a batch into the microbatches that a pipeline was captured for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

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
