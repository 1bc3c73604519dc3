"""What a torch function is called in the name of its result, and which results have no row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_unitscale.graph.nodes import WHOLE_VIEWS
from lightning_unitscale.graph.products import PRODUCT_WORDS
from lightning_unitscale.profiler.module_trace import function_name

# Python's operators reach torch as methods; a captured graph, and so the names of its tensors, has
# the operators.
_OPERATORS: dict[Any, str] = {
    Tensor.div: "truediv",
    Tensor.remainder: "mod",
    Tensor.add_: "iadd",
    Tensor.sub_: "isub",
    Tensor.mul_: "imul",
    Tensor.div_: "itruediv",
}
# A cast has the scale of its tensor, up to the rounding.
_CASTS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "data",
     "requires_grad", "deepcopy", "H", "mH", "pin_memory", "as_subclass", "copy"}
)  # fmt: skip
_ALIASES = WHOLE_VIEWS | _CASTS
# Asked all the time, and never answered with a tensor of the step's.
_ANSWERS = frozenset(
    {"size", "dim", "item", "len", "bool", "numel", "stride", "is_floating_point", "is_complex",
     "tolist", "format", "repr", "is_contiguous", "storage_offset", "data_ptr", "untyped_storage",
     "register_hook", "index", "hash", "set", "delete", "element_size", "nelement", "get_device",
     "retain_grad", "register_post_accumulate_grad_hook", "set_grad_enabled", "is_inference"}
)  # fmt: skip
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


def word_of(function: Any) -> str:
    """Torch's own word for a function: ``linear``, ``add``, ``getitem``."""
    try:
        known = _OPERATORS.get(function)
    except TypeError:  # not hashable, so none of torch's
        known = None
    return known or function_name(function)


def answers(function: Any, word: str) -> bool:
    """Whether the function only tells something of a tensor, or sets it, and makes none."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return word not in _TENSOR_ATTRIBUTES
    # ``x.float()`` makes one, ``float(x)`` does not.
    return word in _ANSWERS or name in {"__float__", "__int__"}


def is_alias(word: str) -> bool:
    """Whether a result is its argument seen otherwise, so that it has the row of that."""
    return word in _ALIASES


def is_product(word: str) -> bool:
    """Whether the function is a matrix product."""
    return word in PRODUCT_WORDS
