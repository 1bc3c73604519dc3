"""Loops of packages, run within ``attach``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_unitscale import attach

from .entry_point import EntryPoint, Trained, attached

os.environ.setdefault("KERAS_BACKEND", "torch")


def _environment(action_space: Any) -> Any:
    """Random states, of which an action gets a part as its reward."""
    import gymnasium as gym

    class Environment(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (6,), np.float32)

        def __init__(self) -> None:
            self.action_space = action_space

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.dice, self.step_index = np.random.default_rng(0), 0
            return self._next(), {}

        def step(self, action: Any) -> Any:
            self.step_index += 1
            reward = float(np.sum(self.state[action] if np.ndim(action) == 0 else action))
            return self._next(), reward, self.step_index >= 20, False, {}

        def _next(self) -> Any:
            self.state = self.dice.uniform(-1, 1, 6).astype(np.float32)
            return self.state

    return Environment()


def ppo(callbacks: list[Any], folder: Path) -> Trained:
    from gymnasium.spaces import Discrete
    from stable_baselines3 import PPO

    agent = PPO("MlpPolicy", _environment(Discrete(3)), n_steps=64, batch_size=32, n_epochs=3,
                seed=1, device="cpu")  # fmt: skip
    # Only what collects experience calls the policy itself; what trains calls a method of it.
    with attached(agent.policy, agent.policy.optimizer, callbacks, methods="evaluate_actions"):
        agent.learn(256)
    actions, _ = agent.predict(np.ones((4, 6), np.float32), deterministic=True)
    return Trained(agent.policy, [dict(agent.logger.name_to_value), actions])


def sac(callbacks: list[Any], folder: Path) -> Trained:
    from gymnasium.spaces import Box
    from stable_baselines3 import SAC

    agent = SAC("MlpPolicy", _environment(Box(-1, 1, (2,), np.float32)), learning_starts=20, seed=1,
                device="cpu", policy_kwargs={"net_arch": [32, 32]})  # fmt: skip
    with attached(agent.critic, agent.critic.optimizer, callbacks):
        agent.learn(60)
    actions, _ = agent.predict(np.ones((4, 6), np.float32), deterministic=True)
    return Trained(agent.critic, [actions, *agent.actor.state_dict().values()])


def fastai_learner(callbacks: list[Any], folder: Path) -> Trained:
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.vision.models.xresnet import xresnet18

    rows = [*zip(torch.randn(96, 3, 16, 16), torch.randint(4, (96,)), strict=True)]
    training = DataLoader(rows[:80], bs=8, shuffle=True, num_workers=0)
    loaders = DataLoaders(training, DataLoader(rows[80:], bs=8, num_workers=0))
    model = xresnet18(n_out=4, pretrained=False)
    learner = Learner(loaders, model, loss_func=nn.CrossEntropyLoss(), path=folder)
    learner.create_opt()  # of fastai's own, not torch's
    with attached(model, learner.opt, callbacks):
        learner.fit_one_cycle(2, 1e-3)
    return Trained(model, [learner.recorder.values, learner.recorder.losses])


def skorch_classifier(callbacks: list[Any], folder: Path) -> Trained:
    from skorch import NeuralNetClassifier

    dice = np.random.default_rng(0)
    x, y = dice.standard_normal((128, 8)).astype(np.float32), dice.integers(3, size=128)
    net = NeuralNetClassifier(
        nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3)), criterion=nn.CrossEntropyLoss,
        max_epochs=3, batch_size=16, lr=0.1, iterator_train__shuffle=True, verbose=0,
    )  # fmt: skip
    net.initialize()
    with attached(net.module_, net.optimizer_, callbacks):
        net.partial_fit(x, y)
    losses = [epoch[name] for epoch in net.history for name in ("train_loss", "valid_loss")]
    return Trained(net.module_, [losses, net.predict_proba(x[:8])])


def ignite_trainer(callbacks: list[Any], folder: Path) -> Trained:
    from ignite.engine import Events, create_supervised_trainer

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = create_supervised_trainer(
        model, optimizer, nn.CrossEntropyLoss(), gradient_accumulation_steps=2
    )
    losses: list[float] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
    )
    data = [(torch.randn(4, 3, 8, 8), torch.randint(4, (4,))) for _ in range(10)]
    with attached(model, optimizer, callbacks):
        trainer.run(data, max_epochs=4)
    return Trained(model, losses)


def neural_operator(callbacks: list[Any], folder: Path) -> Trained:
    from neuralop import Trainer
    from neuralop.losses import LpLoss
    from neuralop.models import FNO
    from torch.utils.data import DataLoader

    rows = [{"x": torch.randn(1, 16, 16), "y": torch.randn(1, 16, 16)} for _ in range(48)]
    model = FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = LpLoss(d=2)
    trainer = Trainer(model=model, n_epochs=2, device="cpu", verbose=False)
    with attached(model, optimizer, callbacks):
        found = trainer.train(
            train_loader=DataLoader(rows[:40], batch_size=4, shuffle=True),
            test_loaders={"test": DataLoader(rows[40:], batch_size=4)}, optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2), training_loss=loss,
            eval_losses={"l2": loss},
        )  # fmt: skip
    return Trained(model, {name: value for name, value in found.items() if "time" not in name})


def sbi_flow(callbacks: list[Any], folder: Path) -> Trained:
    from sbi.inference import NPE
    from sbi.neural_nets import posterior_nn

    theta = torch.rand(200, 2)
    x = theta + 0.1 * torch.randn(200, 2)
    attachments = []

    def build(*batch: torch.Tensor) -> nn.Module:
        flow = posterior_nn("maf", hidden_features=32)(*batch)
        if callbacks:
            # Its trainer makes the flow, by this function, and calls its loss.
            attachments.append(attach(flow, None, callbacks, methods="loss"))
        return flow

    inference = NPE(density_estimator=build, show_progress_bars=False)
    inference.append_simulations(theta, x)
    flow = inference.train(training_batch_size=36, max_num_epochs=3)
    for attachment in attachments:
        attachment.detach()
    probabilities = inference.build_posterior(flow).log_prob(theta[:5], x=x[:1])
    return Trained(flow, [inference.summary["training_loss"], probabilities])


def tabnet(callbacks: list[Any], folder: Path) -> Trained:
    from pytorch_tabnet.callbacks import Callback
    from pytorch_tabnet.tab_model import TabNetClassifier

    class Attaching(Callback):
        """By the time that it hears of, the network is there."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.attachment = attach(self.trainer.network, None, callbacks)

        def on_train_end(self, logs: Any = None) -> None:
            self.attachment.detach()

    dice = np.random.default_rng(0)
    x, y = dice.standard_normal((112, 8)).astype(np.float32), dice.integers(3, size=112)
    model = TabNetClassifier(n_d=8, n_a=8, seed=1, verbose=0, device_name="cpu")
    model.fit(
        x, y, max_epochs=3, batch_size=16, virtual_batch_size=8,
        callbacks=[Attaching()] if callbacks else [],
    )  # fmt: skip
    return Trained(model.network, [model.history["loss"], model.predict_proba(x[:8])])


