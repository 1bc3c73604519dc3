"""Linear layers in real FP8: their products are taken to the hardware's own kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_unitscale.dispatch.execute import Product
from lightning_unitscale.dispatch.fp8_function import run_layer
from lightning_unitscale.dispatch.simulate import grid_factor
from lightning_unitscale.dispatch.sites import running_module
from lightning_unitscale.functional.fp8_linear import GRADIENTS, OPERAND, to_fp8
from lightning_unitscale.functional.scaled_product import MULTIPLE, scaled_product, why_no_fp8
from lightning_unitscale.transforms.calibration import Direction, root_mean_square
from lightning_unitscale.transforms.drift import HIGH, LOW
from lightning_unitscale.transforms.range_loss import Misfits, Shares, misfits_among, stored_shares

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.products import ProductRule
    from lightning_unitscale.dispatch.session import ProductSession
    from lightning_unitscale.dispatch.sites import Site
    from lightning_unitscale.dispatch.torch_internals import Kernel
    from lightning_unitscale.transforms.fp8_linears import FP8Linears

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LINEAR = "linear"


class FP8Products:
    """Runs linear layers, and both their gradients, in FP8 with the units of their operands.

    Args:
        config: What is left out, by name or by measurement, and the formats.
        measures_range: Whether what does not fit, by what :meth:`measure` sees, is left out.

    Attributes:
        is_training: Whether the steps that run now are those of training.
    """

    def __init__(self, config: FP8Linears, *, measures_range: bool = True) -> None:
        self._config = config
        self._measures_range = measures_range
        self.is_training = True
        self._shares: list[tuple[Direction, str, Tensor]] = []

    @property
    def is_active(self) -> bool:
        """Whether the steps that run now are in FP8."""
        return self.is_training or self._config.in_evaluation

    def applies_to(
        self, site: Site, rule: ProductRule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether a product runs in FP8."""
        config = self._config
        if not self.is_active:
            return False
        if site.name not in config.decisions:
            config.decisions[site.name] = self._why_not(site, rule, args, kwargs)
        return config.decisions[site.name] is None and rule.operator in ("mm", "addmm")

    def measure(self, product: Product, operands: Sequence[Tensor], *, is_first: bool) -> None:
        """Find out what FP8 would lose of operands in their units; see :meth:`misfits`.

        At first sight it is decided at once: what does not fit is not to be cast even once.
        """
        if not self._measures_range or product.rule.operator not in ("mm", "addmm"):
            return
        if self._config.decisions.get(product.site.name) is not None:
            # It is not in FP8 anyway.
            return
        for tensor, unit, name, is_gradient in zip(
            operands, product.log2_units, product.names, product.is_gradient, strict=True
        ):
            direction: Direction = "backward" if is_gradient else "forward"
            stored = tensor.detach().float() * 2.0**-unit
            shares = stored_shares(stored, direction)
            row = torch.cat([root_mean_square(stored).to(shares.dtype)[None], shares])
            self._shares.append((direction, name, row))
        if is_first:
            self.leave_out(self.misfits())

    def misfits(self) -> Misfits:
        """What does not fit of what was measured since the last call."""
        measured, self._shares = self._shares, []
        if not measured:
            return Misfits()
        numbers = torch.stack([row for *_, row in measured]).tolist()
        found: list[Shares] = [
            (direction, name, shares)
            for (direction, name, _), (rms, *shares) in zip(measured, numbers, strict=True)
            # Out of the range it gets other units first.
            if LOW <= rms <= HIGH
        ]
        return misfits_among(found)

    def leave_out(self, misfits: Misfits) -> Misfits:
        """Keep products out of FP8, or their gradients in E5M2; returns what is new of that."""
        new = self._config.leave_out(misfits)
        for name, reason in new.products.items():
            if self._config.decisions.get(name, "unknown") is None:
                self._config.decisions[name] = reason
        return new

    def run(
        self, product: Product, original: Kernel, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a product in FP8."""
        config, site = self._config, product.site
        first, second = product.rule.operands
        if args[first].shape[1] != args[second].shape[0]:
            return original(*args, **kwargs)  # which says what is wrong; FP8 would pad it
        scale = 1.0
        casts: list[Tensor] = []
        for position, unit, is_gradient, name in zip(
            (first, second), product.log2_units, product.is_gradient, product.names, strict=True
        ):
            factor = grid_factor(config.moving_grid, name, product.step)
            scale *= 2.0**unit / factor
            # The hardware multiplies no two matrices in E5M2.
            is_wide = is_gradient and not any(cast.dtype == GRADIENTS["E5M2"] for cast in casts)
            dtype = GRADIENTS[config.gradient_of(site.name)] if is_wide else OPERAND
            casts.append(to_fp8(args[position], 2.0**-unit * factor, dtype))
        tensor = args[first]
        result = scaled_product(
            casts[0],
            casts[1].t(),
            torch.full((), scale, dtype=torch.float32, device=tensor.device),
            tensor.dtype,
            fast=not any(product.is_gradient),
        )
        return result.add_(args[0]) if product.rule.addends else result

    def run_layer(
        self, session: ProductSession, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """Run a linear layer so that it keeps FP8 for its backward pass, if it is in FP8."""
        return run_layer(session, self, self._config, (input, weight, bias))

    def _why_not(
        self, site: Site, rule: ProductRule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str | None:
        if rule.operator not in ("mm", "addmm"):
            return "it is no linear layer"
        read, weight = (args[position] for position in rule.operands)
        is_linear = site.name.rpartition(".")[2].startswith(_LINEAR) and _is_of_layer(weight)
        if not (is_linear or is_parameter(weight)):
            return "it is no linear layer"
        if not self._config.patterns.match_names(site.name, site.module):
            return "its name is excluded"
        for tensor in (read, weight):
            if tensor.dtype not in _DTYPES:
                return f"made of {tensor.dtype}"
        for name in ("beta", "alpha"):
            if kwargs.get(name, 1) != 1:
                return f"it has {name}={kwargs[name]}"
        for what, size in zip(("input", "output"), weight.shape, strict=True):
            if size % MULTIPLE or size == 0:
                return f"its {size} {what} features are no multiple of {MULTIPLE}"
        reason = why_no_fp8(read.device)
        if reason is not None:
            raise RuntimeError(
                f"{site.name} on {read.device}: {reason}; expected a GPU of compute capability "
                "8.9 or above, or a CPU; leave FP8 out, or simulate it."
            )
        return self._config.unfit.products.get(site.name)


def _is_of_layer(weight: Tensor) -> bool:
    """Whether a matrix is made of a parameter of the layer that runs, by that parameter's shape.

    ``F.linear(x, 2 * w)`` and ``x @ y.t()`` are the same operation.
    """
    layer = running_module()
    if layer is None:
        return False
    shape = weight.shape[::-1]
    own = layer.parameters(recurse=False)
    return isinstance(layer, nn.Linear) or any(param.shape == shape for param in own)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, another arrangement of one, or autocast's copy of one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return any(
        source is not None and isinstance(getattr(source, "variable", None), nn.Parameter)
        for source, _ in made_by.next_functions
    )
