"""The monitor and ``explain()`` agree about every matmul."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import FP8, ScaleMonitor, UnitScaleCallback
from lightning_unitscale.scales.layout import DIRECTIONS
from lightning_unitscale.tensorboard.history import LastStep, read_run
from tests.callbacks.runs import loader, run

D = 32


def _row(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(D, generator=generator)
    return x, x.cumsum(0)


def shrunk(parameter: Tensor, power: int) -> Tensor:
    """The same parameter, far from RMS 1."""
    with torch.no_grad():
        return parameter.mul_(2.0**-power)


class Module(pl.LightningModule):
    """Reads ``mul``, a batch at RMS 2^-6, and gets small gradients.

    Attributes:
        reads: For each matmul, by its name in ``explain()``, the rows of its operands and of what
            it makes.
    """

    reads: Mapping[str, tuple[str, ...]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x * 2.0**-6).float(), y.float()) * 2.0**-5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Layers(Module):
    """Linear layers with and without a bias, on three dimensions."""

    reads = MappingProxyType(
        {
            "a.linear": ("mul", "a.weight", "a.linear"),
            "b.linear": ("gelu", "b.weight", "b.linear"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, D), nn.Linear(D, 16, bias=False)
        shrunk(self.a.weight, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x.view(-1, 2, 16)))).flatten(1)


class Convolutions(Module):
    reads = MappingProxyType(
        {
            "c.conv1d": ("mul", "c.weight", "c.conv1d"),
            "h.linear": ("c.conv1d", "h.weight", "h.linear"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.c, self.h = nn.Conv1d(4, 8, 3, padding=1), nn.Linear(64, D)
        shrunk(self.c.weight, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.c(x.view(-1, 4, 8)).flatten(1))


class Attention(Module):
    """A module with ``nn.MultiheadAttention``."""

    reads = MappingProxyType(
        {
            "i.linear": ("mul", "i.weight", "i.linear"),
            "m.linear": ("i.linear", "m.in_proj_weight", "m.linear"),
            "m.scaled_dot_product_attention": (
                *("m.query", "m.key", "m.value"),
                "m.scaled_dot_product_attention",
            ),
            "m.linear_1": ("m.scaled_dot_product_attention", "m.out_proj.weight", "m.linear_1"),
            "o.linear": ("m.linear_1", "o.weight", "o.linear"),
        }
    )
    need_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.i, self.o = nn.Linear(D, 64), nn.Linear(64, D)
        self.m = nn.MultiheadAttention(16, 2, batch_first=True)
        shrunk(self.m.in_proj_weight, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.i(x).view(-1, 4, 16)
        return self.o(self.m(h, h, h, need_weights=self.need_weights)[0].flatten(1))


class AttentionWithWeights(Attention):
    """It multiplies batches of matrices then."""

    need_weights = True
    reads = MappingProxyType(
        {
            **{name: rows for name, rows in Attention.reads.items() if "dot_product" not in name},
            "m.matmul": ("m.mul", "m.getitem_1", "m.bmm"),
            "m.matmul_1": ("m.softmax", "m.getitem_2", "m.bmm_1"),
            "m.linear_1": ("m.bmm_1", "m.out_proj.weight", "m.linear_1"),
        }
    )


class FusedAttention(Module):
    reads = MappingProxyType(
        {
            "i.linear": ("mul", "i.weight", "i.linear"),
            "scaled_dot_product_attention": (
                *("query", "key", "value"),
                "scaled_dot_product_attention",
            ),
            "o.linear": ("scaled_dot_product_attention", "o.weight", "o.linear"),
        }
    )
    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.i, self.o = nn.Linear(D, 3 * 64), nn.Linear(64, D)
        shrunk(self.i.weight, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.i(x).view(-1, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.o(h.transpose(1, 2).flatten(1))


class UnfusedAttention(FusedAttention):
    """Torch multiplies the query and the key before, and the probabilities have no row."""

    dropout = 0.1
    reads = MappingProxyType(
        {
            "i.linear": FusedAttention.reads["i.linear"],
            "matmul": ("query", "key", ""),
            "matmul_1": ("", "value", "scaled_dot_product_attention"),
            "o.linear": FusedAttention.reads["o.linear"],
        }
    )


class Batches(Module):
    """Batches of matrices: ``bmm``, ``einsum``, and a matrix that is multiplied with a batch."""

    reads = MappingProxyType(
        {
            "matmul": ("mul", "w", "bmm"),
            "matmul_1": ("bmm", "v", "einsum"),
            # Torch multiplies the transposed matrices.
            "linear": ("einsum", "u", "matmul"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8, 8) * 2.0**-7)
        self.v = nn.Parameter(torch.randn(4, 8, 8) * 2.0**3)
        self.u = nn.Parameter(torch.randn(4, 4) * 2.0**-2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.bmm(x.view(-1, 4, 8).transpose(0, 1), self.w).transpose(0, 1)
        return (self.u @ torch.einsum("bhd,hde->bhe", h, self.v)).flatten(1)


class Tied(Module):
    reads = MappingProxyType(
        {
            "l.linear": ("add", "l.weight", "l.linear"),
            "linear": ("l.linear", "e.weight", "matmul"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.e, self.l = nn.Embedding(D, D), nn.Linear(D, D)
        shrunk(self.e.weight, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x + self.e(torch.arange(x.shape[0]) % D)) @ self.e.weight.t()


class LowRank(Module):
    """A frozen weight, whose matmul has no gradient at all, beside trained ones."""

    reads = MappingProxyType(
        {
            "linear": ("mul", "w", ""),
            "linear_1": ("mul", "a", "linear_1"),
            "linear_2": ("linear_1", "b", "linear_2"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D) * 2.0**-8, requires_grad=False)
        self.a = nn.Parameter(torch.randn(16, D) * 2.0**-5)
        self.b = nn.Parameter(torch.randn(D, 16) * 2.0**-9)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w) + F.linear(F.linear(x, self.a), self.b)


class Checkpointed(Module):
    reads = MappingProxyType(
        {
            "a.linear": ("mul", "a.weight", "a.linear"),
            "b.linear": ("a.linear", "b.weight", "b.linear"),
            "c.linear": ("gelu", "c.weight", "c.linear"),
        }
    )
    is_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        shrunk(self.b.weight, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self.body, self.a(x), use_reentrant=self.is_reentrant)
        return h

    def body(self, x: Tensor) -> Tensor:
        return self.c(F.gelu(self.b(x)))


class CheckpointedReentrant(Checkpointed):
    is_reentrant = True


class Shared(Module):
    """One weight that two matmuls read, of which autocast makes one copy."""

    reads = MappingProxyType(
        {
            "a.linear": ("mul", "a.weight", "a.linear"),
            "a.linear_1": ("gelu", "a.weight", "a.linear_1"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        shrunk(self.a.weight, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(F.gelu(self.a(x) * 64))


class CastByHand(Module):
    reads = MappingProxyType(
        {
            "linear": ("mul", "a.weight", "linear"),
            "b.linear": ("linear", "b.weight", "b.linear"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        shrunk(self.a.weight, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x.to(torch.bfloat16), self.a.weight.to(torch.bfloat16))
        return self.b(h.to(self.b.weight.dtype))


MODULES: list[type[Module]] = [
    Layers,
    Convolutions,
    Attention,
    AttentionWithWeights,
    FusedAttention,
    UnfusedAttention,
    Batches,
    Tied,
    LowRank,
    Checkpointed,
    CheckpointedReentrant,
    Shared,
    CastByHand,
]
FORMATS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "simulated": lambda: {"simulate": "fp8"},
    "fp8": lambda: {"precision": "fp8"},
    "fp8 but": lambda: {"precision": FP8(exclude=["a", "b.*", "o"])},
}
LOG2_LOSS_SCALE = 8
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]


def _settings(precision: str) -> dict[str, Any]:
    if precision != "16-mixed":
        return {"precision": precision}
    # Lightning makes BF16 of it on a CPU.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**LOG2_LOSS_SCALE)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


class Shown(NamedTuple):
    """The scale of a tensor that one place shows: log2 of the RMS, true and as it is stored.

    Where it shows the unit as well, that has to be as in ``explain()``.
    """

    true: float
    stored: float
    unit: int | None = None

    @property
    def divisor(self) -> int:
        """Return the power of two that the stored value was divided by. Digits may be rounded."""
        divisor = round(self.true - self.stored)
        assert abs(self.true - self.stored - divisor) < 0.15
        return divisor


_Found = dict[tuple[str, str], Shown]


def _explained(callback: UnitScaleCallback) -> tuple[dict[str, int], dict[str, int]]:
    """Units of operands and of arriving gradients, by the matmul's name in ``explain()``."""
    text = str(callback.explain()).split("\n\n")[-1]
    sigmas, gammas = {}, {}
    for line in _lines(text):
        # BF16 parameters are held in units, which are a column of their own.
        module, tensor, operands, *_, gradient = line
        if not operands:
            continue
        name = tensor if module == "(the step itself)" else f"{module}.{tensor}"
        for role, power in re.findall(r"(\w+) 2\^(-?\d+)", operands):
            sigmas[f"{name}:{role}"] = int(power)
        if gradient:
            gammas[name] = int(gradient.removeprefix("2^"))
    return sigmas, gammas


