"""What running a node costs: floating-point operations, bytes moved, and an estimate of seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_unitscale.remat.sizes import hint

# Kernels that torch's registry does not list, by the query and key that they are given first.
_ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu",)
_ATTENTION_BACKWARD = ("_scaled_dot_product_flash_attention_for_cpu_backward",)


@dataclass(frozen=True)
class CostModel:
    """How fast a device is, to compare plans with; constants, so that all ranks plan the same.

    Attributes:
        flops_per_second: Rate of matrix products and convolutions.
        bytes_per_second: Rate at which the other operations read and write.
        overhead_seconds: Time to launch an operation.
        random_seconds: Additional time per random element.
        fused: Whether a compiler fuses chains of pointwise operations, which then cost little and
            whose intermediate values are never stored.
        measured: Seconds of nodes by name, in place of the estimate.
    """

    flops_per_second: float = 5e10
    bytes_per_second: float = 8e9
    overhead_seconds: float = 4e-6
    random_seconds: float = 4e-9
    fused: bool = False
    measured: Mapping[str, float] = field(default_factory=dict)

    def key(self) -> str:
        """A string that two equal models share, for hashes of plans."""
        text = repr([(one.name, _sorted(getattr(self, one.name))) for one in fields(self)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def seconds(self, name: str, flops: float, num_bytes: int, *, fusible: bool) -> float:
        """Estimated seconds of a node that does ``flops`` and moves ``num_bytes``."""
        if name in self.measured:
            return self.measured[name]
        if self.fused and fusible:
            # Within a fused kernel the intermediate values stay in registers.
            return 0.1 * num_bytes / self.bytes_per_second
        work = max(flops / self.flops_per_second, num_bytes / self.bytes_per_second)
        return work + self.overhead_seconds


def default_cost_model(device_type: str, *, fused: bool = False) -> CostModel:
    """The model for a kind of device: one core of a CPU, or a data-centre GPU."""
    if device_type == "cpu":
        return CostModel(fused=fused)
    return CostModel(1e14, 1.5e12, 6e-6, 2e-12, fused=fused)


def _sorted(value: Any) -> Any:
    return sorted(value.items()) if isinstance(value, Mapping) else value


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a nested value."""
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; symbolic sizes count with the numbers behind them."""
    count = 1
    for size in tensor.shape:
        count *= hint(size)
    return count * tensor.element_size()


def node_flops(node: fx.Node) -> float:
    """Floating-point operations of a node: 2 for a multiply-add, 1 per element otherwise."""
    value = node.meta.get("val")
    arguments = [example_of(one) for one in node.args]
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name in _ATTENTION:
        return _attention_flops(arguments[0], arguments[1], 2)
    if name in _ATTENTION_BACKWARD:
        return _attention_flops(arguments[1], arguments[2], 5)
    if packet in flop_registry:
        options = {key: example_of(one) for key, one in node.kwargs.items()}
        try:
            return float(flop_registry[packet](*arguments, **options, out_val=concrete(value)))
        except (AssertionError, IndexError, TypeError, ValueError):
            pass  # an overload that the registry's formula does not know
    return float(sum(size_of(one) // one.element_size() for one in tensors_of(value)))


def _attention_flops(query: Any, key: Any, num_products: int) -> float:
    batch, heads, length, width = (hint(size) for size in query.shape)
    return 2.0 * num_products * batch * heads * length * hint(key.shape[-2]) * width


def example_of(argument: Any) -> Any:
    """An argument of a node with the example values of the nodes in it."""
    return fx.node.map_arg(argument, lambda node: concrete(node.meta.get("val")))


def concrete(value: Any) -> Any:
    """An example value with numbers for symbolic sizes; asking these for ints would fix them."""
    if isinstance(value, Tensor):
        if all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            return value
        shape, stride = ([hint(one) for one in many] for many in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, (tuple, list)):
        return type(value)(concrete(one) for one in value)
    return value
