"""A write-up is one HTML page that asks no other host for anything."""

import base64
import re
from html.parser import HTMLParser

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from syncbn_lab.errors import InputError
from syncbn_lab.writeup import write

PNG = base64.b64encode(
    base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
    )
).decode()
SCRIPT = '<script src="https://cdn.example.com/evil.js"></script>'
LONG = "a sentence that is longer than any cell of pandas would show by itself " * 5


class _Page(HTMLParser):
    """Everything that a browser would fetch for a page, and the page's text."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.scripts, self.text, self._style = [], 0, "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        # The state of widgets lies in a script element of its own type: data, which nothing runs.
        self.scripts += tag == "script" and not (found.get("type") or "").endswith("+json")
        self._style = tag == "style"
        if tag == "link":
            self.fetched.append(found.get("href"))
        elif tag != "a":  # a link to follow is fetched by nobody
            self.fetched += [found[name] for name in ("src", "srcset", "data") if name in found]
        self._css(found.get("style") or "")

    def handle_endtag(self, tag):
        self._style = False

    def handle_data(self, data):
        if self._style:
            self._css(data)
        else:
            self.text += data

    def _css(self, text):
        self.fetched += re.findall(r"url\(\s*['\"]?([^'\")]+)", text)
        self.fetched += re.findall(r"@import\s+['\"]([^'\"]+)", text)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    table = f"<table><tr><td>{LONG}</td></tr></table>"
    notebook = new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            # As a notebook has it that once showed a widget.
            "widgets": {"application/vnd.jupyter.widget-state+json": {"state": {}}},
        },
        cells=[
            new_markdown_cell(
                "# A title\n\nInline $E = mc^2$ and\n\n$$\\sigma^2 = E[x^2]$$\n\n"
                "```mermaid\ngraph TD;\n```\n\n`" + SCRIPT + "` and [a link](https://example.com)."
            ),
            new_code_cell(
                "print('said')",
                execution_count=1,
                outputs=[
                    new_output("stream", text=f"said {SCRIPT}\n"),
                    new_output(
                        "execute_result",
                        data={"text/plain": f"'{SCRIPT}'"},
                        execution_count=1,
                    ),
                    new_output("display_data", data={"text/html": table, "text/plain": "t"}),
                    new_output("display_data", data={"image/png": PNG, "text/plain": "p"}),
                ],
            ),
        ],
    )
    source = tmp_path_factory.mktemp("writeup") / "out.ipynb"
    nbformat.write(notebook, source)
    target = write(str(source))
    assert target == source.with_suffix(".html")
    return _Page(target.read_text(encoding="utf-8"))


def test_nothing_is_fetched_from_anywhere(page):
    assert page.fetched, "the picture at least is a src"
    for address in page.fetched:
        # Inside the page itself: data, or a place in it.
        assert address.startswith(("data:", "#")), address[:100]


def test_no_script_runs(page):
    # Neither nbconvert's own, which come from other hosts, nor what an output only quotes.
    assert page.scripts == 0


def test_the_text_is_whole(page):
    text = page.text
    assert "A title" in text
    assert "E = mc^2" in text  # mathematics stays as it was written
    assert "\\sigma^2 = E[x^2]" in text
    assert LONG.strip() in text
    assert "print('said')" in "".join(text.split("\n"))
    # As text: in the code of the Markdown, in the stream, and in the result.
    assert text.count("cdn.example.com/evil.js") == 3
    assert f"said {SCRIPT}" in text


def test_the_picture_is_in_the_page(page):
    assert any(PNG in address.replace("\n", "") for address in page.fetched)


def _refusal(path):
    with pytest.raises(InputError) as caught:
        write(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path} ")
    assert text.endswith(".")
    return text.removeprefix(f"{path} ")


def test_a_missing_file(tmp_path):
    assert _refusal(tmp_path / "no.ipynb") == "does not exist."
    assert _refusal(tmp_path) == "does not exist."  # a folder is no file


def test_a_file_of_another_kind(tmp_path):
    file = tmp_path / "out.py"
    file.write_text("1")
    assert _refusal(file) == "is not a notebook file (.ipynb)."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not json\nat all " * 9, "Notebook does not appear to be JSON"),  # nbformat cuts it
        (b"", "Notebook does not appear to be JSON"),  # an interrupted write
        (b"\x89PNG\xff", "'utf-8' codec can't decode"),  # not UTF-8
        (b"[]", "it holds no list of cells."),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": 5}', "it holds no list"),
        (b'{"nbformat": 9, "cells": []}', "Unsupported nbformat version 9."),
    ],
)
def test_a_file_that_is_no_notebook(tmp_path, content, said):
    file = tmp_path / "x.ipynb"
    file.write_bytes(content)
    assert _refusal(file).startswith(f"can't be read as a notebook: {said}")
    assert not file.with_suffix(".html").exists()
