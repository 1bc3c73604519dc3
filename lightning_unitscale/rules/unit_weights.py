"""Set parameters to unit scale, once, and bring their gradients to unit scale."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.capture.graph_recorder import stored_elements
from lightning_unitscale.capture.passes import GraphPass, Phase, StepGraph
from lightning_unitscale.matmuls.autograd_nodes import after_backward, autograd_operations
from lightning_unitscale.matmuls.measurement import root_mean_square
from lightning_unitscale.rules.learning_rates import ParameterInfo, Role
from lightning_unitscale.rules.plan import ParameterPlan
from lightning_unitscale.scales.transfer import HostCopy, numbers_on

# Outside of this range a gradient counts as zero or as broken, since its unit would be noise.
_MAX_LOG2 = 100
_TELLING_FAN_IN = 5
# Below this share of a sibling's RMS a gradient is rounding error. A key's bias moves all logits of
# a query equally, and a bias before a batch norm is subtracted again. The rest of their gradients
# is noise.
_ROUNDING = 2.0**-18

_STEPS_PER_OCTAVE = 32


def prepared_like(plans: Mapping[str, ParameterPlan]) -> Callable[[str, Tensor], Tensor]:
    """Return values of parameters as in their plans, without changing the parameters."""
    sigmas: dict[str, float] = {}

    def prepare(fqn: str, value: Tensor) -> Tensor:
        plan = plans.get(fqn)
        if plan is None or plan.action == "left":
            return value
        if plan.action == "zeroed":
            return value * 0.0
        if fqn not in sigmas:
            sigmas[fqn] = parameter_rms(value)
        return value / sigmas[fqn]

    return prepare


def parameter_rms(value: Tensor) -> float:
    """Return the RMS of a parameter's nonzero entries, to about 1 %, or 1 without any."""
    # Layers of one kind are drawn with RMS values that differ by less. One value lets them share a
    # parameter group in a step.
    # The row of a padding token is zero by choice and not part of the distribution.
    with torch.no_grad():
        value = whole(value)
        nonzero = int(torch.count_nonzero(value))
        if nonzero == 0:
            return 1.0
        rms = float(root_mean_square(value)) * (value.numel() / nonzero) ** 0.5
    if not 0.0 < rms < float("inf"):
        return 1.0
    return 2.0 ** (round(math.log2(rms) * _STEPS_PER_OCTAVE) / _STEPS_PER_OCTAVE)


