"""Estimate the costs of a configured step on one device of its job, without the devices."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_unitscale.arguments import check_choice, check_count, check_file, check_picture
from lightning_unitscale.callbacks.lightning_steps import step_arguments
from lightning_unitscale.callbacks.packages import misconfigured
from lightning_unitscale.capture.absent_ranks import emptied, is_sharded, take_over
from lightning_unitscale.cli.commands import UnitScaleCLI
from lightning_unitscale.memory.gpus import DEVICE_WORDS, device_type, name_with_type
from lightning_unitscale.memory.profile_report import check_sort_by, format_bytes
from lightning_unitscale.patching import nothing
from lightning_unitscale.pipeline.data_parallel import GridStrategy
from lightning_unitscale.pipeline.explain import explain_step
from lightning_unitscale.profiler import GraphProfile, fake_process_group, profile_graph

# Subclasses of DDP with another content of a device.
_NO_REPLICAS = (DeepSpeedStrategy, XLAStrategy, GridStrategy)
# Configurations of `fit` may have it.
IGNORED = "Accepted as by `fit`, but not used."


@dataclass(frozen=True)
class ProfiledJob:
    """The share of a job on one device, and the Trainer to profile it with."""

    # One device, the whole model on each of several devices, or a shard on each.
    kind: Literal["one", "replicas", "shards"] = "one"
    strategy: Any = "auto"
    num_devices: int = 1
    num_nodes: int = 1
    num_ranks: int | None = 1  # ``None`` if it is not known
    options: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def ranks(self, trainer: pl.Trainer, model: pl.LightningModule, device: str) -> Iterator[None]:
        """Make this process rank 0 of the job, and give the module its mesh, in this context."""
        strategy = trainer.strategy
        strategy.connect(model)
        if self.kind != "shards":
            yield
            return
        assert isinstance(strategy, ModelParallelStrategy)
        assert self.num_ranks is not None
        with fake_process_group(self.num_ranks, device=device):
            if device == "cuda":
                strategy.accelerator = CUDAAccelerator()
                strategy.parallel_devices = [
                    torch.device(device, i) for i in range(self.num_devices)
                ]
            strategy.setup_environment()
            yield

    def configure(self, trainer: pl.Trainer, model: pl.LightningModule, device: str) -> None:
        """Call the module's ``configure_model``. Shards consist of tensors without memory."""
        precision = trainer.precision_plugin
        if self.kind != "shards":
            model.configure_model()
            precision.convert_module(model)
            return
        if not is_overridden("configure_model", model):
            raise MisconfigurationException(
                f"`strategy=ModelParallelStrategy`: {type(model).__name__} has no configure_model. "
                "Define one that shards it by fully_shard or parallelize_module."
            )
        emptied(model, "meta")
        with torch.device("meta"), precision.module_init_context():
            model.configure_model()
        precision.convert_module(model)
        if is_sharded(model):
            take_over(model, torch.device(device))

    def remark(self, profile: GraphProfile) -> str:
        """Return a note about memory that the profile leaves out, or an empty string."""
        if self.kind == "shards" and profile.num_ranks == 1:
            return (
                f"configure_model has sharded nothing: each of {self.num_ranks} ranks has it all."
            )
        if self.kind != "replicas":
            return ""
        buckets, timeline = profile.gradient_bytes, profile.timeline
        if self.options.get("gradient_as_bucket_view"):
            # Gradients are stored in the buckets, which always exist.
            gradients = timeline.live_by_kind["gradient"]
            beside = [
                live - grad for live, grad in zip(timeline.live_bytes, gradients, strict=True)
            ]
            peak = max(beside, default=0) + buckets
        else:
            peak = profile.peak_bytes + buckets
        ranks = "every device" if self.num_ranks is None else f"each of {self.num_ranks} devices"
        return (
            f"DDP: the whole model is on {ranks}; with its buckets of gradients, "
            f"{format_bytes(buckets)}, the peak is {format_bytes(peak)}"
        )


def profiled_job(strategy: Any, devices: Any, num_nodes: int) -> ProfiledJob:
    """Return the part of a Trainer's job that is profiled."""
    kind, options = _class_of(strategy)
    num_devices = _num_devices(devices)
    num_ranks = None if num_devices is None else num_devices * num_nodes
    if issubclass(kind, ModelParallelStrategy):
        if num_devices is None:
            raise MisconfigurationException(
                f"`devices={devices!r}`: {kind.__name__} needs the number of devices. Expected a "
                "number. Pass it, such as --trainer.devices=8."
            )
        return ProfiledJob("shards", strategy, num_devices, num_nodes, num_ranks, options)
    if num_ranks == 1 or issubclass(kind, SingleDeviceStrategy):
        return ProfiledJob()
    if issubclass(kind, DDPStrategy) and not issubclass(kind, _NO_REPLICAS):
        if strategy == "auto" and num_ranks is None:
            return ProfiledJob()
        return ProfiledJob("replicas", num_ranks=num_ranks, options=options)
    instead = "explain-pipeline" if issubclass(kind, GridStrategy) else "ModelParallelStrategy"
    raise MisconfigurationException(
        f"`strategy={kind.__name__}` with `devices={devices!r}`: the memory of one device is "
        f"not known. Expected ModelParallelStrategy, DDPStrategy or one device. Use {instead}, or "
        "profile the whole model by --trainer.strategy=auto --trainer.devices=1."
    )


