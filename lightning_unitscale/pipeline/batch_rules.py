"""Derive the relation of a result to the batch from the relations of its operands.

A step is captured twice: for a microbatch and for the whole batch. Sizes and numbers that differ
between the two graphs depend on the batch. Each tensor then has one of four relations to the batch,
which ``batchwise.py`` finds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from lightning_unitscale.capture.graph_nodes import example_tensor, line_of, op_name, tensor_name

_SUMS = frozenset(
    {"add", "iadd", "radd", "sub", "isub", "rsub", "subtract", "where", "stack", "cat", "concat",
     "hstack"}
)  # fmt: skip
_PRODUCTS = frozenset({"mul", "imul", "rmul", "multiply"})
_QUOTIENTS = frozenset({"div", "truediv", "itruediv", "divide", "true_divide"})
ARITHMETIC = _SUMS | _PRODUCTS | _QUOTIENTS | {"pow", "ipow", "rpow"}
# Linear in their only tensor operand, whatever the other arguments.
_LINEAR = frozenset(
    {"neg", "negative", "positive", "pos", "to", "float", "double", "half", "bfloat16", "type",
     "type_as", "cpu", "cuda", "detach", "clone", "contiguous", "view", "reshape", "view_as",
     "reshape_as", "squeeze", "unsqueeze", "flatten", "unflatten", "ravel", "permute", "transpose",
     "t", "expand", "getitem", "select", "sum", "mean", "requires_grad", "alias"}
)  # fmt: skip
# Sums of multiplied elements of two tensors.
_CONTRACTIONS = frozenset(
    {"matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "einsum", "tensordot"}
)
_VIEWS = frozenset(
    {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as",
     "ravel"}
)  # fmt: skip
_PIECES = frozenset(
    {"chunk", "split", "tensor_split", "split_with_sizes", "unbind", "narrow", "hsplit", "vsplit"}
)
_CONCATENATIONS = frozenset({"cat", "concat", "concatenate", "vstack", "hstack"})
# The dimension along which elements depend on each other. -1 if there is none.
_ALONG = {
    "softmax": 1, "log_softmax": 1, "softmin": 1, "gumbel_softmax": 4, "safe_softmax": 1,
    "cumsum": 1, "cumprod": 1, "cummax": 1, "cummin": 1, "logcumsumexp": 1, "flip": 1, "roll": 2,
    "normalize": 2, "sort": 1, "argsort": 1, "diff": 2, "renorm": 2, "fft": 2, "ifft": 2,
}  # fmt: skip
# Integers may be sorted along the batch: experts sort their tokens and restore the order.
_ORDERS = frozenset({"sort", "argsort"})
_BY_STATISTICS = frozenset({"batch_norm", "instance_norm", "sync_batch_norm"})
_WEIGHTED_BY_ELEMENT = frozenset({"mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"})
COUNTED = frozenset({"cross_entropy", "nll_loss"})
# Losses of two tensors with the same shape.
_ELEMENTWISE_LOSSES = frozenset(
    {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
     "binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss"}
)  # fmt: skip


@dataclass(frozen=True)
class Same:
    """The value of any microbatch, times ``count ** power``."""

    power: int = 0


@dataclass(frozen=True)
class Rows:
    """The rows of all samples in the order of the batch, times ``count ** power``."""

    dim: int
    # How many times the samples repeat, as in ``torch.cat([first, second])``. It is 0 for a tensor
    # that is the same for all samples.
    blocks: int = 1
    power: int = 0


@dataclass(frozen=True)
class Mean:
    """The mean of the values of the microbatches, times ``count ** power``."""

    power: int = 0  # 0 for a mean over samples, 1 for a sum


@dataclass(frozen=True)
class Coupled:
    """A value of the batch that does not follow from those of the microbatches."""

    reason: str  # the operation that couples the samples, and why


Fact = Same | Rows | Mean | Coupled


@dataclass(frozen=True)
class Operation:
    """An operation in the graph of a microbatch (``node``) and of the batch (``whole``)."""

    node: fx.Node
    whole: fx.Node
    facts: dict[fx.Node, Fact]  # the relations of its operands to the batch
    count: int  # the number of microbatches

    @property
    def name(self) -> str:
        """Return the operation's short name."""
        return op_name(self.node)

    @property
    def read(self) -> list[tuple[fx.Node, Fact]]:
        """Return its operands with their relations, once for each use."""
        leaves = tree_leaves((self.node.args, dict(self.node.kwargs)))
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node) and leaf in self.facts]
        return [(node, self.facts[node]) for node in nodes]

    def coupled(self, why: str) -> Coupled:
        """Return the relation of a result that does not follow from microbatches."""
        line = line_of(self.node)
        place = f" (in {Path(line[0]).name}:{line[1]})" if line else ""
        return Coupled(f"{tensor_name(self.node)} {why}{place}")

    def bound(self) -> dict[str, Any] | None:
        """Return all arguments by name, or ``None`` if the function has no signature."""
        try:
            signature = inspect.signature(self.node.target)  # type: ignore[arg-type]
            bound = signature.bind(*self.node.args, **self.node.kwargs)
        except (TypeError, ValueError):
            return None
        bound.apply_defaults()
        return dict(bound.arguments)

    def numbers(self) -> Iterator[tuple[Any, Any]]:
        """Yield the constants among the arguments, for a microbatch and for the batch."""
        part = tree_leaves((self.node.args, dict(self.node.kwargs)))
        whole = tree_leaves((self.whole.args, dict(self.whole.kwargs)))
        return ((a, b) for a, b in zip(part, whole, strict=True) if not isinstance(a, fx.Node))

    def factors(self) -> int | None:
        """Return the power of the number of microbatches in the constant factors."""
        powers = [power_of(a, b, self.count) for a, b in self.numbers()]
        return None if None in powers else sum(power for power in powers if power)


