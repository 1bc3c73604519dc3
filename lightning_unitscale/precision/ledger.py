"""Measure at the executed matmuls of a step what rounding each computation does.

A session with a :class:`Ledger` calls a pass for every matmul. A pass sees the operands in their
units, and in a backward matmul also the gradient that arrives at its forward matmul.

Notation: ``y`` is the result of a forward matmul, ``g`` the gradient that arrives at it, ``d`` the
error that rounding adds to a result, ``theta`` the parameters, ``L`` the loss of the step.

- A forward error changes the loss by ``<g, d> + d^T H d / 2``. The first term needs one step. For
  the second, a step adds every error with a random sign ``s``: there ``<g, s d>`` is on average
  ``d^T H d``, since the signs of other matmuls are independent. It is Hutchinson's estimator of the
  trace, over matmuls in place of elements.
- An error ``d`` in the gradient of a tensor ``x`` gives an error ``J^T d`` in the gradient of the
  parameters, with the Jacobian ``J`` of ``x``. For random signs ``r`` of the parameters,
  ``<d, J r>**2`` is on average its squared norm. One forward pass at ``theta + h r`` gives ``J r``
  of all operands.

References:
    Hutchinson, "A stochastic estimator of the trace of the influence matrix" (1989), equation 1.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_unitscale.matmuls.block_rounding import is_parameter
from lightning_unitscale.matmuls.computations import Computation, computations_of, computed_operands
from lightning_unitscale.matmuls.execute import Matmul
from lightning_unitscale.matmuls.measurement import FORWARD, Site
from lightning_unitscale.matmuls.rounding import Numerics, SimulatedMatmuls
from lightning_unitscale.matmuls.torch_internals import Kernel

# Buckets of a sketch. Its error is about sqrt(2 / buckets), 2 %.
_BUCKETS = 2**12
_KEPT = torch.bfloat16  # errors and tangents are kept in this type, since only their size matters
Key = tuple[str, Computation]  # the name of a matmul, and one of its computations
Numbers = dict[Any, Tensor]  # numbers that are still on their device


@dataclass(frozen=True)
class MatmulCall:
    """A matmul that is about to run."""

    matmul: Matmul
    original: Kernel
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def site(self) -> Site:
        """Return the forward matmul."""
        return self.matmul.site

    @property
    def is_forward(self) -> bool:
        """Check whether it is a forward matmul."""
        return self.matmul.slot == FORWARD

    @functools.cached_property
    def computations(self) -> tuple[Computation, ...]:
        """Return its computations."""
        return computations_of(self.site, self.matmul.slot)

    @functools.cached_property
    def operands(self) -> Sequence[Tensor]:
        """Return its operands."""
        operands: Sequence[Tensor] = self.matmul.rule.operands_in(self.args)
        return operands

    @functools.cached_property
    def exact(self) -> Any:
        """Return its result without rounding."""
        return self.original(*self.args, **self.kwargs)

    def rounded(self, numerics: Numerics) -> Any:
        """Return its result in a format."""
        return numerics.run(self.matmul, self.original, list(self.args), dict(self.kwargs))

    def gradients(self, result: Any) -> dict[int, Tensor]:
        """Return the gradients in the result of a backward matmul, by operand, in its layout."""
        computed = computed_operands(self.matmul.slot, len(self.site.roles))
        if isinstance(result, Tensor):
            turned = result.transpose(-2, -1) if self._is_turned else result
            return dict.fromkeys(computed, turned)
        return {index: result[index] for index in computed if result[index] is not None}

    def of(self, computation: Computation, result: Any) -> list[Tensor]:
        """Return the tensors of a result that belong to one of its computations."""
        if self.is_forward:
            return [first_tensor(result)]
        if computation == "weight_gradient" and not isinstance(result, Tensor):
            # A convolution's bias has the gradient that its weight has, summed.
            return [tensor for tensor in result[1:] if tensor is not None]
        gradients = self.gradients(result)
        return [gradients[0]] if len(self.computations) > 1 else list(gradients.values())

    @property
    def arriving(self) -> Tensor:
        """Return the gradient that arrives at the forward matmul, in the layout of its result."""
        gradient = self.operands[self.matmul.is_gradient.index(True)]
        return gradient.transpose(-2, -1) if self._is_turned else gradient

    @property
    def _is_turned(self) -> bool:
        # For a column-major operand autograd computes the transposed gradient: ``b g^T`` in place
        # of ``g b^T``, and ``g^T a`` in place of ``a^T g``.
        if len(self.operands) != 2 or min(map(Tensor.dim, self.operands)) < 2:
            return False
        if self.matmul.rule.sources:
            return False
        computed = computed_operands(self.matmul.slot, len(self.site.roles))
        return self.matmul.is_gradient[0] == (1 in computed)


def first_tensor(result: Any) -> Tensor:
    """Return the product in a result, which an attention returns with its saved values."""
    tensor: Tensor = result if isinstance(result, Tensor) else result[0]
    return tensor


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of the products of two tensors' elements, in FP64 where the device has it."""
    dtype = torch.float32 if first.device.type == "mps" else torch.float64
    return (first.float() * second.float()).sum(dtype=dtype)


