"""Precision reports: predictions against measurement, and a module that stays as it is."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import nn

from lightning_unitscale import precision_report
from lightning_unitscale.matmuls.computations import EXEMPT
from lightning_unitscale.matmuls.matmul_formats import SimulateFormat
from lightning_unitscale.precision.ledger import sketch
from lightning_unitscale.precision.measured_step import Effort, large_estimates
from lightning_unitscale.precision.meter import metering
from lightning_unitscale.quantize import quantize
from lightning_unitscale.transforms import fp8_linears, lossless_unit_scale, simulate_format
from tests.helpers import assert_same_bits


class Loss(nn.Module):
    """A loss of an image model with a convolution, attention by hand, dropout and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.qkv = nn.Linear(16, 48)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.conv(images))).flatten(2).transpose(1, 2)  # (B, 16, 16)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v
        x = x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)
        return F.cross_entropy(self.head(x.mean(1)), classes)


@pytest.fixture(scope="module")
def trained() -> tuple[Loss, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(10, 3, 4, 4, generator=generator)
    module, classes = Loss(), torch.randint(10, (32,), generator=generator)
    images = patterns[classes] + torch.randn(32, 3, 4, 4, generator=generator)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        module(images, classes).backward()
        optimizer.step()
    optimizer.zero_grad()
    return module, (images, classes)


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("format", ["E4M3FN", "E2M1FN", "MXFP8_E4M3", "NVFP4"])
def test_predicted_order_matches_measurement(trained, format):
    module, batch = trained
    found = {True: [], False: []}
    with metering(module, batch, {}, (format,)) as meter:
        report = meter.report(Effort(directions=8, pairs=2))
        for row in report.rows:
            measure = meter.loss_change if row.is_forward else meter.gradient_error
            key = row.name, row.computation
            measured = measure(format, lambda other, key=key: other == key)
            found[row.is_forward].append((row.loss_change, measured))
    for pairs in found.values():
        assert spearmanr(*zip(*pairs, strict=True)).statistic > 0.8
    together, predicted = report.together[format], report.predicted()
    assert together.gradient_error == pytest.approx(predicted.gradient_error, rel=0.35)
    # Every computation of 7 matmuls, without the gradient of the images.
    assert len(report.rows) == 3 * 7 - 1


@pytest.mark.slow
def test_moving_grid_loss_change_matches_measurement(trained):
    module, batch = trained
    own = SimulateFormat("E2M1FN", "E2M1FN", grid="moving")
    with metering(module, batch, {}, ("E2M1FN",), own=own) as meter:
        rows = [row for row in meter.report(Effort(1, pairs=16)).rows if row.is_forward]
        measured = []
        for row in rows:
            key = row.name, row.computation
            measured.append(meter.loss_change("E2M1FN", lambda other, key=key: other == key))
    found, expected = torch.tensor([row.loss_change for row in rows]), torch.tensor(measured)
    assert spearmanr(found, expected).statistic > 0.9
    # With the second order of other places, the difference is a third.
    assert (found - expected).norm() < 0.2 * expected.norm()


@pytest.mark.slow
def test_gain_of_exemptions_matches_measurement(trained):
    module, batch = trained
    own, grids = SimulateFormat("E2M1FN", "E2M1FN", grid="moving"), range(16)
    with metering(module, batch, {}, ("E2M1FN",), own=own) as meter:
        report = meter.report(Effort(directions=32, pairs=16))
        rows = report.rows_of()

        def loss_changes(exempt):
            changes = []
            for place in grids:
                assert meter.move_grids(place)
                changes.append(meter.loss_change("E2M1FN", lambda key: key not in exempt))
            meter.move_grids(0)
            return torch.tensor(changes)

        before = loss_changes(set())
        lasting = report.together["E2M1FN"].lasting
        assert lasting == pytest.approx(float(before.mean()))
        gains = [report.predicted_gain([(r.name, r.computation)]) for r in rows if r.is_forward]
        assert sum(gain.loss_change for gain in gains) == pytest.approx(lasting)
        for chosen in (rows[::2], rows[1::2]):
            exempt = [(row.name, row.computation) for row in chosen]
            gain = report.predicted_gain(exempt)
            changes = before - loss_changes(set(exempt))
            noise = float(changes.std()) / len(grids) ** 0.5
            expected = pytest.approx(float(changes.mean()), rel=0.25, abs=3 * noise)
            assert gain.loss_change == expected
            # Over the places of the report: on a single one, errors are not independent.
            rest = meter.gradient_error("E2M1FN", lambda key, exempt=exempt: key not in exempt, 8)
            error = report.together["E2M1FN"].gradient_error
            assert error == meter.gradient_error("E2M1FN", lambda key: True, 8)
            assert gain.gradient_error == pytest.approx(error - rest, rel=0.25)


def test_report_uses_format_options_of_module(trained):
    module, batch = trained
    plain = SimulateFormat("NVFP4", "NVFP4", exclude="head", exempt=[("conv", "forward")])
    squares = SimulateFormat(
        "NVFP4", "NVFP4", square_weights=True, hadamard=True, gradient_rounding="stochastic"
    )
    errors = {}
    for name, own in (("plain", plain), ("squares", squares)):
        with metering(module, batch, {}, (own,), own=own) as meter:
            assert not meter.move_grids(0)
            rows = meter.report(Effort(directions=1, pairs=1)).rows_of("NVFP4")
        errors[name] = {(row.name, row.computation): row.added for row in rows}
        # The rounding of matmuls that the module leaves out is accounted for as well.
        assert all(error > 0.0 for error in errors[name].values())
    key = "up.linear", "weight_gradient"
    assert errors["squares"][key] > 1.1 * errors["plain"][key]
    assert errors["squares"]["matmul", "forward"] == errors["plain"]["matmul", "forward"]


def test_without_units_nvfp4_has_a_scale_per_call():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 32, bias=False), torch.randn(16, 32)
    with torch.no_grad():
        layer.weight.mul_(2.0**-12)  # below what a constant scale near 1 can represent

    def added(module):
        report = precision_report(
            module, x, formats=("NVFP4",), loss=lambda y: y.square().mean(), directions=1, pairs=1
        )
        return report.rows[0].added

    assert added(simulate_format(layer, "NVFP4", "NVFP4")) == pytest.approx(added(layer), rel=0.3)


