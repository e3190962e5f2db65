"""Encoder–decoders: what each side reads, what the decoder sees of the encoder, and what it writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import MarianConfig, MarianMTModel, PreTrainedModel, PreTrainedTokenizerFast, T5Config
from transformers import T5ForConditionalGeneration as T5

from workbench import HookedTransformer, KVCache
from workbench.encoder_decoder import HookedEncoderDecoder

D_VOCAB, START = 61, 2
_MARIAN = {
    "vocab_size": D_VOCAB, "d_model": 24, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 90,
    "pad_token_id": START, "decoder_start_token_id": START, "eos_token_id": None, "forced_eos_token_id": None,
    "scale_embedding": True,
}  # fmt: skip
_T5 = {
    "vocab_size": D_VOCAB, "d_model": 24, "d_kv": 5, "d_ff": 20, "num_layers": 3, "num_decoder_layers": 2,
    "num_heads": 4, "decoder_start_token_id": START, "pad_token_id": START, "eos_token_id": None, "n_positions": 90,
}  # fmt: skip


@pytest.fixture(scope="module", params=["marian", "t5"])
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A random model of transformers that does not say the same word for ever. Read-only.

    What it reads of the encoder is weak, as it is nearly the same at each step; and its last norm turns round, as what
    it unembeds would else resemble the embedding of the last word most.
    """
    torch.manual_seed(0)
    model = MarianMTModel(MarianConfig(**_MARIAN)) if request.param == "marian" else T5(T5Config(**_T5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_positions.weight"):
                continue
            weak = name.endswith(("bias", "encoder_attn.out_proj.weight", "EncDecAttention.o.weight"))
            parameter.normal_(std=0.03 if weak else 0.3)
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter += 1.0
        is_marian = isinstance(model, MarianMTModel)
        norm = model.model.decoder.layers[-1].final_layer_norm if is_marian else model.decoder.final_layer_norm
        norm.weight.neg_()
    return model.eval()


@pytest.fixture(scope="module")
def model(reference: PreTrainedModel) -> HookedEncoderDecoder:
    """The same under our class, with a tokenizer whose template ends in EOS. Read-only."""
    vocabulary = {"</s>": 0, "<unk>": 1, "<pad>": START} | {f"w{i}": i for i in range(3, D_VOCAB)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    loaded = HookedTransformer.from_pretrained(reference, tokenizer=tokenizer)
    assert isinstance(loaded, HookedEncoderDecoder)
    return loaded


@pytest.fixture
def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [2, 17] of the encoder and their mask; the second text is padded on the right."""
    tokens = torch.randint(3, D_VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 11:] = 0
    return tokens, mask


def test_greedy_generation_equals_transformers(
    model: HookedEncoderDecoder, reference: PreTrainedModel, texts: tuple[torch.Tensor, torch.Tensor]
) -> None:
    tokens, mask = texts
    expected = reference.generate(
        tokens, attention_mask=mask, max_new_tokens=64, do_sample=False, num_beams=1, suppress_tokens=[START]
    )
    assert len(expected[0].unique()) > 5
    generated = model.generate(tokens, 64, attention_mask=mask, stop_at_eos=False)
    assert generated.tolist() == expected.tolist()
    begun = model.generate(tokens, 54, attention_mask=mask, decoder_input=expected[:, :11], stop_at_eos=False)
    assert begun.tolist() == expected.tolist()


@pytest.mark.parametrize("ablated", [None, "blocks.0.attn.hook_z", "blocks.1.cross_attn.hook_z"])
@pytest.mark.parametrize("size", [1, 7, 20])
def test_cached_decoding_equals_one_pass(
    model: HookedEncoderDecoder, texts: tuple[torch.Tensor, torch.Tensor], size: int, ablated: str | None
) -> None:
    """In pieces of any size, also without one head."""
    tokens, mask = texts
    decoder_tokens = torch.randint(3, D_VOCAB, (2, 20))
    without_head = [] if ablated is None else [(ablated, lambda z, hook: z.index_fill(2, torch.tensor([1]), 0.0))]
    with model.hooks(fwd_hooks=without_head):
        expected = model(tokens, attention_mask=mask, decoder_input=decoder_tokens)
        encoder_output, real = model.encode(tokens, attention_mask=mask)
        cache = KVCache()
        pieces = [
            model(encoder_output=encoder_output, attention_mask=real, decoder_input=piece, kv_cache=cache)
            for piece in decoder_tokens.split(size, dim=1)
        ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)
    if ablated is not None:
        assert not torch.allclose(model(tokens, attention_mask=mask, decoder_input=decoder_tokens), expected)


def test_the_decoder_reads_text_from_its_start_token_on(model: HookedEncoderDecoder) -> None:
    """The encoder's text has the tokenizer's template; the decoder's has none, as it goes on."""
    assert model.to_tokens("w5 w6").tolist() == [[5, 6, 0]]
    assert model.to_decoder_tokens("w5 w6").tolist() == [[START, 5, 6]]
    tokens, mask = model.to_decoder_tokens(["w5", "w6 w7"], padding_side="left", return_attention_mask=True)
    assert tokens[1].tolist() == [START, 6, 7] and mask.tolist() == [[False, True, True], [True] * 3]
    expected = model(torch.tensor([[5, 6, 0]]), decoder_input=torch.tensor([[START, 8, 9]]))
    torch.testing.assert_close(model("w5 w6", decoder_input="w8 w9"), expected)
    torch.testing.assert_close(model("w5 w6"), expected[:, :1])
    loss = model("w5 w6", "loss", decoder_input="w8 w9")
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(expected[0, :2], torch.tensor([8, 9])))


def test_generation_of_texts(model: HookedEncoderDecoder) -> None:
    """Texts of unequal length, on either side, are continued as each would be alone."""
    together = model.generate(["w5 w6 w7", "w8"], 6, decoder_input=["w9", "w10 w11"])
    alone = [model.generate(text, 6, decoder_input=begun) for text, begun in (("w5 w6 w7", "w9"), ("w8", "w10 w11"))]
    assert together == alone
    assert alone[1].startswith("w10 w11 w")


def test_cross_attention_reads_only_the_encoder(
    model: HookedEncoderDecoder, texts: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Without what it writes, the decoder does not notice what the encoder has read; pads get no weight."""
    tokens, mask = texts
    decoder_tokens = torch.randint(3, D_VOCAB, (2, 9))
    _, cache = model.run_with_cache(tokens, attention_mask=mask, decoder_input=decoder_tokens)
    pattern = cache["blocks.1.cross_attn.hook_pattern"]  # [batch, head, decoder pos, pos]
    assert pattern.shape == (2, 4, 9, 17)
    torch.testing.assert_close(pattern.sum(dim=-1), torch.ones(2, 4, 9))
    assert not pattern[1, :, :, 11:].any()
    drop = [(f"blocks.{layer}.hook_cross_attn_out", lambda x, hook: x * 0) for layer in range(2)]
    with model.hooks(fwd_hooks=drop):
        torch.testing.assert_close(
            model(tokens, decoder_input=decoder_tokens), model(tokens.flip(1), decoder_input=decoder_tokens)
        )


def test_statistics_of_each_stack(model: HookedEncoderDecoder, texts: tuple[torch.Tensor, torch.Tensor]) -> None:
    tokens, mask = texts
    decoder_tokens = torch.randint(3, D_VOCAB, (2, 9))
    _, cache = model.run_with_cache(tokens, attention_mask=mask, decoder_input=decoder_tokens)
    for stack, name, n_layers in (("encoder", "encoder_blocks.{}.attn", 3), ("cross", "blocks.{}.cross_attn", 2)):
        _, statistics = model.run_with_statistics(
            tokens, attention_mask=mask, decoder_input=decoder_tokens, collect_from=stack
        )
        assert len(statistics["entropy"]) == n_layers
        for layer in range(n_layers):
            pattern = cache[f"{name.format(layer)}.hook_pattern"]
            torch.testing.assert_close(
                statistics["entropy"][layer], torch.special.entr(pattern).sum(dim=-1), rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model(), "either input"),
        (lambda model: model("w5", decoder_input=["w6", "w7"]), "decoder_input has 2 texts, but the encoder read 1"),
        (lambda model: model.generate("w5", 2, decoder_input=["w6", "w7"]), "decoder_input has 2 texts"),
        (lambda model: model("w5", decoder_input="w6", decoder_attention_mask=torch.ones(1, 2)), "leave decoder_att"),
        (lambda model: model("w5", decoder_input=torch.tensor([[D_VOCAB]])), "vocabulary"),
        (lambda model: model.to_decoder_tokens("w5 " * 90), "context holds 90"),
        (lambda model: model.generate("w5", 90), "max_new_tokens must be between 1 and 89"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: HookedEncoderDecoder, call: Callable[[HookedEncoderDecoder], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(model)
