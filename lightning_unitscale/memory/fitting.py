"""Find the batch size, budget and shards with which a training step fits into memory.

A step is traced at two batch sizes. Between and beyond them each tensor's bytes lie on a line. With
several shards, FSDP2 by ``fully_shard`` on each block is assumed: parameters, gradients and the
optimizer's state are divided, and two blocks are gathered at a time.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tabulate import tabulate
from torch import nn

from lightning_unitscale.memory.graph_profile import GraphProfile
from lightning_unitscale.memory.offload import HostLink
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.problem import NodeRegion, RematProblem
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.memory.real_memory import gradient_bytes, storage_bytes
from lightning_unitscale.memory.traced_planner import at_batch

# A batch this large means that nothing grows with it.
_MOST_SAMPLES = 2**30


@dataclass(frozen=True)
class Fit:
    """A way in which a step fits. Operations and seconds are those of one rank's optimizer step."""

    precision: str  # of the Trainer
    num_shards: int  # ranks that parameters, gradients and optimizer state are divided over
    microbatch: int  # samples that a rank runs at once
    num_microbatches: int  # that a rank accumulates for one step of the optimizer
    budget: int | None  # in bytes, for ``RematCallback``; ``None`` without rematerialization
    peak_bytes: int  # predicted, on a rank
    extra_flops: float  # of the recomputed matmuls
    flops: float  # of all other matmuls
    extra_seconds: float = 0.0  # estimate of the recomputation and of waiting for copies
    offload: Literal["host"] | None = None  # for ``RematCallback``
    host_bytes: int = 0  # that wait in host memory
    is_checked: bool = False  # True if the step was traced at this very microbatch

    @property
    def cost(self) -> tuple[float, ...]:
        """Return the costs to compare, in this order: ranks, added time, microbatches."""
        return self.num_shards, self.extra_seconds, self.num_microbatches


@dataclass(frozen=True)
class Shards:
    """Bytes of a module that FSDP2 gathers: of its blocks, and of the rest."""

    largest_block: int
    rest: int

    @classmethod
    def of(cls, module: nn.Module) -> Shards:
        """Take the items of the list of modules with the most parameters as blocks."""
        lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        largest = max(lists, key=lambda each: storage_bytes(list(each.parameters())), default=None)
        blocks: list[nn.Module] = [] if largest is None else list(largest)
        sizes = [storage_bytes(list(block.parameters())) for block in blocks]
        rest = storage_bytes(list(module.parameters())) - sum(sizes)
        return cls(max(sizes, default=0), max(0, rest))

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes gathered at once: the rest, two blocks, and a block's gradients."""
        return self.rest + 3 * self.largest_block


