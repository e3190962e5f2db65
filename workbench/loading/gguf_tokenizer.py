"""The tokenizer inside a GGUF file, rebuilt as a transformers tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from workbench.errors import CorruptWeightsError, UnsupportedModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

# The regular expressions by which Llama 3 and Qwen2 cut text before they merge; \p{N} counts tell them apart.
_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build_tokenizer(fields: Mapping[str, Any], described_as: str) -> Any:
    """A fast transformers tokenizer from a GGUF file's metadata, or None where it holds none.

    Encoded without special tokens, text gives the ids that the model was trained on; whether a BOS comes first is the
    model's decision.

    Raises:
        UnsupportedModelError: a kind of tokenizer, or a way to cut text before merging, that is not supported.
        CorruptWeightsError: metadata that contradicts itself, or has other types than the format.
    """
    try:
        return _build(fields, described_as)
    except (TypeError, AttributeError, OverflowError) as error:
        raise CorruptWeightsError(
            f"{described_as}: the tokenizer holds a value of a wrong type ({error}); pass tokenizer=… instead"
        ) from None


def _build(fields: Mapping[str, Any], described_as: str) -> Any:
    kind = fields.get("tokenizer.ggml.model")
    if kind is None:
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{described_as}: the tokenizer {kind!r} is not supported; pass tokenizer=… (a transformers tokenizer)"
        )
    tokens = list(fields.get("tokenizer.ggml.tokens", ()))
    types = list(fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)))
    if not tokens or len(types) != len(tokens):
        raise CorruptWeightsError(f"{described_as}: {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(tokens, fields, described_as)
    else:
        tokenizer = _sentencepiece_bpe(tokens, types, fields, described_as)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return _wrap(tokenizer, tokens, fields, described_as)


def _byte_level_bpe(tokens: Sequence[str], fields: Mapping[str, Any], described_as: str) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", ())]
    cut = fields.get("tokenizer.ggml.pre", "default")
    if cut not in _CUTS:
        raise UnsupportedModelError(
            f"{described_as}: the pre-tokenizer {cut!r} is not supported (supported are {', '.join(_CUTS)}); "
            "pass tokenizer=… (a transformers tokenizer)"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(vocabulary, merges, described_as, ignore_merges=cut in _LLAMA_3))
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _CUTS[cut]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2_cut() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_cut() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_cut()])


def _llama_3_cut() -> pre_tokenizers.PreTokenizer:
    return _regex_cut(_CONTRACTIONS_AND_WORDS + r"\p{N}{1,3}|" + _REST)


def _qwen2_cut() -> pre_tokenizers.PreTokenizer:
    return _regex_cut(_CONTRACTIONS_AND_WORDS + r"\p{N}|" + _REST)


def _regex_cut(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
_CUTS = {
    "gpt-2": _gpt2_cut,
    "smollm": _smollm_cut,
    "qwen2": _qwen2_cut,
    **dict.fromkeys(_LLAMA_3, _llama_3_cut),
}


def _sentencepiece_bpe(
    tokens: Sequence[str], types: Sequence[int], fields: Mapping[str, Any], described_as: str
) -> Tokenizer:
    """SentencePiece's BPE as Llama 1, 2 and Mistral use it: "▁" for spaces, bytes for characters without a token.

    It keeps a score for each token instead of a list of merges: of all neighbours that join to a token, those whose
    token scores highest are joined first. Each way to cut a token in two tokens is thus a merge, ranked by its score.
    """
    scores = fields.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise CorruptWeightsError(f"{described_as}: {len(tokens)} tokens but {len(scores)} token scores")
    if fields.get("tokenizer.ggml.remove_extra_whitespaces") or fields.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedModelError(
            f"{described_as}: the tokenizer normalises text in a way that is not supported; pass tokenizer=…"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    mergeable = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(mergeable, key=lambda token: -scores[mergeable[token]])
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        _bpe(vocabulary, merges, described_as, byte_fallback=True, unk_token=unknown, fuse_unk=unknown is not None)
    )
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _bpe(vocabulary: dict[str, int], merges: list[Any], described_as: str, **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # what tokenizers raises when a merge names a token that is not there
        reason = str(error).partition("\n")[0]
        raise CorruptWeightsError(f"{described_as}: the tokenizer's merges do not fit its tokens ({reason})") from None


def _wrap(tokenizer: Tokenizer, tokens: Sequence[str], fields: Mapping[str, Any], described_as: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    named: dict[str, str] = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        if key == "bos" and fields.get("tokenizer.ggml.pre") == "qwen2":
            continue  # such files name a token that Qwen2 never starts with
        if index is not None:
            if not 0 <= index < len(tokens):
                raise CorruptWeightsError(f"{described_as}: {key}_token_id is {index}, of {len(tokens)} tokens")
            named[f"{name}_token"] = tokens[index]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=fields.get("tokenizer.chat_template"),
        **named,
    )
