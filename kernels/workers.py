"""Runs independent pieces of work on threads of one core each.

Operations on tiles are too small to be split over cores themselves: the threads of torch's own pool would wait for each
other after every one of them. So the pieces are split, and every worker calculates alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")

_one_at_a_time = threading.Lock()  # the number of threads is a setting of the whole process


def run_pieces(work: Callable[[Piece], None], pieces: Sequence[Piece], device: torch.device) -> None:
    """Calls ``work`` on every piece, without gradients; on a CPU, by as many workers as torch has threads.

    Pieces write to places of their own, so that the result depends neither on their order nor on the number of workers.
    An exception in one of them is raised here.
    """
    if device.type != "cpu":
        with torch.no_grad():
            for piece in pieces:
                work(piece)
        return
    inference = torch.is_inference_mode_enabled()

    def run(piece: Piece) -> None:
        with torch.inference_mode(inference), torch.no_grad():  # both belong to a thread
            work(piece)

    with _one_at_a_time:
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            if n_threads == 1 or len(pieces) == 1:
                for piece in pieces:
                    run(piece)
            else:
                with ThreadPoolExecutor(n_threads, thread_name_prefix="attention") as pool:
                    list(pool.map(run, pieces))
        finally:
            torch.set_num_threads(n_threads)
