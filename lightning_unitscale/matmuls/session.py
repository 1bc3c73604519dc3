"""Scale every matmul that a module's steps run, forward and backward.

A session belongs to one module. While one of the module's steps is active on a thread, the
overridden kernels (``kernels.py``) pass their calls to it. A backward matmul finds the session by
the number of its forward matmul's autograd node, on any thread. Nothing is captured and nothing
runs twice. A matmul without units is measured when it first runs.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.operators import MatmulRule, Sources
from lightning_unitscale.capture.patches import opened_layers
from lightning_unitscale.matmuls.autograd_nodes import HandedOn, thread_number
from lightning_unitscale.matmuls.calls import (
    Call,
    making,
    may_belong_to,
    remember,
    show,
    slot_of,
    sources_of,
)
from lightning_unitscale.matmuls.coverage import NO_UNIT, CoverageCounter, Kind
from lightning_unitscale.matmuls.execute import Matmul, forget_copy, least_size, run_in_units
from lightning_unitscale.matmuls.measurement import (
    FORWARD,
    Extent,
    Extents,
    Measurement,
    Site,
    Unrepresentable,
)
from lightning_unitscale.matmuls.rounding import Numerics
from lightning_unitscale.matmuls.sites import LOSS, Run, Sites, runs_in_graph
from lightning_unitscale.matmuls.steady import note_backward, note_forward
from lightning_unitscale.matmuls.torch_internals import Kernel, graph_task
from lightning_unitscale.matmuls.units import Units

_Args = tuple[Any, ...]
# The session of forward matmuls, and of the backward passes that a step calls.
SESSION: HandedOn[MatmulSession | None] = HandedOn("session", None)


class _ThreadState(threading.local):
    """The state of one thread."""

    # The session whose step continues after its module's call: the user's loop may compute its
    # loss there.
    after_call: weakref.ref[MatmulSession] | None = None
    is_inside: bool = False  # in a matmul, whose inner kernels are not scaled again


LOCAL = _ThreadState()


def run_inside(function: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Call a function whose inner matmuls are neither scaled nor counted."""
    previous, LOCAL.is_inside = LOCAL.is_inside, True
    try:
        return function(*args, **kwargs)
    finally:
        LOCAL.is_inside = previous


