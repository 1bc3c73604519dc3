"""Measure the units of a captured step: in a rehearsal that is undone, or in real calls.

In FP16 a gradient below 2**-24 measures as zero, so what runs in FP16 is rehearsed in FP32 as well.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.compiled_graph import Interpreter, NotOneGraphError
from lightning_unitscale.capture.rollback import detached_copy, find_once_only, restoring
from lightning_unitscale.graph.nodes import tensors_in
from lightning_unitscale.lossless.calibrate import Measured, root_mean_square
from lightning_unitscale.lossless.gauge import Gauge, GaugePair
from lightning_unitscale.lossless.rewrite import LosslessUnitScale
from lightning_unitscale.scales.transfer import numbers_of

# Pairs of an output and a gradient for it.
Seeds = Callable[[Any], Sequence[tuple[Tensor, Tensor]]]
Reduce = Callable[[Measured], Measured]


def calibrate(
    step: CapturedStep,
    rewrite: LosslessUnitScale,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    seed_gradient: float = 1.0,
    results: Reduce = lambda measured: measured,
    backward: bool = True,
    seeds: Seeds | None = None,
) -> Mapping[str, float] | None:
    """Rehearse a step forward and backward, set the measured gauge, undo the rest.

    A module in FP16, or under autocast to it, is rehearsed in FP32 as well.
    """
    module = step.owner.module

    def measure(*, is_wide: bool) -> Mapping[str, float] | None:
        calibrator = rewrite.calibrator()
        with (
            full_precision(module) if is_wide else contextlib.nullcontext(),
            torch.enable_grad() if backward else contextlib.nullcontext(),
            rehearsed(step, calibrator, args, kwargs, is_wide=is_wide, wants_output=backward) as (
                output,
                inputs,
            ),
        ):
            loss = find_loss(output) if backward else None
            measured: Mapping[str, float] | None = None
            if loss is not None:
                seeded = [(loss, torch.full_like(loss, seed_gradient))]
                measured = _backward(seeded, module, inputs)
            elif backward and seeds is not None:
                measured = _backward(seeds(output), module, inputs)
        calibrator.release()
        rewrite.update_gauge(results(calibrator.measured()))
        return measured

    measured = measure(is_wide=False)
    if not runs_in_fp16(module):
        return measured
    # What FP16 loses measures as zero. Tensors that are there in FP16 only (autocast may choose
    # other kernels) keep what was measured above.
    with warning_where_fp16_is_cast_to(f"{type(module).__name__}.{step.name}"):
        wide = measure(is_wide=True)
        return None if measured is None else {**measured, **(wide or {})}
    return measure(is_wide=False)  # the error has discarded what was captured


@contextlib.contextmanager
def rehearsed(
    step: CapturedStep,
    interpreter: Interpreter,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_wide: bool = False,
    wants_output: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """What a step returns with ``interpreter`` running its graphs; undone at the end of the block.

    A step that is one graph is not called: the graph runs on the inputs of the call. Where it is
    several, the user's code runs on copies.
    """
    module = step.owner.module

    def widened(value: Any) -> Any:
        return in_full_precision(value) if is_wide else value

    with restoring(module, parameters=False):
        wide_args, wide_kwargs = widened((args, dict(kwargs)))
        try:
            call = step.graph_call(*wide_args, **wide_kwargs)
        except NotOneGraphError as error:
            reason = str(error)
        else:
            with call.rehearsing() as (run, inputs):
                outputs = run(interpreter)
                if not wants_output or len(call.differentiable) == 1:
                    yield (outputs[call.differentiable[0]] if wants_output else None), inputs
                    return
                # Which of several is the loss, what follows the graph tells.
                copied_args, copied_kwargs = detached_copy((wide_args, wide_kwargs))
                yield step.rehearse(lambda *_: outputs, *copied_args, **copied_kwargs), inputs
            return
    if (once_only := find_once_only(module)) is not None:
        warnings.warn(
            f"{type(module).__name__}.{step.name}: its first call runs twice, once to measure, "
            f"since it is not one graph ({reason}), and what it reads from "
            f"{once_only} cannot be put back; expected a step that takes its data from the batch; "
            "let train_dataloader return all loaders.",
            stacklevel=2,
        )
    with restoring(module):
        copied_args, copied_kwargs = widened(detached_copy((args, dict(kwargs))))
        output = step.rehearse(interpreter, *copied_args, **copied_kwargs)
        yield output, (copied_args, copied_kwargs)


def _backward(
    seeded: Sequence[tuple[Tensor, Tensor]], module: nn.Module, inputs: Any
) -> Mapping[str, float]:
    """Gradients without touching ``.grad``: hooks of DDP or of an optimizer must not run."""
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    leaves: list[Tensor] = [param for _, param in named]
    leaves += [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    if not leaves or not seeded:
        return {}
    roots, gradients = zip(*seeded, strict=True)
    gradients_of = torch.autograd.grad(roots, leaves, gradients, allow_unused=True)
    rms = {
        name: root_mean_square(gradient)
        for (name, _), gradient in zip(named, gradients_of, strict=False)
        # A complex or a sparse gradient has no unit here.
        if gradient is not None
        and gradient.is_floating_point()
        and gradient.layout is torch.strided
    }
    return dict(zip(rms, numbers_of([*rms.values()]), strict=True))


class LiveGradients:
    """Measures real calls until one has had a backward pass, then sets the units of gradients.

    An object rather than a closure, so that a copied module measures its own gradients.
    """

    def __init__(self, rewrite: LosslessUnitScale) -> None:
        self.rewrite = rewrite
        self.calibrator = rewrite.calibrator()
        self.num_calls = 0

    def attach(self, step: CapturedStep) -> None:
        """Measure the next calls of a step."""
        step.interpreter, step.before_call = self.calibrator, self

    def __call__(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Called before each call of the step."""
        if not torch.is_grad_enabled():
            step.interpreter = None  # a call that no backward pass can follow needs no units of it
            return
        if not self.calibrator.saw_gradients:
            self.calibrator.clear()
            step.interpreter = self.calibrator
            self._warn_of_rounding(step)
            return
        measured = Gauge.of_rms({}, self.calibrator.measured().backward)
        self.calibrator.release()
        gauge = self.rewrite.gauge
        self.rewrite.set_gauge(
            gauge.updated(
                {
                    name: GaugePair(gauge.pair(name).log2_sigma, pair.log2_gamma)
                    for name, pair in measured.items()
                }
            )
        )
        step.interpreter = None
        step.before_call = None

    def _warn_of_rounding(self, step: CapturedStep) -> None:
        self.num_calls += 1
        left_out = [graph_pass.name for graph_pass in step.owner.passes if graph_pass.phase.rounds]
        if self.num_calls == 2 and left_out:
            warnings.warn(
                f"{type(step.owner.module).__name__}: it was called again before any backward pass "
                f"has shown in which units its gradients are, so {', '.join(left_out)} did nothing "
                "yet; expected a backward pass after the first call, or calls without gradients; "
                "use torch.no_grad() for inference.",
                stacklevel=4,
            )


