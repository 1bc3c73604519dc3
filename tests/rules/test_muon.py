"""Muon under u-muP: which weights it takes, at which rates, and the optimizer for all of them."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.optim import MuonAdamW, muon_param_groups
from lightning_unitscale.rules.learning_rates import (
    Family,
    ParameterInfo,
    Role,
    check_group,
    family_of,
    is_decay_decoupled,
    muon_rate,
    takes_muon,
)
from lightning_unitscale.rules.scaled_step import scale_learning_rates
from lightning_unitscale.rules.transform import PLAN_ATTRIBUTE
from tests.callbacks.runs import QUIET
from tests.helpers import IS_TORCH_2_14, assert_same_bits


def info(role: Role = Role.HIDDEN, fan_in: int = 32, fan_out: int = 128, **more: Any) -> Any:
    return ParameterInfo("net.up.weight", role, fan_in, fan_out, model_width=32, **more)


def stepped(
    one: ParameterInfo, shape: tuple[int, int], adjust: Any = None, lr: float = 0.5
) -> Tensor:
    """Change of a weight by one step of torch's Muon at the scaled rate."""
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape, generator=generator)
    optimizer = torch.optim.Muon([weight], lr, weight_decay=0.0, adjust_lr_fn=adjust)
    scale_learning_rates(optimizer, {weight: one}, "u-mup")
    optimizer.step()
    return weight.detach()


ADJUST = [None, "original", "match_rms_adamw", *["spectral_unclamped"] * IS_TORCH_2_14]


@pytest.mark.parametrize("adjust", ADJUST)
@pytest.mark.parametrize("shape", [(128, 32), (32, 128), (64, 64)])
@pytest.mark.parametrize("role", [Role.HIDDEN, Role.READOUT])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_step_has_spectral_norm_of_its_rate(
    adjust: Any, shape: tuple[int, int], role: Role, is_transposed: bool
) -> None:
    """The effective change has spectral norm lr * sqrt(fan_out / fan_in), however it is stored.

    It is the same in one of four branches.
    """
    fan_out, fan_in = shape[::-1] if is_transposed else shape
    change = stepped(info(role, fan_in, fan_out, num_residuals=4), shape, adjust)
    graph_factor = 1 / fan_in if role is Role.READOUT else fan_in**-0.5
    norms = torch.linalg.svdvals(change) * graph_factor / (fan_out / fan_in) ** 0.5
    # Newton-Schulz leaves nearly all singular values between 0.7 and 1.2.
    assert norms.median() > 0.7 * 0.5
    assert norms.max() < 1.25 * 0.5


def test_only_hidden_matrices_use_muon() -> None:
    assert takes_muon(info(), (128, 32))
    assert not takes_muon(info(), (128, 32, 3)) and not takes_muon(info(is_tied=True), (8, 8))
    assert not any(takes_muon(info(role), (8, 8)) for role in Role if role is not Role.HIDDEN)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (info(Role.EMBEDDING), "of role 'embedding'"),
        (info(Role.NORM), "of role 'norm'"),
        (info(Role.READOUT, is_tied=True), "tied to a second role"),
    ],
)
def test_muon_rate_of_other_role_is_an_error(one: ParameterInfo, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"'net.up.weight' is {expected}.*optim.MuonAdamW"):
        muon_rate(one, (8, 8))
    assert muon_rate(info(Role.OTHER, num_residuals=4), (8, 8)) == 1.0


def test_other_muon_implementation_is_an_error() -> None:
    class Muon(torch.optim.Optimizer):
        """An implementation whose factor of the shape is not known."""

    optimizer = Muon([nn.Parameter(torch.ones(2, 2))], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"Expected torch.optim.Muon.*lr_scaling='match'"):
        check_group(optimizer, optimizer.param_groups[0], "u-mup")
    check_group(optimizer, optimizer.param_groups[0], "match")


def test_decay_does_not_depend_on_learning_rate() -> None:
    weight = nn.Parameter(torch.ones(4, 16))
    weight.grad = torch.zeros_like(weight)
    for optimizer in (
        torch.optim.Muon([weight], lr=0.3, weight_decay=0.25),
        MuonAdamW([weight], lr=2.0, muon_lr=0.3, weight_decay=0.25),
    ):
        weight.data.fill_(1.0)
        scale_learning_rates(optimizer, {weight: info(fan_in=16, fan_out=4)}, "u-mup")
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((4, 16), 0.75))


