"""The tensors that a graph is being compiled for, by the names of its inputs.

A file of its own for the names it takes from torch (checked on torch 2.13 and 2.11):
``TracingContext``, and the table in which its fake tensors are kept by the tensors they stand for.
"""

from __future__ import annotations

from torch import Tensor, fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor


def real_inputs(graph: fx.Graph) -> dict[str, Tensor]:
    """The tensors behind a graph's fake inputs; those that are not known are left out."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return {}
    converter = context.fake_mode.fake_tensor_converter.meta_converter
    fakes = {
        fake.untyped_storage()._cdata: real
        for real, number in list(converter.describer.lookup_tensor.items())
        if isinstance(fake := converter.tensor_memo.get(number), FakeTensor)
    }
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and (key := value.untyped_storage()._cdata) in fakes:
            found[node.name] = fakes[key]
    return found
