"""Every way to load a model gives the same parameters, and they compute what transformers computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench import HookedTransformer
from workbench.errors import CorruptWeightsError, ModelNotFoundError, UnsupportedModelError
from workbench.loading.pretrained import load_pretrained


def _assert_same_weights(a: HookedTransformer, b: HookedTransformer) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_logits_equal_transformers(hf_model: PreTrainedModel) -> None:
    """Over the whole context. Every pattern is materialised: here the weights are in question, not the kernel."""
    model = HookedTransformer.from_pretrained(hf_model, attention_backend="materialised")
    tokens = torch.randint(0, 61, (2, 53), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = hf_model(tokens).logits, model(tokens)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_memory_and_folder_give_the_same_parameters(hf_model: PreTrainedModel, tmp_path: Path) -> None:
    hf_model.save_pretrained(tmp_path)
    _assert_same_weights(HookedTransformer.from_pretrained(hf_model), HookedTransformer.from_pretrained(tmp_path))


def test_sharded_folder_gives_the_same_parameters(hf_model: PreTrainedModel, tmp_path: Path) -> None:
    hf_model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _assert_same_weights(HookedTransformer.from_pretrained(hf_model), HookedTransformer.from_pretrained(tmp_path))


def test_model_in_memory_is_neither_shared_nor_changed(hf_model: PreTrainedModel) -> None:
    before = {name: tensor.clone() for name, tensor in hf_model.state_dict().items()}
    config = hf_model.config.to_dict()
    model = HookedTransformer.from_pretrained(hf_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    assert hf_model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in hf_model.state_dict().items())
    assert hf_model.config.to_dict() == config


def test_llama_parameters_by_hand(make_hf_model: Callable[..., PreTrainedModel]) -> None:
    """Each head's slice of the projections, taken apart by index."""
    hf = make_hf_model("llama-biases-tied-mqa")
    model = HookedTransformer.from_pretrained(hf)
    hf_layer: Any = hf.model.layers[1]
    attention, ours = hf_layer.self_attn, model.blocks[1]
    for head in range(6):
        rows = slice(head * 10, head * 10 + 10)
        assert torch.equal(ours.attn.W_Q[head], attention.q_proj.weight[rows].T)
        assert torch.equal(ours.attn.b_Q[head], attention.q_proj.bias[rows])
        assert torch.equal(ours.attn.W_O[head], attention.o_proj.weight[:, rows].T)
    assert torch.equal(ours.attn.W_K[0], attention.k_proj.weight.T)
    assert torch.equal(ours.attn.W_V[0], attention.v_proj.weight.T)
    assert torch.equal(ours.attn.b_O, attention.o_proj.bias)
    assert torch.equal(ours.mlp.W_gate, hf_layer.mlp.gate_proj.weight.T)
    assert torch.equal(ours.ln2.w, hf_layer.post_attention_layernorm.weight)
    assert torch.equal(model.W_U, hf.model.embed_tokens.weight.T)


def test_gpt2_parameters_by_hand(make_hf_model: Callable[..., PreTrainedModel]) -> None:
    hf = make_hf_model("gpt2")
    model = HookedTransformer.from_pretrained(hf)
    hf_block: Any = hf.transformer.h[2]
    ours = model.blocks[2]
    for part, weight, bias in ((0, "W_Q", "b_Q"), (1, "W_K", "b_K"), (2, "W_V", "b_V")):
        for head in range(5):
            columns = slice(part * 30 + head * 6, part * 30 + head * 6 + 6)
            assert torch.equal(getattr(ours.attn, weight)[head], hf_block.attn.c_attn.weight[:, columns])
            assert torch.equal(getattr(ours.attn, bias)[head], hf_block.attn.c_attn.bias[columns])
    assert torch.equal(ours.attn.W_O[4], hf_block.attn.c_proj.weight[24:30])
    assert torch.equal(ours.mlp.W_in, hf_block.mlp.c_fc.weight)
    assert torch.equal(model.W_pos, hf.transformer.wpe.weight)


def test_result_is_in_eval_mode_and_owns_trainable_parameters(llama_folder: Path) -> None:
    model = HookedTransformer.from_pretrained(llama_folder)
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.cfg.device == torch.device("cpu") and model.cfg.dtype == torch.float32


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(stored: torch.dtype, hf_model: PreTrainedModel, tmp_path: Path) -> None:
    half = copy.deepcopy(hf_model).to(stored)
    half.save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    _assert_same_weights(model, HookedTransformer.from_pretrained(half.float()))
    name = str(stored).removeprefix("torch.")
    assert model.cfg.weights_description == f"{name}, cast to float32"
    kept = HookedTransformer.from_pretrained(tmp_path, dtype=stored)
    assert kept.embed.W_E.dtype == stored and kept.cfg.weights_description == name