def test_added_error_matches_rounded_matmul(trained):
    module, batch = trained
    report = precision_report(module, *batch, formats=("E3M2FN",), directions=1, pairs=1)
    layer, seen = module.head, []
    handle = layer.register_forward_hook(lambda _, args, result: seen.append((args[0], result)))
    torch.manual_seed(0)
    module(*batch)
    handle.remove()
    inputs = seen[0][0].detach()

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        unit = 2.0 ** round(math.log2(tensor.square().mean().sqrt()))
        return quantize(tensor / unit, "E3M2FN") * unit

    # Dropout makes other inputs than those of the report, but errors of the same size.
    exact = inputs @ layer.weight.detach().T
    error = rounded(inputs) @ rounded(layer.weight.detach()).T - exact
    row = next(row for row in report.rows if row.name == "head.linear" and row.is_forward)
    assert row.added == pytest.approx(float(error.norm() / exact.norm()), rel=0.3)


def test_gradient_errors_of_weights_are_exact(trained):
    module, batch = trained
    with metering(module, batch, {}, ("E4M3FN",)) as meter:
        report = meter.report(Effort(directions=1, pairs=1))
        for row in report.rows:
            if row.computation != "weight_gradient" or "matmul" in row.name:
                continue
            key = row.name, row.computation
            measured = meter.gradient_error("E4M3FN", lambda other, key=key: other == key)
            assert row.loss_change == pytest.approx(measured, rel=1e-3)


def test_large_estimates_are_measured(trained):
    module, batch = trained
    with metering(module, batch, {}, ("E2M1FN",)) as meter:

        def measured(directions):
            rows = meter.report(Effort(directions=directions, pairs=1)).rows
            keys = {row.lasting: (row.name, row.computation) for row in rows}
            return [
                key
                for lasting, key in keys.items()
                if key[1] == "input_gradient"
                and lasting == meter.gradient_error("E2M1FN", lambda other, key=key: other == key)
            ]

        assert measured(directions=4) == []
        assert len(measured(directions=8)) == 1
    squares = {("a", "input_gradient"): 1.0, ("b", "input_gradient"): 2.0, ("c", "forward"): 0.1}
    assert [key[0] for key in large_estimates(squares, 3.1, Effort(64), 1)] == ["b", "a"]
    assert [key[0] for key in large_estimates(squares, 3.1, Effort(64), 8)] == ["b"]


