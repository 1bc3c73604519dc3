"""Define the gauge, a pair of powers of two per tensor, and the units of captured tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tabulate import tabulate
from torch import fx

from lightning_unitscale.capture.graph_matmuls import Places, matmul_of
from lightning_unitscale.capture.graph_nodes import is_whole_view, tensor_name
from lightning_unitscale.capture.passes import StepGraph

# A matmul's factor combines two sigmas, or a sigma and a gamma. Within these bounds each factor and
# its inverse are normal FP32 numbers, so multiplying by them is exact.
MAX_LOG2_SIGMA = 60
MAX_LOG2_GAMMA = 60
# Keys of ``StepGraph.notes``: a function that returns the units in force, and the units of tensors.
GAUGE = "gauge"
HELD = "held"
# Key of a node's meta: the number by which a rule multiplies the node's first input.
FACTOR = "rule_factor"
# Suffix of a matmul's result if the rest of the model reads it times a factor.
UNSCALED = ":unscaled"


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
        operand, gradient = gauge.pair(self.operand), gauge.pair(self.gradient)
        return operand.log2_sigma + gradient.log2_gamma + self.log2


ONE = Unit()


@dataclass(frozen=True)
class TensorUnits:
    """The units of a tensor at the matmuls that read it."""

    sigma: Unit = ONE  # forward unit of the stored value
    gamma: Unit = ONE  # unit of the stored gradient


_TRUE = TensorUnits()


def held_units(graph: StepGraph) -> dict[str, TensorUnits]:
    """Return the units in which matmuls read each tensor, by its name."""
    places = Places(graph)
    held: dict[str, TensorUnits] = {}
    for region in places.regions:
        for matmul in filter(None, map(matmul_of, region.graph.nodes)):
            # The gauge's name of a matmul ignores the factors of rules.
            site = tensor_name(matmul.node).removesuffix(UNSCALED)
            for operand in matmul.operands:
                for read, log2_factor in _read_through(operand.node):
                    name = tensor_name(places.origin(region, read))
                    # A tensor that several matmuls read is shown in the units of the first.
                    known = held.get(name, _TRUE)
                    if known.sigma == ONE:
                        unit = Unit(f"{site}:{operand.role}", log2=-log2_factor)
                        held[name] = replace(known, sigma=unit)
            scaled = [user for user in matmul.node.users if FACTOR in user.meta]
            for result in (matmul.node, *scaled):
                name, unit = tensor_name(result), Unit(gradient=site, log2=-_log2_factor(result))
                held[name] = replace(held.get(name, _TRUE), gamma=unit)
    return held


def _read_through(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield an operand and its sources, with the exponent of the factor in between."""
    # A view or a rule's factor may separate the displayed tensor from the matmul's operand.
    log2_factor = 0
    yield node, log2_factor
    while FACTOR in node.meta or is_whole_view(node):
        log2_factor += _log2_factor(node)
        node = node.all_input_nodes[0]
        yield node, log2_factor


def _log2_factor(node: fx.Node) -> int:
    """Return the exponent of the power of two nearest to a rule's factor."""
    return round(math.log2(abs(node.meta.get(FACTOR, 1.0))))