def test_base_model_prefix_may_be_absent(make_hf_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """The oldest GPT-2 checkpoints name their tensors without "transformer." and carry their masks along."""
    from safetensors.torch import save_file

    hf = make_hf_model("gpt2")
    hf.save_pretrained(tmp_path)
    state = {name.removeprefix("transformer."): tensor for name, tensor in hf.state_dict().items()}
    del state["lm_head.weight"]
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 53, 53).tril() for layer in range(3)}
    save_file(state | masks | {"h.0.attn.masked_bias": torch.tensor(-1e4)}, tmp_path / "model.safetensors")
    _assert_same_weights(HookedTransformer.from_pretrained(hf), HookedTransformer.from_pretrained(tmp_path))


def test_provenance(llama_folder: Path, hf_model: PreTrainedModel) -> None:
    cfg = HookedTransformer.from_pretrained(llama_folder).cfg
    assert (cfg.model_name, cfg.weights_description) == ("tiny-llama", "float32")
    assert cfg.revision is not None and len(cfg.revision) == len("sha256:") + 16
    in_memory = HookedTransformer.from_pretrained(hf_model).cfg
    assert (in_memory.model_name, in_memory.revision) == (type(hf_model).__name__, None)


def test_other_weights_are_another_revision(llama_folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    first = HookedTransformer.from_pretrained(llama_folder).cfg.revision
    state = load_file(llama_folder / "model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, llama_folder / "model.safetensors")
    assert HookedTransformer.from_pretrained(llama_folder).cfg.revision != first


def test_n_ctx_cuts_learned_positions(make_hf_model: Callable[..., PreTrainedModel]) -> None:
    hf = make_hf_model("gpt2")
    model = HookedTransformer.from_pretrained(hf, n_ctx=7)
    assert model.cfg.n_ctx == 7 and torch.equal(model.W_pos, hf.transformer.wpe.weight[:7])
    with pytest.raises(UnsupportedModelError, match="n_ctx = 54 exceeds the 53 positions"):
        HookedTransformer.from_pretrained(hf, n_ctx=54)


def test_n_ctx_of_rotary_models_may_grow(make_hf_model: Callable[..., PreTrainedModel]) -> None:
    hf = make_hf_model("llama")
    model = HookedTransformer.from_pretrained(hf, n_ctx=80, attention_backend="materialised")
    tokens = torch.randint(0, 61, (1, 80), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, logits = hf(tokens).logits, model(tokens)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_progress_runs_from_the_first_to_the_last_tensor(llama_folder: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    load_pretrained(llama_folder, progress=lambda *call: calls.append(call))
    totals = {total for _, _, total in calls}
    assert [done for _, done, _ in calls] == list(range(totals.pop())) and not totals


@pytest.mark.parametrize(
    "arguments",
    [{"dtype": torch.int8}, {"dtype": "float32"}, {"n_ctx": 0}, {"n_ctx": 2.5}, {"revision": "main"}],
    ids=str,
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], llama_folder: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        HookedTransformer.from_pretrained(llama_folder, **arguments)


def test_source_of_a_wrong_type() -> None:
    with pytest.raises(ValueError, match="source must be a name, a path or a transformers model"):
        load_pretrained(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["no/such/folder", "./missing", "missing.gguf", Path("missing"), "a name"])
def test_missing_path(source: str | Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder or file"):
        HookedTransformer.from_pretrained(source)


def test_models_that_are_not_supported_in_memory(make_hf_model: Callable[..., PreTrainedModel]) -> None:
    from transformers import CTRLConfig, CTRLModel

    with pytest.raises(UnsupportedModelError, match="'ctrl' is not supported; supported are gpt2, gpt_neo, gptj"):
        HookedTransformer.from_pretrained(CTRLModel(CTRLConfig(vocab_size=11, n_embd=8, dff=8, n_layer=1, n_head=2)))
    with pytest.raises(UnsupportedModelError, match="load a LlamaForCausalLM, which has the language-model head"):
        HookedTransformer.from_pretrained(make_hf_model("llama").model)
    with pytest.raises(UnsupportedModelError, match="no transformers model"):
        HookedTransformer.from_pretrained(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_subclass_of_a_supported_model_is_refused(make_hf_model: Callable[..., PreTrainedModel]) -> None:
    """It may compute something else."""
    hf = make_hf_model("llama")
    hf.__class__ = type("Patched", (type(hf),), {"__module__": __name__})
    with pytest.raises(UnsupportedModelError, match="Patched is no transformers model"):
        HookedTransformer.from_pretrained(hf)


def test_adapters_in_memory_are_refused(make_hf_model: Callable[..., PreTrainedModel]) -> None:
    """A wrapped projection has tensors that the table does not know."""
    hf: Any = make_hf_model("llama")
    hf.model.layers[0].self_attn.q_proj.register_parameter("lora_A", torch.nn.Parameter(Tensor([1.0])))
    with pytest.raises(CorruptWeightsError, match="q_proj.lora_A has no place"):
        HookedTransformer.from_pretrained(hf)


def test_model_on_the_meta_device_is_refused(make_hf_model: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(CorruptWeightsError, match="is not in memory"):
        HookedTransformer.from_pretrained(make_hf_model("llama").to("meta"))
