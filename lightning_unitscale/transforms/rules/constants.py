"""The RMS of tensors that a step makes out of nothing: constants and noise."""

from __future__ import annotations

from torch import fx

from lightning_unitscale.graph.nodes import op_name

_FILLED = {"zeros": 0.0, "new_zeros": 0.0, "zeros_like": 0.0, "zero": 0.0}
_FILLED |= {"ones": 1.0, "new_ones": 1.0, "ones_like": 1.0}
# Standard normal numbers, and numbers between 0 and 1.
_NOISE = {"randn": 1.0, "randn_like": 1.0, "rand": 3**-0.5, "rand_like": 3**-0.5}
_LARGEST = 1e3
_FULL = frozenset({"full", "new_full", "full_like"})


def writes(node: fx.Node) -> bool:
    """Whether an operation may write into one of its arguments, which then is no constant."""
    target = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    name = str(target)
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in {"setitem", "__setitem__"} or node.kwargs.get("out") is not None


def takes_form_only(node: fx.Node) -> bool:
    """Whether nothing of a tensor that the operation reads is in its result but type and shape."""
    name = op_name(node)
    return name.startswith("new_") or name.endswith("_like")


def made_rms(node: fx.Node) -> float | None:
    """RMS of a tensor that no other tensor's values are in; ``None`` for any other."""
    name = op_name(node)
    if name in _FULL:
        value = node.kwargs.get("fill_value", node.args[-1] if len(node.args) > 1 else None)
        # What is larger is a mask, no scale.
        is_scale = isinstance(value, (int, float)) and abs(value) < _LARGEST
        return abs(float(value)) if is_scale else None  # type: ignore[arg-type]
    return {**_FILLED, **_NOISE}.get(name)