class MeasuredAgain:
    """Measures, before its first call, the units that a captured step has no names for yet.

    Products have mostly the same names in a graph and at the dispatcher; their units stay.
    """

    def __init__(self, rewrite: LosslessUnitScale) -> None:
        self.rewrite = rewrite

    def __call__(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Called before each call of the step."""
        seen: set[str] = set()

        def unknown(measured: Measured) -> Measured:
            seen.update(name.rpartition(":")[0] for name in measured.forward)
            gauge = self.rewrite.gauge
            return Measured(
                {name: rms for name, rms in measured.forward.items() if name not in gauge},
                {name: rms for name, rms in measured.backward.items() if name not in gauge},
            )

        calibrate(step, self.rewrite, args, kwargs, results=unknown)
        step.before_call = None
        if step.owner.executor != "eager":
            step.reset()  # what was rehearsed is of no use to a compiler
        if not seen <= self.rewrite.gauge.keys():
            LiveGradients(self.rewrite).attach(step)
            if step.before_call is not None:
                step.before_call(step, args, kwargs)


def find_loss(output: object) -> Tensor | None:
    """The scalar that a step returned for its backward pass, if there is one."""
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
    """Whether parameters of the module are FP16, or autocast casts to it here and now."""
    parameters = list(module.parameters())
    if any(param.dtype == torch.float16 for param in parameters):
        return True
    return any(
        torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == torch.float16
        for device_type in {param.device.type for param in parameters}
    )


@contextlib.contextmanager
def warning_where_fp16_is_cast_to(title: str) -> Iterator[None]:
    """What a module in FP16 measures in FP32 within this context is left out if it fails."""
    try:
        yield
    except RuntimeError as error:
        warnings.warn(
            f"{title}: it runs in FP16 and not in FP32 "
            f"({str(error).splitlines()[0]}), so units are measured in FP16, where small "
            "gradients are zero; expected a step without casts to torch.float16 of its "
            "own; use tensor.to(other.dtype) for them.",
            stacklevel=6,
        )


@contextlib.contextmanager
def full_precision(module: nn.Module) -> Iterator[None]:
    """Within this context FP16 parameters and buffers are FP32, and autocast is off.

    So are attributes of the modules that name FP16, to which steps cast: a LightningModule's
    ``dtype`` is one. The tensors that were there come back afterwards, untouched.
    """
    tensors = [*module.parameters(), *module.buffers()]
    wide = {
        tensor: nn.Parameter(tensor.detach().float(), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.float()
        for tensor in tensors
        if tensor.dtype == torch.float16
    }
    tensor_attributes = [
        (owner, name, tensor)
        for owner in module.modules()
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None and tensor in wide
    ]
    dtype_attributes = [
        (attributes, name)
        for attributes in map(vars, module.modules())
        for name, value in attributes.items()
        if value is torch.float16
    ]
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for device_type in {tensor.device.type for tensor in tensors}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        try:
            # Other objects, not other ``data`` in them: with a change of type a parameter loses its
            # node of the autograd graph, and with it DDP's hook that averages the gradient.
            for owner, name, tensor in tensor_attributes:
                setattr(owner, name, wide[tensor])
            for attributes, name in dtype_attributes:
                attributes[name] = torch.float32
            if default == torch.float16:
                torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(default)
            for attributes, name in dtype_attributes:
                attributes[name] = torch.float16
            for owner, name, tensor in tensor_attributes:
                setattr(owner, name, tensor)


def in_full_precision(value: Any) -> Any:
    """A structure with its FP16 tensors in FP32."""

    def widened(leaf: Any) -> Any:
        is_half = isinstance(leaf, Tensor) and leaf.dtype == torch.float16
        return leaf.float() if is_half else leaf

    return tree_map(widened, value)
