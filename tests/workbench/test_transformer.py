"""The model against transformers' implementation of the same weights, and against its own definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from workbench import HookedTransformer, MixtureOfExperts, RopeScaling, StatisticsRequest, TransformerConfig
from workbench.hooks import ReadOnlyHookPoint

PADS = 7


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def test_logits_and_patterns_equal_transformers(pair, tokens):
    expected = pair.reference(tokens, output_attentions=True)
    logits, cache = pair.model.run_with_cache(tokens)
    assert relative_error(logits, expected.logits) < 1e-4
    for layer, pattern in enumerate(expected.attentions):
        torch.testing.assert_close(cache["pattern", layer], pattern, atol=1e-4, rtol=0)


@torch.no_grad()
def test_flash_path_equals_transformers(pair, tokens):
    assert relative_error(pair.model(tokens), pair.reference(tokens).logits) < 1e-4


@torch.no_grad()
def test_residual_stream_equals_transformers_hidden_states(pair, tokens):
    hidden = pair.reference(tokens, output_hidden_states=True).hidden_states
    _, cache = pair.model.run_with_cache(tokens)
    for layer in range(pair.model.cfg.n_layers):
        assert relative_error(cache["resid_pre", layer], hidden[layer]) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_equals_transformers_and_the_unpadded_run(pair, tokens, side):
    real = slice(PADS, None) if side == "left" else slice(None, -PADS)
    mask = torch.zeros_like(tokens)
    mask[:, real] = 1
    mask[0] = 1  # one row without pads in the same batch
    logits = pair.model(tokens, attention_mask=mask)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    expected = pair.reference(tokens, attention_mask=mask, position_ids=positions).logits
    assert relative_error(logits[mask.bool()], expected[mask.bool()]) < 1e-4
    assert relative_error(logits[1:, real], pair.model(tokens[1:, real])) < 1e-4
    assert torch.isfinite(logits).all()


@torch.no_grad()
def test_a_pad_never_changes_a_real_token(pair, tokens):
    mask = torch.ones_like(tokens)
    mask[:, :PADS] = 0
    other = tokens.clone()
    other[:, :PADS] = (tokens[:, :PADS] + 5) % 23
    assert torch.equal(
        pair.model(tokens, attention_mask=mask)[:, PADS:], pair.model(other, attention_mask=mask)[:, PADS:]
    )
    losses = [pair.model(t, return_type="loss", attention_mask=mask) for t in (tokens, other)]
    assert torch.equal(*losses)


@torch.no_grad()
def test_packed_documents_equal_each_document_alone(pair, tokens):
    """Documents neither see each other nor shift each other's positions, and no loss crosses their border."""
    documents = torch.tensor([0] * 60 + [1] * 1 + [2] * 89).expand(3, -1)
    logits, losses = pair.model(tokens, return_type="both", loss_per_token=True, documents=documents)
    for document in (0, 1, 2):
        part = tokens[documents == document].view(3, -1)
        assert relative_error(logits[documents == document].view(3, part.shape[1], -1), pair.model(part)) < 1e-4
    border = documents[:, 1:] != documents[:, :-1]
    assert torch.equal(losses.isnan(), border)


@torch.no_grad()
def test_loss_is_next_token_cross_entropy(pair, tokens):
    expected = pair.reference(tokens, labels=tokens).loss
    torch.testing.assert_close(pair.model(tokens, return_type="loss"), expected)
    per_token = pair.model(tokens, return_type="loss", loss_per_token=True)
    assert per_token.shape == (3, 149)
    torch.testing.assert_close(per_token.mean(), expected)


@torch.no_grad()
def test_causality(pair, tokens):
    """Changing a later token changes no earlier logit, to the bit."""
    changed = tokens.clone()
    changed[:, 100] = (tokens[:, 100] + 1) % 23
    before, after = pair.model(tokens), pair.model(changed)
    torch.testing.assert_close(before[:, :100], after[:, :100], atol=0, rtol=0)
    assert not torch.equal(before[:, 100:], after[:, 100:])


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1, 2, -1, 3])
def test_stopping_and_restarting_at_a_layer_is_the_whole_run(pair, tokens, layer):
    mask = torch.ones_like(tokens)
    mask[1, :PADS] = 0
    residual = pair.model(tokens, stop_at_layer=layer, attention_mask=mask)
    logits = pair.model(residual, start_at_layer=layer, attention_mask=mask)
    assert torch.equal(logits, pair.model(tokens, attention_mask=mask))


