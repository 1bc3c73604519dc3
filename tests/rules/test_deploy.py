"""A deployed module runs without this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.transforms import deploy, lossless_unit_scale, track_scales, unit_scale
from tests.callbacks.rule_runs import Classifier, fit, trainer_with
from tests.callbacks.rule_runs import unit_scale as callback_of
from tests.helpers import IS_TORCH_2_11

EXPORTED = "by rules: it is exported"
# Strict exports of torch 2.11 do not show the error.
HIDDEN = "Observed exception" if IS_TORCH_2_11 else EXPORTED


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, bias=False)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.out(self.second(x).mean((2, 3)))


class Attention(nn.Module):
    """Embeddings, attention with a residual add, and a readout that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(13, 16), nn.Linear(16, 48)
        self.back, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        heads = self.mix(self.norm(x)).unflatten(-1, (3, 2, 8)).movedim(2, 0).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.back(mixed.transpose(1, 2).flatten(2))
        return F.linear(self.norm(x), self.embed.weight)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


INPUTS = {
    mlp: lambda: torch.randn(5, 16) * 3,
    Convolutions: lambda: torch.randn(2, 3, 8, 8),
    Attention: lambda: torch.randint(13, (2, 7)),
}
CASES = pytest.mark.parametrize("make", INPUTS, ids=lambda value: value.__name__)


def trained(make: Any) -> tuple[nn.Module, Tensor]:
    """Unit-scaled and moved by a few steps, so that biases and norms count."""
    torch.manual_seed(2)
    module, x = unit_scale(make()), INPUTS[make]()
    module(x)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    return module.eval(), x


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max())


