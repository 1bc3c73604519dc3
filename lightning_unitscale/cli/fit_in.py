"""Find what fits into a device's memory: `fit-in --config run.yaml --memory 24GiB`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from tabulate import tabulate
from typing_extensions import override

from lightning_unitscale.arguments import check_count, check_file
from lightning_unitscale.callbacks.lightning_steps import step_arguments
from lightning_unitscale.callbacks.packages import misconfigured
from lightning_unitscale.cli.profiled import IGNORED, ProfileCLI, ProfiledJob, use_base_precision
from lightning_unitscale.memory.budgets import parse_bytes
from lightning_unitscale.memory.fitting import Fit, SizedStep, byte_owners, owners_table
from lightning_unitscale.memory.gpus import DEVICE_WORDS, parse_device
from lightning_unitscale.memory.offload import gpu_cost_model, link_of
from lightning_unitscale.memory.problem import RematProblem
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.memory.profile_step import batch_size_of, resized
from lightning_unitscale.memory.traced_planner import traced_problem
from lightning_unitscale.profiler import GraphProfile, profile_graph

# Precisions that are compared, those that convert the weights last.
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
_TRIED = ("32-true", "bf16-mixed", "bf16-true")
_LARGEST = ("precision", "remat", "on the host", "batch", "peak", "extra FLOPs")
_STEPS = ("", "precision", "shards", "microbatch", "accumulated", "remat", "on the host", "peak",
          "extra FLOPs")  # fmt: skip
# Ways to find the largest batch: no plan, rematerialization, also copies to the host.
_WAYS: tuple[dict[str, bool], ...] = ({}, {"remat": True}, {"offload": True})
# An allowance for the driver, the CUDA context (a few hundred MiB) and gaps between blocks.
_CONTEXT_BYTES = 2**30


class FitInCLI(ProfileCLI):
    """Find what fits into a device's memory: `fit-in --config run.yaml --memory 24GiB`.

    The configuration is that of `fit`. The number of samples per optimizer step stays the same. The
    command compares microbatches, budgets for `RematCallback`, precisions and FSDP2 shards. Nothing
    is trained, logged or saved, and you do not need the devices.
    """

    command = "fit-in"

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--memory",
            type=int | str | None,
            help="Memory of a device, such as 24GiB; by default the named GPU's minus 1 GiB.",
        )
        parser.add_argument(
            "--device",
            type=Literal[DEVICE_WORDS] | None,
            help="Device whose kernels are simulated, such as h100; by default the trainer's "
            "accelerator. You do not need the device.",
        )
        parser.add_argument(
            "--batch",
            type=int | None,
            help="Samples per optimizer step on all devices; by default those of the "
            "configuration.",
        )
        parser.add_argument(
            "--max_shards",
            type=int,
            default=8,
            help="Maximum number of ranks to shard the model over.",
        )
        parser.add_argument("--json", type=str | None, help="JSON file to write the results to.")
        parser.add_argument(
            "--explain", action="store_true", help="Also show what takes the most memory."
        )
        parser.add_argument("--ckpt_path", type=str | None, help=IGNORED)

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.config.trainer
        use_base_precision(trainer)
        self._precision = str(trainer.precision or "32-true")
        self._accumulated = trainer.accumulate_grad_batches or 1
        super().before_instantiate_classes()
        if self._job.kind == "shards":
            raise misconfigured(
                "`strategy=ModelParallelStrategy`: fit-in divides the whole model itself. Expected "
                "a strategy that replicates it. Pass --trainer.strategy=auto."
            )
        self._num_devices, self._job = self._job.num_ranks or 1, ProfiledJob()
        trainer.strategy, trainer.devices, trainer.num_nodes = "auto", 1, 1
        trainer.precision = "32-true"  # each precision is applied to the step below

    @override
    def _check_options(self) -> None:
        if self.config.json is not None:
            check_file("json", self.config.json)
        check_count("max_shards", self.config.max_shards)
        if self.config.batch is not None:
            check_count("batch", self.config.batch)
        if self._precision not in _PRECISIONS:
            raise misconfigured(
                f"`precision={self._precision!r}`: fit-in cannot predict its memory. Expected one "
                f"of {', '.join(_PRECISIONS)}. Pass --trainer.precision."
            )
        self._memory = self._memory_bytes()

    def _memory_bytes(self) -> int:
        """Return the given memory, or that of the named GPU without its CUDA context."""
        memory, gpu = self.config.memory, parse_device(self._device)[1]
        if memory is None and gpu is not None:
            return gpu.memory_bytes - _CONTEXT_BYTES
        num_bytes = parse_bytes(int(memory) if str(memory).isdigit() else memory)
        if not num_bytes or num_bytes < 0:
            raise ValueError(
                f"memory={memory!r}: not a size. Expected bytes, or a string such as 24GiB. Pass "
                "the memory of the device, or name a GPU, such as --device h100."
            )
        return num_bytes

    @override
    def answer(self) -> None:
        """Print the batches and combinations that fit, cheapest first."""
        batch = self._first_batch()
        self._drop_logs()
        self._samples = self.config.batch
        largest: list[Fit] = []
        fits: list[Fit] = []
        least: dict[str, int] = {}
        for precision in sorted({self._precision, *_TRIED}, key=_PRECISIONS.index):
            step = self._sized(precision, batch)
            limit = _limit(self._memory, step.profile)
            if precision == self._precision:
                profile = step.profile
            ways = _WAYS if step.link is not None else _WAYS[:2]
            found = [step.largest(limit, **way) for way in ways]
            largest += [fit for fit in found if fit is not None]
            fits += self._checked(step, limit)
            if not any(found):
                smallest = step.planner(1).floor.peak_bytes
                least[precision] = max(step.least_bytes(), smallest)
        fits.sort(key=self._cost)
        best = next((fit for fit in fits if fit.is_checked), None)
        self._show(largest, fits, best)
        if self.config.explain:
            self._explain(profile, least)
        if self.config.json is not None:
            self._write(largest, fits, best, profile)

    def _sized(self, precision: str, batch: Any) -> SizedStep:
        """Return the step in a precision. The model is converted, and stays so."""
        model, plugin = self.model, _plugin(precision)
        plugin.convert_module(model)
        args = step_arguments(model, "training_step", plugin.convert_input(batch), 0)
        size = batch_size_of(args)
        if not size:
            raise misconfigured(
                "`fit-in`: the batch has no tensor with a batch dimension. Expected one whose "
                "first dimension is the number of samples. Use `profile` for this configuration."
            )
        gpu = parse_device(self._device)[1]
        if self._samples is None:
            self._samples = size * self._accumulated * self._num_devices

        def profile_at(size: int) -> GraphProfile:
            return profile_graph(
                model,
                *resized(args, size),
                device=self._device,
                optimizer=self._optimizer(),
                method="training_step",
                context=plugin.forward_context,
            )

        def problem_at(size: int) -> RematProblem:
            return traced_problem(
                model,
                *resized(args, size),
                device=self._device,
                method="training_step",
                context=plugin.forward_context,
                cost_model=None if gpu is None else gpu_cost_model(gpu),
            )

        # Copies of a CPU's tensors would stay in the same memory.
        link = None if gpu is None else link_of(self._device)
        return SizedStep(precision, size, model, profile_at, problem_at, self._memory, link)

    def _checked(self, step: SizedStep, limit: int) -> Iterator[Fit]:
        """Yield what fits in a precision. The cheapest is traced at its own microbatch size."""
        found: list[Fit] = []
        num_shards = 1
        while num_shards <= self.config.max_shards:
            if self._samples % num_shards == 0:
                found += step.fits(limit, self._samples // num_shards, num_shards)
            num_shards *= 2
        while found:
            best = min(found, key=lambda fit: fit.cost)
            place = found.index(best)
            way = best.microbatch, best.num_microbatches, best.num_shards
            checked = step.fit(limit, *way, exact=True, offload=best.offload is not None)
            if checked is not None:
                found[place] = checked
                break
            del found[place]
        yield from found

    def _show(self, largest: Sequence[Fit], fits: Sequence[Fit], best: Fit | None) -> None:
        memory = format_bytes(self._memory)
        print(f"The largest batch on one {self._device} device of {memory}:")
        rows: list[tuple[Any, ...]] = [
            (fit.precision, *_plan(fit), fit.microbatch, *_costs(fit)) for fit in largest
        ]
        print(tabulate(rows, _LARGEST) if rows else "none fits")
        print(f"\nSteps of {self._samples} samples, the cheapest first:")
        rows = [
            (
                "*" if fit is best else "",
                fit.precision,
                fit.num_shards,
                fit.microbatch,
                fit.num_microbatches,
                *_plan(fit),
                *_costs(fit),
            )
            for fit in fits
        ]
        print(tabulate(rows, _STEPS) if rows else "none fits")

    def _explain(self, profile: GraphProfile, least: dict[str, int]) -> None:
        """Print the largest owners of bytes, and the bytes that a batch of one needs."""
        peak = profile.peak
        where = f" at {peak.node}" if peak.node else ""
        print(
            f"\nWith {self._precision} and batch size {profile.batch_size} the peak is in the "
            f"{peak.phase} pass{where}. The largest owners of its bytes:\n{owners_table(profile)}"
        )
        for precision, num_bytes in least.items():
            print(f"{precision}: a batch of one needs at least {format_bytes(num_bytes)}")

    def _write(
        self, largest: Sequence[Fit], fits: Sequence[Fit], best: Fit | None, profile: GraphProfile
    ) -> None:
        found = {
            "device": self._device,
            "memory_bytes": self._memory,
            "samples": self._samples,
            "largest": [asdict(fit) for fit in largest],
            "fits": [asdict(fit) for fit in fits],
            "cheapest": None if best is None else asdict(best),
            "owners": dict(byte_owners(profile)),
        }
        Path(self.config.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def _cost(self, fit: Fit) -> tuple[Any, ...]:
        """Order by ranks, added time, another precision, and microbatches."""
        num_shards, seconds, num_microbatches = fit.cost
        return num_shards, seconds, fit.precision != self._precision, num_microbatches


def _plugin(precision: str) -> Precision:
    """Return the Trainer's plugin for a precision."""
    if precision.endswith("-mixed"):
        # A simulated device takes the types from the CPU's autocast. FP16 has the bytes of BF16.
        return MixedPrecision("bf16-mixed", "cpu")
    return Precision() if precision == "32-true" else HalfPrecision(precision)  # type: ignore[arg-type]


def _limit(memory: int, profile: GraphProfile) -> int:
    """Return the bytes that may be alive, since a GPU's caching allocator reserves more."""
    if profile.allocator is None:
        return memory
    share = profile.peak_bytes / max(profile.peak_bytes, profile.allocator.reserved_bytes)
    return int(share * memory)


def _plan(fit: Fit) -> tuple[str, str]:
    """Return the budget of a fit's plan, and the bytes that wait on the host."""
    budget = "-" if fit.budget is None else format_bytes(fit.budget)
    return budget, format_bytes(fit.host_bytes) if fit.offload else "-"


def _costs(fit: Fit) -> tuple[str, str]:
    extra = f"{100 * fit.extra_flops / max(fit.flops, 1):.1f} %"
    return format_bytes(fit.peak_bytes), extra
