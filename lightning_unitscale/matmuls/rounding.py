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

from lightning_unitscale.formats import E4M3FN, E5M2, NumberFormat
from lightning_unitscale.matmuls.coverage import first_of, percent
from lightning_unitscale.matmuls.execute import Matmul, run_scaled
from lightning_unitscale.matmuls.matmul_formats import MovingGrid, SimulateFormat
from lightning_unitscale.matmuls.measured_operands import MAX_FLUSHED, Unrepresentable
from lightning_unitscale.matmuls.measurement import Site
from lightning_unitscale.matmuls.torch_internals import Kernel
from lightning_unitscale.quantize import rounded
from lightning_unitscale.scales.transfer import HostCopy, numbers_on

# Share of the nonzero elements that may become zero without a report, beyond three times the share
# of normal numbers: E4M3FN makes one of a thousand zero, E2M1FN one of five. In healthy trainings,
# E4M3FN makes 5 % of attention's gradients zero.
# An operand is reported at the first share, and once more at the second.
_MAX_SHARES = (0.1, MAX_FLUSHED)
_OF_NORMAL = 3
# So few elements are not reported, since one is a large share of a small tensor.
_FEW = 2


class Numerics(abc.ABC):
    """The effect of a format on matmuls: simulated, or run in it."""

    name: str  # what users call the format
    is_training = True  # whether the running steps are training steps
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
        self, matmul: Matmul, operands: Sequence[Tensor], *, is_first: bool
    ) -> None:
        """Measure scaled operands, for the first time or again."""

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

    def fit(self, joint: Callable[[Unrepresentable], Unrepresentable]) -> Unrepresentable:
        """Leave out measured operands that do not fit the format."""
        return Unrepresentable()


class FlushedOperands:
    """Collects the shares of operands that become zero, without waiting for their device."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, NumberFormat, Tensor]] = []
        self._sent: list[tuple[list[tuple[str, NumberFormat]], HostCopy]] = []
        self._found: dict[str, str] = {}
        # By operand, the highest level reported.
        self._levels: Counter[str] = Counter()

    def measure(self, name: str, stored: Tensor, format: NumberFormat) -> None:
        """Measure an operand."""
        if self._levels[name] == len(_MAX_SHARES):
            return
        magnitudes = stored.detach().abs()
        is_some = magnitudes > 0
        flushed = (is_some & (magnitudes <= format.flush_threshold)).sum()
        share = torch.where(flushed > _FEW, flushed / is_some.sum().clamp(min=1), 0.0)
        self._rows.append((name, format, share))

    def _note(self, name: str, share: float, format: NumberFormat) -> None:
        usual = _OF_NORMAL * math.erf(format.flush_threshold / math.sqrt(2.0))
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
        return first_of(texts)


class SimulatedMatmuls(Numerics):
    """Rounds operands of matmuls to one format, and arriving gradients to another."""

    # A backward matmul rounds a saved operand as its forward matmul did: a random or a moving
    # grid is drawn by the operand's name and the step, not by the call.

    name = "a simulated format"

    def __init__(self, *configs: SimulateFormat, measures_range: bool = False) -> None:
        self._configs = configs
        self.spacing = (
            max(config.operand_format.eps for config in configs),
            max(config.gradient_format.eps for config in configs),
        )
        self._measures_range = measures_range
        self._flushed = FlushedOperands()

    def why_not(self, matmul: Matmul, *_: Any) -> str | None:
        """Return which of the globs leaves a matmul out; ``None`` if it is rounded."""
        site = matmul.site
        if self._configs_of(site):
            return None
        return self._configs[0].patterns.why_not(site.name, site.module)

    def run(self, matmul: Matmul, original: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run a matmul on rounded operands."""
        configs = self._configs_of(matmul.site)
        for position, unit, is_gradient, name in matmul.places():
            for config in configs:
                args[position] = _rounded(
                    config, args[position], unit, is_gradient, name, matmul.step
                )
                unit = 0  # it is scaled now
        return run_scaled(matmul, original, args, kwargs)

    def measure(self, matmul: Matmul, operands: Sequence[Tensor], *, is_first: bool) -> None:
        """Measure the share of elements of operands that become zero."""
        configs = self._configs_of(matmul.site) if self._measures_range else []
        for tensor, (_, unit, is_gradient, name) in zip(operands, matmul.places(), strict=True):
            for config in configs[:1]:
                stored = tensor.detach().float() * 2.0**-unit
                self._flushed.measure(name, stored, _format_of(config, is_gradient))

    def take_flushed(self) -> str:
        """Return operands of which many elements become zero."""
        return self._flushed.take()

    def _configs_of(self, site: Site) -> list[SimulateFormat]:
        return [
            config
            for config in self._configs
            if config.patterns.match_names(site.name, site.module)
        ]


def _rounded(
    config: SimulateFormat, tensor: Tensor, unit: int, is_gradient: bool, name: str, step: int
) -> Tensor:
    format = _format_of(config, is_gradient)
    key = None
    if config.rounding == "stochastic":
        # The same for all of an operand in a step.
        text = f"{config.seed}/{step}/{name}".encode()
        key = numbers_on(tensor.device, [zlib.crc32(text), zlib.adler32(text)], torch.int64)
    factor = grid_factor(config.moving_grid, name, step)
    wide = tensor.detach().float() * (factor * 2.0**-unit)
    # Divide in FP32, where the quotient of an FP8 number is off by one rounding at most.
    result = rounded(wide, format, config.saturate, key)
    return (result if factor == 1.0 else result / factor).to(tensor.dtype)


def _format_of(config: SimulateFormat, is_gradient: bool) -> NumberFormat:
    return config.gradient_format if is_gradient else config.operand_format


def grid_factor(grid: MovingGrid | None, name: str, call: int) -> float:
    """Return the factor of a grid on an operand, 1 without one."""
    return 1.0 if grid is None else grid.factor(name, call)
