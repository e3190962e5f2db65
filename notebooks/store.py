"""Runs notebooks and stores them with their outputs, as small as they can be: figures become slim SVG pictures.

../.venv/bin/python store.py quick_tour.ipynb    # in this folder, with a Chromium on the machine
"""

import os
import re
import sys

import nbformat
from nbclient import NotebookClient

FONT = re.compile(r"font-family: ([^;\"]+);")
NOISE = (
    r'<rect class="bg"[^>]*fill-opacity: 0;"/>',  # behind text, invisible
    r' (?:class|data-\w+)="[^"]*"',
    r" (?:fill-opacity|stroke-opacity|opacity): 1;",
    r' style=""',
)


def slim(svg: str) -> str:
    """The same picture without what plotly says again for every mark: the font is said once, numbers are rounded."""
    font = FONT.search(svg)
    for pattern in NOISE:
        svg = re.sub(pattern, "", svg)
    svg = re.sub(FONT.pattern + " ?| ?white-space: pre;", "", svg)
    svg = re.sub(r"(\d\.\d\d)\d+(?=[^\d%])", r"\1", svg)
    style = f"white-space: pre; font-family: {font[1]}" if font else "white-space: pre"
    return svg.replace("<svg ", f'<svg style="{style}" ', 1)


def stored(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without warnings, progress bars and times, and with slim pictures."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr" and not _is_progress(o)]
        for output in cell.outputs:
            if svg := output.get("data", {}).get("image/svg+xml"):
                output.data["image/svg+xml"] = slim(svg)
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    return notebook


def _is_progress(output: nbformat.NotebookNode) -> bool:
    data = output.get("data", {})
    return "text/html" in data and not data.get("text/plain")


if __name__ == "__main__":
    os.environ |= {"PLOTLY_RENDERER": "svg", "PYTHONWARNINGS": "ignore"}
    for path in sys.argv[1:]:
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=3600).execute()
        nbformat.write(stored(notebook), path)
