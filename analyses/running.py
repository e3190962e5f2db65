"""How analyses run a model: what goes in, which statistics come out, where a result comes from.

A model is a HookedTransformer, or anything with transformer_lens' ``cfg``, ``run_with_cache`` and hook names, such as a
TransformerBridge. The latter gives its patterns, so its statistics cost O(n²) memory, one layer at a time.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from workbench.analyses.prompts import DescribedTokens, quoted, text_frame
from workbench.analyses.result import Provenance
from workbench.analyses.support import check_plain_causal, emits_statistics
from workbench.kernels import AttentionMask, StatisticsRequest, pattern_statistics
from workbench.statistics import ModelStatistics
from workbench.tokens import check_tokens

Progress = Callable[[float, str], None]
Input = str | Sequence[str] | Tensor | DescribedTokens

MOST_ROUNDING = 0.1  # nats that a score may be off by rounding
TOKENS_PER_RUN = 8192  # statistics of so many tokens are held at a time
_PACKAGES = ("attention-workbench", "numpy", "torch", "transformers", "transformer-lens")


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token sequences with their real tokens first and any pads (id 0) after them.

    Where the pads were before changes nothing, as nobody attends to them and positions count real tokens. So column j
    is the j-th real token of every sequence.

    Args:
        tokens: int64 [sequence, pos].
        real: bool [sequence, pos].
        description: what they are, in one line of words.
    """

    tokens: Tensor
    real: Tensor
    description: str = ""

    @classmethod
    def read(cls, model: Any, input: Input, attention_mask: Tensor | None = None) -> Sequences:
        """Text or token ids ([pos] or [batch, pos]) with an optional mask (1 or true = real).

        Raises:
            ValueError: what the model refuses, a mask that does not fit, or a sequence without a real token.
        """
        if isinstance(input, DescribedTokens):
            return replace(cls.read(model, input.tokens, attention_mask), description=input.description)
        if isinstance(input, Tensor):
            sequences = cls._masked(check_tokens(input, model.cfg).cpu(), attention_mask)
        elif attention_mask is None:
            sequences = cls._tokenised(model, input)
        else:
            raise ValueError("text is padded and masked by the model; leave attention_mask out, or pass tokens")
        return replace(sequences, description=_in_words(model, sequences))

    @classmethod
    def _masked(cls, tokens: Tensor, attention_mask: Tensor | None) -> Sequences:
        if attention_mask is None:
            return cls(tokens, torch.ones_like(tokens, dtype=torch.bool))
        if not isinstance(attention_mask, Tensor):
            raise ValueError(f"attention_mask must be a tensor of 0 and 1, got {type(attention_mask).__name__}")
        mask = torch.atleast_2d(attention_mask).cpu()
        if mask.shape != tokens.shape:
            raise ValueError(f"attention_mask must have the tokens' shape {list(tokens.shape)}, got {list(mask.shape)}")
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("attention_mask must hold only 0 (pad) and 1 (real token)")
        return cls(*_real_first(tokens, mask.bool()))

    @classmethod
    def _tokenised(cls, model: Any, text: str | Sequence[str]) -> Sequences:
        if emits_statistics(model):
            tokens, real = model.to_tokens(text, return_attention_mask=True)
            return cls(*_real_first(tokens.cpu(), real.cpu()))
        if not isinstance(text, str):
            raise ValueError("several texts need a HookedTransformer; pass one text, or tokens of one length")
        tokens = model.to_tokens(text).cpu()
        return cls(tokens, torch.ones_like(tokens, dtype=torch.bool))

    @cached_property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence, int64 [sequence]."""
        return self.real.sum(dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> Sequences:
        """The same on a device."""
        return replace(self, tokens=self.tokens.to(device), real=self.real.to(device))

    def first(self, n_tokens: int) -> Sequences:
        """The first ``n_tokens`` tokens of each sequence."""
        if self.tokens.shape[1] <= n_tokens:
            return self
        description = f"the first {n_tokens:,} tokens of {self.description}"
        return Sequences(self.tokens[:, :n_tokens], self.real[:, :n_tokens], description)

    def batches(self, tokens_per_run: int = TOKENS_PER_RUN, *, one_length: bool = False) -> Iterator[Sequences]:
        """The same sequences in order, as many at a time as ``tokens_per_run`` allows (at least one).

        Args:
            one_length: only sequences of one length together.
        """
        cuts = {*range(0, len(self), max(1, tokens_per_run // self.tokens.shape[1])), len(self)}
        if one_length:
            cuts |= {i for i in range(1, len(self)) if self.lengths[i] != self.lengths[i - 1]}
        for first, end in pairwise(sorted(cuts)):
            width = int(self.lengths[first:end].max())
            yield Sequences(self.tokens[first:end, :width], self.real[first:end, :width])

    def digest(self) -> str:
        """SHA-256 of the token ids (int64) and the mask (bool), in row order."""
        content = hashlib.sha256(str(list(self.tokens.shape)).encode())
        content.update(self.tokens.contiguous().numpy().tobytes())
        content.update(self.real.contiguous().numpy().tobytes())
        return content.hexdigest()


def _real_first(tokens: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    lengths = real.sum(dim=1)
    if empty := (lengths == 0).nonzero().flatten().tolist():
        raise ValueError(f"sequence {empty[0]} has no real token; leave it out")
    order = (~real).long().argsort(dim=1, stable=True)[:, : int(lengths.max())]
    real = torch.arange(order.shape[1]) < lengths[:, None]
    return tokens.gather(1, order).masked_fill(~real, 0), real


def _in_words(model: Any, sequences: Sequences) -> str:
    """The beginning of the first sequence as text, and how many more there are."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return "token ids"
    ids = sequences.tokens[0, : min(40, int(sequences.lengths[0]))].tolist()
    frame = text_frame(model)
    words = quoted(tokenizer.decode([i for i in ids if i not in (*frame.before, *frame.after)]))
    words = words if len(ids) == int(sequences.lengths[0]) or words.endswith("…”") else f"{words[:-1]}…”"
    return words if len(sequences) == 1 else f"{words} and {len(sequences) - 1:,} more"


