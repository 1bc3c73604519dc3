"""A module cut into stages, and its reference execution in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override

from lightning_unitscale.pipeline.engine import EngineStage
from lightning_unitscale.pipeline.program import Program
from lightning_unitscale.pipeline.stage import StageInfo, StageModule


@dataclass(frozen=True)
class PipeInfo:
    """Inputs, parameters and outputs of the stages of a pipeline.

    Attributes:
        num_stages: How many.
        stages: Each of them.
        has_loss: Whether one of the outputs is known to be the loss.
        shared_parameters: Parameters that several stages have, with the stages.
        left_out: Outputs of the module that the pipeline does not return.
    """

    num_stages: int
    stages: tuple[StageInfo, ...]
    has_loss: bool
    shared_parameters: dict[str, tuple[int, ...]]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        rows = [
            (
                info.index,
                info.num_operations,
                len(info.parameters),
                ", ".join(info.input_names),
                "\n".join(f"{sent.name} {sent.tensor}" for sent in info.sent),
                info.sent_bytes,
                len(info.recomputed),
            )
            for info in self.stages
        ]
        headers = ("stage", "operations", "parameters", "arguments", "sends", "bytes", "recomputed")
        lines = [tabulate(rows, headers=headers)]
        lines += [
            f"{name} is in stages {', '.join(map(str, stages))}"
            for name, stages in self.shared_parameters.items()
        ]
        return "\n".join(lines)


class Pipe(nn.Module):
    """The stages of a module, in order.

    Calling it runs all stages in this process, one after the other, forward and, by autograd,
    backward: the same bits as the module's own. The stages have the module's own parameters, the
    same objects, under their own names.

    Args:
        program: The captured module.
        stages: Its stages.
        aliases: Other names of tied parameters and buffers to the names that the stages know.
    """

    def __init__(
        self,
        program: Program,
        stages: list[StageModule],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.program = program
        self._stages = stages
        self._aliases = dict(aliases or {})

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self._stages)

    @property
    def stages(self) -> tuple[StageModule, ...]:
        """The stages in order."""
        return tuple(self._stages)

    def get_stage_module(self, stage_index: int) -> StageModule:
        """One stage.

        Raises:
            ValueError: If there is none of this index.
        """
        if not isinstance(stage_index, int) or not 0 <= stage_index < self.num_stages:
            raise ValueError(
                f"stage_index={stage_index!r}: the pipeline has {self.num_stages} stages; expected "
                f"an index from 0 to {self.num_stages - 1}."
            )
        return self._stages[stage_index]

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> PipelineStage:
        """One stage for a schedule of ``torch.distributed.pipelining``.

        Give the module's arguments to ``schedule.step`` by name, on every rank. Results are the
        loss, if it is known, which the engine cannot put together: ``return_outputs=False``. Pass
        ``scale_grads=False`` to the schedule and divide the loss by the number of microbatches.
        Gradients of parameters in stages of several ranks
        (``info().shared_parameters``) are not summed; :class:`PipelineRunner` does all of that.

        Args:
            stage_index: Which stage.
            device: Where it runs; it is moved there.
            group: The pipeline's process group; all ranks by default.

        Raises:
            ValueError: If there is no such stage.
            RuntimeError: If there is no process group.
        """
        stage = self.get_stage_module(stage_index)
        if not dist.is_initialized():
            raise RuntimeError(
                "Pipe.build_stage: there is no process group; expected one rank per device; call "
                "torch.distributed.init_process_group first."
            )
        device = torch.device(device)
        stage.on_device(device)
        return EngineStage(
            stage, partial(self._run_by_name, stage), device, group, has_backward=True
        )

    def _run_by_name(self, stage: StageModule, *received: Tensor, **inputs: Any) -> Any:
        """The outputs of a stage; of the last one the loss, if it is known."""
        info = stage.info
        names = info.input_names
        if len(received) != len(info.received) or any(name not in inputs for name in names):
            raise ValueError(
                f"stage {info.index} was given {len(received)} positional arguments and "
                f"{sorted(inputs)}; expected the module's arguments by name on every rank, "
                f"{', '.join(names) or 'none'} of them here: schedule.step(name=value, ...)."
            )
        outputs = stage(*received, *(inputs[name] for name in names))
        if not info.is_last:
            return outputs
        if self.program.loss is not None:
            return outputs[self.program.loss]
        tensors = tuple(value for value in outputs if isinstance(value, Tensor))
        return tensors[0] if len(tensors) == 1 else tensors

    def info(self) -> PipeInfo:
        """Inputs, parameters and outputs of every stage."""
        stages = tuple(stage.info for stage in self._stages)
        return PipeInfo(
            num_stages=len(stages),
            stages=stages,
            has_loss=self.program.loss is not None,
            shared_parameters=self.shared_parameters(),
            left_out=self.program.left_out,
        )

    def shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages have, with the indices of those."""
        users: dict[str, list[int]] = {}
        for index, stage in enumerate(self._stages):
            for name in stage.info.parameters:
                users.setdefault(name, []).append(index)
        return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}

    def print_readable(self, print_output: bool = True) -> str:
        """The code of all stages; printed, unless ``print_output`` is false."""
        parts = []
        for index, stage in enumerate(self._stages):
            code = stage.print_readable(print_output=False)
            parts.append(f"# stage {index} of {self.num_stages}\n{code}")
        text = "\n".join(parts)
        if print_output:
            print(text)
        return text

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all stages; the result has the module's own structure.

        Raises:
            ValueError: If the arguments are not like those that the pipeline was captured with.
        """
        flat = self.program.flatten(args, kwargs)
        self.program.check(flat)
        return self.program.unflatten(self.run_flat(flat))

    def run_flat(self, flat: list[Any]) -> list[Any]:
        """Flat outputs of all stages for flat inputs."""
        values: tuple[Any, ...] = ()
        for stage in self._stages:
            values = stage(*values, *(flat[position] for position in stage.info.inputs))
        return list(values)

    @override
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all stages under the module's names; a shared one once."""
        seen: set[str] = set()
        for stage in self._stages:
            for name, param in stage.named_parameters(prefix, recurse, remove_duplicate):
                if name not in seen or not remove_duplicate:
                    seen.add(name)
                    yield name, param

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Parameters and buffers of all stages under the module's names, tied ones under each."""
        state: dict[str, Tensor] = {}
        for stage in self._stages:
            state |= stage.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for alias, name in self._aliases.items():
            if prefix + name in state:
                state[prefix + alias] = state[prefix + name]
        return state
