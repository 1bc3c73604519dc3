"""Models of other sizes and kinds than the demo, with a batch each, to time matmuls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from demo_step import DemoLoss, demo_batch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class _Residual(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_inputs, num_outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(num_outputs, num_outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(num_outputs) for _ in range(2))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_inputs != num_outputs:
            self.shortcut = nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(hidden)) + self.shortcut(x))


class ResNetLoss(nn.Module):
    """``(images, classes) -> loss`` of a ResNet with eight residual blocks."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)]
        width = widths[0]
        for index, next_width in enumerate(widths):
            blocks += [_Residual(width, next_width, 1 if index == 0 else 2)]
            blocks += [_Residual(next_width, next_width, 1)]
            width = next_width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(images).mean((2, 3))), classes)


def small_models() -> dict[str, tuple[nn.Module, Batch]]:
    """By name: a GPT whose step takes a few milliseconds, and a ResNet on small images."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16, 3, 32, 32, generator=generator)
    classes = torch.randint(10, (16,), generator=generator)
    return {
        "tiny GPT": (DemoLoss(width=64, depth=2, num_heads=2), demo_batch(6, 64)),
        "ResNet": (ResNetLoss(), (images, classes)),
    }
