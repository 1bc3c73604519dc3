"""Modules whose parameters FSDP2 shards, captured and planned as if they were whole.

FSDP gathers the parameters of a module in hooks around its call. Dynamo breaks the graph at each,
and what the module around them computes in a loop is in no graph at all. So these hooks stand aside
while a step is captured, and the graph calls them itself: each before the first operation of its
module and after the last one. It is FSDP that gathers, frees and reduces, as in an eager step.
Where tensor parallelism has split a module before, what is gathered is what it has made.

Private names used here were checked on torch 2.13 and 2.11: ``_forward_pre_hooks``,
``_forward_hooks`` and ``_parameters`` of modules; that what FSDP gathers is one and the same
``Parameter`` every time, whose storage is empty meanwhile; ``_get_fsdp_state`` and
``_mp_policy`` of what it shards, its mark for Dynamo, and the package of its hooks.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_unitscale.graph.recorder import local_part
from lightning_unitscale.patching import shadowed

_FSDP = "torch.distributed.fsdp._fully_shard"
# What tells Dynamo that FSDP has sharded a module.
_MANAGED = "_is_fsdp_managed_module"


@dataclass(frozen=True)
class ShardedPart:
    """A module that FSDP2 gathers by itself, with FSDP's hooks before and after its call."""

    path: str
    module: Any
    before: Callable[..., Any]
    after: Callable[..., Any]

    def enter(self, *tensors: Any) -> tuple[Any, ...]:
        """Gather the parameters; returns what the module reads, whose gradients FSDP waits for."""
        args, _ = self.before(self.module, tensors, {})
        return tuple(args)

    def leave(self, *tensors: Any) -> tuple[Any, ...]:
        """Free what was gathered; returns what the module has made, with FSDP's own hooks on it."""
        return tuple(self.after(self.module, (), tensors))


@dataclass(frozen=True)
class _Slot:
    """A place where a module has a parameter: a shard of it, or the whole while it is gathered."""

    holder: dict[str, Any]
    name: str
    shard: nn.Parameter
    whole: nn.Parameter


class ShardedModule:
    """A module of which parts are sharded by ``fully_shard``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_gathered = False  # all parameters are whole for the time being
        self._slots: list[_Slot] | None = None
        self._owners: dict[str, ShardedPart] = {}

    @cached_property
    def parts(self) -> list[ShardedPart]:
        """The parts, an outer one before those in it; known once the module is sharded."""
        return [
            ShardedPart(path, part, _hook(part._forward_pre_hooks), _hook(part._forward_hooks))
            for path, part in self.module.named_modules()
            if any(map(_is_of_fsdp, part._forward_pre_hooks.values()))
        ]

    @property
    def owners(self) -> dict[str, ShardedPart]:
        """The part that gathers each parameter, by its path in the module."""
        self._find_slots()
        return self._owners

    def parts_around(self, path: str) -> tuple[ShardedPart, ...]:
        """The parts that a module is in, or is, from the outermost one."""
        return tuple(
            part
            for part in self.parts
            if not part.path or path == part.path or path.startswith(f"{part.path}.")
        )

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within this context it is a plain module; all ranks have to enter it together."""
        if self.is_gathered:
            yield
            return
        self._find_slots()
        for part in self.parts:
            part.module.unshard()
        self.is_gathered = True
        try:
            with self._without_hooks():
                yield
        finally:
            self.is_gathered = False
            self.shard()

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within this context it looks whole: parameters are where they will be gathered."""
        slots = self._find_slots()
        for slot in slots:
            slot.whole.requires_grad_(slot.shard.requires_grad)
            slot.holder[slot.name] = slot.whole
        try:
            with self._without_hooks():
                yield
        finally:
            for slot in slots:
                # FSDP leaves what the root has gathered where it is.
                is_gathered = local_part(slot.whole).untyped_storage().size() > 0
                if slot.holder[slot.name] is slot.whole and not is_gathered:
                    slot.holder[slot.name] = slot.shard

    def shard(self) -> None:
        """Free what is gathered."""
        for part in self.parts:
            part.module.reshard()

    @cached_property
    def _marked(self) -> list[dict[str, Any]]:
        """Attributes of the modules that Dynamo takes for FSDP's."""
        every = map(vars, self.module.modules())
        return [attributes for attributes in every if attributes.get(_MANAGED)]

    def _mark(self) -> None:
        for attributes in self._marked:
            attributes[_MANAGED] = True

    def _find_slots(self) -> list[_Slot]:
        """Where parameters are; the first time each is gathered once, on all ranks together."""
        if self._slots is not None:
            return self._slots
        self.shard()
        slots: list[_Slot] = []
        holders = [(path, child._parameters) for path, child in self.module.named_modules()]
        for part in self.parts:
            shards = [dict(holder) for _, holder in holders]
            part.module.unshard()
            for (path, holder), before in zip(holders, shards, strict=True):
                for name, whole in holder.items():
                    shard = before[name]
                    if whole is not None and shard is not None and whole is not shard:
                        slots.append(_Slot(holder, name, shard, whole))
                        self._owners[f"{path}.{name}" if path else name] = part
            part.module.reshard()
        self._slots = slots
        return slots

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Within this context FSDP's hooks only cast what goes in and comes out, if they do."""
        with contextlib.ExitStack() as stack:
            # Dynamo does not guard on what it reads of modules that it takes for FSDP's.
            for marked in self._marked:
                marked[_MANAGED] = False
            stack.callback(self._mark)
            for part in self.parts:
                policy = part.module._get_fsdp_state()._mp_policy
                dtype = policy.param_dtype if policy.cast_forward_inputs else None
                before = None if dtype is None else partial(_cast_inputs, dtype)
                dtype = policy.output_dtype
                after = None if dtype is None else partial(_cast_outputs, dtype)
                hooks = {
                    "_forward_pre_hooks": _replaced(part.module._forward_pre_hooks, before),
                    "_forward_hooks": _replaced(part.module._forward_hooks, after),
                }
                stack.enter_context(shadowed(part.module, **hooks))
            yield


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_FSDP)


def _hook(hooks: dict[int, Any]) -> Callable[..., Any]:
    hook: Callable[..., Any] = next(filter(_is_of_fsdp, hooks.values()))
    return hook


def _replaced(hooks: dict[int, Any], hook: Any) -> OrderedDict[int, Any]:
    """The hooks with another one, or none, in the place of FSDP's."""
    items = ((key, hook if _is_of_fsdp(own) else own) for key, own in hooks.items())
    return OrderedDict((key, own) for key, own in items if own is not None)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(partial(_cast, dtype), (args, kwargs))


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return tree_map(partial(_cast, dtype), output)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value