def test_muon_adamw_steps_match_muon_and_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(8, 8, generator=generator) for name in ("hidden", "other", "late")}
    ours = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    both = MuonAdamW(ours.values(), lr=0.1, muon_lr=0.02, weight_decay=0.5)
    both.follow_roles({ours["hidden"]: info(), ours["other"]: info(Role.EMBEDDING)})
    muon = torch.optim.Muon([theirs["hidden"]], lr=0.02, weight_decay=2.5)
    adamw = torch.optim.AdamW(
        [theirs["other"], theirs["late"]], lr=0.1, betas=(0.9, 0.95), weight_decay=0.5
    )
    seen: list[Any] = []
    both.register_step_post_hook(lambda *_: seen.append(both.param_groups[0]["lr"]))
    schedule = torch.optim.lr_scheduler.LambdaLR(both, lambda step: 1 / (step + 1))
    for step in range(3):
        gradient = torch.randn(8, 8, generator=generator)
        for weight in (*ours.values(), *theirs.values()):
            weight.grad = gradient.clone()
        muon.param_groups[0]["lr"] = 0.02 / (step + 1)
        adamw.param_groups[0]["lr"] = 0.1 / (step + 1)
        for optimizer in (both, muon, adamw):
            optimizer.step()
        schedule.step()
    assert_same_bits(
        [one.detach() for one in ours.values()], [one.detach() for one in theirs.values()]
    )
    assert len(seen) == 3  # hooks run once a step
    # A copy has the state, and the roles again when it is told.
    other = MuonAdamW([nn.Parameter(one.detach().clone()) for one in ours.values()], lr=0.1)
    other.load_state_dict(copy.deepcopy(both.state_dict()))
    assert other.param_groups[0]["muon_ratio"] == both.param_groups[0]["muon_ratio"]
    with pytest.raises(
        RuntimeError, match=r"without the graph of the step.*UnitScaleCallback\('u-mup'\)"
    ):
        other.step()


@pytest.mark.parametrize("rates", [{"lr": 0.0}, {"muon_lr": -1.0}, {"lr": math.nan}, {"lr": "1"}])
def test_rates_must_be_positive(rates: Any) -> None:
    (name,) = rates
    with pytest.raises(ValueError, match=rf"^{name}=.* Expected a positive number"):
        MuonAdamW([nn.Parameter(torch.ones(2, 2))], **rates)


class Text(pl.LightningModule):
    """A residual block between an embedding and a readout, under names that say nothing."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer_of = optimizer
        self.a, self.b = nn.Embedding(16, 8), nn.Parameter(torch.randn(8, 32) * 0.3)
        self.c, self.d = nn.Linear(32, 8), nn.Linear(8, 16, bias=False)
        self.e = nn.LayerNorm(8)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.a(batch)
        x = x + self.c(F.gelu(self.e(x) @ self.b))
        loss = F.cross_entropy(self.d(x).flatten(0, 1), batch.flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer_of(self)


def _fit(module: Any, max_steps: int, **options: Any) -> pl.Trainer:
    data = torch.utils.data.DataLoader(
        torch.randint(0, 16, (16, 6), generator=torch.Generator().manual_seed(2)), batch_size=4
    )
    given = options.pop("ckpt_path", None)
    callbacks = options.pop("callbacks", [UnitScaleCallback("u-mup")])
    trainer = pl.Trainer(**{**QUIET, "max_steps": max_steps, **options}, callbacks=callbacks)
    trainer.fit(module, data, ckpt_path=given)
    return trainer


def _both(module: nn.Module) -> Any:
    optimizer = MuonAdamW(module.parameters(), lr=0.5, muon_lr=0.1, weight_decay=2**-10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.slow
def test_roles_and_rates_come_from_the_graph(tmp_path: Path) -> None:
    """This also holds in a Trainer with automatic optimization, and in a resumed run."""
    pl.seed_everything(5, verbose=False)
    module = Text(_both)
    trainer = _fit(module, 8)
    trainer.save_checkpoint(tmp_path / "eight.ckpt")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state = trainer.optimizers[0].state
    muon = {names[id(one)] for one in state if "momentum_buffer" in state[one]}
    assert muon == {"b", "c.weight"}
    assert {names[id(one)] for one in state} - muon == set(names.values()) - muon
    # Of x @ b, the outputs are the columns.
    plans = vars(module)[PLAN_ATTRIBUTE].parameters
    assert (plans["b"].info.fan_in, plans["b"].info.fan_out) == (8, 32)
    assert sum(module.losses[-3:]) < 0.8 * sum(module.losses[:3])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * 0.92)
    straight = Text(_both)
    straight.load_state_dict(Text(_both).state_dict())
    resumed = [Text(_both), Text(_both)]
    for one in resumed:
        _fit(one, 12, ckpt_path=tmp_path / "eight.ckpt")
    assert_same_bits(resumed[0].state_dict(), resumed[1].state_dict())
    assert sum(resumed[0].losses) / len(resumed[0].losses) < module.losses[0]


@pytest.mark.slow
def test_muon_and_adamw_under_manual_optimization() -> None:
    """One of torch's Muon, with the same rates as in the optimizer for all."""

    class Manual(Text):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer)
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()

    def two(module: Any) -> Any:
        hidden = [module.b, module.c.weight]
        others = [one for one in module.parameters() if all(one is not each for each in hidden)]
        return [
            torch.optim.Muon(hidden, lr=0.1, weight_decay=0.0),
            torch.optim.AdamW(others, lr=0.5, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def one(module: Any) -> Any:
        return MuonAdamW(module.parameters(), lr=0.5, muon_lr=0.1)

    found = []
    for kind, optimizer in ((Manual, two), (Text, one)):
        pl.seed_everything(5, verbose=False)
        module = kind(optimizer)
        _fit(module, -1, max_epochs=1)
        found.append(dict(module.state_dict()))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-4)


def test_step_without_rules_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"Use UnitScaleCallback\('u-mup'\)"):
        _fit(Text(_both), 1, callbacks=[UnitScaleCallback()])
    module = Text(_both)
    _fit(module, 2, callbacks=[UnitScaleCallback("u-mup", lr_scaling=None)])
    assert len(module.losses) == 2


