"""Models and inputs: seeded, shaped as promised, and honest about where the input comes from."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import syncbn_lab
from syncbn_lab import inputs, models

NEEDS_PHOTO = pytest.mark.skipif(
    inputs.sample_photo() is None, reason="the photograph ships with matplotlib and needs Pillow"
)
SOURCES = [pytest.param("photo", marks=NEEDS_PHOTO), "noise"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("model", models.SHAPES)
def test_input_has_the_shape_of_its_model(model, source):
    x, labels, said = inputs.load(source, model, seed=0)
    shape = models.SHAPES[model]
    assert x.shape == (shape.batch, 3, shape.size, shape.size)
    assert x.dtype == torch.float32
    assert x.isfinite().all()
    assert labels.shape == (shape.batch,)
    assert labels.dtype == torch.int64
    assert said


@pytest.mark.parametrize("source", SOURCES)
def test_input_follows_seed_and_rank(source):
    def load(seed, rank):
        return inputs.load(source, "encoder", seed, rank)[0]

    assert torch.equal(load(0, 0), load(0, 0))
    assert not torch.equal(load(0, 0), load(1, 0))
    assert not torch.equal(load(0, 0), load(0, 1))
    # A rank's share is no other seed's: ranks 0 and 1 of neighbouring seeds all differ.
    shares = [load(seed, rank) for seed in (0, 1) for rank in (0, 1)]
    assert len({tuple(share.flatten()[:50].tolist()) for share in shares}) == 4


def test_input_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    inputs.load("noise", "toy", seed=0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("source", SOURCES)
def test_labels_are_classes(source):
    seen = torch.cat([inputs.load(source, "encoder", seed)[1] for seed in range(20)])
    # Eighty draws of four quadrants: every one is met.
    assert sorted(set(seen.tolist())) == list(range(models.CLASSES))


def whole_photograph():
    """The photograph as the crops see it, (3, height, width), by its definition."""
    photo = inputs.read_photo(inputs.sample_photo())
    pixels = torch.tensor(list(photo.pixels), dtype=torch.float32)
    pixels = pixels.reshape(photo.height, photo.width, 3).permute(2, 0, 1)
    mean, deviation = torch.tensor(photo.mean), torch.tensor(photo.deviation)
    return (pixels - mean[:, None, None]) / deviation[:, None, None]


@NEEDS_PHOTO
def test_the_photograph_is_normalized_colour_by_colour():
    pixels = whole_photograph()
    assert pixels.shape == (3, 600, 512)  # height and width of grace_hopper.jpg
    # Float32 sums of 307200 values of order one.
    assert pixels.mean((1, 2)).abs().max() < 1e-5
    assert (pixels.std((1, 2)) - 1).abs().max() < 1e-5


@NEEDS_PHOTO
def test_crops_are_cut_from_the_photograph_and_labelled_by_quadrant():
    pixels = whole_photograph()
    x, labels, said = inputs.load("photo", "encoder", seed=3)
    assert "crops of 32x32 pixels from grace_hopper.jpg" in said
    height, width = pixels.shape[1:]
    windows = pixels[0].unfold(0, 32, 1).unfold(1, 32, 1)  # a view of every crop
    for crop, label in zip(x, labels.tolist(), strict=True):
        # Candidates by their first pixel, then by the whole crop.
        rows, columns = torch.where(pixels[0, : height - 31, : width - 31] == crop[0, 0, 0])
        places = [
            (row, column)
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
            if torch.equal(windows[row, column], crop[0])
        ]
        quadrants = {
            2 * (row + 16 > height // 2) + (column + 16 > width // 2) for row, column in places
        }
        assert label in quadrants


# ---------------------------------------------------------------- without the photograph


def test_without_matplotlib_noise_stands_in(tmp_path):
    # matplotlib is really missing: `-S` drops site-packages, links bring back all but it.
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        # A .pth file is read in site-packages alone, so an editable install stays out too.
        if not entry.name.lower().startswith(("matplotlib", "mpl_toolkits", "pylab")):
            (tmp_path / entry.name).symlink_to(entry)
    code = (
        "import importlib.util, torch\n"
        "assert importlib.util.find_spec('matplotlib') is None\n"
        "from syncbn_lab import inputs, models\n"
        "x, labels, said = inputs.load('photo', 'toy', seed=0)\n"
        "noise, _, _ = inputs.load('noise', 'toy', seed=0)\n"
        "assert torch.equal(x, noise)\n"
        "print(said)\n"
    )
    package = Path(syncbn_lab.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(package), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "seeded normal noise" in done.stdout
    assert "matplotlib" in done.stdout


@pytest.mark.parametrize(
    "missing",
    [
        "matplotlib",  # the photograph itself
        "PIL",  # what reads it
    ],
)
def test_a_missing_package_is_said_and_not_raised(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert inputs.sample_photo() is None
    assert "photograph" in inputs.load("photo", "toy", seed=0)[2]


@NEEDS_PHOTO
def test_a_missing_photograph_is_said_and_not_raised(monkeypatch):
    # Distributions that ship matplotlib without its sample data.
    monkeypatch.setattr(Path, "is_file", lambda path: path.name != "grace_hopper.jpg")
    assert inputs.sample_photo() is None
    said = inputs.load("photo", "toy", seed=0)[2]
    assert "photograph" in said
    assert "not installed" not in said  # both packages are


def test_noise_is_not_called_a_lost_photograph():
    assert "photograph" not in inputs.load("noise", "toy", seed=0)[2]


# ---------------------------------------------------------------- models