@CASES
@pytest.mark.parametrize("fold", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_exported_program_matches_module(make: Any, fold: bool) -> None:
    module, x = trained(make)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        # Another batch: factors are numbers, not measured anew.
        other = INPUTS[make]()
        expected, expected_of_other = module(x), module(other)
        deployed = deploy(module, x, fold=fold)
        program = torch.export.export(deployed, (x,))
        assert relative_error(deployed(x), expected) < 1e-6
        assert relative_error(program.module()(x), expected) < 1e-6
        assert relative_error(deployed(other), expected_of_other) < 1e-6
    assert set(dict(deployed.named_parameters())) == set(dict(module.named_parameters()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    modules = {getattr(node.target, "__module__", "") or "" for node in deployed.graph.nodes}
    assert not any("lightning_unitscale" in module for module in modules)


_SCRIPT = """
import sys, torch
sys.modules["lightning_unitscale"] = None
x, expected = torch.load(sys.argv[2], weights_only=True)
found = torch.export.load(sys.argv[1]).module()(x)
print(float((found - expected).abs().max() / expected.abs().max()))
"""


@pytest.mark.slow
def test_exported_program_runs_without_this_package(tmp_path: Path) -> None:
    module, x = trained(Attention)
    program = torch.export.export(deploy(module, x), (x,))
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, module(x).detach()), tmp_path / "data.pt")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, "model.pt2", "data.pt"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1e-6


@pytest.mark.slow
def test_mlp_folds_into_plain_module() -> None:
    module, x = trained(mlp)
    kept, folded = deploy(module, x), deploy(module, x, fold=True)
    assert len(kept.unfolded) >= 3
    assert folded.unfolded == ()
    plain = mlp()
    plain.load_state_dict(folded.state_dict())
    assert relative_error(plain(x), module(x)) < 1e-6
    assert sum(node.target is torch.mul for node in folded.graph.nodes) == 0


@pytest.mark.slow
def test_unfoldable_factors_are_kept_and_reported() -> None:
    module, x = trained(Attention)
    folded = deploy(module, x, fold=True)
    # The embedding is read twice, and the shares of the residual add belong to no weight.
    assert any(value.startswith("linear") for value in folded.unfolded)
    assert all(" * " in value for value in folded.unfolded)
    assert len(folded.unfolded) < len(deploy(module, x).unfolded)
    number = sum(node.target is torch.mul for node in folded.graph.nodes)
    assert number == len(folded.unfolded)


@pytest.mark.slow_cases
@pytest.mark.parametrize("where", ["before", "between"])
def test_weight_with_two_readers_is_not_folded(where: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            if where == "between":
                return self.other(self.one(x.relu()))
            return self.other(x) + self.one(x.tanh())

    torch.manual_seed(3)
    module, x = unit_scale(Twice()), torch.randn(4, 16) * 2
    module(x)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn_like(param) * 0.3)
        folded = deploy(module.eval(), x, fold=True)
        assert relative_error(folded(x), module(x)) < 1e-6
        other = torch.randn(9, 16)
    assert relative_error(deploy(module, other, fold=True)(other), module(other)) < 1e-6
    assert any("one" in value for value in folded.unfolded)


def test_deployed_module_has_same_call_signature() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(8, 8)

        def forward(self, x: Tensor, *, gate: Tensor, twice: bool = False) -> dict[str, Any]:
            y = self.map(x) * gate
            return {"y": self.map(y) if twice else y, "shape": (x, gate)}

    module, x, gate = unit_scale(Keywords()), torch.randn(3, 8), torch.randn(3, 8)
    expected = module.eval()(x, gate=gate, twice=True)
    deployed = deploy(module, x, gate=gate, twice=True)
    found = deployed(x, gate=gate, twice=True)
    assert relative_error(found["y"], expected["y"]) < 1e-6
    assert torch.equal(found["shape"][1], gate)


@pytest.mark.slow_cases
@pytest.mark.parametrize("fold", [False, True])
def test_deploy_lightning_module_after_fit(fold: bool) -> None:
    pl.seed_everything(2, verbose=False)
    module, x = Classifier(), torch.randn(6, 8)
    fit(module, callback_of("u-mup"), max_steps=8)
    rows = torch.utils.data.DataLoader([(value, torch.tensor(0)) for value in x], 6)
    predicting = trainer_with(callback_of("u-mup"))
    (expected,) = predicting.predict(module, rows)
    deployed = deploy(module.eval(), x, fold=fold)
    assert relative_error(deployed(x), expected) < 1e-6
    assert relative_error(module(x), expected) > 0.1  # the plain function of these weights
    program = torch.export.export(deployed, (x,))
    assert relative_error(program.module()(x), expected) < 1e-6


@pytest.mark.slow_cases
@pytest.mark.parametrize("strict", [True, False])
def test_exporting_scaled_module_error_suggests_deploy(strict: bool) -> None:
    x = torch.randn(2, 16)
    never_called, called = unit_scale(mlp()), unit_scale(mlp())
    called(x)
    for module in (never_called, called):
        with pytest.raises(RuntimeError, match=rf"{EXPORTED}\. .*\.deploy\(module|{HIDDEN}"):
            torch.export.export(module, (x,), strict=strict)
        deploy_after = module(x)  # as if nothing had been asked for
        assert relative_error(deploy(module.eval(), x)(x), deploy_after) < 1e-6


@pytest.mark.parametrize("strict", [True, False])
def test_lossless_and_tracked_modules_can_be_exported(strict: bool) -> None:
    x = torch.randn(2, 16)
    plain = mlp()
    for module in (lossless_unit_scale(plain, x), track_scales(plain)):
        program = torch.export.export(module, (x,), strict=strict)
        assert relative_error(program.module()(x), plain(x)) < 1e-6


def test_deploying_unscaled_module_is_an_error() -> None:
    x = torch.randn(2, 16)
    for module in (mlp(), unit_scale(mlp()), lossless_unit_scale(mlp(), x)):
        with pytest.raises(ValueError, match=r"not been unit-scaled by rules.*\. Expected .*\. "):
            deploy(module, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_deploying_forward_with_graph_break_is_an_error() -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.map(x)
            torch._dynamo.graph_break()
            return self.map(x)

    module, x = unit_scale(Breaking()), torch.randn(2, 8)
    module(x)
    with pytest.raises(
        RuntimeError,
        match=r"Breaking\.forward cannot be captured as one graph: .*\. Keep it out",
    ):
        deploy(module, x)
    with pytest.raises(RuntimeError, match=f"{EXPORTED}|{HIDDEN}"):
        torch.export.export(module, (x,), strict=True)