class MatmulSession:
    """The matmuls of one module's steps, with their units."""

    def __init__(
        self, module: nn.Module, boundary: CodeType, units: Units, numerics: Sequence[Numerics] = ()
    ) -> None:
        self.ref = weakref.ref(self)  # always the same object, so ``is`` compares sessions
        self.units = units
        self.numerics = tuple(numerics)  # the formats that round matmuls
        self.sites = Sites(module, boundary, units)
        self.counter: CoverageCounter | None = None  # counts the matmuls that run, if it is set
        self.is_open = True  # until :meth:`close`
        self.is_after_call = False  # whether a step continues after a call, until :meth:`end_step`
        # The module's captured steps, if it has any. Weak, as they keep the module alive.
        self.captured: weakref.ref[ModuleSteps] | None = None
        self.threads: list[int] = []  # numbers of the threads that run a call

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the forward matmuls of this thread in the session within this context."""
        self.threads.append(thread_number())
        try:
            # In evaluation, an encoder layer may run as one kernel, which cannot be rounded.
            with SESSION.being(self), making(self.ref), opened_layers(bool(self.format)):
                yield
        finally:
            self.threads.remove(thread_number())

    @property
    def format(self) -> str:
        """Return the name of the active format, or an empty string if nothing is rounded."""
        return next((numerics.name for numerics in self.numerics if numerics.is_active), "")

    @property
    def spacing(self) -> tuple[float, float]:
        """Return the coarsest spacing of the active formats' numbers near 1: values, gradients."""
        active = [numerics.spacing for numerics in self.numerics if numerics.is_active]
        forward, backward = zip((0.0, 0.0), *active, strict=True)
        return max(forward), max(backward)

    def begin_step(self, *, is_training: bool = True) -> None:
        """Begin a step, and restart the numbering of its matmuls."""
        self.sites.begin()
        forget_copy()
        self.units.begin_step(is_training=is_training)

    def end_step(self) -> None:
        """End the step, so that later matmuls outside any call do not belong to it."""
        if self.is_after_call:
            self.is_after_call = False
            self.sites.end()

    def close(self) -> None:
        """Drop all measurements. Call ``close_session`` instead, which calls this."""
        self.is_open = False
        self.end_step()
        self.units.clear()
        forget_copy()

    def run(
        self,
        rule: MatmulRule,
        original: Kernel,
        args: _Args,
        kwargs: dict[str, Any],
        node: Any,
        call: Call | None,
        frame: FrameType | None,
    ) -> Any:
        """Run a matmul of a step of the module, forward or backward."""
        if kwargs or rule.mask is not None:
            rule = rule.reading(args, kwargs)
        operands = rule.operands_in(args)
        size = least_size(operands)
        if node is not None:
            run = None if frame is None else self.sites.run_of(node, frame)
        elif SESSION.get() is self:
            run = self.sites.forward_run(frame)
            if size:
                see_uncaptured(self, operands, in_step=True)
        else:
            run = LOSS if graph_task() < 0 else None
        if size is None:
            result = run_inside(original, *args, **kwargs)
            is_complex = any(operand.is_complex() for operand in operands)
            if self.counter is not None and is_complex and run is not None:
                flops = 4 * rule.flops(args, result)
                reason = "complex numbers"
                self.counter.add_with_gradients(run.path, "plain", reason, flops, operands)
            return result
        multiplies = size > 0 and len(operands) > 1 and not (kwargs and rule.is_no_matmul(kwargs))
        if run is None and call is not None and may_belong_to(rule, call):
            call.num_visits += 1
            if not multiplies:
                return run_inside(original, *args, **kwargs)
            sources = sources_of(rule, call, operands)
            matmul = self.backward_matmul(rule, args, call, sources)
            if not kwargs:
                note_backward(call, rule, sources, matmul, original, args)
        else:
            caller = "hook" if node is None else node.name()
            suffix = f"@{caller}" if run is None else ""
            word, roles = rule.name_in(args)
            site = self.sites.find(word + suffix, roles, run or Run("", self.sites.episode))
            if not multiplies:
                if run is not None and size == 0:
                    self.units.lack(site, (*site.operand_names, site.name))
                return run_inside(original, *args, **kwargs)
            matmul, extents = self.forward_matmul(rule, site, args)
            if run is not None or torch.is_grad_enabled():
                remember(self.ref, matmul, operands, extents)
                if site.matmul is matmul and run is not None and node is None and not kwargs:
                    note_forward(self.sites, matmul, original, args, frame)
            show(site, rule, args, spacing=self.spacing)
        return self.execute(matmul, original, args, kwargs)

    def execute(self, matmul: Matmul, original: Kernel, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run a matmul in a format, scaled or unscaled, and count it."""
        kind: Kind = "units"
        reason = outside = ""
        numerics: Numerics | None = None
        if self.numerics:
            numerics, outside = _format_for(self.numerics, matmul, args, kwargs)
        local = LOCAL
        local.is_inside = True
        try:
            if numerics is not None:
                kind, result = "format", numerics.run(matmul, original, list(args), kwargs)
            elif not self.units.is_used:
                kind, result = "left out", original(*args, **kwargs)
            elif (slots := matmul.site.plain) and (why := slots.get(matmul.slot, "")):
                kind, reason, result = "plain", why, original(*args, **kwargs)
            else:
                result = run_in_units(matmul, original, list(args), kwargs)
        finally:
            local.is_inside = False
        if self.counter is not None:
            flops, site = matmul.rule.flops(args, result), matmul.site
            self.counter.add(site.module, kind, reason, flops, (site.plain, matmul.slot), outside)
        return result

    def forward_matmul(self, rule: MatmulRule, site: Site, args: _Args) -> tuple[Matmul, Extents]:
        """Return a forward matmul, ready to run, and the measurements of its operands."""
        matmul: Matmul | None = site.matmul
        if matmul is not None and matmul.rule is rule and not self.units.is_looking:
            return matmul, ()
        operands, step = rule.operands_in(args), self.units.rounding_step
        is_gradient = (False,) * len(operands)
        matmul = Matmul(rule, site, FORWARD, site.log2_units, is_gradient, site.operand_names, step)
        extents: Extents = ()
        if None in matmul.known or self.units.is_looking:
            extents = self._measure(matmul, args, ())
        elif self.numerics:
            self._show(matmul, args)
        else:
            site.matmul = matmul
        return matmul, extents

    def backward_matmul(
        self, rule: MatmulRule, args: _Args, call: Call, sources: Sources
    ) -> Matmul:
        """Return a backward matmul of a call, ready to run."""
        forward, site = call.matmul, call.matmul.site
        gamma, is_looking = site.log2_gamma, self.units.is_looking
        is_kept = site.matmul is forward and not (is_looking or torch.is_grad_enabled())
        if is_kept and (kept := forward.backward.get((id(rule), sources))) is not None:
            kept_gamma, matmul = kept
            if kept_gamma == gamma:
                return matmul
        operands = rule.operands_in(args)
        matmul = Matmul(
            rule,
            site,
            slot_of(sources),
            tuple(gamma if k is None else forward.known[k] for k in sources),
            tuple(k is None or forward.is_gradient[k] for k in sources),
            site.names_of(sources),
            forward.step,
        )
        extents: Extents = ()
        if gamma is None or is_looking:
            before = call.extents or (None,) * len(forward.log2_units)
            measured = tuple(call.gradient_extent if k is None else before[k] for k in sources)
            extents = self._measure(matmul, args, measured)
            if None in sources:
                call.gradient_extent = extents[sources.index(None)]
        elif self.numerics:
            self._show(matmul, args)
        elif is_kept:
            forward.backward[id(rule), sources] = gamma, matmul
        if torch.is_grad_enabled():
            # In a double backward it acts as a forward matmul, with its own site.
            name, roles = f"{site.name}:{matmul.slot}", tuple(map(str, range(len(operands))))
            if (derived := self.units.sites.get(name)) is None:
                derived = Site(name, site.module, roles)
                self.units.add_site(derived)
            remember(self.ref, replace(matmul, site=derived), operands, extents)
        return matmul

    def _measure(self, matmul: Matmul, args: _Args, before: Extents) -> Extents:
        """Measure operands, and take their units at once if a format needs them."""
        rule, site, names, known = matmul.rule, matmul.site, matmul.names, matmul.known
        operands, read = rule.operands_in(args), rule.measured_in(args)
        addends = rule.addends_in(args)
        is_new = matmul.slot not in site.seen
        extents: list[Extent | None] = list(before) or [None] * len(operands)

        def extent_of(index: int) -> Extent:
            if index >= len(operands):
                return Extent.of(args[addends[index - len(operands)]])
            if (extent := extents[index]) is None:
                extent = extents[index] = Extent.of(read[index])
            return extent

        dtype, num_addends = operands[0].dtype, len(addends)
        measured = self.units.measure(
            site, matmul.slot, names, known, dtype, extent_of, num_addends
        )
        if not self.numerics:
            return tuple(extents)
        without = {name for name, unit in zip(names, known, strict=True) if unit is None}
        # No step waits for the unit of an operand that has been zero or not finite.
        is_first = is_new and not self.units.lacking.keys() >= without
        if is_first:
            matmul.take(self.units.take_at_once(measured))
        if is_first or self.units.is_looking:
            for numerics in self.numerics:
                numerics.measure(matmul, args, is_first=is_first)
        else:
            self._show(matmul, args)
        return tuple(extents)

    def _show(self, matmul: Matmul, args: _Args) -> None:
        """Measure operands for the formats that have not seen them in their current units."""
        for numerics in self.numerics:
            if numerics.awaits(matmul.names):
                numerics.measure(matmul, args, is_first=False)

    def receive(self) -> list[Unrepresentable]:
        """Receive the measurements of the previous step, without waiting for the device."""
        self.units.receive()
        return [numerics.receive() for numerics in self.numerics]

    def adopt(self, measurement: Measurement) -> list[str]:
        """Adopt measured units. Formats measure operands with late units before rounding them."""
        late = self.units.adopt(measurement)
        for numerics in self.numerics:
            numerics.await_units(late)
        return late


def see_uncaptured(session: MatmulSession, operands: Sequence[Tensor], *, in_step: bool) -> None:
    """Let a session's captured steps check operands of a forward matmul outside their graphs."""
    steps = None if session.captured is None else session.captured()
    if steps is None or not steps.changes_function:
        return
    # Outside of a step, code that multiplies the numbers of a weight by itself may want them as
    # they are.
    if (in_step or session.sites.owns_caller()) and not runs_in_graph():
        steps.see_uncaptured(operands, in_step=in_step)


def _format_for(
    formats: Sequence[Numerics], matmul: Matmul, args: _Args, kwargs: dict[str, Any]
) -> tuple[Numerics | None, str]:
    """Return the format that rounds a matmul, or the reason why none does."""
    outside = ""
    for each in formats:
        if (why := each.why_not(matmul, args, kwargs)) is None:
            # With a unit of 1, a cast could flush all of the first nonzero values.
            has_all = None not in matmul.known or not each.needs_units
            if not has_all or each.awaits(matmul.names):
                return None, NO_UNIT
            return each, ""
        outside = outside or why
    return None, outside