def whole(parameter: Tensor) -> Tensor:
    """Return all elements of a parameter. All ranks must ask together for a sharded one."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()


def set_to_unit_scale(
    module: nn.Module, plans: Mapping[str, ParameterPlan]
) -> dict[str, ParameterPlan]:
    """Divide each planned parameter by its RMS, in place, and zero the biases."""
    parameters = dict(module.named_parameters())
    scaled = {}
    with torch.no_grad():
        for fqn, plan in plans.items():
            info = plan.info
            if plan.action == "scaled":
                sigma = parameter_rms(parameters[fqn])
                parameters[fqn].div_(sigma)
                info = replace(info, sigma=sigma)
            elif plan.action == "zeroed":
                parameters[fqn].zero_()
            scaled[fqn] = replace(plan, info=info)
    return scaled


def already_at_unit_scale(module: nn.Module, plans: Mapping[str, ParameterPlan]) -> bool:
    """Check whether the weights of a module seem to have been set to RMS 1 before."""
    # Most of the weights decide. The narrowest ones cannot distinguish the two.
    parameters = dict(module.named_parameters())
    votes = []
    for fqn, plan in plans.items():
        info = plan.info
        # A weight that is also an embedding may have been drawn as one, at RMS 1.
        is_weight = info.role in (Role.HIDDEN, Role.INPUT, Role.READOUT) and not info.is_tied
        if plan.action == "scaled" and is_weight and info.fan_in >= _TELLING_FAN_IN:
            votes.append(is_at_unit_scale(info, parameters[fqn]))
    return bool(votes) and sum(votes) > len(votes) / 2


def is_at_unit_scale(info: ParameterInfo, parameter: Tensor) -> bool:
    """Check whether the RMS of a weight is nearer to 1 than to that of an unscaled weight."""
    # The largest RMS that is common in unscaled models is `sqrt(2 / fan_in)` (He et al., arXiv
    # 1502.01852). Nearer means on a logarithmic scale.
    return parameter_rms(parameter) > (2 / max(info.fan_in, 1)) ** 0.25


class ParameterGradients(GraphPass):
    """Hooks that bring the gradient of every parameter to RMS 1 by a power of two."""

    # The power does not matter to an optimizer that divides by the size of the gradient. It keeps
    # 16-bit gradients in range, and gives SGD the gradients that its rule for rates expects.
    # This is a hook on the parameter, not an operation in a graph. It sees the sum of all
    # gradients, also of uses outside of captured graphs.
    # A gradient has no factor until it is first nonzero. `scale_new` sets it then, before an
    # optimizer has seen the gradient.

    name = "parameter gradients at RMS 1"
    phase = Phase.REWRITE

    def __init__(self, *, ends_backward: bool = False) -> None:
        self.ends_backward = ends_backward
        self.log2_factors: dict[str, int] = {}  # by path of the parameter
        self.num_accumulated = 1  # batches, when gradients were measured
        self.measures_late = False  # gradients without a factor may still get one
        self._log2_shift = 0
        # Factors of the last step, on their way: the parameters, and the value read for each.
        self._sent: tuple[list[str], HostCopy] | None = None
        # Parameters whose gradients have arrived in this backward pass without a factor.
        self._arrived: dict[str, Tensor] = {}
        self._hooks: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Leave the graph unchanged."""
        return (f"gradients of {len(self.log2_factors)} parameters",)

    def before_step(self, module: nn.Module) -> None:
        """Put a hook on every parameter, also on one that replaced another."""
        for fqn, parameter in module.named_parameters():
            if is_lazy(parameter):
                continue  # a sanity check gives it its shape
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_hook(_Factor(self, fqn, parameter))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def forget(self, exchanged: Iterable[str]) -> None:
        """Measure the gradients of exchanged parameters again."""
        self.settle()
        for fqn in exchanged:
            self.log2_factors.pop(fqn, None)
        self.remove()  # parameters may have other paths now

    def clear(self) -> None:
        """Leave gradients unchanged until they have been measured."""
        self.log2_factors.clear()
        self.measures_late, self._sent = False, None

    def start(self, num_accumulated: int) -> None:
        """Start to set factors, or follow a changed number of accumulated batches."""
        if not self.log2_factors:
            self.num_accumulated, self.measures_late = num_accumulated, True
        # The mean over n batches, which are nearly independent, shrinks by sqrt(n).
        self._log2_shift = round(math.log2(num_accumulated / self.num_accumulated) / 2)

    def _seen(self, fqn: str, gradient: Tensor, parameter: Tensor | None = None) -> Tensor:
        """Multiply a newly made gradient by its factor."""
        if self.ends_backward and self.measures_late and fqn not in self.log2_factors:
            self.settle()
            if fqn not in self.log2_factors and parameter is not None:
                self._arrived[fqn] = parameter
                after_backward(self._scale_arrived)
        exponent = self.log2_factors.get(fqn, 0)
        if fqn in self.log2_factors:
            exponent += self._log2_shift
        return gradient if exponent == 0 else gradient * 2.0**exponent

    def scale_new(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Bring gradients without a factor to RMS 1, without waiting for the device."""
        gradients = {fqn: self._new_gradient(fqn, parameter) for fqn, parameter in parameters}
        new = {fqn: grad for fqn, grad in gradients.items() if grad is not None}
        sent = None
        if new:
            rms = torch.stack([_plain_rms(whole(grad)) for grad in new.values()])
            exponents = self._exponents_of(list(new), rms)
            for grad, exponent in zip(new.values(), exponents, strict=True):
                # A rank has a part of a sharded gradient.
                _multiply(stored_elements(grad), torch.exp2(exponent.nan_to_num()))
            sent = (list(new), HostCopy(exponents))
        # Factors of the last step come later, since this step's backward pass did not have them.
        self.settle()
        self._sent = sent

    def _scale_arrived(self) -> None:
        # Called for each of them. All are scaled at the first call, with their siblings.
        arrived, self._arrived = self._arrived, {}
        if arrived:
            self.scale_new(arrived.items())

    def settle(self) -> None:
        """Adopt the factors of the last step for the next backward passes."""
        if self._sent is not None:
            (names, copy), self._sent = self._sent, None
            for fqn, exponent in zip(names, copy.numbers().tolist(), strict=True):
                if math.isfinite(exponent):
                    self.log2_factors.setdefault(fqn, int(exponent) - self._log2_shift)

    def _new_gradient(self, fqn: str, parameter: Tensor) -> Tensor | None:
        grad = parameter.grad
        if not self.measures_late or fqn in self.log2_factors or grad is None:
            return None
        is_plain = grad.is_floating_point() and grad.layout is torch.strided
        # A gradient that may be differentiated again keeps its value.
        return grad.detach() if is_plain and not grad.requires_grad else None

    def _exponents_of(self, names: Sequence[str], rms: Tensor) -> Tensor:
        """Return the exponents of the factors, or NaN for a gradient that is zero or not finite."""
        rms = torch.where(rms.isfinite() & (rms > 0), rms, math.nan)
        known: dict[str, float] = {}
        for fqn, exponent in self.log2_factors.items():
            module = _module_of(fqn)
            known[module] = max(known.get(module, 0.0), math.ldexp(1.0, -exponent))
        modules = [_module_of(fqn) for fqn in names]
        new: dict[str, Tensor] = {}
        for module, number in zip(modules, rms.nan_to_num().unbind(), strict=True):
            new[module] = number if module not in new else number.maximum(new[module])
        before = [known.get(module, 0.0) for module in modules]
        largest = torch.stack([new[module] for module in modules])
        largest = largest.maximum(numbers_on(rms.device, before, rms.dtype))
        total = torch.where(rms < _ROUNDING * largest, largest, rms)
        return -torch.log2(total).round().clamp(-_MAX_LOG2, _MAX_LOG2)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the hooks out, so that the error about pickling comes from the captured step."""
        self.settle()
        names = ("ends_backward", "log2_factors", "num_accumulated", "measures_late")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)


