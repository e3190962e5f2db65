"""What is saved comes back as it was, of every mechanism; what was damaged in between is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench import (
    CorruptWeightsError,
    HookedTransformer,
    MixtureOfExperts,
    RopeScaling,
    TransformerConfig,
    UnsupportedModelError,
    WorkbenchError,
    fold_layer_norm,
)

PROVENANCE = ("model_name", "revision", "weights_description")


def computing_fields(model: HookedTransformer) -> dict[str, Any]:
    """The configuration without where the weights came from, which is another folder now."""
    return {name: value for name, value in model.cfg.to_dict().items() if name not in PROVENANCE}


def tiny(**changes: Any) -> HookedTransformer:
    torch.manual_seed(0)
    fields = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 6, "d_vocab": 23, "n_ctx": 16}
    return HookedTransformer(TransformerConfig(**fields | changes)).eval()


@torch.no_grad()
def test_every_mechanism_comes_back(mechanism, tmp_path):
    """Weights to the bit, configuration and kind of model; logits to rounding, as matrices lie otherwise in memory."""
    model = mechanism.model
    model.save_pretrained(tmp_path / "saved")
    loaded = HookedTransformer.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert type(loaded) is type(model) and not loaded.training
    assert computing_fields(loaded) == computing_fields(model)
    assert loaded.cfg.model_name == "saved" and loaded.cfg.weights_description == "float64"
    original, state = model.state_dict(), loaded.state_dict()
    assert set(state) == set(original)
    for name, tensor in state.items():
        assert torch.equal(tensor, original[name]), name
    torch.testing.assert_close(mechanism.output(loaded), mechanism.output(), rtol=1e-10, atol=1e-10)

    loaded.save_pretrained(tmp_path / "again")  # which lies in memory as the next one will
    again = HookedTransformer.from_pretrained(tmp_path / "again", dtype=torch.float64)
    assert torch.equal(mechanism.output(again), mechanism.output(loaded))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_keep_their_bits(tmp_path, dtype):
    """On disk, and in memory where they are asked for; by default they become float32, exactly."""
    model = tiny().to(dtype)
    model.save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {dtype}
    same = HookedTransformer.from_pretrained(tmp_path, dtype=dtype)
    wide = HookedTransformer.from_pretrained(tmp_path)
    assert same.cfg.dtype == dtype and wide.cfg.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        assert torch.equal(same.state_dict()[name], tensor)
        assert torch.equal(wide.state_dict()[name], tensor.float())
    stored = str(dtype).removeprefix("torch.")
    assert same.cfg.weights_description == stored
    assert wide.cfg.weights_description == f"{stored}, cast to float32"


def test_a_tied_model_is_saved_once(tmp_path):
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "unembed.W_U" not in load_file(tmp_path / "model.safetensors")
    loaded = HookedTransformer.from_pretrained(tmp_path)
    assert loaded.W_U.data_ptr() == loaded.W_E.data_ptr()


@torch.no_grad()
def test_a_folded_model_comes_back_folded(tmp_path):
    folded = fold_layer_norm(tiny(tie_word_embeddings=True))
    folded.save_pretrained(tmp_path)
    loaded = HookedTransformer.from_pretrained(tmp_path)
    assert torch.equal(loaded.W_U, folded.W_U) and torch.equal(loaded.b_U, folded.b_U)


def test_options_with_parts_survive_json(tmp_path):
    """Tuples and nested configurations come back as what they were."""
    model = tiny(
        n_layers=2, positional_embedding_type="rotary", attn_types=("local", "global"), window_size=3,
        rope_scaling=RopeScaling(type="longrope", factor=2.0, original_context=8, short_factor=(1.0, 1.5),
                                 long_factor=(2.0, 3.0)),
        moe=MixtureOfExperts(n_experts=2, n_experts_per_token=1, dense_layers=(1,)),
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    loaded = HookedTransformer.from_pretrained(tmp_path)
    assert loaded.cfg.rope_scaling == model.cfg.rope_scaling and loaded.cfg.moe == model.cfg.moe
    assert loaded.cfg.attn_types == ("local", "global")


def test_another_context_length(tmp_path):
    """A table of learned positions can be cut, not lengthened; rotary positions can be either."""
    tiny().save_pretrained(tmp_path / "learned")
    assert HookedTransformer.from_pretrained(tmp_path / "learned", n_ctx=5).W_pos.shape == (5, 8)
    with pytest.raises(ValueError, match="n_ctx = 17 exceeds the 16 positions"):
        HookedTransformer.from_pretrained(tmp_path / "learned", n_ctx=17)
    tiny(positional_embedding_type="rotary").save_pretrained(tmp_path / "rotary")
    assert HookedTransformer.from_pretrained(tmp_path / "rotary", n_ctx=99).cfg.n_ctx == 99


def test_the_tokenizer_comes_along(tmp_path, tokenizer):
    model = HookedTransformer(tiny().cfg, tokenizer)
    model.save_pretrained(tmp_path)
    loaded = HookedTransformer.from_pretrained(tmp_path)
    text = "a b unknown t"
    assert torch.equal(loaded.to_tokens(text), model.to_tokens(text))
    assert loaded.to_string(loaded.to_tokens(text)) == model.to_string(model.to_tokens(text))
    assert loaded.tokenizer.bos_token_id == tokenizer.bos_token_id


def test_another_models_tokenizer_is_not_taken_for_this_ones(tmp_path, tokenizer):
    HookedTransformer(tiny().cfg, tokenizer).save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(WorkbenchError, match=r"tokenizer\.json belongs to another model"):
        tiny().save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_saving_replaces_the_model_and_nothing_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    tiny().save_pretrained(tmp_path)
    tiny(n_layers=2).save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert HookedTransformer.from_pretrained(tmp_path).cfg.n_layers == 2


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(WorkbenchError, match="file is a file"):
            tiny().save_pretrained(place)
    assert (tmp_path / "file").read_text() == "mine"


def saved(folder: Path, **changes: Any) -> Path:
    """A saved model, whose configuration was then changed; None takes a field out."""
    tiny().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    fields = config["transformer_config"] | changes
    config["transformer_config"] = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"of_tomorrow": 1}, "does not fit this version: unknown fields in the configuration: of_tomorrow"),
        ({"d_model": None}, "missing fields in the configuration: d_model"),
        ({"d_model": "8"}, "d_model must be a positive integer"),
        ({"act_fn": "of_tomorrow"}, "act_fn must be one of"),
        ({"rope_scaling": {"type": "of_tomorrow"}}, "type must be one of"),
        ({"rope_scaling": 3}, "does not fit this version"),
        ({"moe": {"n_experts": 2}}, "missing fields in moe: n_experts_per_token"),
        ({"attn_types": 3}, "does not fit this version"),
        ({"use_norm_bias": "yes"}, "use_norm_bias must be"),
    ],
)
def test_a_configuration_of_another_version_is_refused(tmp_path, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        HookedTransformer.from_pretrained(saved(tmp_path, **changes))


@pytest.mark.parametrize("config", [{}, {"transformer_config": None}, {"transformer_config": [1]}])
def test_a_configuration_without_content_is_refused(tmp_path, config):
    saved(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "attention_workbench", **config}))
    with pytest.raises(UnsupportedModelError, match="no transformer_config"):
        HookedTransformer.from_pretrained(tmp_path)


def test_damaged_weights_are_refused(tmp_path):
    """Cut off, incomplete, too many, of a wrong shape or type: each is found out, and named."""
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}  # which the file is mapped into
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptWeightsError, match="truncated"):
        HookedTransformer.from_pretrained(tmp_path)
    name, weight = "blocks.0.attn.W_Q", weights["blocks.0.attn.W_Q"]
    others = {other: tensor for other, tensor in weights.items() if other != name}
    for damaged, message in [
        (others, rf"1 of \d+ parameters have no tensor, among them {name}"),
        (weights | {"blocks.1.attn.W_Q": weight.clone()}, r"blocks\.1\.attn\.W_Q has no place"),
        (weights | {name: weight[:1].clone()}, rf"{name} has shape"),
        (weights | {name: weight.to(torch.int32)}, "not floating point"),
    ]:
        save_file(damaged, path)
        with pytest.raises(CorruptWeightsError, match=message):
            HookedTransformer.from_pretrained(tmp_path)