def power_of(part: Any, whole: Any, count: int) -> int | None:
    """Return ``k`` if a number of the batch is ``count ** k`` times one of a microbatch."""
    if type(part) is not type(whole):
        return None
    if part == whole or (part != part and whole != whole):  # NaN also counts as a constant
        return 0
    if not isinstance(part, (int, float)) or not part:
        return None
    powers = (power for power in (1, -1, 2, -2))
    return next((k for k in powers if math.isclose(whole / part, float(count) ** k)), None)


def argument_of(node: fx.Node, name: str, position: int, default: Any = None) -> Any:
    """Return a node's argument by name or position. ``axis`` is a synonym of ``dim``."""
    names = (name, "axis") if name in {"dim", "dims"} else (name,)
    for each in names:
        if each in node.kwargs:
            return node.kwargs[each]
    return node.args[position] if position < len(node.args) else default


def _align(operation: Operation, powers: dict[tuple[str, str], int]) -> bool:
    """Note the powers that align a sum's terms. Constants must be equal."""
    if any(power_of(a, b, operation.count) != 0 for a, b in operation.numbers()):
        return False
    for node, fact in operation.facts.items():
        if isinstance(fact, (Mean, Same)) and fact.power:
            powers[operation.node.name, node.name] = fact.power
    return True


def of_reduced(operation: Operation, term_powers: dict[tuple[str, str], int]) -> Fact:
    """Return the relation of a result without samples that comes from means and shared values."""
    name, facts = operation.name, [fact for _, fact in operation.read]
    means = [fact for fact in facts if isinstance(fact, Mean)]
    if name in _SUMS:
        condition = argument_of(operation.node, "condition", 0) if name == "where" else None
        if isinstance(operation.facts.get(condition), Mean):  # type: ignore[arg-type]
            return operation.coupled("chooses by a value of each microbatch")
        powers = {fact.power for fact in facts if isinstance(fact, (Mean, Same))}
        has_number = name not in _CONCATENATIONS | {"stack"} and any(
            isinstance(a, (int, float)) and not isinstance(a, bool) for a, _ in operation.numbers()
        )
        if len(powers) == 1 and len(facts) == len(means) and not has_number:
            return Mean(powers.pop())
        if _align(operation, term_powers):
            return Mean()
        return operation.coupled("adds a number that depends on the size of the batch")
    power = operation.factors()
    if name in _PRODUCTS and len(means) == 1 and power is not None:
        return Mean(power + sum(fact.power for fact in facts if isinstance(fact, (Mean, Same))))
    is_quotient = name in _QUOTIENTS and "rounding_mode" not in operation.node.kwargs
    if is_quotient and len(means) == 1 and power is not None:
        above = operation.node.args[0]
        if isinstance(above, fx.Node) and isinstance(operation.facts[above], Mean):
            divided = sum(fact.power for fact in facts if isinstance(fact, Same))
            return Mean(means[0].power - divided - power)
    if name in _LINEAR and len(facts) == 1:
        return means[0]
    return operation.coupled("is not linear in the mean over the batch")


