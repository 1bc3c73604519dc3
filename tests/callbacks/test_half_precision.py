"""Parameters in 16 bits train as they do without the callback, which reports what they lose."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback, attach
from lightning_unitscale.transforms import lossless_unit_scale
from tests.callbacks.modules import Evaluated, Regression, momentum
from tests.callbacks.runs import QUIET, Run, loader, run, unit_scale_of
from tests.helpers import assert_same_bits
from tests.helpers import run as run_step
from tests.loops.loops import Net, batches

DEPTH_ALL = r"depth='all': only matmuls are scaled. Expected 'products'\. .*precision='16-mixed'"
FP16_PARAMETERS = r"parameters are FP16 .*Use Trainer\(precision='16-mixed'\)"
ZERO_EPS = r"^AdamW\(eps=1e-08\): eps is 0 in torch.float16"


def sgd(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def adamw(eps: float) -> Callable[[nn.Module], Any]:
    return lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, eps=eps)


def ordinary(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A sample whose matmuls and gradients are normal numbers of FP16."""
    x = torch.randn(6, generator=generator).sign() + 0.5
    return x, x[:2] * 3


def in_precision(precision: str) -> dict[str, Any]:
    """Options of a Trainer; without a plugin it has no ``16-mixed`` on a CPU."""
    if precision != "16-mixed":
        return {"precision": precision}
    return {"plugins": MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))}


