"""A module whose stored weights are scaled, and what trains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unitscale.rules.learning_rates import ParameterInfo, Role

TINY = 1e-60  # instead of an eps of 0, for gradients that are zero


class Lion(Optimizer):
    """The sign of an interpolated momentum, as published (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(torch.sign(mean.lerp(param.grad, 1 - first)), alpha=-group["lr"])
                mean.lerp_(param.grad, 1 - second)
        return loss


class Stored(nn.Module):
    """Two layers that store ``W / sigma`` and ``b / s``, and compute with ``W`` and ``b``."""

    def __init__(self, sigmas: tuple[float, float], s: float, bias: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

        self.scales = {"first": sigmas[0], "second": sigmas[1], "bias": s}
        self.first = nn.Parameter(drawn(8, 6) / sigmas[0])
        self.second = nn.Parameter(drawn(2, 8) / sigmas[1])
        self.bias = nn.Parameter(drawn(8) / s) if bias else None

    def effective(self) -> dict[str, Tensor]:
        return {name: one * self.scales[name] for name, one in self.named_parameters()}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        effective = self.effective()
        hidden = F.gelu(F.linear(x, effective["first"], effective.get("bias")))
        return F.mse_loss(F.linear(hidden, effective["second"]), y)

    def infos(self) -> dict[Tensor, ParameterInfo]:
        return {
            one: ParameterInfo(
                name,
                Role.BIAS if name == "bias" else Role.HIDDEN,
                fan_in=one.shape[-1],
                fan_out=one.shape[0],
                model_width=8,
                sigma=1.0 if name == "bias" else self.scales[name],
                output_scale=self.scales["bias"],
            )
            for name, one in self.named_parameters()
        }


def batches(number: int = 20) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    for _ in range(number):
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        yield x, x[:, :2].tanh()


def train(model: Stored, optimizer: Optimizer, with_closure: bool = False) -> dict[str, Tensor]:
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = model.loss(x, y)
            loss.backward()
            return loss

        if with_closure:
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()
    return {name: one.detach() for name, one in model.effective().items()}


def step(model: Stored, optimizer: Optimizer, closure: bool = True) -> None:
    x, y = next(batches())

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        return loss

    if closure:
        optimizer.step(run)
    else:
        run()
        optimizer.step()
