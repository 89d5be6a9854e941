"""The models that an experiment trains."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CLASSES = 4
"""The label of a crop is the quadrant of the photograph that its centre lies in."""


class Shape(NamedTuple):
    """The input that a model takes: (batch, 3, size, size)."""

    batch: int
    size: int


SHAPES = {"encoder": Shape(4, 32), "toy": Shape(4, 16), "layer": Shape(8, 128)}


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and a skip connection, as in a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H/stride, W/stride)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + self.shortcut(x))


class ResidualEncoder(nn.Module):
    """Convolution, batch norm, ReLU, two residual blocks (the second with stride 2), a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.block1 = ResidualBlock(8, 8, 1)
        self.block2 = ResidualBlock(8, 16, 2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, CLASSES)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.block2(self.block1(y))
        return self.head(y.mean((2, 3)))


def build(name: str, seed: int) -> nn.Module:
    """Build a model with seeded parameters, float32, on the CPU."""
    torch.manual_seed(seed)
    if name == "encoder":
        return ResidualEncoder()
    if name == "toy":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )
    # In a container, so that a converter finds the layer as a child and can replace it.
    return nn.Sequential(nn.BatchNorm2d(3))


def loss_function(name: str, labels: Tensor) -> Any:
    """The loss on a model's output: cross entropy for the encoder, mean square elsewhere."""
    if name == "encoder":
        return lambda output: nn.functional.cross_entropy(output, labels)
    # In float32: a float16 mean times the usual loss scale of 65536 is infinite.
    return lambda output: output.float().pow(2).mean()
