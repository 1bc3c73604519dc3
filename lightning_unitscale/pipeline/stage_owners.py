"""Decide once which stages and ranks own each parameter. Every later graph keeps these owners.

A step is recaptured for another batch size, or when Python state that it reads has changed. The
parameters, their optimizer state and their current values stay on their ranks. So the cuts of a
later graph follow the owners.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_unitscale.loops.ranks import hand_out
from lightning_unitscale.pipeline.balance import BalancedSplit
from lightning_unitscale.pipeline.cuts import SplitPolicy
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.program import named_tensors

_Stages = dict[str, frozenset[int]]  # stages of a tensor, by its name


class Ownership:
    """The owners of a module's parameters and of the buffers that its steps change."""

    def __init__(
        self,
        module: nn.Module,
        num_ranks: int,
        rank_of: Callable[[int], int],
        first_policy: SplitPolicy,
    ) -> None:
        self._num_ranks = num_ranks
        self.rank_of = rank_of
        self._first_policy = first_policy  # cuts the first graph
        # A tied tensor has its first name here. A graph may use another of its names.
        self._tensors = named_tensors(module)
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._stages: _Stages = {}
        self._readers: dict[str, frozenset[int]] = {}
        self._written: frozenset[str] = frozenset()
        self._num_stages: int | None = None

    @property
    def is_settled(self) -> bool:
        """Check whether a graph has been noted."""
        return self._num_stages is not None

    @property
    def stages(self) -> tuple[int, _Stages]:
        """Return the number of stages, and the stages of each parameter, for :meth:`adopt`."""
        assert self._num_stages is not None
        return self._num_stages, self._stages

    def adopt(self, settled: tuple[int, _Stages]) -> None:
        """Use the owners of another pipeline of the same module."""
        assert not self.is_settled
        self._num_stages, self._stages = settled

    @property
    def names(self) -> list[set[str]]:
        """Return the names of the tensors of each rank. A tied tensor has its first name."""
        owned: list[set[str]] = [set() for _ in range(self._num_ranks)]
        for name, stages in self._stages.items():
            for rank in self._ranks(stages):
                owned[rank].add(name)
        return owned

    def replicas(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each parameter that several ranks own."""
        return {
            name: tuple(sorted(ranks))
            for name, stages in self._stages.items()
            if len(ranks := self._ranks(stages)) > 1
            and isinstance(self._tensors[name], nn.Parameter)
        }

    def parameters_of(self, rank: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a rank, by name."""
        owned = self.names[rank]
        return {
            name: tensor
            for name, tensor in self._tensors.items()
            if name in owned and isinstance(tensor, nn.Parameter)
        }

    def policy(self) -> SplitPolicy:
        """Return the split policy of the next graph. Later graphs are cut by the owners."""
        if self._num_stages is None:
            return self._first_policy
        stages = {id(self._tensors[name]): stages for name, stages in self._stages.items()}
        return BalancedSplit(self._num_stages, stages_of=stages)

    def note(self, pipe: Pipe) -> None:
        """Note the parameters of a graph's stages, and assign owners to new ones."""
        used, readers, written = self._uses(pipe)
        moved = [
            name
            for name, stages in used.items()
            if name in self._stages and not self._ranks(stages) <= self._ranks(self._stages[name])
        ]
        # A buffer that no stage changes is the same everywhere, so any rank may read it.
        all_written = self._written | written
        all_readers = {
            name: self._readers.get(name, frozenset()) | self._ranks(readers.get(name, ()))
            for name in {*self._readers, *readers}
        }
        moved += [name for name in all_written if len(all_readers[name]) > 1]
        if moved:
            raise RuntimeError(
                f"the step was recaptured (another batch size, or Python state that it reads has "
                f"changed), and {sorted(moved)[:3]} would be used by other ranks than those that "
                "own them. Every graph needs the same parameters in the same stages. Mark the cuts "
                "with pipe_split() or split={path: SplitPoint.BEGINNING}."
            )
        self._stages = {**used, **self._stages}
        for name in all_written:
            self._stages.setdefault(name, frozenset(readers.get(name, ())))
        self._readers, self._written = all_readers, all_written
        self._num_stages = pipe.num_stages

    def own(self, names: Iterable[str], stage: int) -> None:
        """Assign parameters that no graph uses to the rank of a stage."""
        self._stages = {**dict.fromkeys(names, frozenset({stage})), **self._stages}

    def _uses(self, pipe: Pipe) -> tuple[_Stages, _Stages, frozenset[str]]:
        """Return the stages of parameters and buffers, and the buffers that are changed."""
        tensors = named_tensors(pipe.program.graph_module, remove_duplicate=False)
        used: _Stages = {}
        readers: _Stages = {}
        written: set[str] = set()
        for index, stage in enumerate(pipe.stages):
            for users, names in ((used, stage.info.parameters), (readers, stage.info.buffers)):
                for name in self._first_names(names, tensors):
                    users[name] = users.get(name, frozenset()) | {index}
            written |= self._first_names(stage.info.written, tensors)
        return used, readers, frozenset(written)

    def _first_names(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the module's names of those tensors of a graph that the module has."""
        ids = (id(tensors[name]) for name in names)
        return {self._names[key] for key in ids if key in self._names}

    def _ranks(self, stages: frozenset[int] | tuple[()]) -> frozenset[int]:
        return frozenset(map(self.rank_of, stages))


class SharedGradients:
    """The gradients of replicated parameters, summed over their ranks."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, tuple[int, ...]],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.owners = {name: ranks for name, ranks in sorted(owners.items()) if len(ranks) > 1}
        self.parameters = {name: parameters[name] for name in self.owners if name in parameters}
        self._group = group
        self._rank = dist.get_rank(group)

    @contextlib.contextmanager
    def summed(self) -> Iterator[None]:
        """Sum the gradients of a step over their ranks, and add them to the earlier ones."""
        # The earlier gradients are already summed.
        earlier = {name: param.grad for name, param in self.parameters.items()}
        for param in self.parameters.values():
            param.grad = None
        yield
        # All ranks use the same order of names, so no two of them block each other.
        for name, param in self.parameters.items():
            self._sum(param, self.owners[name])
            if (before := earlier[name]) is not None:
                param.grad = before if param.grad is None else before + param.grad

    def _sum(self, parameter: nn.Parameter, ranks: tuple[int, ...]) -> None:
        """Sum a gradient over its owners in rank order, so that all get the same bits."""
        first, *others = ranks
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        # If no rank has a gradient, the parameter gets none, as on one device.
        present = torch.tensor([parameter.grad is not None], device=own.device).int()
        for rank in others:
            for total in (present, own):
                if self._rank == rank:
                    dist.send(total, group=self._group, group_dst=first)
                elif self._rank == first:
                    part = torch.empty_like(total)
                    dist.recv(part, group=self._group, group_src=rank)
                    total += part
        parameter.grad = own if present.item() else None
        hand_out_gradient(parameter, ranks, self._group)


def hand_out_gradient(
    parameter: nn.Parameter, ranks: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    """Send the first rank's gradient, or its absence, to the ranks. Each of them calls it."""
    present = torch.tensor([parameter.grad is not None], device=parameter.device).int()
    hand_out(present, ranks, group)
    if dist.get_rank(group) != ranks[0]:
        parameter.grad = torch.empty_like(parameter).contiguous() if present.item() else None
    if parameter.grad is not None:
        hand_out(parameter.grad, ranks, group)