def keras_model(callbacks: list[Any], folder: Path) -> Trained:
    import keras

    class Steps(keras.callbacks.Callback):
        """An optimizer of Keras has no step()."""

        def step(self) -> None: ...

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step()

    keras.utils.set_random_seed(1)
    dice = np.random.default_rng(0)
    x, y = dice.standard_normal((128, 16)).astype(np.float32), dice.integers(3, size=128)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((16,)), layers.Dense(32, activation="gelu"), layers.Dropout(0.1),
         layers.Dense(3)]
    )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss)
    steps = Steps()
    with attached(model, steps, callbacks):
        history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[steps])
    return Trained(model, [history.history["loss"], model.predict(x[:8], verbose=0)])


def mmengine_runner(callbacks: list[Any], folder: Path) -> Trained:
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
            )

        def forward(self, images: torch.Tensor, labels: torch.Tensor, mode: str) -> Any:
            return {"loss": nn.functional.cross_entropy(self.net(images), labels)}

    losses: list[Any] = []

    class Losses(Hook):
        def after_train_iter(self, *_: Any, outputs: Any, **__: Any) -> None:
            losses.append(outputs["loss"])

    rows = [(torch.randn(3, 8, 8), torch.randint(4, ()).item()) for _ in range(80)]
    model = Model()
    runner = Runner(
        model=model, work_dir=str(folder), train_cfg={"by_epoch": True, "max_epochs": 2},
        train_dataloader={
            "batch_size": 8, "dataset": rows, "collate_fn": {"type": "default_collate"},
            "sampler": {"type": "DefaultSampler", "shuffle": True},
        },
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
        randomness={"seed": 1}, custom_hooks=[Losses()],
    )  # fmt: skip
    with attached(model, None, callbacks):  # its optimizer is made later
        runner.train()
    return Trained(model, losses)


ENTRY_POINTS = (
    EntryPoint(
        "stable-baselines3-ppo", "PPO.learn", "attach(methods=)", ("stable-baselines3",), "torch",
        ("stable_baselines3",), ppo,
    ),
    EntryPoint(
        "stable-baselines3-sac", "SAC.learn", "attach", ("stable-baselines3",), "torch",
        ("stable_baselines3",), sac,
    ),
    EntryPoint(
        "fastai", "Learner.fit_one_cycle", "attach", ("fastai",), "torch",
        ("fastai.callback.schedule", "fastai.vision.models.xresnet"), fastai_learner,
    ),
    EntryPoint(
        "skorch", "NeuralNetClassifier.partial_fit", "attach", ("skorch",), "torch", ("skorch",),
        skorch_classifier,
    ),
    EntryPoint(
        "ignite", "create_supervised_trainer(...).run", "attach", ("pytorch-ignite",), "torch",
        ("ignite.engine",), ignite_trainer,
    ),
    EntryPoint(
        "neuraloperator", "Trainer.train", "attach", ("neuraloperator",), "torch", ("neuralop",),
        neural_operator,
    ),
    EntryPoint(
        "sbi", "NPE.train", "attach(methods=)", ("sbi",), "torch", ("sbi.inference",), sbi_flow,
    ),
    EntryPoint(
        "tabnet", "TabNetClassifier.fit", "attach", ("pytorch-tabnet",), "torch",
        ("pytorch_tabnet.tab_model",), tabnet,
    ),
    EntryPoint("keras", "Model.fit", "attach", ("keras",), "torch", ("keras",), keras_model),
    EntryPoint(
        "mmengine", "Runner.train", "attach", ("mmengine",), "torch", ("mmengine.runner",),
        mmengine_runner,
    ),
)  # fmt: skip
