"""The recipes that torch itself carries out, at work.

Those of kind "apex" patch torch for a whole process, so they are tested where they run: in the
child of an experiment.
"""

import pytest
import torch

from syncbn_lab.policies import POLICIES
from syncbn_lab.recipes import apply


def mean_square(output):
    """A loss that autocast takes in float32."""
    return torch.nn.functional.mse_loss(output, torch.zeros_like(output))


def _at_work(name):
    """A small model under a recipe, and the dtypes that its layers give."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    return apply(POLICIES[name], None, model, optimizer, "cpu"), seen


@pytest.mark.parametrize(
    ("name", "dtype"), [("autocast-fp16", torch.float16), ("autocast-bf16", torch.bfloat16)]
)
def test_autocast_lowers_the_operations_and_leaves_the_model(name, dtype):
    recipe, seen = _at_work(name)
    before = recipe.model[0].weight.detach().clone()
    inside = []

    def loss_function(output):
        inside.append(torch.is_autocast_enabled("cpu"))
        return mean_square(output)

    output, loss = recipe.forward(torch.randn(4, 3, 4, 4), loss_function)
    assert inside == [True]  # the loss belongs inside, as torch's documentation has it
    assert loss.dtype == torch.float32
    assert seen[0] == dtype  # the convolution
    assert seen[3] == dtype  # the linear layer
    assert output.dtype == dtype
    assert {p.dtype for p in recipe.model.parameters()} == {torch.float32}
    assert recipe.model[1].running_mean.dtype == torch.float32
    # Around forward only: outside it a convolution is float32 again.
    assert recipe.model[0](torch.randn(1, 3, 4, 4)).dtype == torch.float32
    recipe.backward(loss)
    recipe.step()
    assert not torch.equal(recipe.model[0].weight, before)


def _gradient(name, factor):
    """The first gradient under a recipe, of a loss made small by a factor."""
    recipe, _ = _at_work(name)
    torch.manual_seed(1)
    _, loss = recipe.forward(torch.randn(4, 3, 4, 4), mean_square)
    recipe.backward(loss * factor)
    return recipe.model[3].bias.grad


def test_only_float16_gradients_are_scaled():
    # 2^16 is the scale that torch.amp.GradScaler starts with; bfloat16 needs none.
    plain = _gradient("bf16", 1.0)
    assert (_gradient("autocast-fp16", 2.0**-16) / plain).allclose(torch.ones(2), rtol=0.1)
    assert (_gradient("autocast-bf16", 1.0) / plain.float()).allclose(torch.ones(2), rtol=0.1)


def test_the_scaled_gradient_is_unscaled_before_the_step():
    recipe, _ = _at_work("autocast-fp16")
    before = recipe.model[3].bias.detach().clone()
    torch.manual_seed(1)
    recipe.backward(recipe.forward(torch.randn(4, 3, 4, 4), mean_square)[1])
    scaled = recipe.model[3].bias.grad.clone()
    recipe.step()
    moved = before - recipe.model[3].bias.detach()
    assert torch.allclose(moved, 0.1 * scaled / 2.0**16, rtol=1e-3)


def test_a_step_with_an_overflown_gradient_is_skipped():
    recipe, _ = _at_work("autocast-fp16")
    before = recipe.model[3].bias.detach().clone()
    recipe.backward(recipe.forward(torch.randn(4, 3, 4, 4), mean_square)[1] * float("inf"))
    recipe.step()
    assert torch.equal(recipe.model[3].bias, before)


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("bf16", torch.bfloat16)])
def test_a_cast_lowers_the_whole_model_and_its_buffers(name, dtype):
    recipe, seen = _at_work(name)
    floating = [*recipe.model.parameters(), *recipe.model.buffers()]
    assert {t.dtype for t in floating if t.is_floating_point()} == {dtype}
    assert recipe.model[1].num_batches_tracked.dtype == torch.int64
    before = recipe.model[0].weight.detach().clone()
    output, loss = recipe.forward(torch.randn(4, 3, 4, 4), mean_square)
    assert set(seen) == {dtype}
    assert output.dtype == dtype  # what the model gave, untouched
    assert loss.dtype == torch.float32
    recipe.backward(loss)
    assert recipe.model[0].weight.grad.dtype == dtype
    recipe.step()
    assert not torch.equal(recipe.model[0].weight, before)
