"""Loops with unusual gradients: per sample, second order, of a likelihood in closed form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .entry_point import EntryPoint, Trained, attached

os.environ.setdefault("DDE_BACKEND", "pytorch")


def opacus(callbacks: list[Any], folder: Path) -> Trained:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    rows = TensorDataset(torch.randn(80, 3, 8, 8), torch.randint(4, (80,)))
    # Hooks of its module make the gradients of each sample, and its optimizer holds torch's.
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(rows, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False,
    )  # fmt: skip
    losses = []
    with attached(model, optimizer, callbacks):
        for _ in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                losses.append(nn.functional.cross_entropy(model(x), y))
                losses[-1].backward()
                optimizer.step()
    return Trained(model, losses)


def gaussian_process(callbacks: list[Any], folder: Path) -> Trained:
    import gpytorch
    from gpytorch.kernels import MaternKernel, ScaleKernel

    class Process(gpytorch.models.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = ScaleKernel(MaternKernel(2.5, ard_num_dims=4))

        def forward(self, x: torch.Tensor) -> Any:
            covariance = self.covar_module(x)
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)

    x = torch.randn(900, 4)  # so many that it iterates, in a function of its own in the loss
    y = torch.sin(x).sum(-1)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Process(x, y, likelihood)
    likelihood_of_all = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    with attached(model, optimizer, callbacks):
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(-likelihood_of_all(model(x), y))
            losses[-1].backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            mean = likelihood(model(torch.randn(5, 4))).mean
    return Trained(model, [losses, mean])


def deepxde_equation(callbacks: list[Any], folder: Path) -> Trained:
    import deepxde as dde

    def equation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -dde.grad.hessian(y, x) - np.pi**2 * torch.sin(np.pi * x)

    dde.config.set_random_seed(1)
    line = dde.geometry.Interval(-1, 1)
    zero = dde.icbc.DirichletBC(line, lambda x: 0, lambda x, is_boundary: is_boundary)
    net = dde.nn.FNN([1, 20, 20, 1], "tanh", "Glorot uniform")
    model = dde.Model(dde.data.PDE(line, equation, zero, 16, 2), net)
    model.compile("adam", lr=1e-3)
    with attached(net, None, callbacks):
        history, _ = model.train(iterations=20, verbose=0, display_every=2)
    return Trained(net, [history.loss_train, model.predict(np.linspace(-1, 1, 5)[:, None])])


def higher_maml(callbacks: list[Any], folder: Path) -> Trained:
    import higher

    model = nn.Sequential(
        nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with attached(model, optimizer, callbacks):
        for x, y in zip(torch.randn(20, 2, 16, 4), torch.randn(20, 2, 16, 2), strict=True):
            optimizer.zero_grad()
            # The inner loop trains a module of its own, which has the attributes of the model.
            with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (fast, descent):
                for _ in range(3):
                    descent.step((fast(x[0]) - y[0]).square().mean())
                losses.append((fast(x[1]) - y[1]).square().mean())
                losses[-1].backward()
            optimizer.step()
    return Trained(model, losses)


def laplace_evidence(callbacks: list[Any], folder: Path) -> Trained:
    from laplace import marglik_training
    from laplace.curvature.backpack import BackPackGGN
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=16)
    # Once it has measured the curvature, it trains the model in evaluation mode.
    with attached(model, None, callbacks):
        posterior, _, evidence, history = marglik_training(
            model, loader, likelihood="regression", hessian_structure="kron", backend=BackPackGGN,
            n_epochs=5, n_epochs_burnin=1, marglik_frequency=2, optimizer_kwargs={"lr": 1e-2},
        )  # fmt: skip
    return Trained(model, [evidence, history, *posterior(torch.randn(4, 8))])


ENTRY_POINTS = (
    EntryPoint("opacus", "PrivacyEngine.make_private", "attach", ("opacus",), "torch", ("opacus",),
               opacus),
    EntryPoint("gpytorch", "ExactMarginalLogLikelihood", "attach", ("gpytorch",), "torch",
               ("gpytorch",), gaussian_process),
    EntryPoint("higher", "innerloop_ctx", "attach", ("higher",), "torch", ("higher",), higher_maml),
    EntryPoint("laplace", "marglik_training", "attach", ("laplace-torch", "backpack-for-pytorch"),
               "torch", ("laplace", "laplace.curvature.backpack"), laplace_evidence),
    EntryPoint("deepxde", "Model.train", "attach", ("deepxde",), "torch", ("deepxde",),
               deepxde_equation),
)  # fmt: skip
