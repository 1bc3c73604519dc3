"""Training loops from no package: a GAN with a gradient penalty, and Q-learning."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .project import Made, Project, loader


class WGAN(pl.LightningModule):
    """A Wasserstein GAN with a gradient penalty: two optimizers, gradients of gradients.

    References:
        Gulrajani et al., Improved Training of Wasserstein GANs, 2017, equation 3.
    """

    def __init__(self, latent: int = 16, penalty: float = 10.0, critic_steps: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent, self.penalty, self.critic_steps = latent, penalty, critic_steps
        self.generator = nn.Sequential(
            nn.Linear(latent, 32 * 16),
            nn.Unflatten(1, (32, 4, 4)),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32 * 16, 1),
        )

    def _slopes(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(len(real), 1, 1, 1, device=real.device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return slope.flatten(1).norm(dim=1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        for _ in range(self.critic_steps):
            fake = self.generator(torch.randn(len(batch), self.latent, device=self.device))
            gap = self.critic(fake.detach()).mean() - self.critic(batch).mean()
            loss = gap + self.penalty * (self._slopes(batch, fake.detach()) - 1).square().mean()
            critic.zero_grad()
            self.manual_backward(loss)
            critic.step()
        self.toggle_optimizer(generator)
        fake = self.generator(torch.randn(len(batch), self.latent, device=self.device))
        generator_loss = -self.critic(fake).mean()
        generator.zero_grad()
        self.manual_backward(generator_loss)
        generator.step()
        self.untoggle_optimizer(generator)
        self.log_dict({"critic": loss, "generator": generator_loss})

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(part.parameters(), lr=1e-4, betas=(0.0, 0.9))
            for part in (self.generator, self.critic)
        ]


class DQN(pl.LightningModule):
    """Double Q-learning with a target network, over a loader that is the replay memory.

    The module plays one move per step on a walk whose reward grows to the right, and the loader
    hands it batches of what it remembers.

    References:
        van Hasselt et al., Deep Reinforcement Learning with Double Q-learning, 2015, equation 4.
    """

    def __init__(self, states: int = 8, sync_steps: int = 5) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.states, self.sync_steps = states, sync_steps
        self.online = nn.Sequential(
            nn.Linear(states, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.state = 0
        self.memory: list[tuple[int, int, float, int]] = []

    def _seen(self, states: Tensor) -> Tensor:
        return F.one_hot(states, self.states).float()

    @torch.no_grad()
    def play(self) -> None:
        """One move, at random in a third of the cases."""
        values = self.online(self._seen(torch.tensor([self.state], device=self.device)))
        action = int(values.argmax()) if torch.rand(()) > 0.3 else int(torch.randint(2, ()))
        after = min(max(self.state + 2 * action - 1, 0), self.states - 1)
        won = after == self.states - 1
        self.memory.append((self.state, action, after / self.states, after))
        self.state = 0 if won else after

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for _ in range(4):
            self.play()
        rows = [self.memory[int(share * len(self.memory))] for share in batch]
        before, action, reward, after = (
            torch.tensor(column, device=self.device) for column in zip(*rows, strict=True)
        )
        values = self.online(self._seen(before)).gather(1, action[:, None])[:, 0]
        with torch.no_grad():
            best = self.online(self._seen(after)).argmax(1, keepdim=True)
            aim = reward + 0.9 * self.target(self._seen(after)).gather(1, best)[:, 0]
        loss = F.smooth_l1_loss(values, aim)
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        if self.global_step % self.sync_steps == 0:
            self.target.load_state_dict(self.online.state_dict())
        self.log("loss", loss)
        self.log("reward", sum(row[2] for row in self.memory) / len(self.memory))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.online.parameters(), lr=1e-3)


def wgan() -> Made:
    return WGAN(), loader(lambda: torch.randn(8, 1, 16, 16).tanh())


def dqn() -> Made:
    return DQN(), loader(lambda: torch.rand(32))


PROJECTS = (Project("wgan-gp", (), wgan), Project("dqn", (), dqn))