@torch.no_grad()
def test_no_return_type_skips_the_unembedding(pair, tokens):
    assert pair.model(tokens, return_type=None) is None


@torch.no_grad()
def test_text_is_tokenised_padded_and_masked(pair):
    texts = ["a b c", "d e f g h i"]
    logits = pair.model(texts)
    assert logits.shape[:2] == (2, 7)
    for i, text in enumerate(texts):
        alone = pair.model(text)[0]
        assert relative_error(logits[i, : len(alone)], alone) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input": torch.tensor([[0, 23]])}, "vocabulary has 23"),
        ({"input": None}, "expected a text or several, got NoneType"),
        ({"input": torch.zeros(0, 3, 30), "start_at_layer": 1}, "must be a residual stream"),
        ({"input": torch.tensor([[0, -1]])}, "vocabulary has 23"),
        ({"input": torch.zeros(1, 0, dtype=torch.long)}, "not empty"),
        ({"input": torch.tensor([[0.5]])}, "must be integers"),
        ({"input": torch.zeros(1, 161, dtype=torch.long)}, "n_ctx"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "attention_mask": torch.tensor([[2, 1, 1, 1]])}, "only 0"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "documents": torch.ones(1, 3)}, "documents"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "position_ids": torch.ones(1, 3)}, "position_ids"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "attention_mask": [1, 1, 1, 1]}, "attention_mask .* got list"),
        ({"input": torch.zeros(1, 2, dtype=torch.long), "position_ids": torch.tensor([0, 0.7])}, "must be integers"),
        (
            {"input": torch.zeros(1, 2, dtype=torch.long), "documents": torch.tensor([[True, False]])},
            "must be integers",
        ),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "stop_at_layer": 1.5}, "must be a whole number"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "stop_at_layer": True}, "must be a whole number"),
        ({"input": torch.zeros(1, 4, 30), "start_at_layer": False}, "must be a whole number"),
        ({"input": torch.zeros(1, 4, 30), "start_at_layer": 2, "stop_at_layer": 1}, "must not lie behind"),
        ({"input": torch.zeros(1, 4, 30), "start_at_layer": -1, "stop_at_layer": -2}, "must not lie behind"),
        (
            {"input": torch.zeros(1, 4, 30).double(), "start_at_layer": 1},
            "of the model's torch.float32, got torch.floa",
        ),
        ({"input": torch.zeros(1, 4, 30), "start_at_layer": 1, "return_type": "both"}, "a loss needs tokens"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "stop_at_layer": 1, "return_type": "loss"}, "has no loss"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "stop_at_layer": 1, "return_type": "x"}, "return_type must be"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "prepend_bos": True}, "already tokens"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "return_type": "probabilities"}, "return_type"),
        ({"input": torch.zeros(1, 4, dtype=torch.long), "stop_at_layer": 4}, "stop_at_layer"),
        ({"input": torch.zeros(1, 4, 3), "start_at_layer": 1}, "residual stream"),
        ({"input": "a b", "attention_mask": torch.ones(1, 3)}, "leave attention_mask out"),
        ({"input": []}, "empty"),
        ({"input": torch.tensor([[3]]), "return_type": "loss"}, "next token"),
    ],
)
def test_input_that_does_not_fit_is_refused(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        pair.model(**arguments)


def test_gradients_equal_transformers(pair, tokens):
    """Loss and its gradient with respect to the embedding, through the flash path."""
    for side in pair:
        side.zero_grad()
    pair.reference(tokens, labels=tokens).loss.backward()
    pair.model(tokens, return_type="loss").backward()
    table = pair.reference.get_input_embeddings().weight.grad
    assert relative_error(pair.model.embed.W_E.grad, table) < 1e-4
    for side in pair:
        side.zero_grad()


def test_rotary_scores_depend_on_the_offset_only():
    """Su et al. 2021: a common shift of all positions changes no attention weight."""
    torch.manual_seed(0)
    cfg = TransformerConfig(
        n_layers=2, d_model=16, n_heads=2, d_head=8, d_mlp=32, d_vocab=11, n_ctx=4096,
        positional_embedding_type="rotary",
    )  # fmt: skip
    model = HookedTransformer(cfg).double().eval()
    tokens = torch.randint(0, 11, (1, 30))
    shifted = model(tokens, position_ids=torch.arange(30) + 1000)
    torch.testing.assert_close(model(tokens), shifted, atol=1e-6, rtol=0)


@torch.no_grad()
def test_without_positions_nothing_tells_bidirectional_order(pair, tokens):
    """The last query of a causal model without position information is invariant under permuting earlier tokens."""
    zero_positions = torch.zeros_like(tokens[:1])
    order = torch.cat((torch.randperm(149, generator=torch.Generator().manual_seed(0)), torch.tensor([149])))
    one_layer = {"stop_at_layer": 1, "position_ids": zero_positions}
    last = pair.model(tokens[:1], **one_layer)[:, -1]
    torch.testing.assert_close(pair.model(tokens[:1, order], **one_layer)[:, -1], last, atol=1e-4, rtol=1e-4)


def test_configuration_follows_dtype_and_round_trips(model):
    model.double()
    assert model.cfg.dtype == torch.float64
    assert model.blocks[0].attn.cfg is model.cfg
    assert TransformerConfig.from_dict(model.cfg.to_dict()) == model.cfg
    with pytest.raises(ValueError, match="unknown fields in the configuration: n_layer"):
        TransformerConfig.from_dict({**model.cfg.to_dict(), "n_layer": 3})


@pytest.mark.parametrize(
    "change",
    [{"n_heads": 0}, {"n_key_value_heads": 4}, {"act_fn": "swish"}, {"eps": 0.0}, {"attn_scale": float("nan")}],
)
def test_configuration_refuses_what_does_not_fit(model, change):
    fields = {**model.cfg.to_dict(), **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        TransformerConfig.from_dict(fields)


@torch.no_grad()
def test_half_precision_stays_near_float32(model, tokens):
    expected = model(tokens)
    model.to(torch.bfloat16)
    logits, statistics = model.run_with_statistics(tokens)
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits.float(), expected) < 0.15  # a few of bfloat16's 2^-8 through three layers
    assert statistics["entropy"].dtype == torch.float32


@torch.no_grad()
def test_statistics_in_float64_have_its_precision(model, tokens):
    model.double()
    _, statistics = model.run_with_statistics(tokens, StatisticsRequest(entropy=True))
    _, cache = model.run_with_cache(tokens, names_filter="blocks.1.attn.hook_pattern")
    expected = torch.special.entr(cache["pattern", 1]).sum(-1)
    torch.testing.assert_close(statistics["entropy"][1], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("part", [{"moe": 4}, {"moe": {"n_experts": 4}}, {"rope_scaling": {"factor": 2.0}}])
def test_parts_of_a_configuration_have_their_own_types(pair, part):
    with pytest.raises(ValueError, match=f"{next(iter(part))} must be a"):
        dataclasses.replace(pair.model.cfg, **part)


def test_a_model_is_made_from_a_configuration_alone(pair):
    with pytest.raises(ValueError, match="cfg must be a TransformerConfig, got dict"):
        HookedTransformer({"n_layers": 2})
    with pytest.raises(ValueError, match="HookedTransformer\\(cfg\\) makes"):
        HookedTransformer.from_pretrained(pair.model.cfg)


def test_hooks_come_as_a_list_of_pairs(pair, tokens):
    with pytest.raises(ValueError, match="list of pairs"):
        pair.model.run_with_hooks(tokens, fwd_hooks=("hook_embed", lambda x, hook: x))


def test_a_ramp_of_yarn_needs_its_bounds_in_order():
    with pytest.raises(ValueError, match="beta_slow must be below beta_fast"):
        RopeScaling(type="yarn", factor=4.0, original_context=64, beta_fast=1.0, beta_slow=32.0)


SMALL = {"n_layers": 2, "d_model": 12, "n_heads": 3, "d_head": 4, "d_mlp": 8, "d_vocab": 23, "n_ctx": 32}


@pytest.mark.parametrize(
    "options",
    [
        {"positional_embedding_type": "alibi"},
        {"positional_embedding_type": "relative"},
        {"positional_embedding_type": "rotary", "window_size": 5},
    ],
)
def test_pads_between_tokens_are_refused_where_distances_are_counted_in_columns(options):
    model = HookedTransformer(TransformerConfig(**SMALL, **options)).eval()
    tokens = torch.arange(9)[None]
    for mask in ([1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 1, 1]):
        with pytest.raises(ValueError, match="pad between real tokens"):
            model(tokens, attention_mask=torch.tensor([mask]))
    for mask in ([0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0, 0]):
        model(tokens, attention_mask=torch.tensor([mask]))


@pytest.mark.parametrize("kind", ["alibi", "relative", "none"])
def test_position_ids_are_refused_where_nothing_reads_them(kind):
    model = HookedTransformer(TransformerConfig(**SMALL, positional_embedding_type=kind))
    with pytest.raises(ValueError, match="position_ids have no effect"):
        model(torch.arange(5)[None], position_ids=torch.arange(5)[None] + 3)


def test_documents_have_no_common_length_to_scale_by():
    scaling = RopeScaling(type="dynamic", factor=2.0, original_context=8)
    model = HookedTransformer(TransformerConfig(**SMALL, positional_embedding_type="rotary", rope_scaling=scaling))
    with pytest.raises(ValueError, match="pass each document as a row"):
        model(torch.arange(6)[None], documents=torch.tensor([[0, 0, 0, 1, 1, 1]]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("glu_linear_offset", float("nan")), ("glu_linear_offset", "a"), ("alibi_slopes", (1.0, float("nan"), 1.0)),
        ("alibi_slopes", 3.0), ("attn_types", 5), ("eps", 10**400), ("embed_scale", 1e39), ("d_mlp", 10**30),
        ("dtype", torch.int32), ("dtype", "float32"),
    ],
)  # fmt: skip
def test_values_that_are_no_numbers_or_too_large_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        TransformerConfig(**SMALL | {"gated_mlp": True, field: value})


@pytest.mark.parametrize("dense_layers", [(7,), (-1,), ("0",), (True,), 3, None])
def test_dense_layers_are_layers_of_the_model(dense_layers):
    with pytest.raises(ValueError, match="dense_layers"):
        experts = MixtureOfExperts(n_experts=2, n_experts_per_token=1, dense_layers=dense_layers)
        TransformerConfig(**SMALL, moe=experts)


@pytest.mark.parametrize("fields", [None, [], {1: 2}, {"rope_scaling": 5}, {"moe": [1]}])
def test_configurations_that_are_no_dictionaries_are_refused(fields):
    with pytest.raises(ValueError, match="must be a dictionary"):
        TransformerConfig.from_dict(fields)


def test_generation_from_numbers_that_are_none_is_refused(model):
    with torch.no_grad():
        model.blocks[0].mlp.W_out[0, 0] = torch.nan
    for options in ({}, {"temperature": 1.0}):
        with pytest.raises(ValueError, match="logits are not numbers"):
            model.generate(torch.arange(5)[None], 3, **options)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_are_the_same_rows_of_the_whole_residual(pair, tokens, side):
    mask = torch.ones_like(tokens)
    mask[1, slice(None, PADS) if side == "left" else slice(-PADS, None)] = 0
    rows = torch.tensor([[9, 3, 3], [20, 0, 50]]).repeat(len(tokens), 1)[: len(tokens)]
    for first, last in ((0, 1), (1, 3), (2, 3)):
        stream = pair.model(tokens, attention_mask=mask, stop_at_layer=first)
        run = {"start_at_layer": first, "stop_at_layer": last, "attention_mask": mask}
        whole, some = pair.model(stream, **run), pair.model(stream, rows=rows, **run)
        expected = torch.stack([residual[wanted] for residual, wanted in zip(whole, rows, strict=True)])
        torch.testing.assert_close(some, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"use_unembed_bias": True, "output_logits_soft_cap": 3.0, "logit_scale": 0.5}])
