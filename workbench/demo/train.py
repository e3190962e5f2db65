"""Trains the demo model from nothing: ``python -m workbench.demo.train``. Seeded; minutes on two CPU cores.

Writes a folder in Hugging Face's layout (Llama, float16) with a model card. ``--checkpoints FOLDER`` keeps the model's
states along the way, each as such a folder, so that the phase change of induction can be looked at afterwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from workbench import HookedTransformer, TransformerConfig
from workbench.demo.card import write_card
from workbench.demo.measure import Progress, measure_progress
from workbench.demo.muon import Muon
from workbench.demo.rows import training_batch
from workbench.demo.tokenizer import train_tokenizer

CHECKPOINTS = (0, 250, 500, 750, 1000, 1250, 1500, 1750, 2000, 2500, 3000, 4000, 5500)
WARM_UP = 100


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the training with a learning-rate schedule of its own.

    ``rate`` is its highest learning rate, as a share of the recipe's; ``random_share`` that of random pieces in a row.
    """

    steps: int
    n_rows: int
    row_length: int
    random_share: float
    rate: float

    def rate_at(self, step: int) -> float:
        """Up over WARM_UP steps, level for a fifth of the stage, then down to 5 %."""
        return self.rate * min(1.0, (step + 1) / WARM_UP) * (1 - 0.95 * max(0.0, (step / self.steps - 0.2) / 0.8))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the model is trained. ``lr`` is Muon's for the matrices, ``vector_lr`` AdamW's for embeddings and gains.

    Random tokens that repeat bring induction about in the first stage. The others are for the texts: short rows, whose
    every text has people of its own, then long ones.
    """

    stages: tuple[Stage, ...] = (
        Stage(steps=3000, n_rows=8, row_length=256, random_share=0.4, rate=1.0),
        Stage(steps=2500, n_rows=16, row_length=128, random_share=0.1, rate=0.7),
        Stage(steps=1500, n_rows=4, row_length=512, random_share=0.15, rate=0.3),
    )
    lr: float = 0.02
    vector_lr: float = 3e-3
    seed: int = 0

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def shortened(self, steps: int) -> Recipe:
        """The first ``steps`` steps of the recipe, to try whether it runs."""
        stages, left = [], steps
        for stage in self.stages:
            stages.append(dataclasses.replace(stage, steps=min(stage.steps, left)))
            left -= stages[-1].steps
        return dataclasses.replace(self, stages=tuple(stage for stage in stages if stage.steps))

    def at(self, step: int) -> tuple[Stage, int]:
        """The stage of a step, and the step within it."""
        for stage in self.stages[:-1]:
            if step < stage.steps:
                return stage, step
            step -= stage.steps
        return self.stages[-1], step


def demo_config(tokenizer: Any) -> TransformerConfig:
    return TransformerConfig(
        n_layers=4,
        d_model=128,
        n_heads=4,
        d_head=32,
        d_mlp=352,
        d_vocab=len(tokenizer),
        n_ctx=512,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        positional_embedding_type="rotary",
        tie_word_embeddings=True,
        model_name="demo",
    )


@torch.no_grad()
def initialise(model: HookedTransformer, generator: torch.Generator) -> None:
    """Starts every head as one that attends to like tokens nearby and copies what it finds.

    W_K = W_Q and W_O = W_Vᵀ, as trained Transformers tend to have it (Trockman & Kolter 2023, "Mimetic initialization
    of self-attention layers"), and embeddings that share one direction, which lets a rotary head attend by position
    alone. From there the circuit of induction forms in about a tenth of the steps.
    """
    std = model.cfg.d_model**-0.5
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        if parameter.dim() > 1:
            parameter.normal_(std=std, generator=generator)
    parameters["embed.W_E"].add_(torch.randn(model.cfg.d_model, generator=generator) * std)
    for layer in range(model.cfg.n_layers):
        prefix = f"blocks.{layer}.attn"
        parameters[f"{prefix}.W_K"].copy_(parameters[f"{prefix}.W_Q"])
        parameters[f"{prefix}.W_O"].copy_(parameters[f"{prefix}.W_V"].mT)


def train(
    recipe: Recipe, tokenizer: Any, watch: Callable[[HookedTransformer, Progress], None] | None = None
) -> tuple[HookedTransformer, list[Progress]]:
    """The trained model in eval mode, and what was measured at the checkpoints and at the end.

    ``watch`` is called with the model and the measurement at each of them.
    """
    model = HookedTransformer(demo_config(tokenizer), tokenizer)
    initialise(model, torch.Generator().manual_seed(recipe.seed))
    optimisers = _optimisers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, partial(_rate, recipe)) for each in optimisers]
    history: list[Progress] = []

    def measure(step: int) -> None:
        history.append(measure_progress(model.eval(), step))
        if watch is not None:
            watch(model, history[-1])

    for step in range(recipe.steps):
        if step in CHECKPOINTS:
            measure(step)
        stage, _ = recipe.at(step)
        tokens = training_batch(
            tokenizer,
            step,
            n_rows=stage.n_rows,
            length=stage.row_length,
            random_share=stage.random_share,
            seed=recipe.seed,
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(tokens, return_type="loss")
        loss.backward()
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
    measure(recipe.steps)
    return model, history


def _optimisers(model: HookedTransformer, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() > 1]
    vectors = [model.embed.W_E, *(parameter for parameter in model.parameters() if parameter.dim() == 1)]
    return [
        Muon(matrices, lr=recipe.lr),
        torch.optim.AdamW(vectors, lr=recipe.vector_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _rate(recipe: Recipe, step: int) -> float:
    stage, within = recipe.at(step)
    return stage.rate_at(within)


def save(model: HookedTransformer, folder: Path) -> None:
    """Writes config.json, model.safetensors (float16) and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.half().contiguous() for name, weight in huggingface_weights(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(huggingface_config(model), indent=2) + "\n", encoding="utf-8")
    model.tokenizer.save_pretrained(folder)


def huggingface_config(model: HookedTransformer) -> dict[str, Any]:
    """The model's shape as transformers' LlamaForCausalLM takes it."""
    cfg, tokenizer = model.cfg, model.tokenizer
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float16",
        "head_dim": cfg.d_head,
        "hidden_act": cfg.act_fn,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_mlp,
        "max_position_embeddings": cfg.n_ctx,
        "num_attention_heads": cfg.n_heads,
        "num_hidden_layers": cfg.n_layers,
        "num_key_value_heads": cfg.n_key_value_heads,
        "rms_norm_eps": cfg.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rotary_base},
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "vocab_size": cfg.d_vocab,
    }


