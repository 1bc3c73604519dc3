"""An evaluation computes the function that rules have trained, though it runs other operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale import transforms
from tests.callbacks.rule_runs import Classifier, fit, loader, unit_scale

BATCH = next(iter(loader(8)))
DATA = loader(8)


class Attending(Classifier):
    """Attention with dropout, which torch runs as two matmuls, and without as one kernel."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.0))
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = self.qkv(x).reshape(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        # The loss of a training step does not depend on it.
        dropped = 1e-9 if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, 3 * v, dropout_p=dropped)
        x = x + attended.transpose(1, 2).reshape(x.shape)
        return self.readout(x + self.blocks[0](x))


class Cached(Attending):
    """Without gradients, one more add and product come before those of a training step."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            x = x + x * 0.0
        return super().forward(x)


class Generating(Attending):
    """An evaluation calls the module twice, and keys and values come from a cache with padding."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = self.qkv(x).reshape(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = None
        if not self.training:
            num_keys = k.shape[-2]
            k, v = (torch.cat((one, torch.zeros_like(one)), dim=2) for one in (k, v))
            mask = (torch.arange(2 * num_keys) < num_keys).expand(num_keys, -1)
        attended = F.scaled_dot_product_attention(q, k, 3 * v, attn_mask=mask)
        x = x + attended.transpose(1, 2).reshape(x.shape)
        return self.readout(x + self.blocks[0](x))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.forward(batch[0])
        return super().validation_step(batch, batch_idx)


class GeneratingByMatmuls(Generating):
    """The same with dropout, by which torch runs two matmuls in training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return Attending.forward(self, x)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", [GeneratingByMatmuls, Generating, Cached, Attending])
def test_evaluation_loss_matches_training_step(kind: type[Attending]) -> None:
    module = kind()
    trainer, (trained, *_) = fit(
        module, unit_scale("u-mup"), data=DATA, val=loader(16, 16), max_steps=1
    )
    (validated,) = trainer.validate(module, DATA, verbose=False)
    predicted: Any = trainer.predict(module, DATA)
    for loss in (validated["val_loss"], F.cross_entropy(predicted[0], BATCH[1])):
        assert float(loss) == pytest.approx(float(trained["loss"]), rel=1e-5)


def test_deployed_attention_matches_training_step() -> None:
    module = Attending()
    _, (trained, *_) = fit(module, unit_scale("u-mup"), data=DATA, max_steps=1)
    deployed = transforms.deploy(module.eval(), BATCH[0])
    loss = F.cross_entropy(deployed(BATCH[0]), BATCH[1])
    assert float(loss.detach()) == pytest.approx(float(trained["loss"]), rel=1e-5)


class Averaging(Classifier):
    """Code of the evaluation alone: predictions that are averaged, and a metric with a matmul."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.forward(batch[0])
        mean = (out + self.forward(batch[0])) / 2
        self.log("val_loss", F.cross_entropy(mean, batch[1]))
        self.log("similarity", (out @ out.mT).sum() / out.sum(0).square().sum())


def test_evaluation_only_code_is_not_scaled() -> None:
    module = Averaging(lambda module: torch.optim.SGD(module.parameters(), lr=0.0))
    trainer, (trained, *_) = fit(module, unit_scale("u-mup"), data=DATA, val=DATA, max_steps=1)
    (validated,) = trainer.validate(module, DATA, verbose=False)
    assert validated["val_loss"] == pytest.approx(float(trained["loss"]), rel=1e-5)
    assert validated["similarity"] == pytest.approx(1, rel=1e-4)


class Measuring(Classifier):
    """An operation of a module that the training step does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(5, 5)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.probe(self.forward(batch[0])).sum()


def test_evaluation_only_operations_warn() -> None:
    module = Measuring()
    with pytest.warns(UserWarning, match=r"validation_step runs .*: probe\.linear\. Rules"):
        fit(module, unit_scale("u-mup"), data=DATA, val=DATA, max_steps=1)
