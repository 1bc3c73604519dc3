"""Every transform keeps writes through an alias of a tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.transforms import remat, track_scales
from tests.helpers import assert_same_bits, run

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


class Teacher(nn.Module):
    """Averages its weights, as a teacher does, and the codes that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("codes", torch.ones(4))
        self.codes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.student(x)
        for mean, one in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.data.mul_(0.5).add_(one.data, alpha=0.5)
        self.codes.data.mul_(0.25).add_(h.detach().mean(0))
        return (h - self.teacher(x)).square().mean()


class Clipped(nn.Module):
    """Clips its weights, as a critic does, and doubles an activation behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.critic.parameters():
            one.data.clamp_(-0.1, 0.1)
        h = self.critic(x)
        h.data[:, 0].mul_(2)
        seen = (h * 3).detach()
        seen.numpy()[:] *= 2
        torch._foreach_mul_([seen], 2.0)
        return (h.tanh() * seen).mean()


class Normalized(nn.Module):
    """Divides one of several results in place, by a tensor with its own units."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = torch.topk((self.linear(x) * 300).sigmoid(), 2)
        values /= values.sum(-1, keepdim=True) * 50
        return values.square().sum()


KINDS = [Teacher, Clipped, Normalized]
EXACT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "remat": lambda module: remat(module, "min_cut"),
    "tracked": track_scales,
}


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXACT)
def test_writes_through_data_match_plain_module(kind: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    plain = kind()
    rewritten = EXACT[name](copy.deepcopy(plain))
    for _ in range(2):
        assert_same_bits(run(rewritten, X), run(plain, X))
        assert_same_bits(dict(rewritten.named_parameters()), dict(plain.named_parameters()))


def test_ema_teacher_is_updated_under_rules() -> None:
    torch.manual_seed(0)
    scaled = unit_scale(Teacher())
    scaled(X)  # sets the weights
    student, teacher = (dict(one.named_parameters()) for one in (scaled.student, scaled.teacher))
    before = {name: one.detach().clone() for name, one in teacher.items()}
    scaled(X).backward()
    for name, mean in teacher.items():
        expected = before[name] * 0.5 + student[name].detach() * 0.5
        torch.testing.assert_close(mean.detach(), expected)
    assert not torch.equal(scaled.codes, torch.ones(4))
    assert not torch.equal(scaled.codes, torch.full((4,), 0.25))
