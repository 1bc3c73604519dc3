"""Share passes and executors between all captured steps of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_unitscale.capture.breaks import Reason, is_watched
from lightning_unitscale.capture.dynamo_capture import no_graph_breaks
from lightning_unitscale.capture.executors import CompileMode, Executor, GraphRewriter
from lightning_unitscale.capture.fsdp_modules import ShardedModule
from lightning_unitscale.capture.passes import GraphPass, PassRecord, Phase
from lightning_unitscale.capture.side_effects import Calls
from lightning_unitscale.patching import nothing

# Attribute of a module for its captured steps.
ATTRIBUTE = "_captured_steps"


class ModuleState:
    """Passes of a module, how its graphs run, and the records of the passes."""

    def __init__(
        self, module: nn.Module, defer: Sequence[str], untraced: Callable[[nn.Module], Calls]
    ) -> None:
        self.module = module
        self.defer = tuple(defer)
        self.untraced = untraced
        self.executor: Executor = "eager"
        self.compile_mode: CompileMode = "default"
        self.partition_fn: Any = None
        # Rewrites AOTAutograd's graphs, if they run op by op.
        self.rewriter: GraphRewriter | None = None
        # The module, if FSDP shards it and its steps are captured as if it did not.
        self.sharded: ShardedModule | None = None
        self.passes: list[GraphPass] = []
        self.records: list[PassRecord] = []
        self.graph_breaks: list[Reason] = []
        self.say: Callable[[str], None] = nothing
        # Why no step may be captured, if there is a reason.
        self.stays_plain = ""
        self._observers: set[str] = set()
        self._always_observed = False

    @property
    def is_attached(self) -> bool:
        """Check whether the module has these steps now."""
        return self.module.__dict__.get(ATTRIBUTE) is self

    @property
    def changes_function(self) -> bool:
        """Check whether a pass makes the steps compute something else than the user's own code."""
        return any(graph_pass.phase is Phase.REPARAMETRIZE for graph_pass in self.passes)

    def observe(self, owner: str, wanted: bool, *, always: bool = False) -> None:
        """Note whether ``owner`` wants the next steps to run the variant with probes."""
        self._always_observed |= always
        if wanted or always:
            self._observers.add(owner)
        else:
            self._observers.discard(owner)

    @property
    def observed(self) -> bool:
        """Check whether any owner wants the next step to have probes."""
        return bool(self._observers)

    def variants(self) -> tuple[bool, ...]:
        """Return the variants that a compiled graph needs: unobserved, observed, or both."""
        if self._always_observed:
            return (True,)
        has_probes = any(graph_pass.phase is Phase.OBSERVE for graph_pass in self.passes)
        return (False, True) if has_probes else (False,)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Run a step whose parameters are known only to its graphs."""
        if self.sharded is None:
            yield
            return
        if is_watched():
            raise RuntimeError(
                f"{type(self.module).__name__}: a mode such as FlopCounterMode observes every "
                "operation of a step that is unit-scaled by rules with ModelParallelStrategy, and "
                "Dynamo captures nothing then. Leave that mode out, or use DDP."
            )
        with self.sharded.standing_in(), no_graph_breaks():
            yield

    def not_to_be_pickled(self, step: str) -> TypeError:
        """Return the error for pickling the module, or a step of it."""
        return TypeError(
            f"{type(self.module).__name__}.{step} is captured and cannot be pickled. Expected a "
            "module without captured steps. Save its state_dict() instead, or pickle the module "
            "before the callbacks or transforms are attached."
        )
