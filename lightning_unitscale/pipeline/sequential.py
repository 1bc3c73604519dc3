"""A sequence of modules with a cut between each two."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import override

from lightning_unitscale.pipeline.marks import pipe_split


class PipeSequential(nn.Sequential):
    """``nn.Sequential`` whose every module is a stage of its own."""

    @staticmethod
    def from_sequential(sequential: nn.Sequential) -> PipeSequential:
        """The same modules under the same names, with a cut between each two.

        Raises:
            TypeError: If it is no ``nn.Sequential``.
        """
        if not isinstance(sequential, nn.Sequential):
            raise TypeError(
                f"sequential={type(sequential).__name__}: expected an nn.Sequential; mark the cuts "
                "of another module with split_spec."
            )
        made = PipeSequential()
        for name, module in sequential.named_children():
            made.add_module(name, module)
        return made.train(sequential.training)

    @override
    def forward(self, input: Any) -> Any:
        """Runs the modules in order."""
        for place, module in enumerate(self):
            if place:
                pipe_split()
            input = module(input)
        return input
