"""Run the matmuls of a module scaled and in formats, with units measured on an example."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.capture.module_steps import MATMULS, matmuls_of, steps_of
from lightning_unitscale.capture.rollback import detached_copy, restoring
from lightning_unitscale.compiling import is_exporting
from lightning_unitscale.matmuls.compiler_internals import compiling_context, is_inductor
from lightning_unitscale.matmuls.coverage import (
    Coverage,
    CoverageCounter,
    LostFormats,
    lacking_line,
)
from lightning_unitscale.matmuls.fp8_linear import numerics_of
from lightning_unitscale.matmuls.gauge import Gauge
from lightning_unitscale.matmuls.matmul_formats import FP8Linears, SimulateFormat
from lightning_unitscale.matmuls.measurement import Measurement
from lightning_unitscale.matmuls.scaled_methods import AttachedSession, SessionMethod
from lightning_unitscale.matmuls.torch_internals import current_node, is_tracing
from lightning_unitscale.matmuls.units import Units

_KEPT = "lightning_unitscale.session"  # key in the metadata of autograd nodes

Format = SimulateFormat | FP8Linears


def units_of_example(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Units:
    """Run a copy of a module on copies of an example, forward and, with a loss, backward."""
    # Neither the module nor any random state changes. FP16 modules are measured in FP32 as well,
    # because gradients that FP16 rounds to zero measure as zero.
    units, measurement = _measure(module, args, kwargs, is_wide=False)
    if runs_in_fp16(module):
        try:
            _, wide = _measure(module, args, kwargs, is_wide=True)
        except RuntimeError as error:
            warnings.warn(
                f"{type(module).__name__}.forward: it runs in FP16 and not in FP32 "
                f"({str(error).splitlines()[0]}), so units are measured in FP16, where small "
                "gradients are zero. Expected a step without casts to torch.float16 of its "
                "own. Use tensor.to(other.dtype) for them.",
                stacklevel=4,
            )
        else:
            # Matmuls that occur only in FP16 keep their FP16 measurements.
            measurement = replace(
                measurement,
                forward={**measurement.forward, **wide.forward},
                backward={**measurement.backward, **wide.backward},
            )
    units.adopt(measurement)
    return units


def _measure(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_wide: bool
) -> tuple[Units, Measurement]:
    trial = detached_copy(module)
    if (matmuls := matmuls_of(trial)) is not None:
        matmuls.detach()
    if (steps := steps_of(trial)) is not None:
        # A discarded copy needs no compilation and no plan.
        steps.use_executor("eager")
        steps.partition_by(None)
    attached = AttachedSession(trial, ["forward"])
    try:
        with (
            # The copy shares its random state with the module.
            restoring(trial, parameters=False),
            full_precision(trial) if is_wide else contextlib.nullcontext(),
            torch.enable_grad(),
        ):
            given = detached_copy((args, dict(kwargs)))
            if is_wide:
                given = tree_map_only(Tensor, _widened, given)
            output = trial(*given[0], **given[1])
            loss = find_loss(output)
            if loss is not None:
                loss.backward(torch.ones_like(loss))
        units = attached.session.units
        return units, units.send()()
    finally:
        attached.detach()


def find_loss(output: object) -> Tensor | None:
    """Return the scalar loss in a step's output, if there is one."""
    candidates: list[object] = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, Tensor) and candidate.numel() == 1 and candidate.requires_grad:
            return candidate
    return None


def runs_in_fp16(module: nn.Module) -> bool:
    """Check whether a module has FP16 parameters or autocast casts to FP16 now."""
    parameters = list(module.parameters())
    if any(param.dtype == torch.float16 for param in parameters):
        return True
    return any(
        torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == torch.float16
        for device_type in {param.device.type for param in parameters}
    )


