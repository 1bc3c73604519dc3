"""Steps of a module whose parameter was resized, as by resized embeddings."""

import copy

import torch
from torch import Tensor, nn

from lightning_unitscale.transforms import remat
from tests.helpers import assert_same_bits


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        loss: Tensor = self.out(self.table(words)).square().mean()
        return loss


def _losses(module: nn.Module) -> list[Tensor]:
    losses = []
    for step in range(4):
        if step == 2:  # the gradient of the last step still has the old size
            table = module.get_submodule("table")
            table.weight.data = torch.cat([table.weight.data, torch.ones(2, 4)])
        loss = module(torch.arange(5 + 2 * (step >= 2)))
        module.zero_grad()
        loss.backward()
        losses += [loss.detach(), *(one.grad.clone() for one in module.parameters())]
        del loss  # its graph would keep the old size
    return losses


def test_resized_parameter_is_captured_again() -> None:
    torch.manual_seed(0)
    plain = Words()
    planned = remat(copy.deepcopy(plain), "min_cut")
    assert_same_bits(_losses(planned), _losses(plain))