def energy(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares of several tensors."""
    return torch.stack([dot(tensor, tensor) for tensor in tensors]).sum()


@functools.lru_cache(maxsize=8)
def _signs(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    signs = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8)
    return (2 * signs - 1).to(device)


def sketch(tensors: Sequence[Tensor]) -> Tensor:
    """Return a few linear functions of the tensors. On average they keep the distances."""
    sketches = []
    for tensor in tensors:
        flat = tensor.detach().float().reshape(-1)
        signed = flat * _signs(flat.numel(), flat.device)
        padded = torch.nn.functional.pad(signed, (0, -flat.numel() % _BUCKETS))
        sketches.append(padded.view(-1, _BUCKETS).sum(0))
    return torch.cat(sketches)


class Ledger(Numerics):
    """Passes every matmul of a session to the pass in progress, which returns its result."""

    name = "a format of the ledger"
    needs_units = False

    def __init__(self) -> None:
        self.run_pass: Callable[[MatmulCall], Any] = lambda call: call.exact
        self.flops = 0  # of the matmuls that ran, those for measurement included

    @override
    def why_not(self, *_: Any) -> str | None:
        return None

    @override
    def run(self, matmul: Matmul, original: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
        out: Tensor | None = kwargs.get("out")

        def counted(*args: Any, **kwargs: Any) -> Any:
            if out is not None:
                kwargs["out"] = out.clone()
            result = original(*args, **kwargs)
            self.flops += matmul.rule.flops(args, result)
            return result

        result = self.run_pass(MatmulCall(matmul, counted, tuple(args), kwargs))
        return result if out is None else out.copy_(result)


@dataclass
class Computed:
    """One computation of the step, as it ran unrounded."""

    name: str
    module: str
    computation: Computation
    flops: int
    reason: str | None  # why it does not run in the module's format


@dataclass
class BasePass:
    """The unrounded step: what each rounding adds, and its first-order effect on the loss."""

    formats: Mapping[str, SimulatedMatmuls]
    why_not: Callable[[MatmulCall], str | None]
    computed: dict[Key, Computed] = field(default_factory=dict)
    energies: Numbers = field(default_factory=dict)  # of the results, by key
    sketches: Numbers = field(default_factory=dict)  # of the results, by key
    added: Numbers = field(default_factory=dict)  # energies of errors, by format and key
    first_order: Numbers = field(default_factory=dict)  # <g, d> by format and name
    eps: float = 0.0  # of the coarsest type of an operand
    # By name: the errors of the forward results, until the gradient arrives.
    _errors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __call__(self, call: MatmulCall) -> Any:
        """Measure a matmul, and return its result."""
        name, result = call.site.name, call.exact
        rounded = {word: call.rounded(each) for word, each in self.formats.items()}
        reason = self.why_not(call)
        self.eps = max(self.eps, *(torch.finfo(each.dtype).eps for each in call.operands))
        flops = call.matmul.rule.flops(call.args, result) // len(call.computations)
        for computation in call.computations:
            key = name, computation
            parts = call.of(computation, result)
            # A checkpoint runs a forward matmul again. Several matmuls may be one computation.
            if key not in self.computed or call.is_forward:
                computed = Computed(name, call.site.module, computation, flops, reason)
                self.computed[key] = computed
                self.energies[key], self.sketches[key] = energy(parts), sketch(parts)
            for word, other in rounded.items():
                errors = _differences(call.of(computation, other), parts)
                self.added[word, key] = energy(errors)
                if call.is_forward:
                    self._errors.setdefault(name, {})[word] = errors[0].to(_KEPT)
        if not call.is_forward:
            for word, error in self._errors.pop(name, {}).items():
                self.first_order[word, name] = dot(call.arriving, error)
        return result


def _differences(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return [one.float() - other.float() for one, other in zip(ones, others, strict=True)]


def sign_of(name: str, index: int) -> float:
    """Return the random sign of a matmul in a step. The steps of a pair have opposite ones."""
    sign = 1.0 if zlib.crc32(f"{index // 2}/{name}".encode()) & 1 else -1.0
    return sign if index % 2 else -sign


@dataclass
class SignedPass:
    """A step whose forward matmuls have their rounding errors with random signs."""

    format: SimulatedMatmuls
    index: int
    products: Numbers = field(default_factory=dict)  # <g, s d> by name
    _errors: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, call: MatmulCall) -> Any:
        """Add the error to a forward result, or meet the gradient that arrives at it."""
        name, result = call.site.name, call.exact
        if not call.is_forward:
            if (error := self._errors.pop(name, None)) is not None:
                self.products[name] = dot(call.arriving, error)
            return result
        first, sign = first_tensor(result), sign_of(name, self.index)
        error = sign * (first_tensor(call.rounded(self.format)) - first)
        self._errors[name] = error.to(_KEPT)
        first.add_(error)
        return result


@dataclass
class MovedPass:
    """A forward pass at other parameters, which keeps the operands that depend on them."""

    operands: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def __call__(self, call: MatmulCall) -> Any:
        """Keep the operands of a matmul."""
        if call.is_forward:
            for index, tensor in enumerate(call.operands):
                if not is_parameter(tensor):
                    # A later operation may write into it.
                    self.operands[call.site.name, index] = tensor.detach().clone()
        return call.exact


@dataclass
class TangentPass:
    """An unrounded step that multiplies errors of gradients by the tangents of their tensors."""

    formats: Mapping[str, SimulatedMatmuls]
    moved: Sequence[dict[tuple[str, int], Tensor]]  # operands at other parameters
    step: float  # how far the parameters were moved
    measures_added: bool = False
    products: Numbers = field(default_factory=dict)  # <d, J r> by direction, format and key
    added: Numbers = field(default_factory=dict)  # energies of errors, by format and key
    _tangents: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)

    def __call__(self, call: MatmulCall) -> Any:
        """Find the tangents of the operands, or multiply them by the errors of their gradients."""
        if call.is_forward:
            for index, tensor in enumerate(call.operands):
                place = call.site.name, index
                # A checkpoint runs a forward matmul again.
                if place in self.moved[0]:
                    before = tensor.detach().float()
                    self._tangents[place] = [
                        ((operands.pop(place).float() - before) / self.step).to(_KEPT)
                        for operands in self.moved
                    ]
        elif (wanted := self._wanted(call)) or self.measures_added:
            for word, format in self.formats.items():
                result = call.rounded(format)
                self._multiply(call, word, wanted, result)
                for computation in call.computations if self.measures_added else ():
                    parts = call.of(computation, result), call.of(computation, call.exact)
                    key = call.site.name, computation
                    self.added[word, key] = energy(_differences(*parts))
        return call.exact

    def _multiply(
        self, call: MatmulCall, word: str, wanted: Sequence[tuple[Computation, int]], result: Any
    ) -> None:
        """Multiply the errors of a rounded result by the tangents of the operands."""
        rounded, exact = call.gradients(result), call.gradients(call.exact)
        for computation, index in wanted:
            error = rounded[index].float() - exact[index].float()
            key = call.site.name, computation
            for number, tangent in enumerate(self._tangents[call.site.name, index]):
                product = dot(error, tangent)
                if (sum_before := self.products.get((number, word, key))) is not None:
                    product = product + sum_before
                self.products[number, word, key] = product

    def _wanted(self, call: MatmulCall) -> list[tuple[Computation, int]]:
        """Return the operands with tangents, and the computation of their gradient."""
        is_joint = len(call.computations) > 1
        return [
            (computation, index)
            for computation in call.computations
            for index in computed_operands(call.matmul.slot, len(call.site.roles))
            if (call.site.name, index) in self._tangents
            and (not is_joint or (index == 1) == (computation == "weight_gradient"))
        ]


@dataclass
class TogetherPass:
    """A step in which several computations are rounded at once."""

    format: SimulatedMatmuls
    is_rounded: Callable[[Key], bool]
    sketches: Numbers = field(default_factory=dict)  # of unrounded results, by key; empty to skip
    inherited: Numbers = field(default_factory=dict)  # energies of the errors of operands

    def __call__(self, call: MatmulCall) -> Any:
        """Round a matmul, and measure the error that its operands arrive with."""
        keys = [(call.site.name, computation) for computation in call.computations]
        for key in keys:
            if (before := self.sketches.get(key)) is not None:
                now = sketch(call.of(key[1], call.exact))
                self.inherited[key] = energy([now - before])
        chosen = [self.is_rounded(key) for key in keys]
        if not any(chosen):
            return call.exact
        rounded = call.rounded(self.format)
        if all(chosen):
            return rounded
        first, second = (rounded, call.exact) if chosen[0] else (call.exact, rounded)
        return first[0], *second[1:]


def relative(error: float, size: float) -> float:
    """Return the ratio of two norms, from their squares."""
    return math.sqrt(max(error, 0.0) / size) if size else 0.0
