"""The rules on a GPU: backward runs on a worker thread, messages say cuda."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncbn_lab.rules import Torch12RuleError, torch12_rules

pytestmark = pytest.mark.gpu


class GivesFloat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.float()


def half(*shape):
    return torch.ones(*shape, device="cuda", dtype=torch.half)


def test_the_reported_gradient_on_a_worker_thread():
    x = half(3).requires_grad_()
    with torch12_rules() as rules, pytest.raises(Torch12RuleError) as caught:
        GivesFloat.apply(x * 1).sum().backward()
    assert str(caught.value) == (
        "Function GivesFloatBackward returned an invalid gradient at index 0 - "
        "expected type torch.cuda.HalfTensor but got torch.cuda.FloatTensor"
    )
    assert len(rules.violations) == 1
    with torch12_rules(on_violation="record") as rules:
        GivesFloat.apply(x * 1).sum().backward()
    assert [v.operation for v in rules.violations] == ["GivesFloatBackward"]


def test_the_reported_forward():
    with torch12_rules(), pytest.raises(Torch12RuleError) as caught:
        half(3) * torch.ones(3, device="cuda")
    assert str(caught.value) == (
        "expected device cuda:0 and dtype Float but got device cuda:0 and dtype Half"
    )


def test_the_engines_cast_of_a_built_in_node():
    x, scale = half(3).requires_grad_(), torch.ones((), device="cuda").requires_grad_()
    with torch12_rules(), pytest.raises(Torch12RuleError) as caught:
        (x * scale).sum().backward()
    assert str(caught.value) == (
        "Function MulBackward0 returned an invalid gradient at index 1 - "
        "expected type torch.cuda.FloatTensor but got torch.cuda.HalfTensor"
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_half_with_float32(training):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    model = model.cuda().half().train(training)
    model[1].float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with torch12_rules() as rules:
        y = model(torch.randn(2, 3, 8, 8, device="cuda").half())
        y.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert rules.violations == []
    assert y.dtype == torch.half


def test_autocast_and_the_gradient_scaler():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    with torch12_rules() as rules:
        for _ in range(2):
            with torch.autocast("cuda"):
                y = model(torch.randn(2, 3, 8, 8, device="cuda"))
                loss = F.cross_entropy(y, torch.tensor([0, 1], device="cuda"))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert rules.violations == []