def _class_of(strategy: Any) -> tuple[type[Strategy], Mapping[str, Any]]:
    """Return the class that a configuration names, and its arguments; for "auto" that of DDP."""
    if strategy == "auto":
        return DDPStrategy, {}
    if isinstance(strategy, str):
        if strategy not in StrategyRegistry:
            raise MisconfigurationException(
                f"`strategy={strategy!r}`: no such strategy. Expected one of "
                f"{', '.join(sorted(StrategyRegistry))}, or a class. Pass --trainer.strategy=auto."
            )
        registered = StrategyRegistry[strategy]
        kind, options = registered["strategy"], registered["init_params"]
        return kind if isinstance(kind, type) else type(kind(**options)), options
    module, _, name = strategy["class_path"].rpartition(".")
    given = [strategy.get(part) or {} for part in ("init_args", "dict_kwargs")]
    options = {name: value for part in given for name, value in dict(part).items()}
    return getattr(importlib.import_module(module), name), options


def _num_devices(devices: Any) -> int | None:
    """Return a Trainer's number of devices per node, or ``None`` for all available ones."""
    if isinstance(devices, str):
        listed = [part for part in devices.split(",") if part.strip()]
        if "," in devices:
            return len(listed)
        devices = int(devices) if devices.lstrip("-").isdigit() else "auto"
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else None


