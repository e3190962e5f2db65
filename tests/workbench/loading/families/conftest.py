"""What every family must pass, and the table in ARCHITECTURE.md of what was measured on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from workbench import HookedTransformer, TransformerConfig
from workbench.config import MixtureOfExperts, RopeScaling
from workbench.hooks import HookPoint
from workbench.loading.families import FAMILIES, native
from workbench.parity import ParityErrors, measure_parity
from workbench.testing import check_cache, check_hook_contract

ROOT = Path(__file__).parents[4]
TOLERANCE = 1e-4
N_POSITIONS, N_PADS = 260, 70
TABLE_START, TABLE_END = "<!-- families: written by the tests -->", "<!-- end of families -->"

_ROWS = pytest.StashKey[list[tuple[str, TransformerConfig, ParityErrors]]]()
_PROVENANCE = {"model_name": "", "revision": "", "weights_description": ""}


@pytest.fixture
def check_family(
    request: pytest.FixtureRequest, tmp_path: Path, build_random: Callable[..., PreTrainedModel]
) -> Callable[..., HookedTransformer]:
    """``check_family(kind, config, std=0.3, **hf_arguments)`` converts a random transformers model; returns ours.

    It checks logits, residual streams and patterns against transformers without pads, with pads on the left and on the
    right; the hook contract; of decoders that a cache changes nothing and greedy generation equals transformers'; and
    that the model comes back the same from a folder that transformers wrote and from one that we wrote.
    ``hf_arguments`` go to the transformers model's call.
    """

    def check(
        kind: type[PreTrainedModel], config: PreTrainedConfig, *, std: float = 0.3, **hf_arguments: Any
    ) -> HookedTransformer:
        reference = build_random(kind, config, std)
        model = HookedTransformer.from_pretrained(reference)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, model.cfg.d_vocab, (2, N_POSITIONS), generator=generator)  # 0, 1, 2 may be special
        extra: dict[str, Any] = {}
        if model.cfg.n_encoder_layers is not None:
            extra["decoder_tokens"] = torch.randint(3, model.cfg.d_vocab, (2, N_POSITIONS - 1), generator=generator)
        measured = []
        for padding in (None, slice(N_PADS), slice(-N_PADS, None)):
            real = torch.ones_like(tokens, dtype=torch.bool)
            if padding is not None:
                real[1, padding] = False
            padded = tokens.masked_fill(~real, getattr(config, "pad_token_id", None) or 0)
            mask = None if padding is None else real
            measured.append(measure_parity(model, reference, padded, mask, hf_arguments=hf_arguments, **extra))
            assert measured[-1].largest < TOLERANCE, f"pads {padding}: {measured[-1]}"
        names = [field.name for field in dataclasses.fields(ParityErrors)]
        worst = ParityErrors(**{name: max(getattr(errors, name) for errors in measured) for name in names})
        request.config.stash.setdefault(_ROWS, []).append((config.model_type, model.cfg, worst))

        decoder = {"decoder_input": extra["decoder_tokens"][:, :12]} if extra else {}
        check_hook_contract(model, tokens[:, :20], **decoder)
        if model.cfg.attention_dir == "causal" and model.cfg.use_unembed:
            if extra:
                decoder_tokens = extra["decoder_tokens"][:, :60]
                _check_cached(model, decoder_tokens, encoder_output=model.encode(tokens[:, :30])[0].detach())
                decoder_tokens[:, 0] = model.cfg.decoder_start_token_id
                _check_generation(model, reference, tokens[:, :9], decoder_tokens[:, :5])
            else:
                _check_cached(model, tokens[:, :60])
                _check_generation(model, reference, tokens[:, :9])
        reference.save_pretrained(tmp_path / "theirs")
        model.save_pretrained(tmp_path / "ours")
        for folder in ("theirs", "ours"):
            _assert_same(HookedTransformer.from_pretrained(tmp_path / folder), model)
        return model

    return check


def _check_cached(model: HookedTransformer, tokens: Tensor, **encoder: Any) -> None:
    """With pads on the left, plain and with a head ablated."""
    scaling = model.cfg.rope_scaling
    if scaling is not None and scaling.depends_on_length:  # beyond, other frequencies would end the cache
        tokens = tokens[:, : scaling.original_context]
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[1, :5] = False

    def ablate(z: Tensor, hook: HookPoint) -> Tensor:
        z[:, :, 1] = 0
        return z

    check_cache(model, tokens, real, TOLERANCE, **encoder)
    with model.hooks([(f"blocks.{model.cfg.n_layers - 1}.attn.hook_z", ablate)]):
        check_cache(model, tokens, real, TOLERANCE, **encoder)


def _check_generation(
    model: HookedTransformer, reference: PreTrainedModel, tokens: Tensor, decoder_tokens: Tensor | None = None
) -> None:
    """64 greedy tokens for two prompts, one of which is padded: on the left, but for an encoder on the right."""
    mask = torch.ones_like(tokens)
    mask[1, slice(4) if decoder_tokens is None else slice(-4, None)] = 0
    config = reference.generation_config
    config.eos_token_id = config.forced_eos_token_id = None
    theirs: dict[str, Any] = {"do_sample": False, "num_beams": 1, "pad_token_id": 0}
    ours: dict[str, Any] = {}
    if decoder_tokens is not None:
        theirs |= {"decoder_input_ids": decoder_tokens, "suppress_tokens": [model.cfg.decoder_start_token_id]}
        ours["decoder_input"] = decoder_tokens
    if model.cfg.rope_scaling is not None and model.cfg.rope_scaling.depends_on_length:
        theirs["use_cache"] = False  # in which keys would stay that were rotated for a shorter text
    expected = reference.generate(tokens, attention_mask=mask, max_new_tokens=64, **theirs)
    found = model.generate(tokens, max_new_tokens=64, attention_mask=mask, **ours)
    assert torch.equal(found, expected)
    assert len(found[:, -64:].unique()) > 1


def _assert_same(left: HookedTransformer, right: HookedTransformer) -> None:
    assert left.cfg.to_dict() | _PROVENANCE == right.cfg.to_dict() | _PROVENANCE
    weights = left.state_dict()
    assert weights.keys() == right.state_dict().keys()
    for name, value in right.state_dict().items():
        assert torch.equal(weights[name], value), name


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--write-family-table"):
        return
    rows = session.config.stash.get(_ROWS, [])
    if missing := FAMILIES.keys() - {native.MODEL_TYPE} - {model_type for model_type, _, _ in rows}:
        raise pytest.UsageError(f"the table lacks {', '.join(sorted(missing))}: run all of {Path(__file__).parent}")
    lines = ["| model_type | options | logits | residual | pattern |", "|---|---|---|---|---|"]
    for model_type, cfg, errors in sorted(rows, key=lambda row: row[0]):
        numbers = [f"{getattr(errors, field.name):.0e}" for field in dataclasses.fields(errors)]
        if not cfg.use_unembed:
            numbers[0] = "–"
        lines.append(f"| {model_type} | {', '.join(_options(cfg))} | {' | '.join(numbers)} |")
    document = ROOT / "ARCHITECTURE.md"
    before, _, rest = document.read_text(encoding="utf-8").partition(TABLE_START)
    after = rest.partition(TABLE_END)[2]
    table = "\n".join([TABLE_START, "", *lines, "", TABLE_END])
    document.write_text(before + table + after, encoding="utf-8")


_SAY_IT_ALL = ("attention_dir", "normalization_type", "positional_embedding_type")  # fields whose value needs no name
_BIASES = {"use_qkv_bias": "qkv", "use_attn_out_bias": "attn_out", "use_mlp_bias": "mlp", "use_unembed_bias": "unembed"}
_SIZES = ("n_layers", "d_model", "n_heads", "d_head", "d_mlp", "d_vocab", "n_ctx", "n_key_value_heads")
_NO_OPTIONS = (*_SIZES, *_PROVENANCE, *_BIASES, "init_mode", "initializer_range", "decoder_start_token_id")


def _options(cfg: TransformerConfig) -> Iterator[str]:
    """What a configuration switches on, apart from sizes."""
    if cfg.n_key_value_heads != cfg.n_heads:
        yield f"{cfg.n_heads} query heads on {cfg.n_key_value_heads}"
    for field in dataclasses.fields(cfg):
        name, value = field.name, getattr(cfg, field.name)
        if not field.compare or name in _NO_OPTIONS or value == field.default:
            continue
        if name in _SAY_IT_ALL:
            yield value
        elif isinstance(value, bool):
            yield f"`{name}`" if value else f"no `{name.removeprefix('use_')}`"
        elif isinstance(value, RopeScaling):
            yield f"`{name}` {value.type}"
        elif isinstance(value, MixtureOfExperts):
            yield f"`{name}` {value.n_experts_per_token} of {value.n_experts}"
        elif isinstance(value, tuple):
            yield f"`{name}` {', '.join(value)}"
        else:
            yield f"`{name}` {format(value, '.4g') if isinstance(value, float) else value}"
    if biases := [place for name, place in _BIASES.items() if getattr(cfg, name)]:
        yield f"biases ({', '.join(biases)})"
