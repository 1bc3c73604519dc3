"""``compare``: where two runs diverge, and no finding for equal runs."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from lightning_unitscale import ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.cli import main
from lightning_unitscale.scales.layout import MIN_EXPONENT, NUM_EXPONENTS
from lightning_unitscale.tensorboard.divergence import compare_runs, find_divergence
from lightning_unitscale.tensorboard.history import read_run
from lightning_unitscale.tensorboard.run_pair import RunPair

FAULT_STEP = 3


class Layer(nn.Module):
    """A residual layer of two linear ones."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.drops_residual = False

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(x))))
        return y if self.drops_residual else x + y


class Net(nn.Module):
    """Three residual layers and a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(32, 8)
        self.order = 0, 1, 2

    def forward(self, x, classes):
        for k in self.order:
            x = self.layers[k](x)
        return F.cross_entropy(self.head(x), classes)


class Images(nn.Module):
    """Convolutions whose biases have no effect, with ReLUs that the smallest change turns over."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        channels = (1, 16, 16, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 3), nn.BatchNorm1d(b), nn.ReLU())
            for a, b in pairwise(channels)
        )
        self.head = nn.Linear(32, 8)

    def forward(self, x, classes):
        x = x[:, None]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(-1)), classes)


def train(
    folder,
    *,
    fault=None,
    fault_step=FAULT_STEP,
    apart=0.0,
    simulate=None,
    every=1,
    steps=6,
    autocast=False,
    make=Net,
    exclude=None,
    rate=1e-3,
    left_out=(),
    batches=2,
    labels=0,
    zeroes=True,
):
    """Train a net with a fault from a step on, and return the folder of its event file."""
    net, data = make(), torch.Generator().manual_seed(1)
    for parameter in net.parameters() if apart else ():
        parameter.data += apart * torch.randn(parameter.shape, generator=data)
    data.manual_seed(batches)
    trained = [each for name, each in net.named_parameters() if not name.startswith(left_out)]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    unit_scale = UnitScaleCallback(simulate=simulate, recalibrate=None) if simulate else None
    monitor = ScaleMonitor(every, exclude=exclude, on_violation=None, tensorboard_tabs="scales")
    callbacks = [each for each in (unit_scale, monitor) if each is not None]
    with attach(net, optimizer, callbacks=callbacks, log_dir=folder):
        for step in range(steps):
            if fault is not None and step == fault_step:
                fault(net, unit_scale)
            x = torch.randn(64, 32, generator=data)
            classes = torch.randint(8, (64,), generator=data).roll(labels)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = net(x, classes)
            loss.backward()
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"))


def scale_weight(net, _):
    net.layers[1].up.weight.data *= 1.3


def scale_result(net, _):
    net.layers[1].down.register_forward_hook(lambda *call: call[2] * 0.7)


def scale_gradient(net, _):
    def hook(*call):
        call[2].register_hook(lambda gradient: gradient * 2)

    net.layers[1].up.register_forward_hook(hook)


def drop_residual(net, _):
    net.layers[1].drops_residual = True


def clip(net, _):
    net.layers[1].up.register_forward_hook(lambda *call: call[2].clamp(-0.3, 0.3))


def stale_unit(net, unit_scale):
    units = unit_scale._matmuls._units
    pair = units.gauge.pair("layers.1.up.linear:weight")
    moved = type(pair)(pair.log2_sigma + 12, pair.log2_gamma)
    units.set_gauge(units.gauge.updated({"layers.1.up.linear:weight": moved}))


FAULTS = [
    (scale_weight, "layers.1.up", "layers.1.up.weight", "forward"),
    (scale_result, "layers.1.down", None, "forward"),
    (scale_gradient, "layers.1.up", "layers.1.up.linear", "backward"),
    (drop_residual, "layers.1", "layers.1.add", "forward"),
    (clip, "layers.1.up", None, "forward"),
]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("simulate", [None, "fp8"])
@pytest.mark.parametrize(("fault", "module", "tensor", "direction"), FAULTS)
def test_fault_is_found_with_step_and_module(
    plain, tmp_path, fault, module, tensor, direction, simulate
):
    run = train(tmp_path, fault=fault, apart=1e-6, simulate=simulate)
    for found in (compare_runs(plain, run), compare_runs(run, plain)):
        assert (found.step, found.module, found.direction) == (FAULT_STEP, module, direction)
        assert found.tensor == (tensor or found.tensor)
        assert found.inherited == ()
        assert found.diverged
        assert f"step {FAULT_STEP}, {direction}" in found.text


