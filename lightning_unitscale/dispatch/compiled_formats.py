"""Products of compiled graphs in formats: operators that do what a kernel does in eager mode.

Whether a product runs in a format, and in which units, is decided whenever it runs, so a decision
of FP8's compiles nothing again. A graph begins with one operator that finds the session; its result
is a number that goes with what is saved for the backward pass, so that a backward product knows the
run of the forward graph that it belongs to: its units, its step, its random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import register_flop_formula

from lightning_unitscale.dispatch.calls import CALLS, Call, record
from lightning_unitscale.dispatch.compiled_callers import Callers
from lightning_unitscale.dispatch.compiled_runs import GraphRun, GraphRuns, Place
from lightning_unitscale.dispatch.compiler_internals import define_operator
from lightning_unitscale.dispatch.session import run_inside
from lightning_unitscale.dispatch.tensors import forget_copy
from lightning_unitscale.dispatch.torch_internals import Kernel, plain_functions
from lightning_unitscale.graph.operators import ProductRule, Sources

# Runs that may go on, one in a thread.
_MAX_BEGUN = 2**6
# The run of a graph that nobody rounds.
_NOBODY = 0


@dataclass(frozen=True)
class Changing:
    """Stands for what changes among the arguments of a product.

    Attributes:
        index: Which of the tensors it is, or of the numbers that change with the shapes.
        is_tensor: Which of the two.
    """

    index: int
    is_tensor: bool


@dataclass(eq=False)
class RoundedProduct:
    """A product of a compiled graph, forward or backward.

    Attributes:
        rule: Its operator.
        operator: The same, as torch calls it.
        args: Its arguments, with :class:`Changing` in place of what changes.
        kwargs: Its keyword arguments.
        results: Positions of its results that are tensors; ``None`` for one that is no tuple.
        place: Where it was when it was compiled.
        flops: Its floating-point operations, of the shapes that it was compiled with.
        forward: For a backward product, the index in the graph of its forward product.
        sources: For each operand of a backward product which forward operand it is.
        is_weight: Whether its second operand is made of a parameter of the layer that runs it.
        input: Index of the graph's input, if any, that its second operand is an arrangement of.
    """

    rule: ProductRule
    operator: Kernel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...] | None
    place: Place
    flops: int
    forward: int | None = None
    sources: Sources = ()
    is_weight: bool = False
    input: int | None = None

    def arguments(
        self, tensors: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one run."""

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, Changing):
                return leaf
            return (tensors if leaf.is_tensor else sizes)[leaf.index]

        args, kwargs = pytree.tree_map(filled, (self.args, self.kwargs))
        return tuple(args), dict(kwargs)

    def listed(self, result: Any) -> list[Tensor]:
        """Its results that are tensors."""
        return [result] if self.results is None else [result[index] for index in self.results]


class RoundedGraph:
    """The products of one compiled graph, forward and backward.

    Attributes:
        products: The products.
    """

    def __init__(self, root: str) -> None:
        self.products: list[RoundedProduct] = []
        self._runs = GraphRuns(root)
        # The latest runs: another thread may run the graph meanwhile.
        self._begun: dict[int, GraphRun] = {}
        self._are_parameters: tuple[bool, ...] = ()
        self._callers = Callers()

    def add(self, product: RoundedProduct) -> None:
        """Add a product, which comes last."""
        if product.forward is None:
            self._runs.places[len(self.products)] = product.place
        self.products.append(product)

    def begin(self, inputs: Sequence[Tensor]) -> int:
        """Number of the run that begins; that of nobody's where no session has its products."""
        self._callers.note(is_backward=False)
        run = self._runs.begin()
        if run is None:
            return _NOBODY
        self._are_parameters = tuple(isinstance(tensor, nn.Parameter) for tensor in inputs)
        if len(self._begun) >= _MAX_BEGUN:
            del self._begun[next(iter(self._begun))]
        self._begun[run.number] = run
        return run.number

    def run(
        self, index: int, run: int, tensors: Sequence[Tensor], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Run a product."""
        product = self.products[index]
        if product.forward is not None:
            self._callers.note(is_backward=True)
        args, kwargs = product.arguments(tensors, sizes)
        # The memory of a gradient may be another's by now, within one autograd node.
        forget_copy()
        try:
            with plain_functions():
                return product.listed(self._run(product, index, run, args, kwargs))
        finally:
            forget_copy()

    def _run(
        self,
        product: RoundedProduct,
        index: int,
        run: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not product.rule.multiplies(args, kwargs):
            return run_inside(product.operator, *args, **kwargs)
        first = index if product.forward is None else product.forward
        number = run + first
        recorded, begun = CALLS.get(number), self._begun.get(run)
        session = None
        if recorded is not None:
            session = recorded[0]()
        elif begun is not None and product.forward is None:
            session = begun.session()
        if session is None or not session.is_open:
            return run_inside(product.operator, *args, **kwargs)
        if product.forward is not None and recorded is not None:
            run_as = session.backward_product(product.rule, args, recorded[1], product.sources)
        elif recorded is not None:
            # A checkpoint computes it again.
            run_as = recorded[1].product
        else:
            assert begun is not None, "a session was found by it"
            site = begun.sites[index]
            run_as, extents = session.forward_product(product.rule, site, args)
            if len(self._runs.places) < len(self.products):  # there is a backward graph
                record(number, session.ref, Call(run_as, extents=extents))
        run_as.reads_weight = product.is_weight
        if product.input is not None:
            run_as.reads_weight = product.is_weight or self._are_parameters[product.input]
        return session.execute(run_as, product.operator, args, kwargs)


GRAPHS: list[RoundedGraph] = []


def _product_flops(
    tensors: Any, sizes: Any, run: Any, graph: int, product: int, *, out_val: Any
) -> int:
    return GRAPHS[graph].products[product].flops


def _fake_product(
    tensors: Sequence[Tensor], sizes: Sequence[int], run: Tensor, graph: int, product: int
) -> list[Tensor]:
    rounded = GRAPHS[graph].products[product]
    args, kwargs = rounded.arguments(tensors, sizes)
    return rounded.listed(rounded.operator(*args, **kwargs))


define_operator(
    "begin(Tensor[] inputs, int graph) -> Tensor",
    lambda inputs, graph: torch.tensor(GRAPHS[graph].begin(inputs), dtype=torch.int64),
    lambda inputs, graph: torch.empty((), dtype=torch.int64),
    torch.Tag.flexible_layout,
)
define_operator(
    "product(Tensor[] tensors, SymInt[] sizes, Tensor run, int graph, int product) -> Tensor[]",
    lambda tensors, sizes, run, graph, product: GRAPHS[graph].run(
        product, int(run), tensors, sizes
    ),
    _fake_product,
    # BLAS may add in another order for another stride.
    torch.Tag.needs_exact_strides,
)
# What a plan runs again costs as much as the matmul that it is.
register_flop_formula(torch.ops.lightning_unitscale.product)(_product_flops)