def trained(optimizer: Any, precision: Any, *callbacks: pl.Callback) -> tuple[Run, list[str]]:
    """A training without dropout, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(
            lambda: Regression(optimizer, norm=False, dropout=0.0),
            callbacks,
            **in_precision(precision),
            data=lambda: loader(make=ordinary),
        )
    texts = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    return found, [text for text in texts if "eps" in text or "UnitScaleCallback" in text]


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
@pytest.mark.parametrize(
    "optimizer", [momentum, adamw(1e-8), adamw(1e-4)], ids=["SGD", "eps=1e-8", "eps=1e-4"]
)
def test_half_precision_is_bit_identical(optimizer: Any, precision: str) -> None:
    plain, _ = trained(optimizer, precision)
    callback = UnitScaleCallback()
    found, _ = trained(optimizer, precision, callback)
    assert_same_bits(found.compared(), plain.compared())
    assert callback.coverage.num_in_units == callback.coverage.num_matmuls == 5


@pytest.mark.parametrize(
    ("optimizer", "precision", "expected"),
    [
        (sgd, "16-true", [FP16_PARAMETERS]),
        (adamw(1e-8), "16-true", [FP16_PARAMETERS, ZERO_EPS]),
        (adamw(1e-4), "16-true", [FP16_PARAMETERS]),
        (adamw(0.0), "16-true", [FP16_PARAMETERS]),
        (adamw(1e-8), "bf16-true", []),
        (adamw(1e-8), "16-mixed", []),
        (adamw(1e-8), "32-true", []),
    ],
)
def test_half_precision_warnings(optimizer: Any, precision: str, expected: list[str]) -> None:
    _, found = trained(optimizer, precision, UnitScaleCallback())
    assert len(found) == len(expected), found
    for text, pattern in zip(found, expected, strict=True):
        with pytest.warns(UserWarning, match=pattern):
            warnings.warn(text, stacklevel=1)


def test_zero_eps_in_one_group_warns_once() -> None:
    def groups(module: Regression) -> Any:
        first = {"params": list(module.first.parameters()), "eps": 1e-4}
        second = {"params": list(module.second.parameters())}
        return torch.optim.AdamW([first, second], lr=1e-2)

    _, found = trained(groups, "16-true", UnitScaleCallback())
    assert sum("eps is 0 in torch.float16" in text for text in found) == 1


def test_bf16_parameters_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        _, found = trained(sgd, "bf16-true", UnitScaleCallback())
    assert found == []
    (text,) = [one.getMessage() for one in caplog.records if "parameters are BF16" in one.message]
    assert "update below 1/512 of a weight is lost" in text


def test_evaluation_in_half_precision_does_not_warn() -> None:
    make = partial(Evaluated, norm=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(make, [UnitScaleCallback()], entry="validate", precision="16-true")
    assert not [one for one in caught if "UnitScaleCallback" in str(one.message)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_parameter_dtype_is_reported_in_other_loops(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        warnings.catch_warnings(record=True) as caught,
        caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"),
    ):
        warnings.simplefilter("always")
        with attach(model, optimizer, UnitScaleCallback()):
            for x, _ in batches(2):
                model(x.to(dtype) / 50).float().square().mean().backward()
                optimizer.step()
    assert any("parameters are FP16" in str(one.message) for one in caught) == (
        dtype == torch.float16
    )
    assert ("parameters are BF16" in caplog.text) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("eps", "dtype", "count"),
    [(1e-8, torch.float16, 1), (1e-4, torch.float16, 0), (1e-8, torch.float32, 0)],
)
def test_zero_eps_is_reported_in_other_loops(
    eps: float, dtype: torch.dtype, count: int, given: bool
) -> None:
    """Two optimizers step in turn, and a third has the parameters of another model."""
    model, other = Net().to(dtype), Net().half()
    halves = [list(model.up.parameters()), list(model.down.parameters())]
    optimizers = [
        torch.optim.SGD(halves[0], lr=0.01),
        torch.optim.Adam(halves[1], lr=0.01, eps=eps),
    ]
    foreign = torch.optim.Adam(other.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(model, optimizers if given else None, UnitScaleCallback()):
            for x, _ in batches(3):
                model(x.to(dtype) / 50).float().square().mean().backward()
                for optimizer in (*optimizers, foreign):
                    optimizer.step()
    found = [str(one.message) for one in caught if "eps is 0" in str(one.message)]
    assert len(found) == count
    assert all(text.startswith("Adam(eps=1e-08): eps is 0 in torch.float16") for text in found)


def _as_of_depth_all(path: Path) -> Path:
    """The checkpoint of a run as an earlier version wrote it with ``depth="all"``."""
    checkpoint = torch.load(path, weights_only=True)
    names = ["first.linear", "gelu", "first.weight"]
    checkpoint["callbacks"]["UnitScaleCallback"] = {
        "gauge": {name: [-3, 5] for name in names},
        "depth": "all",
        "held": {"first.weight": [-2, 4]},
        "missing": ["second.linear"],
    }
    checkpoint["MixedPrecision"] |= {"scale": 1.0, "_growth_tracker": 4}
    older = path.with_name("older.ckpt")
    torch.save(checkpoint, older)
    return older


@pytest.mark.parametrize("captured", [{}, {"remat": "min_cut"}], ids=["dispatcher", "captured"])
def test_checkpoint_of_depth_all_resumes(captured: dict[str, Any], tmp_path: Path) -> None:
    def trainer(steps: int, *callbacks: pl.Callback) -> pl.Trainer:
        return pl.Trainer(
            callbacks=list(callbacks),
            max_steps=steps,
            max_epochs=-1,
            **in_precision("16-mixed"),
            **QUIET,
        )

    class First(pl.Callback):
        """Keeps the state at the first batch after a checkpoint."""

        weights: Any = None

        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            if self.weights is None:
                self.weights = copy.deepcopy(dict(module.state_dict()))
                self.state = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
                self.scaler = trainer.precision_plugin.state_dict()
                self.gauge = unit_scale_of(trainer.callbacks).gauge

    pl.seed_everything(1, verbose=False)
    first = trainer(4, UnitScaleCallback())
    first.fit(Regression(adamw(1e-8)), loader())
    path = tmp_path / "now.ckpt"
    first.save_checkpoint(path)
    seen, callback = First(), UnitScaleCallback(**captured)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        trainer(8, callback, seen).fit(
            Regression(adamw(1e-8)), loader(), ckpt_path=_as_of_depth_all(path)
        )
    saved = torch.load(path, weights_only=True)
    assert_same_bits(seen.weights, dict(saved["state_dict"]))
    assert_same_bits(seen.state, saved["optimizer_states"][0]["state"])
    assert seen.scaler == torch.amp.GradScaler("cpu").state_dict()
    # Units of the old names are not taken over.
    assert not {"gelu", "first.weight"} & set(callback.gauge)
    assert callback.gauge.pair("first.linear:input").log2_sigma < -4
    assert callback.state_dict()["depth"] == "products"


def test_loss_scale_of_other_checkpoint_is_resumed(tmp_path: Path) -> None:
    """Only a checkpoint of ``depth="all"`` loses its gradient scaler."""
    pl.seed_everything(1, verbose=False)
    options = {"max_epochs": -1, **QUIET}
    half = in_precision("16-mixed")
    trainer = pl.Trainer(callbacks=[UnitScaleCallback()], max_steps=4, **options, **half)
    trainer.fit(Regression(sgd), loader())
    trainer.precision_plugin.scaler.update(4.0)
    trainer.save_checkpoint(tmp_path / "now.ckpt")
    resumed = pl.Trainer(
        callbacks=[UnitScaleCallback()], max_steps=8, **options, **in_precision("16-mixed")
    )
    resumed.fit(Regression(sgd), loader(), ckpt_path=tmp_path / "now.ckpt")
    assert resumed.precision_plugin.scaler.get_scale() == 4.0


@pytest.mark.parametrize("depth", ["all", "some", None, 1])
def test_removed_depth_is_an_error(depth: Any) -> None:
    with pytest.raises(ValueError, match=DEPTH_ALL.replace("'all'", repr(depth))):
        UnitScaleCallback(depth=depth)
    with pytest.raises(ValueError, match=DEPTH_ALL.replace("'all'", repr(depth))):
        UnitScaleCallback("u-mup", depth=depth)


@pytest.mark.parametrize("depth", ["all", "products"])
def test_depth_from_yaml_file(depth: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "seed_everything: 1\ntrainer:\n  accelerator: cpu\n  logger: false\n  callbacks:\n"
        "    - class_path: lightning_unitscale.UnitScaleCallback\n"
        f"      init_args: {{depth: {depth}}}\n"
    )

    monkeypatch.setattr("sys.argv", ["fit", f"--config={config}"])

    def command_line() -> Any:
        return LightningCLI(Empty, run=False, save_config_callback=None)

    if depth == "all":
        with pytest.raises(ValueError, match=DEPTH_ALL):
            command_line()
    else:
        (callback,) = [
            one for one in command_line().trainer.callbacks if isinstance(one, UnitScaleCallback)
        ]
        assert repr(callback) in ("UnitScaleCallback()", "UnitScaleCallback(depth='products')")


class Empty(pl.LightningModule):
    """A module that a command line makes."""


def test_bias_that_overflows_when_scaled_is_unscaled() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 64).half()
    with torch.no_grad():
        layer.weight.normal_(std=2.0**-11)
        layer.bias.fill_(0.25)
    inputs = (torch.randn(8, 256) * 2.0**-8).half()
    scaled = lossless_unit_scale(layer, inputs)
    with pytest.warns(UserWarning, match="0 of 1 matmuls scaled"):
        assert torch.equal(scaled(inputs), layer(inputs))
    assert "above 2**13 when scaled" in scaled.explain()  # type: ignore[operator]


@pytest.mark.parametrize("how", ["mm", "addmm", "bmm", "baddbmm"])
def test_sums_within_fp16_stay_finite_when_scaled(how: str) -> None:
    """When scaled, many aligned terms add up to more than FP16's maximum."""

    class Aligned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((70_000, 4), 2.0**-12, dtype=torch.float16))
            self.bias = nn.Parameter(torch.full((4,), 2.0**-8, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            if how == "mm":
                return x @ self.weight
            if how == "addmm":
                return torch.addmm(self.bias, x, self.weight)
            if how == "bmm":
                return torch.bmm(x[None], self.weight[None])
            return torch.baddbmm(self.bias, x[None], self.weight[None])

    module, x = Aligned(), torch.full((3, 70_000), 2.0**-6, dtype=torch.float16)
    scaled = lossless_unit_scale(module, x)
    for _ in range(2):
        found, expected = run_step(scaled, x), run_step(module, x)
    assert expected["output"].isfinite().all()
    assert_same_bits(found, expected)
    assert "2 of 2 matmuls scaled" in scaled.explain()  # type: ignore[operator]
