"""The layer recorder: what a layer really saw and gave, and nothing changed by looking."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from syncbn_lab import models, oracle
from syncbn_lab.layers import LayerRecorder


def normal(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class TwoReaders(nn.Module):
    """x goes into batch norm and past it: the sum's gradient reaches x twice."""

    def __init__(self, channels=3):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        x = self.conv(x)
        return x + self.bn(x)


def test_records_what_a_layer_with_a_second_reader_saw_and_gave():
    model, x = TwoReaders().double(), normal(4, 3, 5, 5, dtype=torch.float64)
    factors = normal(4, 3, 5, 5, seed=1, dtype=torch.float64)
    with torch.no_grad():
        received = model.conv(x)
    with LayerRecorder(model) as recorder:
        (model(x) * factors).sum().backward()
    (record,) = recorder.records

    # What the layer alone makes of it, which the reference knows: not what its input gets in all.
    expected = oracle.batch_norm(
        received,
        model.bn.weight,
        model.bn.bias,
        running_mean=torch.zeros(3),
        running_var=torch.ones(3),
        grad_output=factors,
    )
    assert record.name == "bn"
    assert (record.eps, record.momentum, record.training) == (1e-5, 0.1, True)
    assert torch.equal(record.x, received)
    assert torch.equal(record.dy, factors)
    torch.testing.assert_close(record.y, expected.y)
    torch.testing.assert_close(record.dx, expected.dx)
    torch.testing.assert_close(record.dweight, expected.dweight)
    torch.testing.assert_close(record.dbias, expected.dbias)
    assert record.running_mean_before.tolist() == [0, 0, 0]
    assert record.running_var_before.tolist() == [1, 1, 1]
    torch.testing.assert_close(record.running_mean, expected.running_mean)
    torch.testing.assert_close(record.running_var, expected.running_var)
    assert record.num_batches_tracked == 0


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,  # what a recorder that computes in float32 would betray
    ],
)
def test_recording_changes_no_bit(dtype):
    def train(recorded):
        model = models.build("encoder", seed=0).to(dtype)
        x = normal(4, 3, 16, 16, dtype=dtype).requires_grad_()
        for _ in range(2):  # the second step shows what the first left behind
            if recorded:
                with LayerRecorder(model):
                    output = model(x)
                    output.square().mean().backward()
            else:
                output = model(x)
                output.square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return [output.detach(), x.grad, *gradients, *model.buffers()]

    for plain, recorded in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, recorded)
        assert plain.dtype == recorded.dtype


def test_one_record_for_each_layer_in_order():
    model = models.build("encoder", seed=0)
    with LayerRecorder(model) as recorder:
        model(normal(2, 3, 16, 16)).sum().backward()
    names = [
        "bn1",
        "block1.bn1",
        "block1.bn2",
        "block2.bn1",
        "block2.bn2",
        "block2.shortcut.1",
    ]
    assert [record.name for record in recorder.records] == names
    for record in recorder.records:
        assert record.dy.shape == record.dx.shape == record.x.shape == record.y.shape


class Twice(nn.Module):
    """One layer, called on x and on what it made of x."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.bn(torch.sin(self.bn(x)))


def test_a_layer_called_twice():
    model, x = Twice().double(), normal(8, 2, dtype=torch.float64).requires_grad_()
    factors = normal(8, 2, seed=1, dtype=torch.float64)
    with LayerRecorder(model) as recorder:
        (model(x) * factors).sum().backward()
    first, second = recorder.records
    assert [record.name for record in recorder.records] == ["bn", "bn"]
    assert torch.equal(second.x, torch.sin(first.y))
    assert torch.equal(second.running_mean_before, first.running_mean)
    assert [record.num_batches_tracked for record in recorder.records] == [0, 1]
    for record in recorder.records:
        expected = oracle.batch_norm(record.x, grad_output=record.dy)
        torch.testing.assert_close(record.dx, expected.dx)
        # Only the sum over both calls exists, which is neither call's gradient.
        assert record.dweight is None
        assert record.dbias is None
    assert model.bn.weight.grad is not None


def test_every_step_keeps_its_own_gradients():
    layer = nn.Sequential(nn.BatchNorm1d(2)).double()
    with LayerRecorder(layer) as recorder:
        for step in range(3):  # gradients add up in .grad, and must not in the records
            layer(normal(8, 2, seed=step, dtype=torch.float64)).square().sum().backward()
    for record in recorder.records:
        expected = oracle.batch_norm(record.x, grad_output=record.dy)
        torch.testing.assert_close(record.dweight, expected.dweight)
        torch.testing.assert_close(record.dbias, expected.dbias)


def test_two_forwards_before_their_backwards():
    # As in pipelines, with the backward passes in the other order.
    layer = nn.Sequential(nn.BatchNorm1d(2)).double()
    with LayerRecorder(layer) as recorder:
        losses = [
            layer(normal(8, 2, seed=seed, dtype=torch.float64)).pow(3).sum() for seed in (0, 1)
        ]
        for loss in reversed(losses):
            loss.backward()
    for record in recorder.records:
        expected = oracle.batch_norm(record.x, grad_output=record.dy)
        torch.testing.assert_close(record.dweight, expected.dweight)


def test_eval_leaves_statistics_and_records_gradients():
    model = TwoReaders().eval()
    with LayerRecorder(model) as recorder:
        model(normal(2, 3, 4, 4)).sum().backward()
    (record,) = recorder.records
    assert not record.training
    assert torch.equal(record.running_mean, record.running_mean_before)
    assert torch.equal(record.running_var, record.running_var_before)
    # Before any step: mean 0, variance 1, weight 1; every dy is 1.
    torch.testing.assert_close(record.dx, torch.full_like(record.x, (1 + 1e-5) ** -0.5))
    assert record.dbias.tolist() == [2 * 4 * 4] * 3


def test_without_gradients():
    model = TwoReaders()
    with LayerRecorder(model) as recorder, torch.no_grad():
        model(normal(2, 3, 4, 4))
    (record,) = recorder.records
    assert record.y.shape == (2, 3, 4, 4)
    assert record.dy is record.dx is record.dweight is record.dbias is None


def test_frozen_parameters_and_an_input_without_gradient():
    layer = nn.Sequential(nn.BatchNorm1d(2))
    layer[0].weight.requires_grad_(False)
    with LayerRecorder(layer) as recorder:
        layer(normal(4, 2)).sum().backward()
    (record,) = recorder.records
    assert record.weight.tolist() == [1, 1]
    assert record.dweight is None  # frozen
    assert record.dx is None  # nobody asks for the input's gradient
    assert record.dbias.tolist() == [4, 4]
    assert record.dy.shape == (4, 2)


def test_no_affine_and_no_statistics():
    layer = nn.Sequential(nn.BatchNorm1d(2, affine=False, track_running_stats=False))
    with LayerRecorder(layer) as recorder:
        layer(normal(4, 2).requires_grad_()).sum().backward()
    (record,) = recorder.records
    assert record.weight is record.bias is record.running_mean is record.running_var is None
    assert record.dx is not None


def test_an_input_given_by_name():
    layer = nn.BatchNorm1d(2)
    with LayerRecorder(layer) as recorder:
        layer(input=normal(4, 2).requires_grad_()).square().sum().backward()
    (record,) = recorder.records
    assert record.x.shape == record.dx.shape == (4, 2)


PATCHED = ("cpu", "clone", "detach", "to", "float")
"""apex's O1 casts in methods such as ``cpu``; the others stand for whatever it may patch."""