@torch.no_grad()
def attention_statistics(model: Any, sequences: Sequences, request: StatisticsRequest) -> Mapping[str, Any]:
    """Statistics of every layer, [layer, batch, head, …]. The request's labels must be tensors already.

    Raises:
        ValueError: a model that gives only its patterns, with padding or with attention that is not plainly causal.
    """
    mask = None if bool(sequences.real.all()) else sequences.real
    if emits_statistics(model):
        return _finite(model.run_with_statistics(sequences.tokens, request, attention_mask=mask, return_type=None)[1])
    if mask is not None:
        raise ValueError("sequences of unequal length need a HookedTransformer; pass sequences of one length")
    layers = []
    for layer in range(model.cfg.n_layers):
        name = f"blocks.{layer}.attn.hook_pattern"
        pattern = cached(model, sequences, [name])[name]
        check_plain_causal(pattern, layer)
        layers.append(pattern_statistics(pattern, mask=AttentionMask(), request=request))
    return _finite(ModelStatistics(layers, range(model.cfg.n_layers)))


def _finite(statistics: ModelStatistics) -> ModelStatistics:
    """The statistics of a model whose scores are numbers in every layer, of as many digits as weights need: means over
    others would mean nothing."""
    for name in {"lse", "entropy", "max_weight"} & set(statistics):
        broken = statistics[name].isnan().flatten(1).any(dim=1).nonzero().flatten().tolist()
        if broken:
            raise ValueError(
                f"the attention of layer {broken[0]} is not finite: the weights hold NaN or infinity, or its scores "
                "exceed the range of the model's type; load the model in float32, or mend the weights"
            )
    if "lse" not in statistics:  # of patterns, which are given
        return statistics
    lse = statistics["lse"]  # [layer, batch, head, query]; -inf where a query sees nothing
    largest = lse.masked_fill(lse.isinf(), 0).abs().flatten(1).amax(dim=1)
    unknown = (largest * torch.finfo(lse.dtype).eps > MOST_ROUNDING).nonzero().flatten().tolist()
    if unknown:
        raise ValueError(
            f"the attention scores of layer {unknown[0]} reach {float(largest[unknown[0]]):.1e}, of which "
            f"{str(lse.dtype).removeprefix('torch.')} keeps too few digits to tell weights apart; load the model in "
            "float64, or mend the weights"
        )
    return statistics


@torch.no_grad()
def cached(model: Any, sequences: Sequences, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Values of hook points ``blocks.{layer}…``; layers after the last of them do not run where the model can stop."""
    arguments: dict[str, Any] = {"names_filter": list(names)}
    if emits_statistics(model):
        arguments["stop_at_layer"] = max(int(name.split(".")[1]) for name in names) + 1
        arguments["attention_mask"] = sequences.real
    return model.run_with_cache(sequences.tokens, **arguments)[1]


def unembedded(model: Any, residual: Tensor) -> Tensor:
    """Logits [batch, pos, d_vocab] that the model makes of the stream behind its last layer, [batch, pos, d_model]."""
    return model.to_logits(residual) if emits_statistics(model) else model.unembed(model.ln_final(residual))


def provenance(model: Any, sequences: Sequences) -> Provenance:
    """What a result says of its model and its inputs."""
    cfg = model.cfg
    weights = getattr(cfg, "weights_description", None)
    return Provenance(
        model_name=str(getattr(cfg, "model_name", type(model).__name__)),
        revision=getattr(cfg, "revision", None),
        weights=weights
        or f"{str(cfg.dtype).removeprefix('torch.')}, as loaded by {type(model).__name__}, patterns materialised",
        inputs=sequences.description,
        inputs_sha256=sequences.digest(),
        n_sequences=len(sequences),
        n_tokens=int(sequences.real.sum()),
        bos=_bos_in_words(model, sequences),
        versions=_versions(),
    )


def weights_provenance(model: Any) -> Provenance:
    """The provenance of a result that comes from a model's weights alone."""
    none = torch.zeros(0, 1, dtype=torch.int64)
    return replace(provenance(model, Sequences(none, none.bool(), "weights alone, no text")), bos="no text")


def _bos_in_words(model: Any, sequences: Sequences) -> str:
    frame = text_frame(model)
    if not frame.before:
        return "BOS unknown (no tokenizer that has one)"
    n_with = int((sequences.tokens[:, 0] == frame.before[0]).sum())
    if n_with in (0, len(sequences)):
        return f"starting with {frame.name_before}" if n_with else f"not starting with {frame.name_before}"
    return f"{n_with} of {len(sequences)} starting with {frame.name_before}"


@cache
def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def silent(fraction: float, message: str) -> None:
    """The progress callback of whoever did not pass one."""