def of_reduction(operation: Operation) -> Fact:
    """Return the relation of a result without samples that comes from samples."""
    name, facts = operation.name, [fact for _, fact in operation.read]
    rows = [fact for fact in facts if isinstance(fact, Rows)]
    power = max(fact.power for fact in rows)
    if any(isinstance(fact, Mean) for fact in facts):
        return operation.coupled("combines samples with a mean over the batch")
    if name in {"sum", "nansum", "count_nonzero"} and len(facts) == 1:
        return Mean(power + 1)
    if name == "mean" and len(facts) == 1:
        return Mean(power)
    is_in_order = len(rows) == len(facts) and len({fact.blocks for fact in rows} - {0}) <= 1
    if name in _CONTRACTIONS and is_in_order:
        return Mean(1 + sum(fact.power for fact in rows))
    given = operation.bound()
    if power or given is None or "reduction" not in given:
        return operation.coupled("is neither a sum nor a mean over the batch")
    return _of_loss(operation, given)


def _of_loss(operation: Operation, given: dict[str, Any]) -> Fact:
    name, reduction = operation.name, given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return operation.coupled("has the old arguments size_average and reduce; pass reduction")
    if name in _WEIGHTED_BY_ELEMENT and given.get("weight") is not None and reduction == "mean":
        return operation.coupled("divides by the sum of its weights; pass reduction='none'")
    if name in _ELEMENTWISE_LOSSES and not _is_aligned(operation):
        return operation.coupled("compares each sample with each other one: shapes differ")
    if reduction == "sum":
        return Mean(1)
    # The caller handles the divisor of a mean over classes.
    return Mean() if reduction in {"mean", "batchmean"} else operation.coupled("has no reduction")


def _is_aligned(operation: Operation) -> bool:
    """Check that broadcasting two tensors combines each sample with itself."""
    from_right = set()
    for node, fact in operation.facts.items():
        example = example_tensor(node)
        if isinstance(fact, Rows) and example is not None:
            from_right.add(fact.dim - example.ndim)
    return len(from_right) <= 1


def of_rows(operation: Operation, dim: int, result: Tensor) -> Fact:
    """Return the relation of a result that has samples in one of its dimensions."""
    name = operation.name
    rows = {node: fact for node, fact in operation.facts.items() if isinstance(fact, Rows)}
    powers = [fact.power for _, fact in operation.read if isinstance(fact, Rows)]
    same = sum(fact.power for _, fact in operation.read if isinstance(fact, Same))
    if not rows:
        return Rows(dim, 0) if not same else operation.coupled("depends on the size of the batch")
    if name in _BY_STATISTICS:
        return operation.coupled("takes its statistics over the batch")
    if why := _mixes(operation, rows):
        return operation.coupled(why)
    power = _power_of_rows(operation, powers, same)
    if power is None:
        return operation.coupled("computes with the size of the batch")
    blocks = _blocks(operation, rows, dim, result)
    if blocks is None:
        return operation.coupled("puts the samples into another order")
    return Rows(dim, blocks, power)


def _power_of_rows(operation: Operation, powers: list[int], same: int) -> int | None:
    name = operation.name
    if name in _PRODUCTS | _QUOTIENTS:
        numbers = operation.factors()
        if numbers is None:
            return None
        product = sum(powers) + same + numbers
        if name in _PRODUCTS:
            return product
        first = operation.node.args[0]
        fact = operation.facts.get(first) if isinstance(first, fx.Node) else None
        # ``product`` also covers the dividend.
        return (2 * fact.power if isinstance(fact, (Rows, Same)) else 0) - product
    if name in _LINEAR and len(powers) == 1:
        return powers[0]
    return 0 if not any(powers) and not same else None


