"""Define the interface of formats, and round matmuls to simulated formats."""

from __future__ import annotations

import abc
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.formats import E4M3FN, E5M2, BlockFormat, NumberFormat
from lightning_unitscale.formats.round_numbers import rounded, rounded_blocks
from lightning_unitscale.matmuls.block_rounding import (
    UNIT_SCALE,
    Axes,
    WeightMatmuls,
    axes_of,
    hadamard,
    parts_of,
)
from lightning_unitscale.matmuls.computations import (
    COMPUTATIONS,
    EXEMPT,
    Computation,
    computations_of,
    joined_results,
)
from lightning_unitscale.matmuls.coverage import join_first
from lightning_unitscale.matmuls.execute import Matmul, run_in_units, run_scaled
from lightning_unitscale.matmuls.matmul_formats import MovingGrid, SimulateFormat
from lightning_unitscale.matmuls.measurement import FORWARD, MAX_FLUSHED, Site, Unrepresentable
from lightning_unitscale.matmuls.torch_internals import Kernel
from lightning_unitscale.scales.transfer import HostCopy, numbers_on
from lightning_unitscale.scales.violations import percent

# Share of the nonzero elements that may become zero without a report, beyond three times the share
# of normal numbers: E4M3FN makes one of a thousand zero, E2M1FN one of five. In healthy trainings,
# E4M3FN makes 5 % of attention's gradients zero.
# An operand is reported at the first share, and once more at the second.
_MAX_SHARES = (0.1, MAX_FLUSHED)
_OF_NORMAL = 3
_FEW = 2  # so few elements are not reported, since one is a large share of a small tensor
# The largest of a block of normal numbers.
_OF_BLOCK = 2.5
_Format = NumberFormat | BlockFormat


