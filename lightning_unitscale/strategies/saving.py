"""Checkpoints of a pipeline: the layout and the names of a single device."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.strategies.evaluation import EvaluatingStrategy


class SavingStrategy(EvaluatingStrategy):
    """Collects what the ranks own on the first one, and saves nothing after an exception.

    Attributes:
        shard_optimizer: Whether the pipelines divide the optimizer's state among themselves.
    """

    shard_optimizer: bool

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict that one device would have, on the first rank; ``{}`` on the others."""
        if self._owners is None or self._is_interrupted:
            return super().lightning_module_state_dict()
        if self.grid.replicas.rank:
            return {}
        return self._owners.state_on_first(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state that one device would have, on the first rank alone."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        if self._owners is None or self._is_interrupted:
            state: dict[str, Any] = inner.state_dict()
            return state
        if self.grid.replicas.rank and not self.shard_optimizer:
            return {}
        return self._owners.optimizer_state(inner)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Saves a checkpoint, unless an exception has ended the run."""
        if self._is_interrupted:
            rank_zero_warn(
                f"PipelineStrategy: {filepath} is not saved: the run was interrupted, and the "
                "weights of the other ranks may be gone; go on from an earlier checkpoint."
            )
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Barrier; does nothing after an exception."""
        if self.lightning_module is None or not self._is_interrupted:
            super().barrier(*args, **kwargs)
