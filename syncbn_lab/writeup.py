"""An executed notebook as one HTML page that needs no network.

nbconvert does the conversion. Its own template links scripts on other hosts for mathematics,
widgets and diagrams; ours extends it and leaves them out, because a page that is mailed has to
look the same where there is no network.
"""

from __future__ import annotations

from pathlib import Path

from syncbn_lab.errors import InputError

_TEMPLATES = Path(__file__).resolve().parent / "templates"


def write(path: str | Path) -> Path:
    """Convert an executed notebook into an HTML file beside it, and return the file's path.

    Raises
    ------
    InputError
        When the file is not there or is no notebook, or nbconvert is not installed.
    """
    source = Path(path)
    if not source.is_file():
        raise InputError(f"{path} does not exist.")
    if source.suffix != ".ipynb":
        raise InputError(f"{path} is not a notebook file (.ipynb).")
    try:
        import nbformat
        from nbconvert import HTMLExporter
        from traitlets.config import Config
    except ImportError as error:
        raise InputError(
            f"a write-up needs nbconvert, and {error.name} is not installed; "
            "`pip install nbconvert` brings it."
        ) from error
    try:
        notebook = nbformat.read(source, as_version=4)
    except Exception as error:
        said = " ".join(str(error).split()).rstrip(".")
        if isinstance(error, AttributeError | TypeError):  # of what nbformat took for a notebook
            said = "it holds no list of cells"
        raise InputError(f"{path} can't be read as a notebook: {said}.") from error
    exporter = HTMLExporter(
        config=Config(
            {"HTMLExporter": {"exclude_input_prompt": True, "exclude_output_prompt": True}}
        ),
        extra_template_basedirs=[str(_TEMPLATES)],
        template_name="offline",
    )
    body, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": source.stem}})
    target = source.with_suffix(".html")
    target.write_text(body, encoding="utf-8")
    return target
