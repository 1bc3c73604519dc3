"""Run linear layers in real FP8, and keep FP8 operands for the backward pass.

Below autograd a matmul cannot choose the tensors to save. So ``linear`` itself is overridden, above
autograd. This holds for layers whose units and formats were known before the step began, because
a checkpoint's second run has to save the same tensors as the first one. Graphs that the user
compiles save the tensors that the compiler chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from typing_extensions import override

from lightning_unitscale.capture.operators import RULE_OF
from lightning_unitscale.formats import get_number_format
from lightning_unitscale.functional.low_precision import (
    GRADIENTS,
    OPERAND,
    GradientFormat,
    Scaling,
    fp8_linear,
    fp8_matrices,
    scaled_matmul,
    to_largest,
    undoing,
)
from lightning_unitscale.functional.scale import Factor
from lightning_unitscale.matmuls.block_rounding import is_parameter
from lightning_unitscale.matmuls.calls import show
from lightning_unitscale.matmuls.computations import EXEMPT
from lightning_unitscale.matmuls.execute import Matmul
from lightning_unitscale.matmuls.matmul_formats import (
    NO_LINEAR,
    FP8Linears,
    SimulateFormat,
    TensorKind,
)
from lightning_unitscale.matmuls.measurement import (
    FORWARD,
    Site,
    Unrepresentable,
    stored_row,
    unrepresentable_among,
)
from lightning_unitscale.matmuls.owners import asking_session
from lightning_unitscale.matmuls.rounding import (
    FlushedOperands,
    Numerics,
    SimulatedMatmuls,
    grid_factor,
)
from lightning_unitscale.matmuls.session import LOCAL, SESSION, MatmulSession
from lightning_unitscale.matmuls.sites import frames
from lightning_unitscale.matmuls.torch_internals import (
    MODULE_CALL,
    Kernel,
    current_node,
    has_subclass,
    last_sequence_number,
)
from lightning_unitscale.scales.layout import Direction
from lightning_unitscale.scales.transfer import joint_copy

# How a layer runs in a compiled graph, which is compiled again for another one.
Mode = tuple[Scaling, GradientFormat]
# The operators that compute a linear layer and its gradients.
LAYER_OPERATORS = ("mm", "addmm")
_LINEAR = "linear"
_OPERAND_FORMAT = "E4M3FN"
_ROLES = ("input", "weight")
_MM = RULE_OF["mm"]


class FP8Matmuls(Numerics):
    """Runs linear layers, and both their gradients, in FP8 with the units of their operands."""

    name = "FP8"

    def __init__(self, config: FP8Linears, measures_range: bool) -> None:
        self._config = config
        self._measures_range = measures_range
        self.widens = config.widens  # whether operands are checked in every step
        self._rows: list[tuple[Direction, str, Tensor]] = []
        self._sent: Callable[[], Unrepresentable] | None = None
        self._flushed = FlushedOperands()
        # The properties that each matmul was decided by, by its name.
        self._decided_by: dict[str, tuple[Any, ...]] = {}

    @property
    def is_active(self) -> bool:
        """Check whether the running steps are in FP8."""
        return self.is_training or self._config.in_evaluation

    def why_not(self, matmul: Matmul, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Return why a matmul is not in FP8; empty in steps that are not."""
        if not self.is_active:
            return ""
        name = matmul.site.name
        is_made = matmul.rule.operator in LAYER_OPERATORS and "out" not in kwargs
        if matmul.slot == FORWARD:
            read, weight = matmul.rule.operands_in(args)[:2]

            def why_not() -> str | None:
                if not is_made or not _reads_weight(matmul, weight):
                    return NO_LINEAR
                return self._config.why_not(name, matmul.site.module, read, weight, kwargs)

            self._decide(name, (is_made, read.dtype, weight.dtype, weight.shape), why_not)
        reason = self._config.decisions.get(name, NO_LINEAR)
        if reason is None and self._config.exempts(matmul.site, matmul.slot):
            return EXEMPT
        return reason if is_made else reason or NO_LINEAR

    def _decide(
        self, name: str, decided_by: tuple[Any, ...], why_not: Callable[[], str | None]
    ) -> None:
        """Decide on a matmul, unless it was decided for its shapes and types."""
        # A later step may have others.
        if name not in self._config.decisions or self._decided_by.get(name) != decided_by:
            self._decided_by[name] = decided_by
            self._config.decisions[name] = why_not()

    def compiled_as(self, site: Site, read: TensorKind, weight: TensorKind) -> Mode | None:
        """Return how a compiled graph runs a layer; ``None`` if it calls :meth:`run`."""
        config, name = self._config, site.name
        if config.widens:
            return None  # :meth:`run` checks its operands
        names = *site.operand_names, name
        if not self.is_active or self.awaits(names) or config.exempts(site):
            return None
        decided_by = (True, read.dtype, weight.dtype, weight.shape)
        why_not = functools.partial(config.why_not, name, site.module, read, weight, {})
        self._decide(name, decided_by, why_not)
        if config.decisions[name] is not None:
            return None
        return config.scaling, config.gradient_of(name)

    def factors(self, site: Site, step: int) -> list[float]:
        """Return the factors on a layer's operands, and on its gradient, before the cast."""
        units, names = (*site.log2_units, site.log2_gamma), (*site.operand_names, site.name)
        pairs = zip(units, names, strict=True)
        return [_factor(self._config, unit or 0, name, step) for unit, name in pairs]

    def measure(self, matmul: Matmul, args: Sequence[Any], *, is_first: bool) -> None:
        """Measure how much FP8 would lose of scaled operands, for :meth:`fit`."""
        # Decide at once at the first call, so that an operand that does not fit is never cast.
        if not self._measures_range:
            return
        is_made = matmul.rule.operator in LAYER_OPERATORS
        name = matmul.site.name
        is_out = self._config.decisions.get(name) is not None
        may_return = self._config.widens and name in self._config.unfit.matmuls
        if not is_made or (is_out and not may_return):
            # It is not in FP8 anyway.
            self._config.unseen.difference_update(matmul.names)
            return
        operands = matmul.rule.operands_in(args)
        places = [
            (operands[index].detach().float() * 2.0**-unit, is_gradient, name)
            for index, (_, unit, is_gradient, name) in enumerate(matmul.places())
            if matmul.known[index] is not None
        ]
        for stored, is_gradient, name in places:
            direction: Direction = "backward" if is_gradient else "forward"
            self._rows.append((direction, name, stored_row(stored, direction)))
        if is_first:
            self._config.leave_out(self._send()())
        for stored, is_gradient, name in places:
            format = self._config.gradient_of(matmul.site.name) if is_gradient else _OPERAND_FORMAT
            self._flushed.measure(name, stored, get_number_format(format))

    @override
    def await_units(self, names: Iterable[str]) -> None:
        if self._measures_range:
            self._config.unseen.update(names)

    @override
    def awaits(self, names: Sequence[str]) -> bool:
        unseen = self._config.unseen
        return bool(unseen) and not unseen.isdisjoint(names)

    @override
    def receive(self) -> Unrepresentable:
        sent, self._sent = self._sent, None
        found = Unrepresentable() if sent is None else sent()
        if self._rows:
            is_late = self._rows[0][2].device.type == "cuda" and not self._config.widens
            # Units stay until a recalibration.
            arrived = self._send(awaits_units=not self._config.widens)
            if is_late:
                self._sent = arrived
            else:
                found = found.joined(arrived())
        return self._config.leave_out(found)

    def fit(
        self,
        joint: Callable[[Unrepresentable], Unrepresentable],
        *,
        readmits: bool = False,
    ) -> Unrepresentable:
        """Leave measured operands that do not fit out of FP8, or out of its finer format."""
        if self._config.widens and readmits:
            measured = {name.partition(":")[0] for _, name, _ in self._rows}
            found, out = self._send()(), self._config.unfit
            # A rank that did not run a matmul leaves it unchanged.
            kept = Unrepresentable(
                {name: why for name, why in out.matmuls.items() if name not in measured},
                {name: why for name, why in out.gradients.items() if name not in measured},
            )
            return self._config.readmit(joint(kept.joined(found)))
        # Matmuls that one rank has left out in this step are left out on all ranks.
        before = self._config.unfit
        arrived = self._send(awaits_units=not self._config.widens)
        self._config.leave_out(joint(before.joined(arrived())))
        return self._config.unfit.without(before)

    def _send(self, *, awaits_units: bool = True) -> Callable[[], Unrepresentable]:
        """Start the transfer of the latest measurements."""
        rows, self._rows = self._rows, []
        if not rows:
            return Unrepresentable
        copy = joint_copy([row for *_, row in rows])

        def arrived() -> Unrepresentable:
            numbers = copy.numbers().tolist()
            read = [(*names, row) for (*names, _), row in zip(rows, numbers, strict=True)]
            # A tensor of zeros gives no information about the format.
            self._config.unseen -= {name for _, name, row in read if row[0] > 0.0}
            return unrepresentable_among(read, awaits_units=awaits_units)

        return arrived

    def take_flushed(self) -> str:
        """Return operands of which many elements become zero in their format."""
        return self._flushed.take(lambda name: self._config.runs(name.partition(":")[0]))

    def run(self, matmul: Matmul, original: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run a matmul in FP8."""
        config, site, step = self._config, matmul.site, matmul.step
        first, second = matmul.rule.operands
        if args[first].shape[1] != args[second].shape[0]:
            return original(*args, **kwargs)  # it raises torch's error; FP8 would pad them
        casts: list[Tensor] = []
        factors: list[Factor] = []
        for position, unit, is_gradient, name in matmul.places():
            # The hardware multiplies no two matrices in E5M2.
            is_wide = is_gradient and not any(cast.dtype == GRADIENTS["E5M2"] for cast in casts)
            dtype = GRADIENTS[config.gradient_of(site.name)] if is_wide else OPERAND
            matrix = args[position] if position == first else args[position].t()
            if config.widens and self.is_training:
                direction: Direction = "backward" if is_gradient else "forward"
                stored = args[position].detach().float() * 2.0**-unit
                self._rows.append((direction, name, stored_row(stored, direction)))
            is_dynamic = config.scaling == "dynamic"
            factor = to_largest(matrix, dtype) if is_dynamic else _factor(config, unit, name, step)
            factors.append(factor)
            casts += fp8_matrices(matrix, factor, dtype)
        # Gradients are recorded in a backward pass only for gradients of gradients.
        config.is_recorded |= matmul.slot != FORWARD and torch.is_grad_enabled()
        tensor = args[first]
        scale = undoing(factors[0], factors[1], tensor)
        is_fast = not any(matmul.is_gradient)
        result = scaled_matmul(casts[0], casts[1], scale, tensor.dtype, fast=is_fast)
        return result.add_(args[0]) if matmul.rule.addends else result

    def run_layer(
        self, matmul: Matmul, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Run a linear layer so that it keeps FP8 for its backward pass."""
        site, is_constant = matmul.site, self._config.scaling == "constant"
        factors = self.factors(site, matmul.step) if is_constant else []
        gradient_format = self._config.gradient_of(site.name)
        return fp8_linear(
            input, weight, bias, input.dtype, *factors, gradient_format=gradient_format
        )


def _factor(config: FP8Linears, log2_unit: int, name: str, step: int) -> float:
    """Return the factor by which a tensor is multiplied before the cast, with constant scales."""
    return 2.0**-log2_unit * grid_factor(config.moving_grid, name, step)


def numerics_of(
    formats: Iterable[SimulateFormat | FP8Linears | None],
    *,
    measures_range: bool,
    has_units: bool = True,
) -> list[Numerics]:
    """Return the numerics of some formats. Matmuls in FP8 are not rounded again."""
    formats = list(formats)
    simulated = [each for each in formats if isinstance(each, SimulateFormat)]
    return [
        *(FP8Matmuls(each, measures_range) for each in formats if isinstance(each, FP8Linears)),
        *(
            [SimulatedMatmuls(*simulated, measures_range=measures_range, has_units=has_units)]
            if simulated
            else []
        ),
    ]


def fp8_of(session: MatmulSession) -> FP8Matmuls | None:
    """Return the numerics that run a session's layers in FP8, or ``None``."""
    return next((each for each in session.numerics if isinstance(each, FP8Matmuls)), None)


def _reads_weight(matmul: Matmul, operand: Tensor) -> bool:
    """Check whether the second operand of a matmul is the weight of a linear layer."""
    if matmul.reads_weight is not None:
        return matmul.reads_weight
    call = next((frame for frame in frames() if frame.f_code is MODULE_CALL), None)
    layer = None if call is None else call.f_locals["self"]
    return is_weight(matmul.site.name, operand, layer) or is_parameter(operand)


def is_weight(name: str, weight: Tensor, layer: nn.Module | None) -> bool:
    """Check by its shape whether a matrix is made of a parameter of the layer that reads it."""
    # ``F.linear(x, 2 * w)`` and ``x @ y.t()`` are the same operation.
    if layer is None or not name.rpartition(".")[2].startswith(_LINEAR):
        return False
    shape = weight.shape[::-1]
    own = layer.parameters(recurse=False)
    return isinstance(layer, nn.Linear) or any(param.shape == shape for param in own)


def layer_kernel(original: Kernel) -> Kernel:
    """Make a kernel of ``linear``, above autograd, that keeps FP8 for the backward pass."""

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        session, node = SESSION.get(), current_node()
        if session is None and node is not None:
            session, _ = asking_session(node)
        result = None
        if session is not None and not LOCAL.is_inside:
            result = _run_layer(session, node, input, weight, bias)
        return original(input, weight, bias) if result is None else result

    return linear


def _run_layer(
    session: MatmulSession, node: Any, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor | None:
    """Run a layer in FP8; ``None`` if it is not in FP8, or not everything is known of it."""
    numerics = fp8_of(session)
    if numerics is None or session.units.is_looking or not torch.is_grad_enabled():
        return None
    if numerics.widens or numerics._config.is_recorded or forward_ad._current_level >= 0:
        return None  # its three matmuls check their operands, and can be differentiated
    if not (input.requires_grad or weight.requires_grad) or has_subclass((input, weight)):
        return None
    sites, operands = session.sites, (input, weight.t())
    run = sites.run_of(node)
    site = None if run is None else sites.peek(_LINEAR, run)
    if run is None or site is None or not site.is_settled or input.shape[-1:] != weight.shape[1:]:
        return None
    names, step = site.operand_names, session.units.rounding_step
    matmul = Matmul(_MM, site, FORWARD, site.log2_units, (False, False), names, step)
    if numerics.awaits((*names, site.name)) or numerics._config.exempts(site):
        return None
    if numerics.why_not(matmul, operands, {}) is not None:
        return None
    sites.find(_LINEAR, _ROLES, run)
    if session.counter is not None:
        flops = _MM.flops(operands, None)
        session.counter.add_with_gradients(site.module, "format", "", flops, operands)
    first_node = last_sequence_number() + 1
    result = numerics.run_layer(matmul, input, weight, bias)
    show(site, _MM, operands, first_node, session.spacing)
    return result
