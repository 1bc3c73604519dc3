"""Products of compiled graphs in formats: operators that do what a kernel does in eager mode.

Whether a product runs in a format, and in which units, is decided whenever it runs, so a decision
of FP8's compiles nothing again. A graph begins with one operator that finds the session; its result
is a number that goes with what is saved for the backward pass, so that a backward product knows the
run of the forward graph that it belongs to: its units, its step, its random numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_unitscale.dispatch.calls import CALLS, Call, node_key, record
from lightning_unitscale.dispatch.compiled_callers import Callers
from lightning_unitscale.dispatch.measurement import Site
from lightning_unitscale.dispatch.nodes import NodeKey, keys_of
from lightning_unitscale.dispatch.owners import INSTALLED, running_session
from lightning_unitscale.dispatch.products import RULES, ProductRule, Sources
from lightning_unitscale.dispatch.session import ProductSession, run_inside
from lightning_unitscale.dispatch.tensors import forget_copy
from lightning_unitscale.dispatch.torch_internals import (
    Kernel,
    codes,
    compiled_parts,
    current_node,
    define_operator,
    is_by_inductor,
    keeping_whole,
    plain_functions,
)

# Numbers of products in runs, by which the backward pass finds the calls. A run has as many as a
# graph has products, with room between two runs.
_MAX_PRODUCTS = 2**16
_RUNS = itertools.count(_MAX_PRODUCTS, _MAX_PRODUCTS)
# Runs of one graph whose backward pass may still come, and those that may go on, one in a thread.
_MAX_RUNS = 2**12
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
        word: What it is called.
        roles: What its operands are called.
        path: Path of its module in the run that was compiled.
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
    word: str
    roles: tuple[str, ...]
    path: str
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


@dataclass(frozen=True)
class _Begun:
    """A run of a graph.

    Attributes:
        session: Whose it is.
        sites: The sites of its forward products.
    """

    session: weakref.ref[ProductSession]
    sites: dict[int, Site]


class RoundedGraph:
    """The products of one compiled graph, forward and backward.

    Args:
        root: Path of the module within which it was compiled.

    Attributes:
        products: The products.
    """

    def __init__(self, root: str) -> None:
        self.products: list[RoundedProduct] = []
        self._root = root
        # The latest runs: another thread may run the graph meanwhile.
        self._begun: dict[int, _Begun] = {}
        self._are_parameters: tuple[bool, ...] = ()
        self._has_backward = False
        # Runs by the key of their autograd node.
        self._runs: dict[NodeKey, int] = {}
        self._callers = Callers()

    def begin(self, inputs: Sequence[Tensor]) -> int:
        """Number of the run that begins; that of nobody's where no session has its products."""
        self._callers.note(is_backward=False)
        session, node = running_session(), current_node()
        run = None if session is None else session.sites.run_of(node)
        if run is None and node is not None:
            # Of the backward graph, where a memory budget leaves nothing but the inputs.
            known = (self._runs[key] for key in keys_of(node) if key in self._runs)
            return next(known, _NOBODY)
        if session is None or run is None or not session.is_open:
            return _NOBODY
        sites = {
            # Modules of one class share what was compiled of the first.
            index: session.sites.find(
                product.word,
                product.roles,
                replace(run, path=_moved(product.path, self._root, run.path)),
            )
            for index, product in enumerate(self.products)
            if product.forward is None
        }
        self._has_backward = len(sites) < len(self.products)
        self._are_parameters = tuple(isinstance(tensor, nn.Parameter) for tensor in inputs)
        number = next(_RUNS)
        if len(self._begun) >= _MAX_BEGUN:
            del self._begun[next(iter(self._begun))]
        self._begun[number] = _Begun(session.ref, sites)
        if self._has_backward:
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            if (key := node_key(())) is not None:
                self._runs[key] = number
        return number

    def run(
        self, index: int, run: int, tensors: Sequence[Tensor], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Run a product.

        Args:
            index: Which one.
            run: Number of the graph's run that it belongs to.
            tensors: The tensors among its arguments.
            sizes: The numbers among its arguments that change.
        """
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
            if self._has_backward:
                record(number, session.ref, Call(run_as, {}, (), extents=extents))
        run_as.reads_weight = product.is_weight
        if product.input is not None:
            run_as.reads_weight = product.is_weight or self._are_parameters[product.input]
        return session.execute(run_as, product.operator, args, kwargs)


def _moved(path: str, root: str, new_root: str) -> str:
    """The path below one module, below another one."""
    if path != root and not path.startswith(f"{root}." if root else ""):
        return path
    rest = path[len(root) :].lstrip(".")
    return ".".join(filter(None, (new_root, rest)))


# Sessions that round, and have begun a step.
_met: weakref.WeakSet[ProductSession] = weakref.WeakSet()


def rounding_compiled(session: ProductSession) -> AbstractContextManager[Any]:
    """A context for a step in which what the user has compiled is rounded, if anything is.

    What was compiled before rounds nothing, so it is compiled again in the first step, and Inductor
    takes small products to pieces. What another backend compiles runs uncompiled.

    Args:
        session: Whose step it is.
    """
    module = session.sites.module
    if module is None or not session.numerics:
        return contextlib.nullcontext()
    parts = compiled_parts(module)
    is_first = session not in _met
    _met.add(session)
    by_inductor = all(map(is_by_inductor, parts))
    if is_first and by_inductor:
        # Functions that a module calls may be compiled as well.
        if parts or codes() is not None:
            torch.compiler.reset()
        INSTALLED.callback(keeping_whole([rule.operator for rule in RULES]))
    if by_inductor:
        return contextlib.nullcontext()
    if is_first:
        warnings.warn(
            f"{type(module).__name__} has parts that were compiled by another backend than "
            "Inductor, whose products cannot be rounded, so they run uncompiled; expected "
            "torch.compile(backend='inductor'), its default, or none.",
            stacklevel=4,
        )
    return torch.compiler.set_stance("force_eager")


GRAPHS: list[RoundedGraph] = []


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
