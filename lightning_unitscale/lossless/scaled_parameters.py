"""Hold parameters, gradients and optimizer state in units, and show true values outside.

Where weights and gradients have 16 bits, a gradient of 1e-8 is zero before the optimizer sees it,
and its square long before that. In units near their RMS they lose nothing. The optimizer is told by
its settings (see ``optim.optimizers``), and ``state_dict`` of the module and of the optimizers
give and take true units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unitscale.compiling import is_compiling
from lightning_unitscale.functional.scale import scale_in_place
from lightning_unitscale.lossless.gauge import GaugePair
from lightning_unitscale.optim.optimizers import (
    HeldStep,
    Units,
    check_optimizer,
    kind_of,
    state_power,
)

_UNIT = GaugePair()


class HeldParameters:
    """Holds parameters of one module, and what its optimizers know of them, in units.

    Args:
        module: The module.
        optimizers: All optimizers of its parameters.
        is_running: Whether the module runs as captured graphs at this moment, which know the
            units; any other call of it raises an error.

    Raises:
        ValueError: If an optimizer is not in the table; nothing is changed then.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        is_running: Callable[[], bool] = lambda: False,
    ) -> None:
        for optimizer in optimizers:
            check_optimizer(optimizer)
        self._module = module
        self._optimizers = list(optimizers)
        self._is_running = is_running
        self._parameters = dict(module.named_parameters())
        self._units: dict[int, GaugePair] = {}
        self._shows_true = False
        self._steps: list[HeldStep] = []
        self._handles: list[Any] = []

    @property
    def units(self) -> dict[str, GaugePair]:
        """Current units by the parameter's name; those that are missing are 1."""
        return {
            fqn: self._units[id(param)]
            for fqn, param in self._parameters.items()
            if id(param) in self._units
        }

    def belongs_to(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are the optimizers that know of the units."""
        return [id(optimizer) for optimizer in optimizers] == [
            id(optimizer) for optimizer in self._optimizers
        ]

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters whose units are known, by name."""
        return {fqn: param for fqn, param in self._parameters.items() if id(param) in self._units}

    def attach(self) -> None:
        """Let optimizers step, and state be saved and loaded, as the units demand."""
        self._steps = [HeldStep(optimizer, self._exponents) for optimizer in self._optimizers]
        for step, optimizer in zip(self._steps, self._optimizers, strict=True):
            step.attach(optimizer)
            self._handles += [
                optimizer.register_state_dict_post_hook(self._true_state),
                optimizer.register_load_state_dict_pre_hook(self._held_state),
            ]
        mine = {id(param) for param in self._parameters.values()}
        for submodule in self._module.modules():
            if any(id(p) in mine for p in submodule._parameters.values()):
                self._handles += [
                    submodule.register_state_dict_post_hook(_converting(self, 1)),
                    submodule.register_load_state_dict_pre_hook(_converting(self, -1)),
                    submodule.register_forward_pre_hook(_stop_others(self)),
                ]

    def units_of(self, parameter: Tensor) -> GaugePair:
        """Units in which a parameter and its gradient are held."""
        return self._units.get(id(parameter), _UNIT)

    def _exponents(self, parameter: Tensor) -> Units:
        pair = self.units_of(parameter)
        return pair.log2_sigma, pair.log2_gamma

    def shown_exponent(self, parameter: Tensor) -> int:
        """What a parameter's values must be multiplied by at this moment, as an exponent."""
        return 0 if self._shows_true else self.units_of(parameter).log2_sigma

    @property
    def is_closed(self) -> bool:
        """Whether only captured graphs can read the parameters' values."""
        return bool(self._units) and not self._shows_true and not self._is_running()

    def take(self, units: Mapping[str, GaugePair]) -> None:
        """Set units; exact for powers of two within the range of the types.

        Args:
            units: Of parameters by name; those that are not named keep theirs.
        """
        for fqn, new in units.items():
            parameter = self._parameters[fqn]
            old = self.units_of(parameter)
            scale_in_place(parameter.detach(), old.log2_sigma - new.log2_sigma)
            if parameter.grad is not None:
                scale_in_place(parameter.grad.detach(), old.log2_gamma - new.log2_gamma)
            for optimizer in self._optimizers:
                _rescale_state(optimizer, parameter, old.log2_gamma - new.log2_gamma)
            self._units[id(parameter)] = new

    def release(self) -> None:
        """Return everything to true units, with FP16 state in FP32. Idempotent."""
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                pair = self.units_of(parameter)
                state.update(_in_other_units(kind_of(optimizer), state, pair.log2_gamma))
        for parameter in self._parameters.values():
            pair = self.units_of(parameter)
            scale_in_place(parameter.detach(), pair.log2_sigma)
            if parameter.grad is not None:
                scale_in_place(parameter.grad.detach(), pair.log2_gamma)
        self._units.clear()
        for attached in (*self._handles, *self._steps):
            attached.remove()
        self._handles, self._steps = [], []

    @contextlib.contextmanager
    def true_values(self) -> Iterator[None]:
        """Within this context parameters have their true values, in their own type."""
        if self._shows_true:
            yield
            return
        copies = {param: param.detach().clone() for param in self.named().values()}
        for parameter in copies:
            scale_in_place(parameter.detach(), self.units_of(parameter).log2_sigma)
        self._shows_true = True
        try:
            yield
        finally:
            self._shows_true = False
            with torch.no_grad():
                for parameter, values in copies.items():
                    parameter.copy_(values)

    def true_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The global norm of true gradients, FP32 of shape ``()``, with torch's order of sums."""
        norms = [
            torch.linalg.vector_norm(param.grad, dtype=_wide(param.grad))
            * 2.0 ** self.units_of(param).log2_gamma
            for param in parameters
            if param.grad is not None
        ]
        if not norms:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))

    def clip_by_norm(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        """``torch.nn.utils.clip_grad_norm_`` on true gradients."""
        norm = self.true_norm(parameters)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for param in parameters:
            if param.grad is not None:
                param.grad.detach().mul_(factor.to(param.grad.device))

    def clip_by_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        """``torch.nn.utils.clip_grad_value_`` on true gradients."""
        for param in parameters:
            if param.grad is not None:
                held = limit * 2.0 ** -self.units_of(param).log2_gamma
                param.grad.detach().clamp_(-held, held)

    def _true_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return self._converted(optimizer, state, lambda pair: pair.log2_gamma)

    def _held_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return self._converted(optimizer, state, lambda pair: -pair.log2_gamma)

    def _converted(
        self, optimizer: Optimizer, state: dict[str, Any], exponent: Callable[[GaugePair], int]
    ) -> dict[str, Any]:
        """A state dict in other units; its groups have the parameters' numbers in their order."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        numbered = dict(zip(numbers, parameters, strict=False))
        kind = kind_of(optimizer)
        converted = {
            key: {
                **param_state,
                **_in_other_units(kind, param_state, exponent(self.units_of(numbered[key]))),
            }
            if key in numbered
            else param_state
            for key, param_state in state["state"].items()
        }
        return {**state, "state": converted}


def _in_other_units(kind: str, state: Mapping[str, Any], exponent: int) -> dict[str, Tensor]:
    """What of a parameter's optimizer state changes with its gradient's unit; FP16 becomes FP32."""
    changed = {}
    for name, value in state.items():
        is_tensor = isinstance(value, Tensor) and value.is_floating_point()
        power = state_power(kind, name) if is_tensor else 0
        if power and exponent:
            changed[name] = value.to(_wide(value), copy=True)
            scale_in_place(changed[name], power * exponent)
    return changed


def _rescale_state(optimizer: Optimizer, parameter: Tensor, exponent: int) -> None:
    state = optimizer.state.get(parameter, {})
    for name, wide in _in_other_units(kind_of(optimizer), state, exponent).items():
        state[name].copy_(wide)


def _wide(tensor: Tensor) -> torch.dtype:
    """The type that holds true values: FP16 lacks the range."""
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype


# Functions, since torch sets attributes on its hooks.
def _converting(held: HeldParameters, sign: int) -> Callable[..., None]:
    """A hook that brings a state dict's parameters to true units (1), or to held ones (-1)."""

    def convert(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and prefix + name in state:
                exponent = held.shown_exponent(parameter)
                if exponent:
                    value = state[prefix + name]
                    state[prefix + name] = value.to(_wide(value), copy=True)
                    scale_in_place(state[prefix + name].detach(), sign * exponent)

    return convert


def _stop_others(held: HeldParameters) -> Callable[..., None]:
    def stop(module: nn.Module, args: Any) -> None:
        # Dynamo looks through this: what it captures knows the units.
        if is_compiling() or not held.is_closed:
            return
        raise RuntimeError(
            f"{type(module).__name__} is called outside of the module's steps while its parameters "
            "are held in units; expected true values there; call it within `with "
            "callback.true_parameters():`, or pass Lossless(hold_parameters=False)."
        )

    return stop
