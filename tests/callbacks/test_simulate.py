"""``UnitScaleCallback(simulate=...)``: matmuls in the format, calibration and state around it."""

from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_unitscale import ScaleMonitor, Simulate, UnitScaleCallback
from lightning_unitscale.formats import get_format
from tests.callbacks.modules import Evaluated, Regression
from tests.callbacks.runs import loader, run
from tests.helpers import assert_same_bits


def _module() -> Regression:
    return Regression(dropout=0.0)


class _Roundings(pl.Callback):
    """The tensors that were rounded, with their format and step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[str, str, int]] = set()
        self.stage = ""
        module = import_module("lightning_unitscale.matmuls.rounding")
        plain = module.rounded

        def recorded(tensor: Tensor, format: Any, saturate: Any, key: Any) -> Tensor:
            how = "nearest" if key is None else "stochastic"
            self.seen.add((self.stage, how, format.mantissa_bits))
            return plain(tensor, format, saturate, key)

        patch.setattr(module, "rounded", recorded)

    def on_train_batch_start(self, *_: Any) -> None:
        self.stage = "train"

    def on_validation_batch_start(self, *_: Any) -> None:
        self.stage = "validate"


@pytest.mark.parametrize(
    ("simulate", "bits"),
    [("fp8", (3, 2)), ("E3M4", (4, 4)), (("FP16", "E5M2"), (10, 2)), (["e4m3", "bf16"], (3, 7))],
)
def test_training_and_evaluation_are_rounded(
    simulate: Any, bits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    roundings = _Roundings(monkeypatch)
    callback = UnitScaleCallback(simulate=simulate)
    data = {"val_dataloaders": loader()}
    run(Evaluated, [callback, roundings], entry_options=data, max_steps=4)
    assert roundings.seen == {
        ("train", "nearest", bits[0]),
        ("train", "nearest", bits[1]),
        ("validate", "nearest", bits[0]),
    }
    assert "Operands rounded to" in callback.explain()
    assert callback.coverage.fraction_of_flops("format") == 1.0


def test_units_are_measured_before_a_matmul_rounds_its_operands() -> None:
    plain, simulated = UnitScaleCallback(), UnitScaleCallback(simulate="E2M1FN")
    for callback in (plain, simulated):
        run(_module, [callback], max_steps=1)
    assert plain.gauge and set(simulated.gauge) == set(plain.gauge)
    # The first matmul reads unrounded operands; later ones read results of rounded ones.
    for name in ("first.linear:input", "first.linear:weight", "second.linear:weight"):
        assert simulated.gauge[name] == plain.gauge[name]
    for name, pair in plain.gauge.items():
        found = simulated.gauge[name]
        assert abs(found.log2_sigma - pair.log2_sigma) <= 1
        assert abs(found.log2_gamma - pair.log2_gamma) <= 1


def test_training_differs_a_little_and_repeats() -> None:
    plain = run(_module, max_steps=4)
    first, again = (run(_module, [UnitScaleCallback(simulate="fp8")], max_steps=4) for _ in "12")
    assert_same_bits(first.weights, again.weights)
    assert not torch.equal(plain.weights["first.weight"], first.weights["first.weight"])
    losses = [torch.stack([step["loss"] for step in one.outputs]) for one in (plain, first)]
    torch.testing.assert_close(*losses, rtol=0.1, atol=0.0)


def test_simulated_fp32_is_bit_identical() -> None:
    plain = run(_module)
    assert_same_bits(run(_module, [UnitScaleCallback(simulate="FP32")]).weights, plain.weights)


def test_monitor_sees_values_before_they_are_rounded() -> None:
    monitors = [ScaleMonitor(every_n_steps=1) for _ in range(2)]
    for monitor, simulate in zip(monitors, (None, "E2M1FN"), strict=True):
        run(_module, [UnitScaleCallback(simulate=simulate), monitor], max_steps=1)
    plain, simulated = (one.snapshots[0] for one in monitors)
    assert plain.names == simulated.names
    (last,) = (i for i, name in enumerate(plain.names) if name == "second.linear")
    columns = plain.forward.shape[1]
    assert columns == simulated.forward.shape[1]
    # E2M1 has 7 magnitudes; a gradient seen after the rounding would have many more zeros.
    assert plain.backward[last, 1] == simulated.backward[last, 1] == 0


class _SaveHalfWay(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint("half.ckpt")


@pytest.mark.parametrize(
    "options",
    [
        {"simulate": Simulate("E3M2FN", rounding="stochastic")},
        {"simulate": Simulate("E3M2FN", grid="moving")},
    ],
    ids=["stochastic", "moving"],
)
def test_resumed_rounding_is_bit_identical(options: Any) -> None:
    def callbacks() -> list[pl.Callback]:
        return [UnitScaleCallback(**options)]

    whole = run(_module, callbacks(), others=lambda: [_SaveHalfWay()], max_steps=8)
    resumed = run(_module, callbacks(), max_steps=8, entry_options={"ckpt_path": "half.ckpt"})
    assert_same_bits(resumed.weights, whole.weights)


def test_grid_moves_only_if_requested() -> None:
    fixed, moving = (
        UnitScaleCallback(simulate=Simulate("fp8", grid=grid)) for grid in ("fixed", "moving")
    )
    plain = UnitScaleCallback(simulate="fp8")
    weights = [run(_module, [one], max_steps=4).weights for one in (plain, fixed, moving)]
    assert_same_bits(weights[0], weights[1])
    assert not torch.equal(weights[0]["first.weight"], weights[2]["first.weight"])
    assert "(nearest, moving grid)" in moving.explain() and "(nearest)" in plain.explain()


def test_module_is_restored() -> None:
    done = run(_module, [UnitScaleCallback(simulate="fp8")], max_steps=1)
    assert "training_step" not in done.module.__dict__


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fp8", ("E4M3FN", "E5M2")),
        ("[E4M3FN, E3M2FN]", ("E4M3FN", "E3M2FN")),
        ("bf16", ("BF16", "BF16")),
    ],
)
def test_simulate_from_command_line(given: str, expected: tuple[str, str]) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(UnitScaleCallback, "callback")
    callback = parser.instantiate(parser.parse_args([f"--callback.simulate={given}"])).callback
    assert tuple(map(get_format, callback.simulate.formats)) == tuple(map(get_format, expected))


def test_bad_simulate_settings_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"simulate='fp7': unknown number format"):
        UnitScaleCallback(simulate="fp7")
    with pytest.raises(ValueError, match=r"3 formats. Expected 'fp8', a format, or a pair"):
        UnitScaleCallback(simulate=("FP16", "FP16", "FP16"))
    with pytest.raises(ValueError, match=r"rounding='down': unknown rounding"):
        Simulate("fp8", rounding="down")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grid='still': unknown grid. Expected 'fixed' or"):
        Simulate("fp8", grid="still")  # type: ignore[arg-type]
