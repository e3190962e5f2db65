"""Folders and hub ids: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from workbench import HookedTransformer
from workbench.errors import CorruptWeightsError, ModelNotFoundError, UnsupportedModelError, WorkbenchError
from workbench.loading.pretrained import check_source

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _load(source: str | Path) -> HookedTransformer:
    return HookedTransformer.from_pretrained(source)


def test_folder_without_config(llama_folder: Path) -> None:
    (llama_folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="has no config.json"):
        _load(llama_folder)
    (llama_folder / "some.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"to load some\.gguf, pass that file"):
        _load(llama_folder)


def test_folder_without_weights(llama_folder: Path) -> None:
    (llama_folder / WEIGHTS).unlink()
    with pytest.raises(ModelNotFoundError, match="has no weights: expected model.safetensors"):
        _load(llama_folder)


def test_pickles_are_not_opened(llama_folder: Path) -> None:
    (llama_folder / WEIGHTS).rename(llama_folder / "pytorch_model.bin")
    with pytest.raises(
        ModelNotFoundError, match=r"only as a pickle \(pytorch_model.bin\).*convert it: transformers.LlamaForCausalLM"
    ):
        _load(llama_folder)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1], ids=["empty", "half a length", "half a header", "one byte short"])
def test_truncated_safetensors(keep: int, llama_folder: Path) -> None:
    path = llama_folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptWeightsError, match=f"{path} is truncated.*download it again"):
        _load(llama_folder)


def test_pointer_of_git_lfs(llama_folder: Path) -> None:
    (llama_folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 538090408\n")
    with pytest.raises(CorruptWeightsError, match="truncated or no safetensors file"):
        _load(llama_folder)


def test_config_that_is_no_json(llama_folder: Path) -> None:
    (llama_folder / "config.json").write_text("{")
    with pytest.raises(CorruptWeightsError, match="config.json is not valid JSON"):
        _load(llama_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, "9 of 39 parameters have no tensor, among them blocks.3.attn.W_Q"),
        ({"num_hidden_layers": 2}, r"model\.layers\.2\.\S+ has no place in a model of this configuration"),
        ({"num_key_value_heads": 3}, r"k_proj.weight has shape \[20, 36\], which does not fit"),
        ({"head_dim": 12}, "does not fit the configuration"),
        ({"hidden_size": "wide"}, "tiny-llama: "),
        ({"num_key_value_heads": 4}, "n_heads .6. must be a multiple"),
        ({"attention_bias": True}, "_proj.bias"),
    ],
    ids=str,
)
def test_config_and_weights_must_belong_together(
    changes: dict[str, Any], message: str, llama_folder: Path, edit_config: Callable[..., None]
) -> None:
    edit_config(llama_folder, **changes)
    with pytest.raises((CorruptWeightsError, UnsupportedModelError), match=message) as caught:
        _load(llama_folder)
    assert str(llama_folder) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_head_is_no_random_head(llama_folder: Path) -> None:
    state = load_file(llama_folder / WEIGHTS)
    del state["lm_head.weight"]
    save_file(state, llama_folder / WEIGHTS)
    with pytest.raises(CorruptWeightsError, match=r"unembed.W_U \(lm_head.weight\)"):
        _load(llama_folder)


def test_tied_head_that_differs_is_refused(llama_folder: Path, edit_config: Callable[..., None]) -> None:
    edit_config(llama_folder, tie_word_embeddings=True)
    with pytest.raises(CorruptWeightsError, match="ties lm_head.weight to model.embed_tokens.weight, but they differ"):
        _load(llama_folder)
    state = load_file(llama_folder / WEIGHTS)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, llama_folder / WEIGHTS)
    model = _load(llama_folder)
    assert torch.equal(model.W_U, state["lm_head.weight"].T)


def test_shards(make_hf_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    make_hf_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = (tmp_path / INDEX).read_text()
    copied = shutil.copy(shards[1], tmp_path / "spare")
    shards[1].unlink()
    with pytest.raises(
        CorruptWeightsError, match=f"names {shards[1].name} .of {len(shards)} files., which is not there"
    ):
        _load(tmp_path)
    shutil.copy(shards[0], shards[1])
    with pytest.raises(CorruptWeightsError, match="which another file of the folder holds too"):
        _load(tmp_path)
    shutil.copy(copied, shards[1])
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}}))
    with pytest.raises(CorruptWeightsError, match="has no weight_map"):
        _load(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelNotFoundError, match=f"has {len(shards)} safetensors files but neither"):
        _load(tmp_path)
    (tmp_path / INDEX).write_text(index)
    _load(tmp_path)


def test_only_file_under_another_name(llama_folder: Path) -> None:
    (llama_folder / WEIGHTS).rename(llama_folder / "weights.safetensors")
    _load(llama_folder)


def test_tokenizer_comes_along(llama_folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert _load(llama_folder).tokenizer is None
    tokenizer.save_pretrained(llama_folder)
    model = _load(llama_folder)
    assert model.to_tokens("a c b").tolist() == [[0, 3, 5, 4]]  # <bos> is 0, then a word per token


def test_own_tokenizer_replaces_the_folders(llama_folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (llama_folder / "tokenizer.json").write_text("{}")
    assert HookedTransformer.from_pretrained(llama_folder, tokenizer=tokenizer).tokenizer is tokenizer
    with pytest.raises(CorruptWeightsError, match=f"the tokenizer in {llama_folder} cannot be read .*pass tokenizer="):
        _load(llama_folder)


@pytest.mark.parametrize("limit", ["a", []], ids=repr)
def test_tokenizer_settings_of_a_wrong_type(limit: Any, llama_folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """transformers takes them as they are, and fails on the first text."""
    tokenizer.save_pretrained(llama_folder)
    path = llama_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": limit}))
    with pytest.raises(CorruptWeightsError, match=f"the tokenizer in {llama_folder} cannot be read .*pass tokenizer="):
        _load(llama_folder)


def test_tokenizer_of_a_larger_vocabulary(
    llama_folder: Path, tokenizer: PreTrainedTokenizerFast, make_hf_model: Callable[..., PreTrainedModel]
) -> None:
    tokenizer.save_pretrained(llama_folder)
    make_hf_model("llama", vocab_size=tokenizer.vocab_size).save_pretrained(llama_folder)
    assert _load(llama_folder).cfg.d_vocab == tokenizer.vocab_size
    make_hf_model("llama", vocab_size=tokenizer.vocab_size - 1).save_pretrained(llama_folder)
    with pytest.raises(
        CorruptWeightsError, match=r"tokenizer has \d+ tokens, but the model's vocabulary has \d+; they"
    ):
        _load(llama_folder)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_folder: Path) -> Path:
    """The hub's cache with one model in it, and no connection."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--someone--tiny-llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(llama_folder, repository / "snapshots" / COMMIT)
    return tmp_path / "hub"