def freeze(net, _):
    net.layers[1].up.weight.requires_grad_(False)


def forget_bias(net, _):
    net.layers[1].up.bias = None


@pytest.mark.parametrize("simulate", [None, "fp8"])
@pytest.mark.parametrize(
    ("fault", "tensor", "direction"),
    [(freeze, "layers.1.up.weight", "backward"), (forget_bias, "layers.1.up.bias", "forward")],
)
@pytest.mark.parametrize("step", [0, FAULT_STEP])
def test_nonfinite_or_missing_tensor_in_one_run_is_found(
    plain, tmp_path, fault, tensor, direction, simulate, step
):
    run = train(tmp_path, fault=fault, simulate=simulate, fault_step=step)
    for found in (compare_runs(plain, run), compare_runs(run, plain)):
        assert (found.step, found.tensor, found.direction) == (step, tensor, direction)
        assert found.module == "layers.1.up" and None in found.log2_rms
        assert "none" in found.text and "only one run has it" in found.text


def negate(net, _):
    net.layers[1].up.weight.data.neg_()


def swap(net, _):
    net.order = 0, 2, 1


def restart(net, _):
    torch.manual_seed(5)
    for each in net.modules():
        if isinstance(each, nn.Linear):
            each.reset_parameters()


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("simulate", [None, "fp8"])
@pytest.mark.parametrize(
    ("options", "step", "cause"),
    [
        ({"rate": 1e-2}, 1, "optimizer"),
        ({"zeroes": False, "steps": 9}, None, "optimizer"),
        ({"fault": restart, "fault_step": 0}, 0, "weights"),
    ],
)
def test_cause_outside_modules_has_no_module(tmp_path, simulate, options, step, cause):
    plain = train(tmp_path / "plain", steps=options.get("steps", 6))
    found = compare_runs(plain, train(tmp_path / "b", simulate=simulate, apart=1e-6, **options))
    assert (found.cause, found.module) == (cause, None), found.text
    assert found.step == (found.step if step is None else step)
    assert f"(cause: {cause})" in found.text


def test_other_batches_are_reported_as_cause(plain, tmp_path):
    found = compare_runs(plain, train(tmp_path, batches=3))
    assert (found.step, found.cause, found.module) == (0, "batch", None)


def test_other_labels_are_reported_as_cause(plain, tmp_path):
    found = compare_runs(plain, train(tmp_path, labels=1))
    assert (found.step, found.cause, found.module) == (0, "loss", None)
    assert "compare labels and loss" in found.text


@pytest.mark.parametrize("simulate", [None, "fp8"])
def test_module_missing_in_optimizer_is_found(plain, tmp_path, simulate):
    run = train(tmp_path, left_out=("layers.1.up.",), simulate=simulate)
    found = compare_runs(plain, run)
    assert (found.step, found.cause, found.module) == (1, "module", "layers.1.up")


@pytest.mark.parametrize("simulate", [None, "fp8"])
def test_reordered_layers_are_found(plain, tmp_path, simulate):
    found = compare_runs(plain, train(tmp_path, fault=swap, simulate=simulate))
    assert (found.step, found.cause) == (FAULT_STEP, "module")
    assert found.module.startswith("layers")


def test_small_difference_is_traced_to_its_origin(plain, tmp_path):
    """The result of a negated weight has nearly the same statistics."""
    found = compare_runs(plain, train(tmp_path, fault=negate))
    assert (found.step, found.module) == (FAULT_STEP, "layers.1.up")


