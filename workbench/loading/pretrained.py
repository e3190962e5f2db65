"""From whatever names a model to the model."""

from __future__ import annotations

import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.config import AttentionBackend, RopeScaling, TransformerConfig
from workbench.errors import CorruptWeightsError, ModelNotFoundError, UnsupportedModelError
from workbench.loading import huggingface, sources
from workbench.loading.checkpoint import Checkpoint
from workbench.loading.families import find_family
from workbench.loading.families.common import Family
from workbench.loading.gguf import gguf_checkpoint
from workbench.loading.progress import Progress, terminal_progress
from workbench.loading.weights import convert_weights, differing, refuse_differing, refuse_other_tables
from workbench.paths import expand_home

if TYPE_CHECKING:
    from workbench.transformer import HookedTransformer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def load_pretrained(
    source: str | Path | nn.Module,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    n_ctx: int | None = None,
    rope_scaling: RopeScaling | None = None,
    attention_backend: AttentionBackend = "auto",
    progress: Progress | None = None,
) -> HookedTransformer:
    """Loads a model in evaluation mode; ``HookedTransformer.from_pretrained`` describes the arguments.

    Args:
        device: None means the CPU.
        revision: a branch, tag or commit; only for ids on the Hugging Face hub.
        progress: called as work that takes long proceeds; None shows a bar on the terminal.

    Raises:
        ModelNotFoundError: no model goes by ``source``; the message offers near names.
        UnsupportedModelError: an architecture or attribute that would give wrong numbers if it were ignored.
        CorruptWeightsError: weights that are truncated, or weights, configuration and tokenizer that do not belong
            together.
        ValueError: an argument that does not fit.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch.dtype such as torch.float32, got {dtype!r}")
    if n_ctx is not None and (isinstance(n_ctx, bool) or not isinstance(n_ctx, int) or n_ctx < 1):
        raise ValueError(f"n_ctx must be a positive integer, got {n_ctx!r}")
    place = torch.device(device or "cpu")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(place)!r} needs a GPU that this torch can use, and there is none; leave it out")
    if tokenizer is not None and not hasattr(tokenizer, "bos_token_id"):
        raise ValueError(f"tokenizer must be a transformers tokenizer, got {tokenizer!r}")
    with terminal_progress() if progress is None else nullcontext(progress) as report:
        checkpoint = open_checkpoint(source, tokenizer=tokenizer, revision=revision, progress=report)
        return _build(checkpoint, place, dtype, n_ctx, rope_scaling, attention_backend, report)


def open_checkpoint(
    source: str | Path | nn.Module, *, tokenizer: Any, revision: str | None, progress: Progress
) -> Checkpoint:
    """Finds out what ``source`` is, fetches it where need be, and opens it.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CorruptWeightsError: as ``load_pretrained``.
        ValueError: a revision for something that has none, or a source of a wrong type.
    """
    if isinstance(source, nn.Module):
        _refuse_revision(revision, "a model in memory")
        return huggingface.model_checkpoint(source, tokenizer=tokenizer)
    if isinstance(source, TransformerConfig):
        raise ValueError("a TransformerConfig has no weights; HookedTransformer(cfg) makes a model with new ones")
    if not isinstance(source, (str, Path)):
        raise ValueError(f"source must be a name, a path or a transformers model, got {source!r}")
    if source in sources.KNOWN_MODELS:
        _refuse_revision(revision, "a known name, which is one fixed artefact,")
        folder = sources.fetch(str(source), progress)
        return dataclasses.replace(huggingface.folder_checkpoint(folder, tokenizer=tokenizer), model_name=str(source))
    if (path := local_path(source)) is not None:
        _refuse_revision(revision, "a local path")
        opened = huggingface.folder_checkpoint if path.is_dir() else gguf_checkpoint
        return opened(path, tokenizer=tokenizer)
    folder = _from_hub(str(source), revision)
    checkpoint = huggingface.folder_checkpoint(folder, tokenizer=tokenizer, revision=folder.name)
    return dataclasses.replace(checkpoint, model_name=str(source), described_as=str(source))


def check_source(source: str) -> None:
    """Finds out whether ``source`` names something, without fetching more of it than its configuration.

    Raises:
        ModelNotFoundError: it does not, as ``load_pretrained`` would say.
    """
    if source not in sources.KNOWN_MODELS and local_path(source) is None:
        _from_hub(source, None, files=("config.json",))


def local_path(source: str | Path) -> Path | None:
    """The folder or file that ``source`` names; None where it looks like an id on the hub."""
    if not str(source):  # which would stand for the present folder
        raise ModelNotFoundError(f"no model is named; {sources.near_names('')}")
    path = expand_home(source)
    if path.exists():
        if not path.is_dir() and not path.is_file():  # a pipe, say, which would keep us waiting
            raise ModelNotFoundError(f"{path} is neither a folder nor a file")
        return path
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source) or source.endswith(".gguf"):
        raise ModelNotFoundError(f"there is no folder or file {source}")
    return None


def _from_hub(repo_id: str, revision: str | None, **options: Any) -> Path:
    try:
        return huggingface.download_from_hub(repo_id, revision, **options)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}; {sources.near_names(repo_id)}") from None


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ValueError(f"{what} has no revisions; leave revision out, got {revision!r}")


def _build(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    n_ctx: int | None,
    rope_scaling: RopeScaling | None,
    attention_backend: AttentionBackend,
    progress: Progress,
) -> HookedTransformer:
    from workbench.encoder_decoder import HookedEncoderDecoder
    from workbench.transformer import HookedTransformer

    family = find_family(checkpoint.hf_config, checkpoint.described_as)
    cfg = _configure(checkpoint, family, n_ctx)
    if rope_scaling is not None:
        if cfg.positional_embedding_type != "rotary":
            raise ValueError(
                f"rope_scaling changes rotary positions, but those of {checkpoint.described_as} are "
                f"{cfg.positional_embedding_type!r}; leave it out"
            )
        cfg = dataclasses.replace(cfg, rope_scaling=rope_scaling)
    _refuse_foreign_tokenizer(checkpoint, cfg.d_vocab)
    stored, wanted = checkpoint.weights_description, str(dtype).removeprefix("torch.")
    cfg = dataclasses.replace(
        cfg,
        model_name=checkpoint.model_name,
        revision=checkpoint.revision,
        weights_description=stored if stored.split()[-1] == wanted else f"{stored}, cast to {wanted}",
        device=device,
        dtype=dtype,
        attention_backend=attention_backend,
    )
    # Built without memory of its own: the converted tensors become the parameters.
    build = HookedTransformer if cfg.n_encoder_layers is None else HookedEncoderDecoder
    try:
        with torch.device("meta"):
            model = build(dataclasses.replace(cfg, device=torch.device("meta")), checkpoint.tokenizer)
    except RuntimeError:  # torch cannot even count the bytes
        raise CorruptWeightsError(f"{checkpoint.described_as}: the sizes in its configuration are absurd") from None
    repeats = {**family.copies, **({family.tied[0]: family.tied[1]} if cfg.tie_word_embeddings else {})}
    refuse_differing(checkpoint.tensors, repeats, family.base_prefix, checkpoint.described_as)
    refuse_other_tables(checkpoint.tensors, family.computed, family.base_prefix, checkpoint.described_as)
    state = convert_weights(
        checkpoint.tensors,
        family.weight_rules,
        cfg,
        {name: parameter.shape for name, parameter in model.named_parameters()},
        prefix=family.base_prefix,
        harmless=(*family.harmless_tensors, *family.computed, *repeats),
        described_as=checkpoint.described_as,
        progress=progress,
    )
    model.load_state_dict(state, assign=True)
    return model.to(device).eval()


def _configure(checkpoint: Checkpoint, family: Family, n_ctx: int | None) -> TransformerConfig:
    """What the checkpoint's configuration comes down to, as far as its tensors do not contradict it."""
    try:
        cfg = family.configure(checkpoint.hf_config, n_ctx)
    except ValueError as error:
        raise UnsupportedModelError(f"{checkpoint.described_as}: {error}") from None
    n_layers = max(cfg.n_layers, cfg.n_encoder_layers or 0)
    if n_layers > len(checkpoint.tensors):  # found out here, as building that many could take forever
        raise CorruptWeightsError(
            f"{checkpoint.described_as}: {n_layers:,} layers, but only {len(checkpoint.tensors)} tensors; "
            "config.json and weights do not belong together"
        )
    if cfg.tie_word_embeddings and family.unties and differing(checkpoint.tensors, family.tied, family.base_prefix):
        return dataclasses.replace(cfg, tie_word_embeddings=False)
    return cfg


def _refuse_foreign_tokenizer(checkpoint: Checkpoint, d_vocab: int) -> None:
    """Checks that the embedding has a row for every token.

    Those that were added to the vocabulary, as often for padding, may lack one: a text with such a token is refused
    when it comes.
    """
    if checkpoint.tokenizer is not None and (n_words := checkpoint.tokenizer.vocab_size) > d_vocab:
        raise CorruptWeightsError(
            f"{checkpoint.described_as}: the tokenizer has {n_words:,} tokens, but the model's vocabulary has "
            f"{d_vocab:,}; they do not belong together: give the model its own tokenizer"
        )
