"""Report what low precision costs: `precision --config run.yaml --json`."""

import json
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_unitscale.arguments import check_count
from lightning_unitscale.callbacks import UnitScaleCallback
from lightning_unitscale.callbacks.lightning_steps import step_arguments, step_context
from lightning_unitscale.callbacks.options import LOSSLESS
from lightning_unitscale.callbacks.precision_plugin import UnitScaledPrecision
from lightning_unitscale.callbacks.precision_reports import formats_of
from lightning_unitscale.cli.profiled import ProfileCLI, ProfiledJob
from lightning_unitscale.matmuls.matmul_formats import FP8Linears, SimulateFormat
from lightning_unitscale.precision.measured_step import Effort
from lightning_unitscale.precision.meter import metering

_TRAINING_STEP = "training_step"


class PrecisionCLI(ProfileCLI):
    """Report what low precision costs in a training step: `precision --config run.yaml`.

    The configuration is that of `fit`. The first training batch runs several times on the model,
    whose weights stay as they are. Formats and exemptions are those of the configuration's
    `UnitScaleCallback` or `UnitScaledPrecision`, if it has one. Nothing is trained, logged or
    saved.
    """

    command = "precision"

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--formats",
            type=list[str] | None,
            help="Formats to report on, such as [E4M3FN,E2M1FN]; by default those of the "
            "callback, or E4M3FN.",
        )
        parser.add_argument(
            "--ckpt_path", type=str | None, help="Checkpoint whose weights to report on."
        )
        parser.add_argument(
            "--directions",
            type=int,
            default=Effort.directions,
            help="Number of random directions to average gradient errors over.",
        )
        parser.add_argument(
            "--pairs",
            type=int,
            default=Effort.pairs,
            help="Number of pairs of steps to average second-order loss changes over.",
        )
        parser.add_argument("--limit", type=int, default=20, help="Number of matmuls to show.")
        parser.add_argument(
            "--json", action="store_true", help="Print one JSON object instead of tables."
        )

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.config.trainer
        self._effort = Effort(self.config.directions, self.config.pairs)
        check_count("limit", self.config.limit)
        self._job, self._device = ProfiledJob(), "cpu"
        trainer.strategy, trainer.devices, trainer.num_nodes = "auto", 1, 1
        callbacks = trainer.callbacks or []
        if not isinstance(callbacks, list):  # a single one, without a list
            callbacks = [callbacks]
        self._keep_no_run()
        trainer.callbacks = [
            each for each in callbacks if str(each.class_path).endswith("UnitScaleCallback")
        ]

    @override
    def answer(self) -> None:
        """Print what rounding each computation of each matmul costs."""
        model, trainer = self.model, self.trainer
        own, exempt = self._own_formats()
        batch = self._first_batch()
        trainer.strategy.connect(model)
        model.to(trainer.strategy.root_device)
        batch = trainer.strategy.batch_to_device(batch)
        if self.config.ckpt_path is not None:
            self._load_weights(self.config.ckpt_path)
        with metering(
            model,
            step_arguments(model, _TRAINING_STEP, batch, 0),
            {},
            self.config.formats or formats_of(own),
            _TRAINING_STEP,
            context=lambda: step_context(trainer, _TRAINING_STEP),
            own=own,
        ) as meter:
            report = meter.report(self._effort, exempt)
        if self.config.json:
            print(json.dumps(report.as_json(), indent=1))
            return
        print(f"{report.table(self.config.limit)}\n\n{report.summary()}")
        if chosen := report.smallest_exemption():
            print("The smallest set that halves the damage:")
            print("\n".join(f"  {name}: {computation}" for name, computation in chosen))

    def _load_weights(self, path: str) -> None:
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=False)
            self.model.load_state_dict(checkpoint["state_dict"])
        except (OSError, EOFError, LookupError, TypeError, RuntimeError, UnpicklingError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise ValueError(
                f"ckpt_path={path!r}: the model cannot be loaded from it ({reason}). Expected a "
                "checkpoint of this model. Pass another path."
            ) from None

    def _own_formats(self) -> tuple[FP8Linears | SimulateFormat | None, Any]:
        """Return the formats of the configuration's callback, and its exemptions."""
        trainer: Any = self.trainer
        found: list[Any] = [e for e in trainer.callbacks if isinstance(e, UnitScaleCallback)]
        if isinstance(trainer.precision_plugin, UnitScaledPrecision):
            found.append(trainer.precision_plugin.callback)
        for callback in found:
            if callback.method != LOSSLESS:
                raise ValueError(
                    f"method={callback.method!r}: rules capture the steps of another model, "
                    "but a report measures each matmul as it runs. Expected method='lossless'. "
                    "Change the method, or leave the callback out to report on the model without "
                    "rules."
                )
            if callback.precision is not None:
                own = callback.precision.linears(is_lossless=True)
                return own, callback.precision.exempt
            if callback.simulate is not None:
                return callback.simulate.rounding_pass(), callback.simulate.exempt
        return None, ()