def huggingface_weights(model: HookedTransformer) -> dict[str, Tensor]:
    """The weights under transformers' names for Llama, linear layers as [out, in]."""
    ours = model.state_dict()
    weights = {"model.embed_tokens.weight": ours["embed.W_E"], "model.norm.weight": ours["ln_final.w"]}
    for layer in range(model.cfg.n_layers):
        for name, (our_name, convert) in _LAYER_WEIGHTS.items():
            weights[f"model.layers.{layer}.{name}.weight"] = convert(ours[f"blocks.{layer}.{our_name}"])
    return weights


_LAYER_WEIGHTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "input_layernorm": ("ln1.w", lambda gain: gain),
    "self_attn.q_proj": ("attn.W_Q", lambda heads: heads.mT.flatten(0, 1)),
    "self_attn.k_proj": ("attn.W_K", lambda heads: heads.mT.flatten(0, 1)),
    "self_attn.v_proj": ("attn.W_V", lambda heads: heads.mT.flatten(0, 1)),
    "self_attn.o_proj": ("attn.W_O", lambda heads: heads.flatten(0, 1).T),
    "post_attention_layernorm": ("ln2.w", lambda gain: gain),
    "mlp.gate_proj": ("mlp.W_gate", lambda weight: weight.T),
    "mlp.up_proj": ("mlp.W_in", lambda weight: weight.T),
    "mlp.down_proj": ("mlp.W_out", lambda weight: weight.T),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m workbench.demo.train", description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write (default: the demo's)")
    parser.add_argument("--steps", type=int, help="stop after so many steps (default: the whole recipe)")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--checkpoints", type=Path, help="folder for the model's states along the way")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    torch.set_num_threads(options.threads)
    console, recipe = Console(), Recipe(seed=options.seed)
    if options.steps is not None:
        recipe = recipe.shortened(options.steps)
    start = time.monotonic()
    tokenizer = train_tokenizer(1792, n_context=512)

    def watch(model: HookedTransformer, state: Progress) -> None:
        console.print(state)
        if options.checkpoints is not None:
            save(model, options.checkpoints / f"step-{state.step:05d}")

    model, history = train(recipe, tokenizer, watch)
    save(model, options.out)
    training = (
        " and ".join(f"{stage.steps} steps of {stage.n_rows} × {stage.row_length} tokens" for stage in recipe.stages)
        + f", seed {recipe.seed}, {(time.monotonic() - start) / 60:.1f} minutes on {options.threads} CPU threads"
    )
    # The card describes the files, so it measures what is read back from them.
    write_card(HookedTransformer.from_pretrained(options.out), options.out, history, training)
    console.print(f"Wrote {options.out}: {training}")


if __name__ == "__main__":
    main()
