"""Fake tensors in place of a module's and its inputs' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.profiler.memory import SimulatedDevice, is_several_tensors


class FakeCopies:
    """Fake tensors on one device in place of real (or fake, or meta) ones: only metadata is read.

    Tensors that share a storage get fakes that do; the same tensor always gets the same fake.

    Args:
        mode: The fake mode; the fakes claim to be on its device.
    """

    def __init__(self, mode: SimulatedDevice) -> None:
        self._mode = mode
        self._bases: dict[int, Tensor] = {}
        self._fakes: dict[int, Tensor] = {}
        # Identities are of living objects only.
        self._alive: list[Any] = []

    def of(self, tensor: Tensor) -> Tensor:
        """The fake of ``tensor``, a parameter if it is one.

        Raises:
            TypeError: If it is of a class that is more than one plain tensor.
        """
        if id(tensor) not in self._fakes:
            self._alive.append(tensor)
            self._fakes[id(tensor)] = self._make(tensor)
        return self._fakes[id(tensor)]

    def known(self) -> dict[int, Tensor]:
        """The fakes made so far, by the identity of what they stand for."""
        return self._fakes

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or is_several_tensors(tensor):
            raise TypeError(
                f"tensor={type(tensor).__name__} of layout {tensor.layout}: its memory is not one "
                "plain storage; expected dense tensors; profile the module before it is sharded, "
                "quantized or made sparse."
            )
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bases:
            self._alive.append(storage)
            count = -(-storage.nbytes() // tensor.element_size())
            with self._mode:
                self._bases[storage._cdata] = torch.empty(
                    count, dtype=tensor.dtype, device=self._mode.device
                )
        base = self._bases[storage._cdata]
        with self._mode, torch.no_grad():
            flat = base if base.dtype == tensor.dtype else base.view(tensor.dtype)
            fake = flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
            # No view: autograd regenerates a view's function under a lock, which a mode that looks
            # at the operators of this would wait for without end.
            return fake.data.requires_grad_(tensor.requires_grad)
