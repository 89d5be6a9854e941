"""The input that an experiment trains on: crops of a photograph, or noise."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from syncbn_lab.models import CLASSES, SHAPES


def load(name: str, model: str, seed: int, rank: int = 0) -> tuple[Tensor, Tensor, str]:
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