def _mixes(operation: Operation, rows: dict[fx.Node, Rows]) -> str | None:
    """Return why samples of one microbatch depend on each other, or ``None``."""
    name, first = operation.name, next(iter(rows))
    example, fact = example_tensor(first), rows[first]
    assert example is not None
    if name in _ALONG and not (name in _ORDERS and not example.is_floating_point()):
        default: Any = {"normalize": 1, "sort": -1, "argsort": -1}.get(name)
        name_of_dims = "dims" if name in {"flip", "roll"} else "dim"
        given = argument_of(operation.node, name_of_dims, _ALONG[name], default)
        dims = given if isinstance(given, (tuple, list)) else [given]
        if any(d is None or d % example.ndim == fact.dim for d in dims):
            return "runs along the batch"
    if name in {"layer_norm", "rms_norm"}:
        shape = argument_of(operation.node, "normalized_shape", 1)
        if fact.dim >= example.ndim - len(shape):
            return "normalizes along the batch"
    if name == "scaled_dot_product_attention" and fact.dim >= example.ndim - 2:
        return "attends from one sample to another"
    if name in {"lstm", "gru", "rnn_tanh", "rnn_relu"}:
        batch_first = bool(operation.node.args[-1])
        if example.ndim == 3 and fact.dim != (0 if batch_first else 1):
            return "runs along the batch"
    if name == "multi_head_attention_forward" and example.ndim == 3 and fact.dim != 1:
        return "attends from one sample to another"
    if name in {"getitem", "index_select"}:
        for argument in tree_leaves(operation.node.args[1:]):
            if isinstance(argument, fx.Node) and op_name(argument) == "randperm":
                return "reorders the samples at random"
    return None


def _blocks(
    operation: Operation, rows: dict[fx.Node, Rows], dim: int, result: Tensor
) -> int | None:
    """Return how many times the samples repeat, or ``None`` if they are in another order."""
    name, first = operation.name, next(iter(rows))
    fact, example = rows[first], example_tensor(first)
    assert example is not None
    if name in _VIEWS:
        if not fact.blocks:
            return 0
        before = math.prod(example.shape[: fact.dim]) * fact.blocks
        outer = math.prod(result.shape[:dim])
        return before // outer if outer and not before % outer else None
    if name in _CONCATENATIONS and result.shape[dim] != example.shape[fact.dim]:
        facts = [each for _, each in operation.read]
        if not all(isinstance(each, Rows) for each in facts):
            return None
        return sum(max(each.blocks, 1) for each in facts if isinstance(each, Rows))
    if name in _PIECES and _dim_of_pieces(operation) % example.ndim == fact.dim:
        return _blocks_of_piece(fact, result.shape[dim] / example.shape[fact.dim])
    if name == "getitem" and isinstance(operation.node.args[0], fx.Node):
        sliced = _slice_of(operation.node.args[1], fact.dim, example.ndim)
        if sliced is not None and sliced != slice(None):
            start, stop, step = sliced.indices(example.shape[fact.dim])
            if (start, step) == (0, 1) and stop == example.shape[fact.dim]:
                return fact.blocks
            share = result.shape[dim] / example.shape[fact.dim]
            return _blocks_of_piece(fact, share) if step == 1 else None
    if name in {"repeat", "tile"} and result.ndim == example.ndim:
        return fact.blocks * (result.shape[dim] // example.shape[fact.dim])
    blocks = {each.blocks for each in rows.values()} - {0}
    return max(blocks, default=0) if len(blocks) <= 1 else None


def _blocks_of_piece(fact: Rows, share: float) -> int | None:
    if not fact.blocks:
        return None
    blocks = share * fact.blocks
    return round(blocks) if blocks >= 1 and math.isclose(blocks, round(blocks)) else None


def _dim_of_pieces(operation: Operation) -> int:
    if operation.name in {"hsplit", "vsplit"}:
        return int(operation.name == "hsplit")
    position = 1 if operation.name in {"unbind", "narrow"} else 2
    return int(argument_of(operation.node, "dim", position, 0))


def _slice_of(index: Any, dim: int, ndim: int) -> slice | None:
    """Return the slice that a subscript takes of a dimension, or ``None`` for indices."""
    entry = entry_of(index, dim, ndim)
    return entry if isinstance(entry, slice) else None


def entry_of(index: Any, dim: int, ndim: int) -> Any:
    """Return what a subscript takes of a dimension: a slice, an index or a mask."""
    entries = list(index) if isinstance(index, (tuple, list)) else [index]
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    expanded: list[Any] = []
    for entry in entries:
        if entry is Ellipsis:
            expanded += [slice(None)] * (ndim - used)
        elif entry is not None:
            expanded.append(entry)
    return expanded[dim] if dim < len(expanded) else slice(None)
