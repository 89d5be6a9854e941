"""The models and the input that an experiment trains on."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 4
"""The label of a crop is the quadrant of the photograph that its centre lies in."""


@dataclasses.dataclass(frozen=True)
class Shape:
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


def load_input(name: str, model: str, seed: int, rank: int = 0) -> tuple[Tensor, Tensor, str]:
    """One rank's input (N, 3, H, W) in float32, its labels (N,), and a sentence on its origin.

    Without matplotlib or Pillow the photograph is not to be had; seeded noise takes its place
    and the sentence says so.
    """
    shape = SHAPES[model]
    generator = torch.Generator().manual_seed(seed + 7919 * rank)
    path = sample_photo() if name == "photo" else None
    if path is None:
        x = 0.5 + 0.25 * torch.randn(shape.batch, 3, shape.size, shape.size, generator=generator)
        labels = torch.randint(CLASSES, (shape.batch,), generator=generator)
        said = "seeded normal noise, mean 0.5, standard deviation 0.25"
        if name == "photo":
            said += ": the photograph ships with matplotlib and needs Pillow, not both found here"
        return x, labels, said
    photo = read_photo(path)
    top = torch.randint(photo.height - shape.size, (shape.batch,), generator=generator)
    left = torch.randint(photo.width - shape.size, (shape.batch,), generator=generator)
    crops = [
        _crop(photo, t, s, shape.size) for t, s in zip(top.tolist(), left.tolist(), strict=True)
    ]
    middle = shape.size // 2
    lower, right = top + middle > photo.height // 2, left + middle > photo.width // 2
    labels = 2 * lower.long() + right.long()
    said = (
        f"{shape.batch} crops of {shape.size}x{shape.size} pixels from {path.name}, which ships "
        "with matplotlib, each colour normalized to mean 0 and deviation 1"
    )
    return torch.stack(crops), labels, said


def sample_photo() -> Path | None:
    """The photograph that ships with matplotlib; None when it can't be had. Imports neither."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or not spec.origin or importlib.util.find_spec("PIL") is None:
        return None
    path = Path(spec.origin).parent / "mpl-data" / "sample_data" / "grace_hopper.jpg"
    return path if path.is_file() else None


@dataclasses.dataclass(frozen=True)
class Photo:
    """The decoded photograph: plain bytes, so that a process may hold it without any tensor."""

    height: int
    width: int
    pixels: bytearray
    """Height × width × RGB, a byte each."""
    mean: list[float]
    """Of each colour."""
    deviation: list[float]


@functools.cache
def read_photo(path: Path) -> Photo:
    """Decode the photograph, once a process; the warm parent does it for all its children."""
    from PIL import Image, ImageStat

    with Image.open(path) as image:
        rgb = image.convert("RGB")
        colours = ImageStat.Stat(rgb)
        pixels = bytearray(rgb.tobytes())
        return Photo(rgb.height, rgb.width, pixels, colours.mean, colours.stddev)


def _crop(photo: Photo, top: int, left: int, size: int) -> Tensor:
    """A crop as (3, size, size) in float32, each colour of the photograph normalized.

    Mean 0 and deviation 1 over the photograph: the usual preparation of images. It matters
    here, because batch norm that computes its variance as E[x²] − E[x]² loses digits with the
    square of mean over deviation: raw pixels would put the input's fault on every layer.
    """
    raw = torch.frombuffer(photo.pixels, dtype=torch.uint8).reshape(photo.height, photo.width, 3)
    crop = raw[top : top + size, left : left + size].permute(2, 0, 1).to(torch.float32)
    mean, deviation = torch.tensor(photo.mean), torch.tensor(photo.deviation)
    return (crop - mean[:, None, None]) / deviation[:, None, None]
