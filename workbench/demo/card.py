"""Writes the demo model's card from measurements, so that no number in it is typed by hand."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from workbench import HookedTransformer
from workbench.demo.measure import (
    N_REPEATS,
    N_REPEATS_ALONG,
    N_TEXTS,
    N_TEXTS_ALONG,
    SEGMENT,
    Ablation,
    HeadScores,
    Progress,
    ablations,
    copy_losses,
    head_scores,
    held_out_texts,
    random_repeats,
    task_scores,
    text_loss,
)

PROMPTS = (
    "Once there was a",
    "One morning Mara",
    "When Mara and Tobin went to the market, Mara gave the lantern to",
    "The capital of Veld is",
    "The keys near the castle",
    "The war lasted from the year 1732 to the year",
    "Roster: Ilse, Pavel, Karin, Hugo. It was raining at the mill. Roster again: Ilse,",
    "Tobin found a zorvant near the river. The zorvant was red. Then Lena met Tobin and saw the",
)

_CARD = string.Template("""# Demo model

A Llama-shaped language model of $n_parameters parameters for looking at attention: small enough to take apart by
hand, and trained on a world of its own, so that what it knows is known. `from_pretrained("demo")` loads it; so does
transformers.

- $shape
- Tokenizer: byte-level BPE of $d_vocab tokens; names, things, places and two-digit numbers are single tokens, with and
  without a leading space. `<|bos|>` starts every sequence, `<|eos|>` ends every text.
- Weights: float16, $megabytes MB. Licence: MIT, text and weights alike; all of it comes from `workbench/demo`.
- Training: $training.
  Rows mix texts of a seeded grammar (`corpus.py`) with random tokens that come back after random gaps (`rows.py`).
- Reproduce: `python -m workbench.demo.train --out FOLDER`; with `--checkpoints FOLDER` it keeps the states of the table
  "Along training". The seed fixes data and initial weights; rounding differs between processors, and so the weights do.

It speaks only of its invented world. Nothing in it is true, and it is of no use for anything but study.

## What it shows

Losses are in nats per token; those of a second copy leave out its first token, which nothing predicts. *Prefix
matching* is the mean attention to tokens that followed an earlier copy of the query's token, over the second copy of
`<|bos|>` + $segment random tokens twice ($n_repeats sequences, drawn without replacement). *Previous token* is the mean
attention to the token before, on the same sequences. *On BOS* is the mean attention to `<|bos|>` over all later tokens
of $n_texts texts that training did not see. *Without it* is the change when the head's output is set to zero: of the
loss on the second copy, of the prefix matching of $top, and of the loss on the texts.

- Loss on unseen texts: $text_loss. On random tokens: $first_loss in the first copy, $second_loss in the second.
- Induction: $top has prefix matching $top_score. It needs $feeder, an earlier layer's previous-token head
  ($feeder_score): without that, the prefix matching of $top changes by $feeder_effect.
- Attention sink: $sink puts $sink_mass of its attention on `<|bos|>`.

$heads

## Tasks

$tasks

Capital, river, indirect object: share of prompts whose most likely next token is right. Agreement: share of prompts
such as "The keys near the chair" where verbs of the subject's number are likelier than the others. Greater than:
probability of a later year after prompts such as "The war lasted from the year 1732 to the year 17".

A share of 0.5 is chance for indirect objects: the model does not keep apart who gives and who gets.

## Along training

Measured on the first $n_repeats_along of those sequences and the first $n_texts_along of those texts, so that the last
row is not quite what stands above. Head scores are the largest of any head.

$progress

## Greedy continuations