def test_two_runs_in_one_folder_are_an_error(plain, tmp_path):
    train(tmp_path, steps=2)
    train(tmp_path, steps=3)
    with pytest.raises(ValueError, match="several runs were logged into this folder") as raised:
        compare_runs(plain, tmp_path)
    assert "run_b=" in str(raised.value) and "folder of its own" in str(raised.value)


def test_excluded_tensors_are_not_a_difference(plain, tmp_path):
    for number, pattern in enumerate(("*.bias", "layers.1.up.*")):
        run = train(tmp_path / str(number), apart=1e-6, exclude=pattern)
        assert not compare_runs(plain, run).diverged


def test_first_layer_may_be_frozen(plain, tmp_path):
    """Its result has no gradient in one run, and is not shown."""

    def freeze_embedding(net, _):
        net.emb.requires_grad_(False)

    class Words(Net):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(8, 32)

        def forward(self, x, classes):
            return super().forward(x + self.emb(classes), classes)

    both = [
        train(tmp_path / name, make=Words, fault=fault, fault_step=0)
        for name, fault in (("trained", None), ("frozen", freeze_embedding))
    ]
    found = compare_runs(*both)
    assert (found.step, found.tensor, found.direction) == (0, "emb.weight", "backward")


def test_stale_unit_is_found(plain, tmp_path):
    found = compare_runs(plain, train(tmp_path, fault=stale_unit, simulate="fp8"))
    assert (found.step, found.module) == (FAULT_STEP, "layers.1.up")


@pytest.mark.parametrize(
    "options",
    [{"apart": 1e-6}, {"simulate": "fp8"}, {"apart": 1e-6, "simulate": "fp8"}, {"autocast": True}],
)
def test_equivalent_runs_do_not_diverge(plain, tmp_path, options):
    found = compare_runs(plain, train(tmp_path, **options))
    assert not found.diverged, found.text


@pytest.mark.slow
def test_rounded_run_does_not_diverge(tmp_path):
    plain = train(tmp_path / "plain", steps=80, rate=1e-2)
    found = compare_runs(plain, train(tmp_path / "fp8", steps=80, rate=1e-2, simulate="fp8"))
    assert not found.diverged, found.text


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return train(tmp_path_factory.mktemp("images"), make=Images)


@pytest.mark.parametrize("options", [{"apart": 1e-6}, {"autocast": True}])
def test_gradients_of_kinks_and_dead_biases_are_chance(images, tmp_path, options):
    found = compare_runs(images, train(tmp_path, make=Images, **options))
    assert not found.diverged, found.text


def test_fault_with_relu_noise_is_found(images, tmp_path):
    def fault(net, _):
        net.layers[1][0].register_forward_hook(lambda *call: scaled(call[2]))

    def scaled(result):
        result.register_hook(lambda gradient: gradient * 2)

    found = compare_runs(images, train(tmp_path, make=Images, fault=fault, autocast=True))
    assert (found.step, found.module, found.direction) == (FAULT_STEP, "layers.1.0", "backward")


def test_only_common_sampled_steps_are_compared(plain, tmp_path):
    """Only common steps are compared: the fault is found at the first one after it."""
    run = train(tmp_path, fault=scale_result, apart=1e-6, every=4)
    found = compare_runs(plain, run)
    assert (found.step, found.module) == (4, "layers.1.down")


def test_spacing_of_formats_is_recorded(plain, tmp_path):
    fp8 = read_run(train(tmp_path / "fp8", simulate="fp8", steps=2))
    half = read_run(train(tmp_path / "half", autocast=True, steps=2))
    plain = read_run(plain)
    assert RunPair(plain, plain).history("forward").spacing == np.finfo(np.float32).eps
    assert RunPair(plain, half).history("forward").spacing == 2.0**-7
    assert RunPair(plain, fp8).history("forward").spacing == 2.0**-3
    assert RunPair(fp8, plain).history("backward").spacing == 2.0**-2


def test_nan_in_one_run_is_found(plain, tmp_path):
    def poison(net, _):
        net.layers[1].down.bias.data[0] = torch.nan

    found = compare_runs(plain, train(tmp_path, fault=poison))
    assert (found.step, found.tensor) == (FAULT_STEP, "layers.1.down.bias")
    json.dumps(found.to_json(), allow_nan=False)