def test_first_grid_position_is_measured_once(trained):
    module, batch = trained
    own = SimulateFormat("E2M1FN", "E2M1FN", grid="moving")
    with metering(module, batch, {}, ("E2M1FN",), own=own) as meter:
        costs = [meter.cost_steps]
        first = meter.loss_change("E2M1FN", lambda key: True)
        costs.append(meter.cost_steps)
        mean = meter.lasting_change("E2M1FN", lambda key: True, first + 1.0, 5)
        costs.append(meter.cost_steps)
        assert costs[2] - costs[1] == pytest.approx(4 * (costs[1] - costs[0]))
        assert mean == pytest.approx(
            meter.lasting_change("E2M1FN", lambda key: True, first, 5) + 0.2
        )


def test_moving_grid_weight_errors_are_averaged(trained):
    module, batch = trained
    own = SimulateFormat("E2M1FN", "E2M1FN", grid="moving")
    with metering(module, batch, {}, ("E2M1FN",), own=own) as meter:
        report = meter.report(Effort(directions=12, pairs=3))
        (row,) = (
            each
            for each in report.rows_of()
            if (each.name, each.computation) == ("up.linear", "weight_gradient")
        )

        def error(places):
            return meter.gradient_error(
                "E2M1FN", lambda key: key == (row.name, row.computation), places
            )

        assert row.lasting == pytest.approx(error(3), rel=1e-3)
        assert row.lasting != pytest.approx(error(1), rel=1e-3)


def test_report_does_not_change_module(trained):
    module, batch = trained
    module(*batch).backward()
    before = copy.deepcopy(module.state_dict())
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    state = torch.get_rng_state()
    precision_report(module, *batch, directions=1, pairs=1)
    assert_same_bits(torch.get_rng_state(), state)
    for name, tensor in module.state_dict().items():
        assert_same_bits(tensor, before[name])
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert_same_bits(parameter.grad, gradient)
        parameter.grad = None


def test_reasons_match_format_of_module():
    layers = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16), nn.Linear(16, 7))
    fast = fp8_linears(
        lossless_unit_scale(layers, torch.randn(8, 32)),
        exclude="0",
        exempt=[("1.linear", "weight_gradient")],
    )
    report = precision_report(
        fast, torch.randn(8, 32), loss=lambda y: y.square().mean(), directions=1, pairs=1
    )
    reasons = {(row.name, row.computation): row.reason for row in report.rows}
    assert reasons["0.linear", "forward"] == "name excluded"
    assert reasons["1.linear", "forward"] is None
    assert reasons["1.linear", "weight_gradient"] == EXEMPT
    assert "not a multiple of 16" in reasons["2.linear", "input_gradient"]
    in_format = [row for row in report.rows if row.runs_in_format]
    assert [(row.name, row.computation) for row in in_format] == [
        ("1.linear", "forward"),
        ("1.linear", "input_gradient"),
    ]
    # Only these are rounded together, so the prediction is of them alone.
    assert report.predicted().loss_change == in_format[0].loss_change


def test_opaque_kernel_is_listed():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                distance = torch.cdist(x[0], x[1], p=2.0)
            return (self.head(self.lstm(x)[0]) * distance.mean()).square().mean()

    torch.manual_seed(0)
    report = precision_report(Recurrent(), torch.randn(4, 30, 8), directions=1, pairs=1)
    listed = [row for row in report.rows if not row.runs_in_format]
    assert listed and all(row.reason and row.loss_change is None for row in listed)


def test_smallest_exemption_reaches_requested_share(trained):
    module, batch = trained
    report = precision_report(module, *batch, formats=("E2M1FN",), directions=2, pairs=1)
    exempt = report.smallest_exemption(0.25)
    left = report.predicted(exempt=exempt)
    assert left.gradient_error**2 <= 0.25 * report.predicted().gradient_error ** 2
    rows = {(row.name, row.computation): row for row in report.rows}
    backward = [rows[each] for each in exempt if each[1] != "forward"]
    # Without the last one, too much would remain.
    before = left.gradient_error**2 + backward[-1].loss_change ** 2
    assert before > 0.25 * report.predicted().gradient_error ** 2
    assert report.smallest_exemption(1.0) == ()
    with pytest.raises(ValueError, match="not a share"):
        report.smallest_exemption(2.0)


def test_exempt_computations_are_not_rounded(trained):
    module, batch = trained
    exempt = [("*", "forward"), ("head", "input_gradient"), ("conv*", "weight_gradient")]
    report = precision_report(
        module, *batch, formats=("E2M1FN",), exempt=exempt, directions=1, pairs=1
    )
    assert report.together["E2M1FN"].loss_change == 0.0
    assert report.as_json()["exempt"][:3] == [list(each) for each in exempt]