class SizedStep:
    """A training step of any batch size in one precision.

    Args:
        precision: Precision of the Trainer.
        batch_size: Batch size of ``profile``.
        module: The module, whose parameters come first in the graph.
        profile_at: Profiles the step, with the optimizer, at a batch size.
        problem_at: Traces the joint graph of the step at a batch size.
        memory_bytes: Limit on what a GPU's caching allocator reserves for a step without a plan, or
            0 for none.
        link: The device's link to the host for ways that move saved tensors, or ``None``.
    """

    def __init__(
        self,
        precision: str,
        batch_size: int,
        module: nn.Module,
        profile_at: Callable[[int], GraphProfile],
        problem_at: Callable[[int], RematProblem],
        memory_bytes: int = 0,
        link: HostLink | None = None,
    ) -> None:
        self.precision, self.batch_size = precision, batch_size
        self.profile_at = functools.cache(profile_at)
        self.problem_at = functools.cache(problem_at)
        self.num_parameters = len(list(module.parameters()))
        self.gradient_bytes = gradient_bytes(module)
        self.shards = Shards.of(module)
        self.memory_bytes, self.link = memory_bytes, link

    @property
    def _sizes(self) -> tuple[int, int]:
        """Return the sizes whose bytes define the lines. A batch of one may run other operators."""
        return max(2, self.batch_size), 2 * max(2, self.batch_size)

    @property
    def profile(self) -> GraphProfile:
        """Return the profile at the configured batch size."""
        return self.profile_at(self.batch_size)

    def problem(self, size: int) -> RematProblem:
        """Return the joint graph at a batch size, on the lines through two traced ones."""
        if size < 2:
            return self.problem_at(size)
        low, high = map(self.problem_at, self._sizes)
        found = at_batch(low, high, self._sizes, size)
        return self.problem_at(size) if found is None else found

    def held_bytes(self, size: int, *, exact: bool = False) -> int:
        """Return the bytes by which a step without a plan exceeds the default plan."""
        # Its code holds tensors longer than a graph does.
        if exact:
            return self._held_at(size)
        low, high = map(self._held_at, self._sizes)
        share = (size - self._sizes[0]) / (self._sizes[1] - self._sizes[0])
        return max(0, round(low + share * (high - low)))

    def _held_at(self, size: int) -> int:
        profile = self.profile_at(size)
        phases = zip(profile.timeline.live_bytes, profile.phases, strict=True)
        peak = max((live for live, phase in phases if phase != "optimizer"), default=0)
        planner = Planner(self.problem_at(size), resident_bytes=self._always)
        return max(0, peak - planner.default.peak_bytes)

    @property
    def _always(self) -> int:
        """Return the bytes of the optimizer's state and of the workspaces of libraries."""
        return self.profile.optimizer_bytes + self.profile.library_bytes

    def planner(
        self, size: int, num_shards: int = 1, *, accumulates: bool = False, exact: bool = False
    ) -> Planner:
        """Return the planner of the step on one rank."""
        problem = self.problem_at(size) if exact else self.problem(size)
        resident = -(-self.profile.optimizer_bytes // num_shards) + self.profile.library_bytes
        gradients = -(-self.gradient_bytes // num_shards)
        if num_shards > 1:
            problem = sharded(problem, self.num_parameters, num_shards)
            resident += self.shards.gathered_bytes
        # Lightning drops the last step's gradients between the forward and the backward pass.
        if accumulates:
            return Planner(problem, resident_bytes=resident + gradients)
        return Planner(problem, resident_bytes=resident, forward_bytes=gradients)

    def least_bytes(self, num_shards: int = 1) -> int:
        """Return the peak of the optimizer's step, which no plan changes."""
        profile = self.profile
        phases = zip(profile.timeline.live_bytes, profile.phases, strict=True)
        peak = max((live for live, phase in phases if phase == "optimizer"), default=0)
        whole = min(peak, profile.buffer_bytes + profile.input_bytes)
        return whole + -(-(peak - whole) // num_shards)

    def fit(
        self,
        limit: int,
        size: int,
        count: int,
        num_shards: int,
        *,
        exact: bool = False,
        offload: bool = False,
    ) -> Fit | None:
        """Return the cheapest plan of a microbatch that fits, or ``None`` if none does."""
        # With ``offload``, it is the cheapest of those that move tensors to the host.
        least = self.least_bytes(num_shards)
        if least > limit:
            return None
        planner = self.planner(size, num_shards, accumulates=count > 1, exact=exact)
        if offload:
            planner = replace(planner, link=self.link)
        plan, budget = planner.default, None
        peak = plan.peak_bytes + self.held_bytes(size, exact=exact)
        is_refused = exact and num_shards == 1 and self._reserves_more(size)
        if peak > limit or is_refused:
            if planner.floor.peak_bytes > limit:
                return None
            plan, budget = planner.plan(limit), limit
            peak = plan.peak_bytes
        if offload and not plan.moves:
            return None
        return Fit(
            self.precision,
            num_shards,
            size,
            count,
            budget,
            max(least, peak),
            count * (plan.flops - planner.default.flops),
            count * float(planner.problem.flops.sum()),
            count * (plan.seconds - planner.default.seconds),
            "host" if plan.moves else None,
            plan.host_bytes,
            exact,
        )

    def largest(
        self, limit: int, num_shards: int = 1, *, remat: bool = False, offload: bool = False
    ) -> Fit | None:
        """Return the largest batch that fits, checked by tracing it, or ``None`` if none does."""
        remat |= offload

        def peak(size: int, *, exact: bool = False) -> int:
            planner = self.planner(size, num_shards, exact=exact)
            if offload:
                planner = replace(planner, link=self.link)
            without = 0 if remat else self.held_bytes(size, exact=exact)
            plan = planner.floor if remat else planner.default
            return max(self.least_bytes(num_shards), plan.peak_bytes + without)

        size = _largest(peak, limit, self.batch_size)
        if not remat and num_shards == 1 and self._is_served:
            limit = self.memory_bytes
            size = _checked(lambda size: not self._reserves_more(size), size, size // 16, 1)
        else:
            size = _checked(
                lambda size: peak(size, exact=True) <= limit, size, size // 100, size // 500
            )
        if not size:
            return None
        return self.fit(limit, size, 1, num_shards, exact=True, offload=offload)

    @property
    def _is_served(self) -> bool:
        """Check whether a caching allocator serves the step, and its memory is known."""
        return bool(self.memory_bytes) and self.profile.allocator is not None

    def _reserves_more(self, size: int) -> bool:
        """Check whether the caching allocator reserves more than there is for an unplanned step."""
        if not self._is_served:
            return False
        allocator = self.profile_at(size).allocator
        # The profile has no gradients of the step before.
        reserved = 0 if allocator is None else allocator.reserved_bytes + self.gradient_bytes
        return reserved > self.memory_bytes

    def fits(self, limit: int, batch_size: int, num_shards: int) -> Iterator[Fit]:
        """Yield a fit for each microbatch of a rank's batch, until nothing is recomputed."""
        for size in sorted(divisors(batch_size), reverse=True):
            count = batch_size // size
            fit = self.fit(limit, size, count, num_shards)
            if fit is not None:
                yield fit
                if fit.budget is None:
                    return
            # Shards make a step several graphs, and a value is moved within one.
            if self.link is not None and num_shards == 1:
                moved = self.fit(limit, size, count, num_shards, offload=True)
                if moved is not None:
                    yield moved


def sharded(problem: RematProblem, num_parameters: int, num_shards: int) -> RematProblem:
    """Return a rank's joint graph: its share of parameters and gradients, all the rest."""
    gradients = set(problem.base[list(problem.backward_outputs)].tolist())
    nodes = [
        replace(node, num_bytes=-(-node.num_bytes // num_shards))
        if index < num_parameters or (index in gradients and node.region is NodeRegion.BACKWARD)
        else node
        for index, node in enumerate(problem.nodes)
    ]
    return replace(problem, nodes=tuple(nodes))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _largest(peak: Callable[[int], int], limit: int, start: int) -> int:
    """Return the largest batch with a peak within the limit, by bisection; 0 if none is."""
    if peak(1) > limit:
        return 0
    low, high = 1, max(2, start)
    while peak(high) <= limit:
        if high > _MOST_SAMPLES:
            return high
        low, high = high, 2 * high
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= limit else (low, middle)
    return low


def _checked(fits: Callable[[int], bool], size: int, step: int, finest: int) -> int:
    """Return the largest batch near an estimate that fits, checked itself; 0 if none does."""
    # Memory has steps that the lines do not show: an allocator's blocks, and buffers of reductions.
    fits = functools.cache(fits)
    step, finest = max(1, step), max(1, finest)
    while size and not fits(size):
        size = max(1, size - step) if size > 1 else 0
    while size and step >= finest:
        if size + step <= _MOST_SAMPLES and fits(size + step):
            size += step
        else:
            step //= 2
    return size


_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")


def byte_owners(profile: GraphProfile, limit: int = 5) -> list[tuple[str, int]]:
    """Return the largest owners of the bytes of a step, the largest first."""
    # Modules whose paths differ in the numbers of their parents only, such as those of the blocks
    # of a model, are one owner. The activations of a module are the bytes that autograd saves
    # because of its own operations.
    owners: Counter[str] = Counter(
        {
            "parameters": profile.parameter_bytes,
            "gradients": profile.gradient_bytes,
            "optimizer state": profile.optimizer_bytes,
            "buffers": profile.buffer_bytes,
            "batch": profile.input_bytes,
        }
    )
    for node in profile.nodes:
        path = _NUMBER.sub("*", node.module) or "the step itself"
        owners[f"activations of {path}"] += node.saved_bytes
    return [(owner, size) for owner, size in owners.most_common(limit) if size]


def owners_table(profile: GraphProfile, limit: int = 5) -> str:
    """Return the largest owners as text."""
    rows = [(owner, format_bytes(size)) for owner, size in byte_owners(profile, limit)]
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