class PassesOn(TorchFunctionMode):
    """Does nothing; but under it torch looks methods up by name, and so finds patched ones."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, PassesOn])  # without and with rules
@pytest.mark.parametrize("method", PATCHED)
def test_patched_tensor_methods_change_no_record(monkeypatch, method, mode):
    original = getattr(torch.Tensor, method)

    def casting(self, *args, **kwargs):
        return original(self, *args, **kwargs).to(torch.float32, copy=True) + 1

    def casting_to(self, *args, **kwargs):
        return original(self, torch.float32) + 1

    layer = nn.Sequential(nn.BatchNorm1d(2)).to(torch.bfloat16)
    x = normal(4, 2, dtype=torch.bfloat16).requires_grad_()
    with monkeypatch.context() as patch, mode(), LayerRecorder(layer) as recorder:
        patch.setattr(torch.Tensor, method, casting_to if method == "to" else casting)
        layer(x).sum().backward()
    (record,) = recorder.records
    for name in ("x", "y", "weight", "bias", "running_mean", "running_var", "dx", "dweight"):
        assert getattr(record, name).dtype == torch.bfloat16, name
    assert torch.equal(record.x, x)


def test_records_are_copies():
    layer, x = nn.Sequential(nn.BatchNorm1d(2)), normal(4, 2)
    before = x.clone()
    with LayerRecorder(layer) as recorder:
        output = layer(x)
        y = output.detach().clone()
        x.zero_()
        output.detach().zero_()
        layer[0].running_mean.zero_()
    (record,) = recorder.records
    assert torch.equal(record.x, before)
    assert torch.equal(record.y, y)
    assert record.running_mean.abs().min() > 0


def test_hooks_are_gone_afterwards():
    model = models.build("encoder", seed=0)
    untouched = copy.deepcopy(model)
    with LayerRecorder(model) as recorder:
        model(normal(2, 3, 16, 16)).sum().backward()
    seen = len(recorder.records)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter._backward_hooks
    model(normal(2, 3, 16, 16)).sum().backward()
    assert len(recorder.records) == seen == 6
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in untouched.named_modules()
    ]


def test_hooks_are_gone_after_an_error():
    model = TwoReaders()
    with pytest.raises(RuntimeError), LayerRecorder(model):
        model(normal(2, 5, 4, 4))  # five channels where three belong
    assert not any(module._forward_hooks for module in model.modules())


class Failing(nn.Module):
    def forward(self, x):
        raise RuntimeError("no")


class Catching(nn.Module):
    """Goes on without its inner module when that raises."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Failing())

    def forward(self, x):
        try:
            return self.inner(x)
        except RuntimeError:
            return x


def test_failing_module_is_the_innermost():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.ReLU(), Failing()), nn.ReLU())
    recorder = LayerRecorder(model)
    with pytest.raises(RuntimeError), recorder:
        model(normal(4, 2))
    assert recorder.running == ["1", "1.1"]
    assert recorder.failing_module == "1.1"


def test_no_module_fails_when_all_return():
    model = models.build("encoder", seed=0)
    with LayerRecorder(model) as recorder:
        model(normal(2, 3, 16, 16))
    assert recorder.failing_module is None


def test_an_error_that_somebody_caught_is_no_failure():
    model = nn.Sequential(Catching(), nn.BatchNorm1d(2))
    with LayerRecorder(model) as recorder:
        model(normal(4, 2))
    assert recorder.failing_module is None
    assert [record.name for record in recorder.records] == ["1"]


def test_record_of_is_the_latest():
    layer = nn.Sequential(nn.BatchNorm1d(2))
    with LayerRecorder(layer) as recorder:
        layer(normal(4, 2))
        layer(normal(4, 2, seed=1))
    assert recorder.record_of(layer[0]) is recorder.records[-1]
    assert recorder.record_of(layer) is None
