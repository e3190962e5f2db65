"""How Triton kernels are started, and the sizes of their tiles: a table, to be changed by whoever measured better.

Chosen from the registers, spills and shared memory that ``benchmarks/triton_resources.py`` prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tiles:
    """``rows`` query rows by ``columns`` keys, and how many warps and pipeline stages work on them."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


# (vendor, kernel, widest head dimension, bytes per element) -> tiles.
TILES: dict[tuple[str, str, int, int], Tiles] = {
    ("cuda", "forward", 64, 2): Tiles(128, 64, 4, 3),
    ("cuda", "forward", 128, 2): Tiles(128, 64, 8, 3),
    ("cuda", "forward", 256, 2): Tiles(64, 32, 8, 2),
    ("cuda", "forward", 64, 4): Tiles(64, 32, 8, 2),
    ("cuda", "forward", 128, 4): Tiles(32, 16, 8, 2),
    ("cuda", "forward", 256, 4): Tiles(32, 32, 8, 1),
    ("cuda", "forward with statistics", 64, 2): Tiles(128, 64, 8, 3),
    ("cuda", "forward with statistics", 128, 2): Tiles(128, 32, 8, 2),
    ("cuda", "forward with statistics", 256, 2): Tiles(64, 32, 8, 2),
    ("cuda", "forward with statistics", 64, 4): Tiles(64, 32, 8, 2),
    ("cuda", "forward with statistics", 128, 4): Tiles(32, 16, 8, 2),
    ("cuda", "forward with statistics", 256, 4): Tiles(32, 32, 8, 1),
    ("cuda", "probe", 128, 2): Tiles(32, 1, 4, 2),
    ("cuda", "probe", 256, 2): Tiles(16, 1, 4, 2),
    ("cuda", "probe", 128, 4): Tiles(32, 1, 4, 2),
    ("cuda", "probe", 256, 4): Tiles(16, 1, 4, 1),
    ("cuda", "columns", 64, 2): Tiles(64, 64, 4, 3),
    ("cuda", "columns", 128, 2): Tiles(64, 64, 8, 2),
    ("cuda", "columns", 256, 2): Tiles(32, 64, 8, 2),
    ("cuda", "columns", 128, 4): Tiles(32, 64, 8, 2),
    ("cuda", "columns", 256, 4): Tiles(32, 32, 8, 1),
    ("cuda", "query gradient", 64, 2): Tiles(128, 64, 8, 2),
    ("cuda", "query gradient", 128, 2): Tiles(64, 64, 8, 2),
    ("cuda", "query gradient", 256, 2): Tiles(32, 32, 8, 1),
    ("cuda", "query gradient", 64, 4): Tiles(32, 32, 4, 2),
    ("cuda", "query gradient", 128, 4): Tiles(32, 32, 8, 1),
    ("cuda", "query gradient", 256, 4): Tiles(16, 16, 8, 1),
    ("cuda", "key gradient", 64, 2): Tiles(64, 128, 8, 2),
    ("cuda", "key gradient", 128, 2): Tiles(32, 64, 8, 2),
    ("cuda", "key gradient", 256, 2): Tiles(32, 32, 8, 1),
    ("cuda", "key gradient", 64, 4): Tiles(32, 32, 4, 2),
    ("cuda", "key gradient", 128, 4): Tiles(32, 32, 8, 2),
    ("cuda", "key gradient", 256, 4): Tiles(16, 16, 8, 1),
    ("hip", "forward", 64, 2): Tiles(128, 64, 4, 1),
    ("hip", "forward", 128, 2): Tiles(128, 64, 8, 1),
    ("hip", "forward", 256, 2): Tiles(64, 32, 8, 1),
    ("hip", "forward", 128, 4): Tiles(64, 32, 8, 1),
    ("hip", "forward", 256, 4): Tiles(32, 16, 8, 1),
    ("hip", "forward with statistics", 64, 2): Tiles(128, 64, 8, 1),
    ("hip", "forward with statistics", 128, 2): Tiles(128, 32, 8, 1),
    ("hip", "forward with statistics", 256, 2): Tiles(64, 32, 8, 1),
    ("hip", "forward with statistics", 128, 4): Tiles(64, 32, 8, 1),
    ("hip", "forward with statistics", 256, 4): Tiles(32, 16, 8, 1),
    ("hip", "probe", 128, 2): Tiles(32, 1, 4, 1),
    ("hip", "probe", 256, 2): Tiles(16, 1, 4, 1),
    ("hip", "probe", 128, 4): Tiles(32, 1, 4, 1),
    ("hip", "probe", 256, 4): Tiles(16, 1, 4, 1),
    ("hip", "columns", 128, 2): Tiles(64, 64, 4, 1),
    ("hip", "columns", 256, 2): Tiles(32, 32, 4, 1),
    ("hip", "columns", 256, 4): Tiles(32, 32, 4, 1),
    ("hip", "query gradient", 64, 2): Tiles(64, 64, 4, 1),
    ("hip", "query gradient", 128, 2): Tiles(64, 32, 4, 1),
    ("hip", "query gradient", 256, 2): Tiles(32, 16, 4, 1),
    ("hip", "query gradient", 128, 4): Tiles(32, 16, 4, 1),
    ("hip", "query gradient", 256, 4): Tiles(16, 16, 4, 1),
    ("hip", "key gradient", 64, 2): Tiles(32, 64, 4, 1),
    ("hip", "key gradient", 128, 2): Tiles(32, 32, 4, 1),
    ("hip", "key gradient", 256, 2): Tiles(16, 16, 4, 1),
    ("hip", "key gradient", 128, 4): Tiles(16, 16, 4, 1),
    ("hip", "key gradient", 256, 4): Tiles(16, 16, 4, 1),
}
VENDOR = "hip" if torch.version.hip else "cuda"


def tiles(kernel: str, d_head: int, bytes_per_element: int) -> Tiles:
    """The entry for the smallest listed head dimension that holds ``d_head``."""
    widths = {key[2] for key in TILES if key[:2] == (VENDOR, kernel) and key[3] == bytes_per_element}
    return TILES[VENDOR, kernel, min(width for width in widths if width >= d_head), bytes_per_element]


def launch(kernel: Any, n_programs: int, sizes: Tiles, **arguments: Any) -> None:
    """Runs as many programs of a kernel. Fusing multiplications with additions is pinned: it changes the last bits."""
    kernel[(n_programs,)](**arguments, num_warps=sizes.warps, num_stages=sizes.stages, enable_fp_fusion=True)
