"""The coverage report lists every operation and parameter, with the reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.rules.plan import RulePlan
from lightning_unitscale.rules.rewrite import coverage_report
from lightning_unitscale.rules.transform import unit_scale
from tests.rules.models import GPT, Of, tokens
from tests.rules.oracle import decisions_of, parameters_of


def _function(m: nn.ModuleList, x: Tensor) -> Tensor:
    h = m[0](x)
    h = h + m[1](F.gelu(h).view(5, 16))
    h = torch.fft.rfft(h).abs()
    return m[2](h).square().mean() + torch.linalg.svdvals(m[1].weight).sum()


def test_report_lists_operations_and_parameters() -> None:
    torch.manual_seed(1)
    scaled = unit_scale(Of(_function, nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(9, 4)))
    assert "The rules have seen no step yet." in scaled.explain()
    scaled(torch.randn(5, 16))
    report = scaled.explain()
    lines = {line.split()[0]: line for line in report.splitlines() if line.strip()}
    for name, value in decisions_of(scaled).items():
        row = lines.get(f"forward:{name}")
        if value.op in {"view"}:
            assert row is None
        else:
            assert row is not None and value.origin in row, name
    for fqn, plan in parameters_of(scaled).items():
        assert plan.action in lines[fqn] and plan.reason in lines[fqn]
        assert plan.info.role.value in lines[fqn]
    assert "feed-forward branch 1 of 1" in lines["forward:add"]
    assert "readout: 1/fan_in" in lines["forward:parts.2.linear"]
    assert "measured RMS" in lines["forward:abs"] and "calibrated" in lines["forward:abs"]
    assert "read by linalg_svdvals, which no rule rewrites" in lines["parts.1.weight"]
    assert "passed on" in lines["Operations:"] and "1 residual" in lines["Operations:"]
    assert lines["Parameters:"] == "Parameters: 2 scaled, 3 zeroed, 1 left."
    # The table of the passes comes before it.
    assert "unit scale by rules" in report
    assert "parameter gradients at RMS 1" in report
    assert "No graph breaks." in report


def test_tied_weights_are_reported() -> None:
    scaled = unit_scale(GPT(32, 1, is_tied=True))
    scaled(tokens())
    (row,) = (line for line in scaled.explain().splitlines() if line.startswith("tokens.weight"))
    assert "readout (tied)" in row


@torch.compiler.disable
def _untraced(part: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = part(x)
    return result


class Partly(nn.Module):
    """A kernel of torch's own, layers that are never used, used later, or hidden; attention."""

    def __init__(self, is_hidden: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.unused, self.later, self.used = (nn.Linear(8, 8) for _ in range(3))
        self.hidden = nn.Linear(8, 8) if is_hidden else None

    def between(self, x: Tensor) -> Tensor:
        return x if self.hidden is None else _untraced(self.hidden, x)

    def forward(self, x: Tensor, later: bool = False) -> Tensor:
        h = self.used(self.between(x))
        h = self.later(h) if later else h
        h = (h @ h.mT / 8).softmax(-1) @ F.scaled_dot_product_attention(h, h, h)
        h = h + self.used(h)
        return self.lstm(h)[0].square().mean()


@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:.*a recurrent kernel, whose matmuls are inside")
@pytest.mark.parametrize("is_hidden", [False, True])
def test_report_has_every_parameter_and_attention(is_hidden: bool) -> None:
    scaled = unit_scale(Partly(is_hidden))
    x = torch.randn(2, 4, 8)
    scaled(x)

    def rows() -> dict[str, str]:
        lines = [line for line in scaled.explain().splitlines() if line.strip()]
        return {line.split()[0]: line for line in lines}

    found = rows()
    assert {fqn for fqn, _ in scaled.named_parameters()} <= set(found)
    assert "read by lstm.lstm, which no rule rewrites" in found["lstm.weight_ih_l0"]
    assert "forward does not read it" in found["unused.weight"]
    assert "forward does not read it" in found["later.bias"]
    if is_hidden:
        assert "in no captured graph: forward does not read it, or" in found["hidden.weight"]
    left = 10 if is_hidden else 8
    assert found["Parameters:"] == f"Parameters: 1 scaled, 1 zeroed, {left} left."
    assert found["Attention:"] == "Attention: 2 found. attention_mult multiplies their logits."
    before = [param.detach().clone() for param in scaled.later.parameters()]
    scaled(x, later=True)
    assert "in a branch that forward took later, when the weights were" in rows()["later.weight"]
    for first, other in zip(before, scaled.later.parameters(), strict=True):
        assert torch.equal(first, other)


def test_empty_plan_can_be_reported() -> None:
    assert coverage_report(RulePlan()) == "The rules have seen no step yet."
