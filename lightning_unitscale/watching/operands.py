"""Which tensors of a step a matmul reads and makes, where the dispatcher sees others.

Between a function that a step calls and the matmul that the dispatcher runs for it, torch may cast
its arguments (autocast does, and keeps the cast weight for the next call), turn, expand, copy or
scale them. What the dispatcher sees is another tensor then, perhaps in other memory. Its autograd
graph leads back to the argument; without one its size tells which argument it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_unitscale.dispatch.calls import RanProduct
from lightning_unitscale.dispatch.torch_internals import sequence_number
from lightning_unitscale.graph.recorder import local_part
from lightning_unitscale.watching.torch_state import is_readable

# Operations that a matmul's operand may have come through from an argument, and its result to what
# the function returns: casts, views, copies, paddings, factors and biases.
_ON_THE_WAY = re.compile(
    r"(ToCopy|Copy|Clone|Alias|T|Transpose|Permute|MoveDim|View|UnsafeView|ReshapeAlias|Expand|"
    r"Squeeze|Unsqueeze|AsStrided|Select|Slice|Narrow|ConstantPadNd|Mul|Div|Add)Backward\d+"
)
_MOST_ON_THE_WAY = 16
# Units by which operands were divided, as exponents; ``None`` where they have none yet.
Unit = int | None


class RunningFunction:
    """A function that a step calls, while it runs.

    Attributes:
        units: An argument, its unit and its name in the gauge, in the order in which matmuls have
            read them.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        self.units: list[tuple[Tensor, Unit, str]] = []
        self._arguments = [tensor for tensor in arguments if is_readable(tensor)]
        # Arguments that were found by their size, which several may have.
        self._taken: set[int] = set()
        self._ran: list[tuple[range, Unit]] = []

    def see(self, ran: RanProduct) -> None:
        """Take in a matmul that it has run."""
        self._ran.append((ran.nodes, ran.log2_gamma))
        found = self._by_memory(ran.operands)
        read = zip(found, ran.operands, ran.log2_sigmas, ran.names, strict=True)
        for argument, operand, unit, name in read:
            if argument is None:
                argument = self._by_graph(operand)
            if argument is None and operand.grad_fn is None:
                argument = self._by_size(operand)
            if argument is not None:
                self.units.append((argument, unit, name))

    def gamma_of(self, result: Tensor) -> tuple[Unit] | None:
        """The unit of the gradient that arrives at a matmul which has made a result."""
        if not self._ran:
            return None
        if result.grad_fn is None:
            # Computed for the gradient of another node: a checkpoint, or the user's own function.
            return (self._ran[-1][1],)
        for node, _ in _way(result.grad_fn, result.output_nr):
            number = sequence_number(node)
            for nodes, gamma in reversed(self._ran):
                if number in nodes:
                    return (gamma,)
        return None

    def _by_memory(self, operands: Sequence[Tensor]) -> list[Tensor | None]:
        """For each operand the argument that lies where it lies; parts of one come in order."""
        left = list(self._arguments)
        found: list[Tensor | None] = []
        for operand in operands:
            memory, begin = _place(operand)
            places = [(tensor, *_place(tensor)) for tensor in left]
            parts = [(tensor, start) for tensor, where, start in places if where == memory]
            exact = [tensor for tensor, start in parts if start == begin]
            argument = next(iter((*exact, *(tensor for tensor, _ in parts))), None)
            if argument is not None:
                left = [tensor for tensor in left if tensor is not argument]
            found.append(argument)
        return found

    def _by_graph(self, operand: Tensor) -> Tensor | None:
        """The argument that an operand was made from, by autograd's record of it."""
        if operand.grad_fn is None:
            return None
        for node, output in _way(operand.grad_fn, operand.output_nr):
            for tensor in self._arguments:
                if tensor.grad_fn is None:
                    is_same = getattr(node, "variable", None) is tensor
                else:
                    is_same = tensor.grad_fn is node and tensor.output_nr == output
                if is_same:
                    return tensor
        return None

    def _by_size(self, operand: Tensor) -> Tensor | None:
        numel = operand.numel()
        same = [tensor for tensor in self._arguments if local_part(tensor).numel() == numel]
        if not same:  # expanded to a batch
            same = [t for t in self._arguments if t.numel() and numel % t.numel() == 0]
        free = [tensor for tensor in same if id(tensor) not in self._taken]
        argument = next(iter((*free, *same)), None)
        self._taken.add(id(argument))
        return argument


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies: its memory, and where it begins there."""
    tensor = local_part(tensor)
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin


def _way(node: Any, output: int) -> Iterator[tuple[Any, int]]:
    """The autograd nodes from one on, against the order of computation, and their outputs.

    It ends behind the first that is not on the way between an argument and a matmul. Where two
    tensors were added, the first has the shape of the matmul.
    """
    for _ in range(_MOST_ON_THE_WAY):
        yield node, output
        if _ON_THE_WAY.fullmatch(node.name()) is None:
            return
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if not edges:
            return
        node, output = edges[0]