def _lines(table: str) -> list[list[str]]:
    """The cells of a table of ``tabulate``."""
    lines = table.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("---"))
    columns = [match.span() for match in re.finditer("-+", lines[rule])]
    return [[line[a:b].strip() for a, b in columns] for line in lines[rule + 1 :] if line.strip()]


def _table(monitor: ScaleMonitor) -> tuple[_Found, set[tuple[str, str]]]:
    found: _Found = {}
    read = set()
    for module, tensor, *columns in _lines(monitor.table(full=True)):
        name = f"{module}.{tensor}" if module else tensor
        for direction, (true, stored) in zip(DIRECTIONS, (columns[:2], columns[2:4]), strict=True):
            if stored.endswith("*"):
                read.add((name, direction))
            stored = stored.removesuffix("*")
            if stored not in ("-", "zero"):
                found[name, direction] = Shown(float(true), float(stored))
    return found, read


def _csv(monitor: ScaleMonitor, path: Path) -> tuple[_Found, set[tuple[str, str]]]:
    monitor.to_csv(path)
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) == 3]
    found = {
        (row["tensor"], row["direction"]): Shown(
            float(row["log2_rms"]), float(row["log2_rms_stored"]), int(row["log2_unit"])
        )
        for row in rows
        if float(row["rms"])
    }
    return found, {(row["tensor"], row["direction"]) for row in rows if row["operand"] == "True"}


