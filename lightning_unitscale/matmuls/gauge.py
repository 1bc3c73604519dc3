"""Define the gauge, a pair of powers of two per tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tabulate import tabulate

# A matmul's factor combines two sigmas, or a sigma and a gamma. Within these bounds each factor and
# its inverse are normal FP32 numbers, so multiplying by them is exact.
MAX_LOG2_SIGMA = 60
MAX_LOG2_GAMMA = 60


@dataclass(frozen=True)
class GaugePair:
    """Units of one tensor, as exponents of two.

    Attributes:
        log2_sigma: The forward value is stored as ``x * 2**-log2_sigma``.
        log2_gamma: The gradient is stored as ``g * 2**-log2_gamma``.
    """

    log2_sigma: int = 0
    log2_gamma: int = 0

    @property
    def exponent(self) -> int:
        """Return the exponent of the unit of an operand or of a gradient."""
        return self.log2_sigma + self.log2_gamma


_UNIT = GaugePair()


@dataclass(frozen=True)
class Gauge(Mapping[str, GaugePair]):
    """A frozen mapping from tensor names to their :class:`GaugePair`. Unknown names have units 1.

    Operands of a matmul are named ``matmul:role``, such as ``blocks.0.mlp.linear:weight``.

    Attributes:
        pairs: The units by the tensors' names.

    Examples:
        >>> gauge = Gauge({"head.linear:input": GaugePair(log2_sigma=-3)})
        >>> gauge["head.linear:input"].log2_sigma
        -3
    """

    pairs: Mapping[str, GaugePair] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", MappingProxyType(dict(self.pairs)))

    def __getitem__(self, name: str) -> GaugePair:
        return self.pairs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __hash__(self) -> int:
        return hash(frozenset(self.pairs.items()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Gauge:
        return self

    def __reduce__(self) -> Any:
        return Gauge, (dict(self.pairs),)

    def pair(self, name: str) -> GaugePair:
        """Return the units of a tensor; 1 for an unknown name."""
        return self.pairs.get(name, _UNIT)

    def updated(self, other: Mapping[str, GaugePair]) -> Gauge:
        """Return a copy of this gauge, updated with the pairs of ``other``."""
        return Gauge({**self.pairs, **other})

    def num_changed(self, old: Gauge) -> int:
        """Count the tensors whose units differ from those in ``old``."""
        return sum(self.pair(name) != old.pair(name) for name in self)

    @staticmethod
    def of_rms(forward: Mapping[str, float], backward: Mapping[str, float]) -> Gauge:
        """Return the powers of two nearest to the RMS of values and of gradients, by name."""
        return Gauge(
            {
                name: GaugePair(
                    nearest_exponent(forward.get(name, 0.0), MAX_LOG2_SIGMA),
                    nearest_exponent(backward.get(name, 0.0), MAX_LOG2_GAMMA),
                )
                for name in (*forward, *backward)
            }
        )

    def state(self) -> dict[str, tuple[int, int]]:
        """Return plain numbers for a checkpoint: name to ``(log2_sigma, log2_gamma)``."""
        return {name: (pair.log2_sigma, pair.log2_gamma) for name, pair in self.pairs.items()}

    @staticmethod
    def from_state(state: Mapping[str, tuple[int, int]]) -> Gauge:
        """Create a gauge from the result of :meth:`state`."""
        return Gauge({name: GaugePair(int(s), int(g)) for name, (s, g) in state.items()})

    def __str__(self) -> str:
        rows = [(name, sigma, gamma) for name, (sigma, gamma) in self.state().items()]
        return tabulate(rows, headers=("tensor", "log2 sigma", "log2 gamma"))


def nearest_exponent(rms: float, limit: int) -> int:
    """Return the exponent of the power of two nearest to ``rms``; 0 for zero, NaN and inf."""
    if not math.isfinite(rms) or rms <= 0.0:
        return 0
    return max(-limit, min(limit, round(math.log2(rms))))


@dataclass(frozen=True)
class Unit:
    """The unit of a stored tensor: units of the gauge, times a constant power of two."""

    operand: str = ""  # name whose forward unit it includes
    gradient: str = ""  # name whose gradient unit it includes
    log2: int = 0  # exponent of the constant

    def exponent(self, gauge: Gauge) -> int:
        """Return the exponent of the unit under ``gauge``."""
        if not self.operand and not self.gradient:
            return self.log2
        units = gauge.pair(self.operand).log2_sigma + gauge.pair(self.gradient).log2_gamma
        return units + self.log2


ONE = Unit()
