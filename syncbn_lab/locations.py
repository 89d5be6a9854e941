"""Where the data is that travels with the kit."""

from __future__ import annotations

from pathlib import Path


def data_folder(name: str) -> Path:
    """A folder of ``data/``: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "data" / name
    return inside if inside.is_dir() else package.parent / "data" / name