def zero_gradients(*args: Any, **kwargs: Any) -> None:
    """Give every leaf that a loss depends on a gradient of zeros, if it has none."""
    # A step under manual optimization may read `parameter.grad` after its backward pass, to clip it
    # or to log a norm. The pass itself must not run in a rehearsal, since the hooks of DDP would
    # wait for other ranks. Leaves that the loss does not depend on keep `None`, as after a real
    # backward pass. An embedding's gradient is sparse if the real one will be.
    roots = (tensor.grad_fn for tensor in tensors_in((args, kwargs)))
    operations = list(autograd_operations(roots))
    embedded = (
        source
        for node in operations
        if getattr(node, "_saved_sparse", False)
        for source, _ in node.next_functions
    )
    # A rehearsal may have multiplied the weight by a factor.
    sparse = set(autograd_operations(embedded))
    for node in operations:
        # Only the node that adds to the gradient of a leaf has a variable.
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and variable.grad is None:
            zeros = torch.zeros_like(variable)
            variable.grad = zeros.to_sparse(1) if node in sparse else zeros


def _multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiply a gradient in place by a number that its type may not represent."""
    if gradient.dtype is torch.float16:
        gradient.copy_(gradient.float() * factor.float())
    else:
        gradient.mul_(factor.to(gradient.dtype))


def _plain_rms(gradient: Tensor) -> Tensor:
    """Return the RMS of a gradient as an ordinary tensor, whatever its subclass."""
    rms = root_mean_square(gradient)
    return rms if type(rms) is Tensor else torch.tensor(float(rms), device=rms.device)


def _module_of(fqn: str) -> str:
    return fqn.rpartition(".")[0]


class _Factor:
    """Hook of one parameter. It keeps neither that nor the pass, and so the module, alive."""

    # A parameter is saved without its hook, and torch need not warn of that.
    __torch_unserializable__ = True

    def __init__(self, owner: ParameterGradients, fqn: str, parameter: Tensor) -> None:
        self._owner = weakref.ref(owner)
        self._fqn = fqn
        self._parameter = weakref.ref(parameter)

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        owner = self._owner()
        if owner is None or gradient is None:
            return gradient
        return owner._seen(self._fqn, gradient, self._parameter())