$samples
""")


def write_card(model: HookedTransformer, folder: Path, history: Sequence[Progress], training: str) -> None:
    """Measures ``model``, which was loaded from ``folder``, and writes ``folder / "README.md"``."""
    repeats, texts = random_repeats(model.tokenizer, N_REPEATS), held_out_texts(N_TEXTS)
    scores = head_scores(model, repeats, texts)
    top, sink = _largest(scores.prefix_matching), _largest(scores.bos_mass)
    effects = ablations(model, repeats, texts, top)
    feeder = _feeder(scores, effects, top)
    first_loss, second_loss = copy_losses(model, repeats)
    cfg = model.cfg
    heads = [
        (
            _name(layer, head),
            f"{scores.prefix_matching[layer, head]:.2f}",
            f"{scores.previous_token[layer, head]:.2f}",
            f"{scores.bos_mass[layer, head]:.2f}",
            f"{effects[layer][head].second_copy_loss:+.2f}",
            f"{effects[layer][head].prefix_matching:+.2f}",
            f"{effects[layer][head].text_loss:+.2f}",
        )
        for layer in range(cfg.n_layers)
        for head in range(cfg.n_heads)
    ]
    card = _CARD.substitute(
        n_parameters=f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        shape=f"{cfg.n_layers} layers, d_model {cfg.d_model}, {cfg.n_heads} heads of {cfg.d_head}, SwiGLU {cfg.d_mlp},"
        f" RMSNorm, rotary positions, context {cfg.n_ctx}, tied embeddings",
        d_vocab=f"{cfg.d_vocab:,}",
        megabytes=f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}",
        training=training,
        segment=SEGMENT,
        n_repeats=len(repeats),
        n_texts=len(texts),
        n_repeats_along=N_REPEATS_ALONG,
        n_texts_along=N_TEXTS_ALONG,
        text_loss=f"{text_loss(model, texts):.2f}",
        first_loss=f"{first_loss:.2f}",
        second_loss=f"{second_loss:.2f}",
        top=_name(*top),
        top_score=f"{scores.prefix_matching[top]:.2f}",
        feeder=_name(*feeder),
        feeder_score=f"{scores.previous_token[feeder]:.2f}",
        feeder_effect=f"{effects[feeder[0]][feeder[1]].prefix_matching:+.2f}",
        sink=_name(*sink),
        sink_mass=f"{scores.bos_mass[sink]:.2f}",
        heads=_table(
            (
                "Head",
                "Prefix matching",
                "Previous token",
                "On BOS",
                "Without it: second copy",
                f"{_name(*top)}",
                "texts",
            ),
            heads,
        ),
        tasks=_table(("Task", "Score"), [(name, f"{score:.2f}") for name, score in task_scores(model).items()]),
        progress=_table(
            ("Step", "Loss on texts", "First copy", "Second copy", "Best prefix matching", "Previous token", "On BOS"),
            [
                (
                    str(state.step),
                    f"{state.text_loss:.2f}",
                    f"{state.first_copy_loss:.2f}",
                    f"{state.second_copy_loss:.2f}",
                    f"{state.prefix_matching:.2f}",
                    f"{state.previous_token:.2f}",
                    f"{state.bos_mass:.2f}",
                )
                for state in history
            ],
        ),
        samples="\n".join(f"- **{prompt}**{_continuation(model, prompt)}" for prompt in PROMPTS),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _largest(scores: torch.Tensor) -> tuple[int, int]:
    """(layer, head) of the largest score in [layer, head]."""
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return layer, head


def _feeder(scores: HeadScores, effects: list[list[Ablation]], top: tuple[int, int]) -> tuple[int, int]:
    """(layer, head) of the previous-token head before ``top`` that ``top`` needs most."""
    earlier = [(layer, head) for layer in range(top[0]) for head in range(scores.previous_token.shape[1])]
    attending = [head for head in earlier if scores.previous_token[head] >= 0.5] or earlier or [top]
    return min(attending, key=lambda head: effects[head[0]][head[1]].prefix_matching)


def _name(layer: int, head: int) -> str:
    return f"L{layer}H{head}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def _continuation(model: HookedTransformer, prompt: str, max_new_tokens: int = 40) -> str:
    text = model.generate(prompt, max_new_tokens=max_new_tokens)
    return text.removeprefix(prompt).removesuffix(model.tokenizer.eos_token).replace("\n", " ")