def test_single_direction_is_rounded():
    layer, x = nn.Linear(16, 16), torch.randn(8, 16)

    def run(exempt):
        module = simulate_format(copy.deepcopy(layer), "E2M1FN", "E2M1FN", exempt=exempt)
        inputs = x.clone().requires_grad_()
        result = module(inputs)
        result.square().sum().backward()
        return result.detach(), inputs.grad, module.weight.grad

    plain = run([("*", each) for each in ("forward", "input_gradient", "weight_gradient")])
    expected = layer(x).detach()
    assert_same_bits(plain[0], expected)
    others = run([("*", "forward"), ("*", "weight_gradient")])
    assert_same_bits(others[0], plain[0])
    assert_same_bits(others[2], plain[2])
    assert not torch.equal(others[1], plain[1])


def test_convolution_gradients_are_exempt_separately():
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)

    def run(*exempt):
        module = simulate_format(copy.deepcopy(layer), "E2M1FN", "E2M1FN", exempt=exempt)
        inputs = x.clone().requires_grad_()
        module(inputs).sum().backward()
        return inputs.grad, module.weight.grad

    rounded = run()
    exact = run(("*", "input_gradient"), ("*", "weight_gradient"))
    mixed = run(("*", "weight_gradient"))
    assert_same_bits(mixed[0], rounded[0])
    assert_same_bits(mixed[1], exact[1])
    assert not torch.equal(rounded[1], exact[1])


def test_fp8_layers_exempt_single_computations():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16, bias=False), torch.randn(8, 32)

    def run(*exempt):
        module = fp8_linears(copy.deepcopy(layer), scaling="dynamic", exempt=exempt)
        for _ in range(2):  # the second call keeps FP8 for the backward pass
            module.zero_grad()
            inputs = x.clone().requires_grad_()
            result = module(inputs)
            result.square().sum().backward()
        return result.detach(), inputs.grad, module.weight.grad

    exact = layer(x).detach()
    result, input_gradient, weight_gradient = run(("*", "forward"))
    assert_same_bits(result, exact)
    assert (input_gradient - 2 * exact @ layer.weight.detach()).abs().max() > 1e-3
    result, _, weight_gradient = run(("*", "weight_gradient"))
    assert not torch.equal(result, exact)
    torch.testing.assert_close(weight_gradient, 2 * result.T @ x)


def test_sketch_preserves_distances():
    torch.manual_seed(0)
    one, error = torch.randn(300, 257), 0.01 * torch.randn(300, 257)
    found = (sketch([one + error]) - sketch([one])).norm()
    assert float(found / error.norm()) == pytest.approx(1.0, abs=0.06)


def test_module_keeps_a_method_named_log():
    class Likelihood(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def log(self, x: torch.Tensor) -> torch.Tensor:
            return x.log()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.log(self.layer(x).exp()).square().mean()

    report = precision_report(Likelihood(), torch.randn(4, 16), directions=1, pairs=1)
    assert report.loss > 0.0


@pytest.mark.filterwarnings("ignore")
def test_report_with_nan_has_no_numbers():
    layer, x = nn.Linear(16, 16), torch.full((4, 16), math.nan)
    report = precision_report(layer, x, loss=lambda y: y.square().mean(), directions=1, pairs=1)
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert {row["loss_change"] for row in found["matmuls"]} == {None}
    assert {row["added"] for row in found["matmuls"]} == {None}
    assert found["remainder"] is None and found["exempt"] == []


def test_names_with_glob_characters_can_be_exempt():
    layers = nn.ModuleDict({"[x]*": nn.Linear(16, 16)})

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers["[x]*"](x).square().mean()

    options = {"directions": 1, "pairs": 1}
    report = precision_report(Step(), torch.randn(4, 16), **options)
    chosen = report.smallest_exemption(0.0)
    assert len(chosen) == 2
    without = precision_report(Step(), torch.randn(4, 16), exempt=chosen, **options)
    assert without.together["E4M3FN"].gradient_error == 0.0


def test_bad_arguments_are_an_error():
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    with pytest.raises(ValueError, match="no scalar loss"):
        precision_report(layer, x)
    with pytest.raises(ValueError, match="not a list of formats"):
        precision_report(layer, x, formats="E4M3FN")
    with pytest.raises(ValueError, match="is not an exemption"):
        simulate_format(layer, "E4M3FN", "E4M3FN", exempt="blocks")
    with pytest.raises(ValueError, match="is not an exemption"):
        simulate_format(layer, "E4M3FN", "E4M3FN", exempt=[("*", "backward")])
