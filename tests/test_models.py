"""Models: seeded, and giving what their loss takes."""

import pytest
import torch

from syncbn_lab import inputs, models


@pytest.mark.parametrize("name", models.SHAPES)
def test_parameters_follow_the_seed(name):
    one, same, other = (list(models.build(name, seed).parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert all(parameter.dtype == torch.float32 for parameter in one)
    if name != "layer":  # batch norm begins with ones and zeros whatever the seed
        assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", models.SHAPES)
def test_every_model_trains_a_step(name):
    model = models.build(name, seed=0)
    x, labels, _ = inputs.load("noise", name, seed=0)
    output = model(x)
    loss = models.loss_function(name, labels)(output)
    loss.backward()
    assert loss.ndim == 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    if name == "encoder":
        assert output.shape == (len(x), models.CLASSES)
        assert torch.equal(loss, torch.nn.functional.cross_entropy(output, labels))
    else:
        assert torch.equal(loss, output.square().mean())


def test_a_block_with_stride_halves_the_picture_and_keeps_a_skip():
    block = models.ResidualBlock(8, 16, 2)
    assert block(torch.zeros(2, 8, 10, 10)).shape == (2, 16, 5, 5)
    # With its last batch norm silenced, what is left is the shortcut alone.
    block = models.ResidualBlock(8, 8, 1)
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 8, 4, 4)
    assert torch.equal(block(x), x)
