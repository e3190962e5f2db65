"""Every page on models with windows, learned sinks, an encoder, or both: figures where there are some, else words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from workbench import HookedEncoderDecoder, HookedTransformer, TransformerConfig
from workbench.analyses.labels import SINK_SCORES
from workbench.app import registry
from workbench.app.models import ModelStore
from workbench.app.pages import heads, sinks
from workbench.app.recipes import HEAD_STATISTICS
from workbench.app.selection import rows_used
from workbench.app.services import Services
from workbench.app.shell import error_message
from workbench.app.state import View

TEXT = "a b c a b c d e f a b g a d e f a b c " * 3
KINDS: dict[str, dict[str, Any]] = {
    "windows": {"attn_types": ("local", "global"), "window_size": 8},
    "learned sinks": {"use_sink_logits": True, "positional_embedding_type": "rotary"},
    "ALiBi": {"positional_embedding_type": "alibi"},
    "encoder": {"attention_dir": "bidirectional", "use_mlm_head": True},
    "encoder–decoder": {"n_encoder_layers": 1, "positional_embedding_type": "relative"},
    "linear": {"attn_types": ("global", "linear")},
    "no head": {"use_unembed": False},
}
PREDICTING = ("induction", "attribution", "what-if", "lens")
NO_WORDS = {"attribution": "can be scored with this tokenizer"}  # of letters
REFUSED = {
    **dict.fromkeys(("windows", "learned sinks", "ALiBi"), NO_WORDS),
    "encoder": dict.fromkeys(PREDICTING, "is bidirectional") | {"generation": "cannot continue one"},
    "encoder–decoder": dict.fromkeys(registry.BY_NAME, "is an encoder–decoder"),
    "linear": dict.fromkeys(("heads", "sinks", "compare", "generation", *PREDICTING), "linear attention"),
    "no head": dict.fromkeys((*PREDICTING, "generation"), "no language-model head"),
}


def tokenizer(is_encoder: bool) -> PreTrainedTokenizerFast:
    words = ["[CLS]", "[SEP]", "[UNK]", *"abcdefghijklmnopqrst"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not is_encoder:
        return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="[CLS]", unk_token="[UNK]")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")


def services_on(kind: str) -> Services:
    torch.manual_seed(0)
    cfg = TransformerConfig(
        n_layers=2, d_model=24, n_heads=3, d_head=8, d_mlp=16, d_vocab=23, n_ctx=128, model_name=kind, **KINDS[kind]
    )  # fmt: skip
    make = HookedTransformer if cfg.n_encoder_layers is None else HookedEncoderDecoder
    model = make(cfg, tokenizer(kind.startswith("encoder"))).eval()
    return Services(ModelStore(load=lambda source, job, make_room: model), View(model=kind, text=TEXT), {})


@pytest.mark.parametrize("page", registry.BY_NAME)
@pytest.mark.parametrize("kind", KINDS)
def test_every_page_shows_figures_or_says_in_words_why_not(kind: str, page: str) -> None:
    services = services_on(kind)
    view = dataclasses.replace(services.default, page=page, layer=0, head=2, length=8, sequences=2, score="sink_mass")
    for task in registry.BY_NAME[page].tasks(services, view):
        job = services.jobs.request("test", task)
        assert job.wait(60)
        if words := REFUSED.get(kind, {}).get(page):
            alert = str(error_message(job.error))
            assert "This cannot be analysed" in alert and words in alert
            return
        assert job.error is None, job.error
        for figure in job.result.figure_kinds:
            assert job.result.figure(figure, captioned=True).data
        assert job.result.summary()
    if page == "heads":
        result = services.result(view, HEAD_STATISTICS)
        assert heads.overview_map(result, view, "light")[0].data and heads.score_table(result)[1]
        assert (", mean over layers" in rows_used(result, "sink_mass")) == (kind == "windows")
        assert ("59 tokens, starting with [CLS]" in result.provenance.sentence()) == (kind == "encoder")
    if page == "sinks":
        offered = {option["value"] for option in sinks.score_options(job.result) if not option["disabled"]}
        assert offered == set(SINK_SCORES) - ({"virtual_sink_mass"} if kind != "learned sinks" else set())
        drawn = sinks.head_map(job.result, dataclasses.replace(view, sink_score="virtual_sink_mass"), "light")[0]
        assert bool(drawn.data) == (kind == "learned sinks")