def _dashboard(folder: str) -> tuple[_Found, set[tuple[str, str]]]:
    last = LastStep(read_run(folder))
    assert last.step == 3
    found: _Found = {}
    read = set()
    for direction in DIRECTIONS:
        true, stored = (last.log2_rms(direction, stored=each) for each in (False, True))
        for index, name in enumerate(last.names):
            if np.isfinite(true[index]):
                found[name, direction] = Shown(true[index], stored[index])
            if last.read_by_matmuls(direction)[index]:
                read.add((name, direction))
    return found, read


def _train(
    make: type[Module], settings: dict[str, Any], folder: Path, **options: Any
) -> tuple[UnitScaleCallback, tuple[_Found, set[tuple[str, str]]]]:
    """Train for four steps; return the last values in table, CSV and dashboard."""
    callback = UnitScaleCallback(**options)
    monitor = ScaleMonitor(every_n_steps=1, on_violation="raise")
    logger = TensorBoardLogger(folder, "run")
    settings = {"logger": logger, "max_steps": 4, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that a CPU has not in every type
        run(make, [callback, monitor], data=lambda: loader(64, 16, make=_row), **settings)
    assert monitor.alerts == ()
    first, *others = [
        _csv(monitor, folder / "scales.csv"),
        _table(monitor),
        _dashboard(logger.log_dir),
    ]
    for found, read in others:
        assert set(found) == set(first[0])
        assert read & set(found) == first[1] & set(found)
        for key, each in first[0].items():
            assert found[key].divisor == each.divisor
            assert found[key].stored == pytest.approx(each.stored, abs=0.051)
    return callback, first


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("make", "precision"),
    [
        pytest.param(make, precision, id=f"{make.__name__}-{precision}")
        for make in MODULES
        for precision in PRECISIONS
    ],
)
def test_monitor_and_explain_show_same_units(
    make: type[Module], precision: str, tmp_path: Path
) -> None:
    for name, options in FORMATS.items():
        if name.startswith("fp8") and precision == "64-true":
            continue  # refused
        callback, (found, read) = _train(make, _settings(precision), tmp_path / name, **options())
        sigmas, gammas = _explained(callback)
        reads = make.reads
        assert {name.rpartition(":")[0] for name in sigmas} == set(reads)
        seen = set()
        for matmul, (*operands, result) in reads.items():
            units = [unit for key, unit in sigmas.items() if key.startswith(f"{matmul}:")]
            assert len(units) == len(operands)
            for row, unit in zip(operands, units, strict=True):
                if row:
                    shown = found[row, "forward"]
                    assert shown.unit == shown.divisor == unit, (name, matmul, row)
                    # Torch itself scales the query and the key of an attention that is not fused.
                    is_scaled = make is UnfusedAttention and row in ("query", "key")
                    assert abs(shown.stored) <= (1.4 if is_scaled else 0.6)
                    seen.add((row, "forward"))
            if result and matmul in gammas:
                shown = found[result, "backward"]
                assert shown.unit == gammas[matmul], (name, matmul)
                loss_scale = LOG2_LOSS_SCALE if precision == "16-mixed" else 0
                assert shown.divisor == gammas[matmul] - loss_scale
                assert abs(shown.stored) <= 0.75
                seen.add((result, "backward"))
        # Beside these, tensors without a gradient are made by matmuls.
        assert {key for key in read if key in found} == seen
        # Far from 1, or units would agree that nothing has told.
        assert min(sigmas.values()) <= -5 and min(gammas.values()) <= -3


@pytest.mark.slow_cases
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("options", [{"method": "unit-scaling"}, {"remat": "min_cut"}], ids=str)
@pytest.mark.parametrize("make", [Layers, Convolutions, FusedAttention, Checkpointed])
def test_operands_in_captured_graphs_are_near_unit_scale(
    make: type[Module], options: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    for name, formats in FORMATS.items():
        _, (found, read) = _train(
            make, _settings(precision), tmp_path / name, **options, **formats()
        )
        for matmul, (*operands, result) in make.reads.items():
            for row in operands:
                # A rule's factor, which is no power of two, may stand between the two.
                if (row, "forward") in found:
                    assert (row, "forward") in read and abs(found[row, "forward"].stored) <= 1.3
            assert (result, "backward") in read, matmul
            assert abs(found[result, "backward"].stored) <= 1.3, (name, matmul)