class _Tokens(nn.Module):
    """Every role: embeddings, hidden matrices, vectors, a tied weight, a readout, one unread."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 32)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 16, bias=False)
        self.unread = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(self.frozen(x)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("is_tied", [False, True])
def test_groups_of_a_plain_module_follow_roles(is_tied: bool) -> None:
    model = _Tokens(is_tied=is_tied)
    before = copy.deepcopy(model.state_dict())
    tokens = torch.randint(16, (4, 8))
    groups = muon_param_groups(model, tokens)
    assert [group["use_muon"] for group in groups] == [True, False]
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [[names[parameter] for parameter in group["params"]] for group in groups]
    assert found[0] == ["up.weight", "down.weight"]
    trained = {name for parameter, name in names.items() if parameter.requires_grad}
    assert set(found[1]) == trained - set(found[0])
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])


def test_torch_muon_matches_on_plain_module_groups() -> None:
    model, tokens = _Tokens(), torch.randint(16, (4, 8))
    theirs = copy.deepcopy(model)
    optimizer = MuonAdamW(muon_param_groups(model, tokens), lr=1e-2, muon_lr=2e-2)
    hidden = [theirs.up.weight, theirs.down.weight]
    others = [
        parameter
        for parameter in theirs.parameters()
        if parameter.requires_grad and all(parameter is not each for each in hidden)
    ]
    alone = [
        torch.optim.Muon(hidden, 2e-2, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, 1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for _ in range(3):
        model(tokens).backward()
        theirs(tokens).backward()
        for each in (optimizer, *alone):
            each.step()
            each.zero_grad()
    for parameter, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert_same_bits(parameter, other)


def test_soap_steps_do_not_depend_on_gradient_scale() -> None:
    soap = pytest.importorskip("pytorch_optimizer").SOAP
    optimizer = soap([nn.Parameter(torch.zeros(2, 2))])
    assert family_of(optimizer) is Family.SCALE_INVARIANT
    assert is_decay_decoupled(optimizer, optimizer.param_groups[0])
    changes = []
    for scale in (1.0, 2.0**10):
        weight = nn.Parameter(torch.zeros(16, 24))
        optimizer = soap([weight], lr=0.01, weight_decay=0.0)
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            weight.grad = torch.randn(16, 24, generator=generator) * scale
            optimizer.step()
        changes.append(weight.detach())
    torch.testing.assert_close(*changes, rtol=1e-3, atol=1e-5)