def test_logits_of_some_tokens_are_those_of_all(options):
    torch.manual_seed(0)
    fields = {"n_layers": 1, "d_model": 12, "n_heads": 2, "d_head": 6, "d_mlp": 8, "d_vocab": 20, "n_ctx": 8}
    model = HookedTransformer(TransformerConfig(**fields, **options)).double()
    if options:
        model.unembed.b_U.normal_()
    residual, tokens = torch.randn(2, 3, 12, dtype=torch.float64), torch.tensor([7, 0, 19, 7])
    torch.testing.assert_close(model.to_logits(residual, tokens), model.to_logits(residual)[..., tokens])


@torch.no_grad()
def test_a_run_from_z_is_the_rest_of_the_run(pair, tokens):
    model, rows = pair.model, torch.full((len(tokens), 1), 11)
    n_layers = model.cfg.n_layers
    for layer in range(n_layers):
        names = [f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.attn.hook_z"]
        expected, cache = model.run_with_cache(tokens, stop_at_layer=n_layers, names_filter=names)
        run = {"start_at_layer": layer, "stop_at_layer": n_layers, "z": cache[names[1]]}
        torch.testing.assert_close(model(cache[names[0]], **run), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(cache[names[0]], rows=rows, **run), expected[:, 11:12], rtol=1e-5, atol=1e-5)
        halved = {"fwd_hooks": [(names[1], lambda z, hook: z * 0.5)]}
        edited = model.run_with_hooks(tokens, stop_at_layer=n_layers, **halved)
        torch.testing.assert_close(model.run_with_hooks(cache[names[0]], **run, **halved), edited, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_hooks_see_every_position_whatever_rows_are_asked_for(pair, tokens):
    """And an edit of theirs counts, at every hook point of the last layer."""
    model, rows = pair.model, torch.full((len(tokens), 1), 11)
    last = model.cfg.n_layers
    for name in model.active_hook_names(lambda name: name.startswith(f"blocks.{last - 1}.")):
        if isinstance(model.hook_dict[name], ReadOnlyHookPoint):
            continue
        hook = {"fwd_hooks": [(name, lambda x, hook: x * 0.5)], "stop_at_layer": last}
        expected = model.run_with_hooks(tokens, **hook)[:, 11:12]
        torch.testing.assert_close(model.run_with_hooks(tokens, rows=rows, **hook), expected, rtol=1e-5, atol=1e-5)
        _, cache = model.run_with_cache(tokens, rows=rows, stop_at_layer=last, names_filter=name)
        _, whole = model.run_with_cache(tokens, stop_at_layer=last, names_filter=name)
        torch.testing.assert_close(cache[name], whole[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": torch.zeros(2, 1, dtype=torch.long)}, "pass stop_at_layer"),
        ({"rows": torch.zeros(2, 1, dtype=torch.long), "stop_at_layer": 0}, "a layer that runs"),
        ({"rows": torch.zeros(1, 1, dtype=torch.long), "stop_at_layer": 1}, "for a batch of 2, got torch.int64"),
        ({"rows": torch.zeros(2, dtype=torch.long), "stop_at_layer": 1}, r"rows must be integers \[batch, row\]"),
        ({"rows": torch.zeros(2, 1), "stop_at_layer": 1}, "got torch.float32"),
        ({"rows": torch.tensor([[0], [4]]), "stop_at_layer": 1}, "from 0 to 3, got 0 to 4"),
        ({"rows": torch.tensor([[-1], [3]]), "stop_at_layer": 1}, "from 0 to 3, got -1 to 3"),
        ({"z": torch.zeros(2, 4, 1, 1)}, "pass start_at_layer"),
        ({"z": torch.zeros(2, 4, 1, 1), "stop_at_layer": 0}, "of a layer that runs"),
    ],
)
def test_rows_and_z_that_fit_no_run_are_refused(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        pair.model(torch.zeros(2, 4, dtype=torch.long), **arguments)