class ProfileCLI(UnitScaleCLI):
    """Estimate memory and operations of a training step: `profile --config run.yaml`.

    The configuration is that of `fit`. Only the trainer's precision, accelerator type, strategy and
    numbers of devices and nodes count. You do not need the devices. Nothing is trained, logged or
    saved.
    """

    command = "profile"

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--device",
            type=Literal[DEVICE_WORDS] | None,
            help="Device whose kernels are simulated; by default the trainer's accelerator. "
            "You do not need the device.",
        )
        parser.add_argument("--sort_by", default="saved_bytes", help="Column to sort nodes by.")
        parser.add_argument("--limit", type=int, default=20, help="Number of nodes to show.")
        parser.add_argument("--json", type=str | None, help="JSON file to write the profile to.")
        parser.add_argument("--plot", type=str | None, help="File to draw the live bytes to.")
        parser.add_argument(
            "--budget_bytes",
            type=int | None,
            help="Bytes; also find the largest batch within them.",
        )
        parser.add_argument("--ckpt_path", type=str | None, help=IGNORED)

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.config.trainer
        use_base_precision(trainer)
        gpus = ("gpu", "cuda") if not torch.cuda.is_available() else ("gpu", "cuda", "auto")
        if isinstance(trainer.accelerator, str):
            known = ("gpu", "auto", *AcceleratorRegistry)
            check_choice("accelerator", trainer.accelerator, known, "unknown", "pass 'auto'")
        default = "cuda" if trainer.accelerator in gpus else "cpu"
        self._device = name_with_type(self.config.device or default)
        self._check_options()
        self._job = job = self._profiled_job()
        # The simulated devices need not exist here, and no run happens.
        trainer.accelerator, trainer.strategy = "cpu", job.strategy
        trainer.devices, trainer.num_nodes = job.num_devices, job.num_nodes
        self._keep_no_run()

    def _keep_no_run(self) -> None:
        """Leave out the settings that only a run needs."""
        trainer = self.config.trainer
        trainer.logger, trainer.callbacks = False, None
        trainer.enable_checkpointing = False
        if trainer.max_epochs is None:  # only `fit` sets it
            trainer.max_epochs = 1000 if trainer.max_steps == -1 else -1

    def _check_options(self) -> None:
        """Refuse options that would otherwise fail after the step has been profiled."""
        for name, check in (("json", check_file), ("plot", check_picture)):
            if self.config[name] is not None:
                check(name, self.config[name])
        for name in ("limit", "budget_bytes"):
            if self.config[name] is not None:
                check_count(name, self.config[name])
        check_sort_by(self.config.sort_by)

    def _profiled_job(self) -> ProfiledJob:
        trainer = self.config.trainer
        return profiled_job(trainer.strategy, trainer.devices, trainer.num_nodes)

    def answer(self) -> None:
        """Profile the first training batch, and print its costs."""
        model, context = self.model, self.trainer.precision_plugin.forward_context
        with self._job.ranks(self.trainer, model, device_type(self._device)):
            batch = self._first_batch()
            self._drop_logs()
            profile = profile_graph(
                model,
                *step_arguments(model, "training_step", batch, 0),
                device=self._device,
                optimizer=self._optimizer(),
                method="training_step",
                context=context,
            )
            print(f"{profile.module_table(depth=2)}\n")
            print(profile.table(self.config.sort_by, self.config.limit))
            print(f"\n{profile.totals()}")
            if remark := self._job.remark(profile):
                print(remark)
            if (budget := self.config.budget_bytes) is not None:
                print(f"Largest batch within {budget} bytes: {profile.max_batch_size(budget)}")
            if self.config.json is not None:
                profile.save(self.config.json)
            if self.config.plot is not None:
                profile.plot(self.config.plot)

    def _drop_logs(self) -> None:
        """Drop the values that the step logs, since no loop of the trainer runs."""
        for name in ("log", "log_dict"):
            self.model.__dict__[name] = nothing

    def _first_batch(self) -> Any:
        data, model = self.datamodule, self.model
        if not model.automatic_optimization:
            raise misconfigured(
                f"`{self.command}`: {type(model).__name__} has manual optimization, so its step "
                "cannot run without a training. Expected automatic optimization. Write a "
                "training_step that only returns the loss."
            )
        model.trainer = self.trainer
        if data is not None:
            data.trainer = self.trainer
        for hooks in filter(None, (data, model)):
            hooks.prepare_data()
            hooks.setup("fit")
        # As in `fit`, so that a schedule can read the length of the run from the trainer.
        self.trainer._data_connector.attach_data(model, datamodule=data)
        self._job.configure(self.trainer, model, device_type(self._device))
        loader = (model if data is None else data).train_dataloader()
        for batch in loader:
            return self.trainer.precision_plugin.convert_input(batch)
        raise misconfigured(
            f"`{self.command}`: the training data has no batch. Expected at least one. Check the "
            "size of the data, and `drop_last`."
        )

    def _optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer of the model. Its schedule costs nothing."""
        optimizers = self.model.configure_optimizers()
        if isinstance(optimizers, Mapping):
            optimizers = optimizers["optimizer"]
        while isinstance(optimizers, (list, tuple)):
            first = next(iter(optimizers), None)
            if len(optimizers) > 1 and not isinstance(first, (list, tuple)):
                print(f"Of {len(optimizers)} optimizers, the step is profiled with the first.")
            optimizers = first["optimizer"] if isinstance(first, Mapping) else first
        return optimizers


def use_base_precision(trainer: Any) -> None:
    """Replace a `UnitScaledPrecision` in a configuration by its base."""
    # Without a run there are no scaled matmuls.
    given = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]
    for plugin in given:
        if str(getattr(plugin, "class_path", "")).endswith(".UnitScaledPrecision"):
            base = plugin.init_args.get("base", "32-true")
            is_word, others = isinstance(base, (str, int)), [e for e in given if e is not plugin]
            trainer.plugins = others if is_word else [*others, base]
            if is_word:
                trainer.precision = base


class ExplainPipelineCLI(ProfileCLI):
    """Estimate the costs of stages: `explain-pipeline --config run.yaml --num_stages 4`."""

    command = "explain-pipeline"

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--num_stages", type=int, default=2, help="Number of stages, one per device."
        )
        parser.add_argument(
            "--num_microbatches",
            type=int | None,
            help="Number of equal parts of a batch; by default twice the stages.",
        )
        parser.add_argument(
            "--device", type=Literal["cpu"], default="cpu", help="Device of the cost model."
        )
        parser.add_argument("--ckpt_path", type=str | None, help=IGNORED)

    @override
    def _check_options(self) -> None:
        check_count("num_stages", self.config.num_stages)
        if self.config.num_microbatches is not None:
            check_count("num_microbatches", self.config.num_microbatches)

    @override
    def _profiled_job(self) -> ProfiledJob:
        return ProfiledJob()

    @override
    def answer(self) -> None:
        """Print the costs of the stages of the training step."""
        self.trainer.strategy.connect(self.model)
        batch, *indices = step_arguments(self.model, "training_step", self._first_batch(), 0)
        plan = explain_step(
            self.model,
            batch,
            self.config.num_stages,
            *indices,
            num_microbatches=self.config.num_microbatches,
            context=self.trainer.precision_plugin.forward_context,
        )
        print(plan)