@contextlib.contextmanager
def full_precision(trial: nn.Module) -> Iterator[None]:
    """Cast a copy of a module from FP16 to FP32, and turn autocast off within this context."""
    tensors = [*trial.parameters(), *trial.buffers()]
    for tensor in tensors:
        if tensor.dtype == torch.float16:
            tensor.data = tensor.data.float()
    # Steps may cast to an attribute that is FP16, such as a LightningModule's ``dtype``.
    for attributes in map(vars, trial.modules()):
        named = [name for name, value in attributes.items() if value is torch.float16]
        attributes.update(dict.fromkeys(named, torch.float32))
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for device_type in {tensor.device.type for tensor in tensors}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.callback(torch.set_default_dtype, default)
        if default == torch.float16:
            torch.set_default_dtype(torch.float32)
        yield


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


# Dynamo's error has it, if the user wants one graph.
_FULL_GRAPH = (
    "Its matmuls are scaled or rounded as they run, so it is compiled on its own. Leave out "
    "fullgraph=True, or use lightning_unitscale.transforms.compile(module)"
)


class _ForwardMethod(SessionMethod):
    """A stand-in for ``forward`` that deep copies keep, with the same units."""

    # The user's ``torch.compile`` around it, and the method compiled in the same way.
    _compiled: tuple[Any, Any] = (None, None)

    @override
    def call_recorded(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting() or is_tracing():
            return self._method(*args, **kwargs)
        return self._run_compiled(*args, **kwargs)

    @torch.compiler.disable(reason=_FULL_GRAPH)
    def _run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run the separately compiled method in the session."""
        context = compiling_context()
        # Only Inductor's graphs can be rounded.
        if context is None or (self.owner.session.numerics and not is_inductor(context)):
            return self.run_as(self._method, *args, **kwargs)
        if self._compiled[0] is not context:
            self._compiled = context, context(self._method)
        return self.run_as(self._compiled[1], *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.owner, memo).methods["forward"]

    def __reduce__(self) -> Any:
        return self.owner.__reduce__()


class ModuleMatmuls(AttachedSession):
    """The session for a module's ``forward`` that transforms created."""

    method_type = _ForwardMethod

    def __init__(
        self,
        module: nn.Module,
        formats: Sequence[Format],
        *,
        has_units: bool,
        before: Units | None = None,
    ) -> None:
        self.formats = tuple(formats)  # to which its matmuls are rounded, or in which they run
        self._coverage = Coverage()
        self._num_calls = self._counted_call = 0
        self._has_returned = False
        is_fp8 = any(isinstance(each, FP8Linears) for each in formats)
        self._lost = LostFormats("fp8_linears" if is_fp8 else "simulate_format")
        # The example was not checked for FP8's range, so later measurements are not either.
        numerics = numerics_of(formats, measures_range=False, has_units=has_units)
        super().__init__(module, ["forward"], Units(is_used=has_units), numerics)
        vars(module)[MATMULS] = self
        if before is not None:
            before.settle()
            self.session.units.step = before.step
            if before.is_used:
                self.session.units.restore(before.gauge, before.plain, before.lacking)

    @staticmethod
    def add(
        module: nn.Module, formats: Sequence[Format] = (), *, has_new_units: bool = False
    ) -> ModuleMatmuls:
        """Scale a module's matmuls or add formats, and keep earlier units and formats."""
        before = matmuls_of(module)
        if before is None:
            return ModuleMatmuls(module, formats, has_units=has_new_units)
        before.detach()
        units = before.session.units
        return ModuleMatmuls(
            module,
            (*before.formats, *formats),
            has_units=units.is_used or has_new_units,
            before=None if has_new_units else units,
        )

    def attach_again(self) -> None:
        """Attach again after :meth:`detach`, with another ``forward``."""
        units = self.session.units
        ModuleMatmuls(self._module, self.formats, has_units=units.is_used, before=units)

    @property
    def gauge(self) -> Gauge:
        """Return the units in force."""
        self.session.units.settle()
        return self.session.units.gauge

    @property
    def coverage(self) -> Coverage:
        """Return how the matmuls of a call and of its backward pass ran."""
        # It is the first call, or the last one in which matmuls left their format.
        self._read_coverage()
        return self._coverage

    def measure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measure units on an example. Other matmuls are measured when they first run."""
        example = units_of_example(self._module, args, kwargs)
        self.session.units.restore(example.gauge, example.plain, {})

    def explain(self) -> str:
        """Describe how the matmuls of the first call ran, the FP8 layers and the units."""
        self.session.units.settle()
        coverage = replace(self.coverage, lacking=())
        if coverage.counts:
            call = "the first call" if self._counted_call == 1 else f"call {self._counted_call}"
            parts = [f"In {call} {coverage.line()}.", coverage.table()]
        else:
            parts = ["No matmul has run yet: the first call is counted."]
        parts.append(lacking_line(tuple(self.session.units.lacking.values())))
        if self.session.units.is_used:
            parts.append(str(self.gauge))
        for each in self.formats:
            parts.append(each.summary())
            if isinstance(each, FP8Linears):
                parts.append(each.report())
        return "\n\n".join(filter(None, parts))

    @override
    def detach(self) -> None:
        """Restore ``forward``. This object keeps the units."""
        self.session.units.settle()
        super().detach()
        if matmuls_of(self._module) is self:
            del vars(self._module)[MATMULS]

    @override
    def before_call(self) -> None:
        """Adopt late units, and count the first call, or each call with a format."""
        # A call ends with the next one.
        if self._has_returned:
            self._warn_of_lost_formats()
        self._has_returned = False
        if current_node() is None:
            # A recomputed checkpoint must keep its units.
            self.session.receive()
            units = self.session.units
            self.session.adopt(units.received().beyond(units.gauge))
        self._num_calls += 1
        is_counted = self._num_calls == 1 or bool(self.session.numerics)
        self.session.counter = CoverageCounter() if is_counted else None

    @override
    def after_call(self, result: Any) -> None:
        """Warn of a call that ran unscaled, and keep the session for the backward pass."""
        nodes: Any = (tensor.grad_fn for tensor in tensors_in(result))
        for node in filter(None, nodes):
            node.metadata[_KEPT] = self.session
        self._has_returned = True
        self._warn_of_lost_formats()
        # An evaluation without rounding has the same results scaled and unscaled.
        matters = torch.is_grad_enabled() or self.session.format
        if matters and self._num_calls == 1 and (shortfall := self._coverage.shortfall()):
            warnings.warn(f"{type(self._module).__name__}: {shortfall}", stacklevel=6)

    def _read_coverage(self) -> bool:
        """Read the count of the call so far, and return whether it shows anything new."""
        # The first call's count is complete after its backward pass.
        session, counter = self.session, self.session.counter
        if counter is None:
            return False
        if self._num_calls > 1 and self._lost.are_known("forward", counter):
            return False
        self._counted_call = self._num_calls
        self._coverage = counter.result(
            has_units=session.units.is_used,
            lacking=session.units.lacking.values(),
            format=session.format,
        )
        return True

    def _warn_of_lost_formats(self) -> None:
        if self._read_coverage():
            lost = self._lost.new_in("forward", self._coverage, f"call {self._num_calls}")
            if lost:
                warnings.warn(f"{type(self._module).__name__}: {lost}", stacklevel=7)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleMatmuls:
        """Return the matmuls of the copied module, with the same units."""
        module = copy.deepcopy(self._module, memo)
        if id(self) in memo:
            return memo[id(self)]
        # The module's copy may still be an empty object.
        before = copy.deepcopy(self._shadows["forward"].below, memo)
        if before is not None:
            vars(module)["forward"] = before
        formats, units = copy.deepcopy(self.formats, memo), self.session.units
        memo[id(self)] = ModuleMatmuls(module, formats, has_units=units.is_used, before=units)
        return memo[id(self)]

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self._module).__name__}: its matmuls are scaled or rounded, and such a "
            "module cannot be pickled. Expected an untransformed module. Save its state_dict() "
            "instead, or pickle the original module."
        )
