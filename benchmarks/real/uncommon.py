"""Trainings with hooks, solvers and second derivatives."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .project import Loss, Made, Project, loader


def _rows() -> Tensor:
    return torch.randn(8, 6)


def _autoencoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))


def _reconstruction(model: Any, rows: Tensor) -> Tensor:
    return F.mse_loss(model(rows), rows)


class _Private(Loss):
    """Clips the gradient of every row, which hooks of the backward pass make."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        from opacus.optimizers import DPOptimizer

        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return DPOptimizer(
            optimizer, noise_multiplier=0.5, max_grad_norm=1.0, expected_batch_size=8
        )


def opacus() -> Made:
    from opacus import GradSampleModule

    return _Private(GradSampleModule(_autoencoder()), _reconstruction), loader(_rows)


class _Maml(pl.LightningModule):
    """Trains the weights that two steps of an inner optimizer begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = _autoencoder()

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        from higher import innerloop_ctx

        outer: Any = self.optimizers()
        inner = torch.optim.SGD(self.net.parameters(), lr=0.1)
        outer.zero_grad()
        with innerloop_ctx(self.net, inner, copy_initial_weights=False) as (net, optimizer):
            for _ in range(2):
                optimizer.step(_reconstruction(net, rows[:4]))
            loss = _reconstruction(net, rows[4:])
            self.manual_backward(loss)
        outer.step()
        self.log("loss", loss.detach())
        return loss.detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def higher() -> Made:
    return _Maml(), loader(_rows)


class _Process(nn.Module):
    """An exact Gaussian process and its marginal likelihood."""

    def __init__(self) -> None:
        import gpytorch

        super().__init__()
        self.x = torch.linspace(0, 1, 24)
        self.y = (6 * self.x).sin() + 0.1 * torch.randn(24)
        likelihood = gpytorch.likelihoods.GaussianLikelihood()

        class Exact(gpytorch.models.ExactGP):
            def __init__(self, x: Tensor, y: Tensor) -> None:
                super().__init__(x, y, likelihood)
                self.mean = gpytorch.means.ConstantMean()
                self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

            def forward(self, x: Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

        self.process = Exact(self.x, self.y)
        self.likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, self.process)

    def forward(self) -> Tensor:
        loss: Tensor = -self.likelihood(self.process(self.x), self.y)
        return loss


def gpytorch() -> Made:
    return Loss(_Process(), lambda model, rows: model(), rate=0.05), loader(_rows)


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _autoencoder()

    def forward(self, time: Tensor, state: Tensor) -> Tensor:
        slope: Tensor = self.net(state)
        return slope


def torchdiffeq() -> Made:
    from torchdiffeq import odeint

    def loss(model: Any, rows: Tensor) -> Tensor:
        return F.mse_loss(odeint(model, rows, torch.tensor([0.0, 1.0]))[-1], rows.flip(1))

    return Loss(_Field(), loss), loader(_rows)


def torchdiffeq_adjoint() -> Made:
    from torchdiffeq import odeint_adjoint

    def loss(model: Any, rows: Tensor) -> Tensor:
        end = odeint_adjoint(model, rows, torch.tensor([0.0, 1.0]))[-1]
        return F.mse_loss(end, rows.flip(1))

    return Loss(_Field(), loss), loader(_rows)


def zuko_spline() -> Made:
    from zuko.flows import NSF

    flow = NSF(6, transforms=2, hidden_features=(32, 32))
    return Loss(flow, lambda model, rows: -model().log_prob(rows).mean()), loader(_rows)


def zuko_continuous() -> Made:
    from zuko.flows import CNF

    flow = CNF(6, hidden_features=(32,))
    return Loss(flow, lambda model, rows: -model().log_prob(rows).mean()), loader(_rows)


def torchrl_dqn() -> Made:
    from tensordict import TensorDict
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss

    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    actor = QValueActor(net, in_keys=["observation"], action_space="categorical")
    objective = DQNLoss(actor, action_space="categorical", delay_value=False)
    objective.make_value_estimator(gamma=0.9)

    def loss(model: Any, rows: Tensor) -> Tensor:
        ends = torch.zeros(8, 1, dtype=torch.bool)
        after = {"observation": rows.flip(1), "reward": rows[:, :1], "done": ends,
                 "terminated": ends}  # fmt: skip
        seen = {"observation": rows, "action": torch.arange(8) % 3, "next": after}
        found: Tensor = model(TensorDict(seen, [8]))["loss"]
        return found

    return Loss(objective, loss), loader(_rows)


def _lora(*, checkpoints: bool) -> Made:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip
    net = LlamaForCausalLM(config)
    adapted = get_peft_model(net, LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM"))
    if checkpoints:
        adapted.gradient_checkpointing_enable()
        adapted.enable_input_require_grads()

    def tokens() -> Tensor:
        return torch.randint(128, (4, 16))

    def loss(model: Any, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens)
        mask[:2, -4:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        found: Tensor = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        return found

    return Loss(adapted, loss), loader(tokens)


def peft_lora() -> Made:
    return _lora(checkpoints=False)


def peft_checkpointed() -> Made:
    return _lora(checkpoints=True)


def patchtst() -> Made:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(num_input_channels=2, context_length=32, patch_length=4, patch_stride=4,
                            prediction_length=4, d_model=16, num_hidden_layers=2,
                            num_attention_heads=2, ffn_dim=32)  # fmt: skip

    def loss(model: Any, series: Tensor) -> Tensor:
        found: Tensor = model(past_values=series, future_values=series[:, :4]).loss
        return found

    return Loss(PatchTSTForPrediction(config), loss), loader(lambda: torch.randn(4, 32, 2))


PROJECTS = (
    Project("opacus", ("opacus",), opacus),
    Project("higher", ("higher",), higher),
    Project("gpytorch", ("gpytorch",), gpytorch),
    Project("torchdiffeq", ("torchdiffeq",), torchdiffeq),
    Project("torchdiffeq_adjoint", ("torchdiffeq",), torchdiffeq_adjoint),
    Project("zuko_spline", ("zuko",), zuko_spline),
    Project("zuko_continuous", ("zuko",), zuko_continuous),
    Project("torchrl_dqn", ("torchrl", "tensordict"), torchrl_dqn),
    Project("peft_lora", ("peft", "transformers"), peft_lora),
    Project("peft_checkpointed", ("peft", "transformers"), peft_checkpointed),
    Project("patchtst", ("transformers",), patchtst),
)