def test_compare_command_prints_json_and_exit_status(plain, tmp_path, capsys):
    run = train(tmp_path, fault=scale_gradient)
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(plain), str(run), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert list(printed) == [
        "diverged", "step", "module", "tensor", "direction", "inherited", "log2_rms", "chance",
        "cause",
    ]  # fmt: skip
    a, b = printed.pop("log2_rms")
    assert b - a == pytest.approx(1.0, abs=1e-3) and 0 < printed.pop("chance") < 0.1
    assert printed == {
        "diverged": True, "step": FAULT_STEP, "module": "layers.1.up",
        "tensor": "layers.1.up.linear", "direction": "backward", "inherited": [],
        "cause": "module",
    }  # fmt: skip
    main(["compare", str(plain), str(plain), "--json"])  # exit status 0
    assert json.loads(capsys.readouterr().out)["diverged"] is False
    main(["compare", str(plain), str(plain)])
    assert "no more than chance (6 steps, " in capsys.readouterr().out


def test_errors_have_exit_status_2(plain, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(plain), str(tmp_path / "none")])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "compare: RUN_B=" in error and "none': no such folder. Expected" in error
    other = tmp_path / "other"
    layer = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with attach(layer, optimizer, callbacks=[ScaleMonitor()], log_dir=other):
        layer(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
    with pytest.raises(ValueError, match="run_a, run_b: they share no tensor"):
        find_divergence(read_run(plain), read_run(other))


def test_monitor_compares_current_run(plain, tmp_path):
    monitor = ScaleMonitor(every_n_steps=1)
    with pytest.raises(RuntimeError, match="this run has written nothing to TensorBoard"):
        monitor.compare(plain)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    logger = TensorBoardLogger(tmp_path)
    data = torch.Generator().manual_seed(2)
    with attach(net, optimizer, callbacks=[monitor], loggers=logger):
        net.layers[2].up.bias.data += 1.0
        x = torch.randn(64, 32, generator=data)
        net(x, torch.randint(8, (64,), generator=data)).backward()
        optimizer.step()
    with pytest.raises(FileNotFoundError, match=r"^path='nowhere': no such folder"):
        monitor.compare("nowhere")
    found = monitor.compare(plain)
    assert (found.step, found.tensor) == (0, "layers.2.up.bias")


def _distances_one_by_one(pair, direction, steps, log2_rms, log2_spacing):
    """The shape distance by its definition, a step and a tensor at a time."""
    distance = np.full((len(steps), len(pair.pairs)), np.nan)
    least = min(max(log2_spacing - 3, -12.0), -3)
    lowest = np.nan_to_num(np.fmax(*log2_rms) + least, nan=0.0, neginf=MIN_EXPONENT)
    first = np.clip(lowest.round() - MIN_EXPONENT, 1, NUM_EXPONENTS - 2).astype(int)
    for k, each in enumerate(pair.pairs):
        found = [
            run.exponents(direction, name) for run, name in zip(pair.runs, each.names, strict=True)
        ]
        for row, step in enumerate(steps.tolist()):
            counts = [own[step] for own in found if step in own]
            if np.isnan(log2_rms[:, row, k]).any() or len(counts) < 2:
                continue
            if min(own.num_sampled for own in counts) < 16:
                continue
            a, b = (
                np.cumsum(own.counts[: first[row, k] - 1 : -1]) / own.num_sampled for own in counts
            )
            farther = max(float((a[:-1] - b[1:]).max()), float((b[:-1] - a[1:]).max()))
            distance[row, k] = max(farther, 0.0)
    return distance


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_shape_distances_match_definition(plain, tmp_path, direction):
    other = read_run(train(tmp_path, fault=clip, simulate="fp8"))
    pair = RunPair(read_run(plain), other)
    history = pair.history(direction)
    expected = _distances_one_by_one(
        pair, direction, history.steps, history.log2_rms, np.log2(history.spacing)
    )
    np.testing.assert_array_equal(history.shape_distance, expected)
    assert np.nanmax(expected) > 0.05
