"""A dashboard that really listens, and tiny models to put behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from werkzeug.serving import make_server

from workbench import HookedTransformer, TransformerConfig
from workbench.app import create_app
from workbench.app.main import QuietHandler, listen
from workbench.app.models import ModelStore

if TYPE_CHECKING:
    from playwright.sync_api import Page

WORDS = ["<script>alert(1)</script>", "a", "b", "c", "d", "%{x}", "e", "f"]


@pytest.fixture(scope="session")
def tiny() -> HookedTransformer:
    """Two layers, three heads, random weights; its words are in WORDS, and one of them is markup. Read-only."""
    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate(["<bos>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", unk_token="<unk>")
    cfg = TransformerConfig(
        n_layers=2, d_model=24, n_heads=3, d_head=8, d_mlp=16, d_vocab=len(vocabulary), n_ctx=1024, model_name="tiny"
    )  # fmt: skip
    return HookedTransformer(cfg, tokenizer).eval()


@contextmanager
def served(models: ModelStore | None = None) -> Iterator[str]:
    """The address of a dashboard that runs as long as the block."""
    listener = listen(18050)
    port = listener.getsockname()[1]
    server = make_server(
        "127.0.0.1", port, create_app(models=models).server, threaded=True, request_handler=QuietHandler,
        fd=listener.fileno(),
    )  # fmt: skip
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.shutdown()
        server.server_close()
        listener.close()


@pytest.fixture(scope="session")
def serve() -> Callable[[ModelStore | None], AbstractContextManager[str]]:
    """``with serve(models) as address`` runs a dashboard."""
    return served


@pytest.fixture(scope="session")
def dashboard() -> Iterator[str]:
    """The dashboard as users get it, on the demo model."""
    with served() as address:
        yield address


@pytest.fixture
def watched(new_page: Callable[[], Page]) -> Iterator[Callable[[], Page]]:
    """Opens pages; fails the test where one of them logs an error to the console or throws one."""
    errors: list[str] = []

    def open_page() -> Page:
        page = new_page()
        page.set_default_timeout(60_000)  # a busy machine draws slowly
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        return page

    yield open_page
    assert not errors