def test_hub_id_from_the_hubs_cache(hub_cache: Path, llama_folder: Path) -> None:
    model = _load("someone/tiny-llama")
    assert (model.cfg.model_name, model.cfg.revision) == ("someone/tiny-llama", COMMIT)
    assert torch.equal(model.W_E, _load(llama_folder).W_E)


def test_hub_id_that_is_not_there(hub_cache: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match="^someone/else is neither .*HF_HUB_OFFLINE is set.; known names are demo"
    ):
        _load("someone/else")
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2-135m"):
        _load("smolm2-135m")


def test_a_source_is_checked_without_reading_its_weights(
    hub_cache: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (llama_folder / WEIGHTS).write_bytes(b"")
    wanted: list[Any] = []
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: wanted.append(k["allow_patterns"]) or real(*a, **k)
    )
    for source in ("demo", "smollm2-135m", str(llama_folder), "someone/tiny-llama"):
        check_source(source)
    assert wanted == [["config.json"]]
    for source, message in (("someone/else", "^someone/else is neither .*; known names"), ("./x", "no folder or file")):
        with pytest.raises(ModelNotFoundError, match=message):
            check_source(source)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError, "does not exist on the Hugging Face hub, or is private"),
        (errors.GatedRepoError, "is gated: accept its terms"),
        (errors.RevisionNotFoundError, "has no revision 'v9'"),
        (errors.HfHubHTTPError, r"hub cannot be reached \(502"),
    ],
)
def test_what_the_hub_answers(error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    response = httpx.Response(502, request=httpx.Request("GET", "https://hub"))

    def refuse(*arguments: Any, **options: Any) -> str:
        raise error("502 Bad gateway\nmore", response=response)  # type: ignore[call-arg]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        HookedTransformer.from_pretrained("someone/tiny-llama", revision="v9")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "null", "5", '"llama"', "[" * 100_000], ids=lambda text: text[:8])
def test_config_that_holds_no_attributes(content: str, llama_folder: Path) -> None:
    (llama_folder / "config.json").write_text(content)
    with pytest.raises(CorruptWeightsError, match=r"config.json (holds no attributes|is not valid JSON)"):
        _load(llama_folder)


@pytest.mark.parametrize("architectures", [5, "MysteryModel"])
def test_architectures_that_are_no_list(
    architectures: Any, llama_folder: Path, edit_config: Callable[..., None]
) -> None:
    edit_config(llama_folder, architectures=architectures)
    with pytest.raises(UnsupportedModelError, match=f"{architectures} is not supported"):
        _load(llama_folder)


def test_absurd_sizes_are_refused_before_anything_is_built(
    llama_folder: Path, edit_config: Callable[..., None]
) -> None:
    edit_config(llama_folder, num_hidden_layers=10**9)
    with pytest.raises(CorruptWeightsError, match=r"1,000,000,000 layers, but only \d+ tensors"):
        _load(llama_folder)
    edit_config(llama_folder, num_hidden_layers=3, hidden_size=2**31 - 1, intermediate_size=2**31 - 1)
    with pytest.raises(CorruptWeightsError, match="absurd|does not fit"):
        _load(llama_folder)


def test_blank_description_of_the_weights(llama_folder: Path) -> None:
    save_file(load_file(llama_folder / WEIGHTS), llama_folder / WEIGHTS, metadata={"weights_description": " "})
    assert _load(llama_folder).cfg.weights_description == "float32"


def test_what_is_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a file"):
        _load(tmp_path / "pipe")
    with pytest.raises(WorkbenchError, match="no such home folder"):
        _load("~nobody-of-that-name/model")


def test_tokenizer_that_is_none(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer must be a transformers tokenizer, got 'gpt2'"):
        HookedTransformer.from_pretrained(llama_folder, tokenizer="gpt2")
