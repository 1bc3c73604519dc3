"""Late units of a module that several ranks train."""

from __future__ import annotations

from typing_extensions import override

from lightning_unitscale.lossless.late_units import LateUnits
from lightning_unitscale.ranks import gathered, is_distributed


class JointLateUnits(LateUnits):
    """Late units that all ranks measure at the same steps: they have the same units."""

    @override
    def _is_alone(self) -> bool:
        return not is_distributed()

    @override
    def _joint(self, names: frozenset[str]) -> frozenset[str]:
        return names.union(*gathered(names))
