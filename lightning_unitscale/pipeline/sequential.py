"""A sequence of modules with a cut between each two."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.pipelining import pipe_split
from typing_extensions import override


class PipeSequential(nn.Sequential):
    """``nn.Sequential`` whose every module is a stage of its own."""

    @staticmethod
    def from_sequential(sequential: nn.Sequential) -> PipeSequential:
        """The same modules under the same names, with a cut between each two.

        A module that occurs several times is several stages, with the same parameters.

        Raises:
            TypeError: If it is no ``nn.Sequential``, or one with a ``forward`` of its own.
        """
        if not isinstance(sequential, nn.Sequential):
            raise TypeError(
                f"sequential={type(sequential).__name__}: expected an nn.Sequential; mark the cuts "
                "of another module with split_spec."
            )
        if type(sequential).forward not in (nn.Sequential.forward, PipeSequential.forward):
            raise TypeError(
                f"sequential={type(sequential).__name__}: expected the forward of nn.Sequential, "
                "and it has its own, which would be lost; mark the cuts with split_spec."
            )
        made = PipeSequential()
        # named_children() leaves out a module that occurs a second time.
        for path, module in sequential.named_modules(remove_duplicate=False):
            if path and "." not in path:
                made.add_module(path, module)
        made.training = sequential.training
        return made

    @override
    def forward(self, input: Any) -> Any:
        """Runs the modules in order."""
        for place, module in enumerate(self):
            if place:
                pipe_split()
            input = module(input)
        return input