class Numerics(abc.ABC):
    """The effect of a format on matmuls: simulated, or run in it."""

    name: str  # what users call the format
    is_training = True  # whether the running steps are training steps
    needs_units = True  # whether operands without a unit are not rounded
    # Spacing of the numbers near 1 in the formats of operands and of arriving gradients: FP8's.
    spacing: tuple[float, float] = (E4M3FN.eps, E5M2.eps)

    @property
    def is_active(self) -> bool:
        """Check whether the running steps are rounded at all."""
        return True

    @abc.abstractmethod
    def why_not(self, matmul: Matmul, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Return why a matmul is not rounded; ``None`` if it is."""

    @abc.abstractmethod
    def run(self, matmul: Matmul, original: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run a matmul on scaled and rounded operands."""

    def measure(  # noqa: B027
        self, matmul: Matmul, args: Sequence[Any], *, is_first: bool
    ) -> None:
        """Measure the scaled operands of a call, for the first time or again."""

    def await_units(self, names: Iterable[str]) -> None:  # noqa: B027
        """Record operands that got a unit late, since they were zero at first."""

    def awaits(self, names: Sequence[str]) -> bool:
        """Check whether :meth:`measure` has yet to see one of these with its late unit."""
        return False

    def receive(self) -> Unrepresentable:
        """Leave out measured operands that do not fit, without waiting for the device."""
        return Unrepresentable()

    def take_flushed(self) -> str:
        """Return operands of which many elements become zero, each once; empty if there are none.

        It does not wait for the device, so measurements may arrive after the next step.
        """
        return ""

    def fit(
        self,
        joint: Callable[[Unrepresentable], Unrepresentable],
        *,
        readmits: bool = False,
    ) -> Unrepresentable:
        """Leave out measured operands that do not fit the format."""
        return Unrepresentable()


class FlushedOperands:
    """Collects the shares of operands that become zero, without waiting for their device."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, _Format, Tensor]] = []
        self._sent: list[tuple[list[tuple[str, _Format]], HostCopy]] = []
        self._found: dict[str, str] = {}
        self._levels: Counter[str] = Counter()  # by operand, the highest level reported

    def measure(
        self,
        name: str,
        stored: Tensor,
        format: _Format,
        axes: Axes = (-1,),
        tensor_scale: float | None = None,
    ) -> None:
        """Measure an operand. Blocks lie along the given dimensions."""
        if self._levels[name] == len(_MAX_SHARES):
            return
        magnitudes = stored.detach().abs()
        is_some = magnitudes > 0
        if isinstance(format, BlockFormat):
            is_zero = rounded_blocks(magnitudes, format, axes, tensor_scale) == 0
        else:
            is_zero = magnitudes <= format.flush_threshold
        flushed = (is_some & is_zero).sum()
        share = torch.where(flushed > _FEW, flushed / is_some.sum().clamp(min=1), 0.0)
        self._rows.append((name, format, share))

    def _note(self, name: str, share: float, format: _Format) -> None:
        limit = (
            format.element.flush_threshold * _OF_BLOCK / format.element.max
            if isinstance(format, BlockFormat)
            else format.flush_threshold
        )
        usual = _OF_NORMAL * math.erf(limit / math.sqrt(2.0))
        level = sum(share > each + usual for each in _MAX_SHARES)
        if level > self._levels[name]:
            self._levels[name] = level
            # A matmul's own name is that of the gradient that arrives at it.
            shown = name if ":" in name else f"{name}:gradient"
            self._found[name] = f"{shown} ({percent(share)} of its elements in {format})"

    def take(self, is_rounded: Callable[[str], bool] = lambda name: True) -> str:
        """Return arrived operands that were not reported yet; empty if there are none."""
        if self._rows:
            rows, self._rows = self._rows, []
            device = rows[0][2].device
            shares = torch.stack([share.to(device) for *_, share in rows])
            self._sent.append(([(name, format) for name, format, _ in rows], HostCopy(shares)))
        while self._sent and self._sent[0][1].has_arrived:
            names, copy = self._sent.pop(0)
            for (name, format), share in zip(names, copy.numbers().tolist(), strict=True):
                if is_rounded(name):
                    self._note(name, share, format)
        texts, self._found = list(self._found.values()), {}
        return join_first(texts)


def _eps(format: NumberFormat | BlockFormat | None) -> float:
    """Return the spacing of a format's numbers near 1; 0 without rounding."""
    if format is None:
        return 0.0
    return (format if isinstance(format, NumberFormat) else format.element).eps


class SimulatedMatmuls(Numerics):
    """Rounds operands of matmuls to one format, and arriving gradients to another.

    Blocks lie along the dimension that a matmul sums over. So the three computations of a matmul
    round the same tensor each in its own way.
    """

    # A backward matmul rounds a saved operand as its forward matmul did: a random or a moving
    # grid is drawn by the operand's name and the step, not by the call.

    name = "a simulated format"

    def __init__(
        self, *configs: SimulateFormat, measures_range: bool = False, has_units: bool = True
    ) -> None:
        self._configs = configs
        # With units, a constant. Without, each tensor's own largest magnitude in each call.
        self._tensor_scale = UNIT_SCALE if has_units else None
        self._weights = WeightMatmuls()
        self.spacing = (
            max(_eps(config.operand_format) for config in configs),
            max(_eps(config.gradient_format) for config in configs),
        )
        self._measures_range = measures_range
        self._flushed = FlushedOperands()

    def why_not(self, matmul: Matmul, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Return which of the globs leaves a matmul out; ``None`` if it is rounded."""
        self._see(matmul, args)
        site = matmul.site
        if self._configs_of(site, *computations_of(site, matmul.slot)):
            return None
        return self._configs[0].patterns.why_not(site.name, site.module) or EXEMPT

    def run(self, matmul: Matmul, original: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run a matmul on rounded operands."""
        self._see(matmul, args)
        site = matmul.site
        configs = [self._configs_of(site, each) for each in computations_of(site, matmul.slot)]
        first, last = configs[0], configs[-1]
        has_two_axes = matmul.rule.mask is not None and any(each.has_blocks for each in first)
        if first == last and not has_two_axes:
            return self._run_in(first, matmul, original, list(args), kwargs)
        # The gradients of a convolution round the same operands differently.
        parts = zip(parts_of(matmul, args), (first, last), strict=False)
        return joined_results(
            [self._run_in(each, part, original, given, kwargs) for (part, given), each in parts]
        )

    def _see(self, matmul: Matmul, args: Sequence[Any]) -> None:
        # Only the forward pass shows that a matmul reads a weight, and it may be exempt.
        if any(config.square_weights or config.hadamard for config in self._configs):
            self._weights.see(matmul, args)

    def _run_in(
        self,
        configs: Sequence[SimulateFormat],
        matmul: Matmul,
        original: Kernel,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a matmul on operands rounded to some formats, or unrounded without one."""
        if not configs:  # it is exempt, and the kernel's other gradient is not
            if matmul.slot in matmul.site.plain:
                return original(*args, **kwargs)
            return run_in_units(matmul, original, args, kwargs)
        is_transformed = any(self._is_transformed(config, matmul) for config in configs)
        axes = self._axes(configs, matmul, args)
        for (position, unit, is_gradient, name), along in zip(matmul.places(), axes, strict=True):
            which = {"is_gradient": is_gradient, "is_backward": matmul.slot != FORWARD}
            is_kept = all(config.format_of(**which) is None for config in configs)
            if is_kept and not is_transformed:
                args[position] = args[position] * 2.0**-unit if unit else args[position]
                continue
            wide = args[position].detach().float() * 2.0**-unit  # it is scaled from here on
            for config in configs:
                wide = self._rounded(config, matmul, wide, is_gradient, name, along)
            args[position] = wide.to(args[position].dtype)
        return run_scaled(matmul, original, args, kwargs)

    def _axes(
        self, configs: Sequence[SimulateFormat], matmul: Matmul, args: Sequence[Any]
    ) -> list[Axes]:
        """Return the dimensions of each operand that its blocks lie along, if it has blocks."""
        if any(config.has_blocks for config in configs):
            return axes_of(matmul.rule, args)
        return [(-1,)] * len(matmul.names)

    def _is_transformed(self, config: SimulateFormat, matmul: Matmul) -> bool:
        """Check whether both operands of a matmul get the Hadamard transform."""
        return config.transforms_weight_gradients and self._weights.is_gradient(matmul)

    def _rounded(
        self,
        config: SimulateFormat,
        matmul: Matmul,
        wide: Tensor,
        is_gradient: bool,
        name: str,
        axes: Axes,
    ) -> Tensor:
        """Round a scaled operand, in FP32."""
        format = config.format_of(is_gradient=is_gradient, is_backward=matmul.slot != FORWARD)
        if self._is_transformed(config, matmul):
            wide = hadamard(wide, axes[0], config.seed)
        if format is None:
            return wide
        key = None
        if (config.gradient_rounding if is_gradient else config.rounding) == "stochastic":
            # The same for all of an operand in a step.
            text = f"{config.seed}/{matmul.step}/{name}".encode()
            key = numbers_on(wide.device, [zlib.crc32(text), zlib.adler32(text)], torch.int64)
        factor = grid_factor(config.moving_grid, name, matmul.step)
        wide = wide if factor == 1.0 else wide * factor
        if isinstance(format, NumberFormat):
            result = rounded(wide, format, config.saturate, key)
        else:
            is_square = config.square_weights and wide.dim() == 2
            is_square = is_square and self._weights.reads(matmul, name)
            result = rounded_blocks(wide, format, axes, self._tensor_scale, key, is_square)
        # Divide in FP32, where the quotient of an FP8 number is off by one rounding at most.
        return result if factor == 1.0 else result / factor

    def measure(self, matmul: Matmul, args: Sequence[Any], *, is_first: bool) -> None:
        """Measure the share of elements of operands that become zero."""
        configs = self._configs_of(matmul.site, *COMPUTATIONS) if self._measures_range else []
        for config in configs[:1]:
            axes = self._axes(configs[:1], matmul, args)
            for (position, unit, is_gradient, name), along in zip(
                matmul.places(), axes, strict=True
            ):
                is_backward = matmul.slot != FORWARD
                format = config.format_of(is_gradient=is_gradient, is_backward=is_backward)
                if format is not None:
                    stored = args[position].detach().float() * 2.0**-unit
                    self._flushed.measure(name, stored, format, along, self._tensor_scale)

    def take_flushed(self) -> str:
        """Return operands of which many elements become zero."""
        return self._flushed.take()

    def _configs_of(self, site: Site, *computations: Computation) -> list[SimulateFormat]:
        """Return the formats that round at least one of these computations."""
        return [
            config
            for config in self._configs
            if config.patterns.match_names(site.name, site.module)
            and not all(config.exempt.covers(site, each) for each in computations)
        ]


def grid_factor(grid: MovingGrid | None, name: str, call: int) -> float:
    """Return the factor of a grid on an operand, 1 without one."""
    return 1.0 if grid is None else grid.factor(name, call)
