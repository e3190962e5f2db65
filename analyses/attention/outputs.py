"""What heads write, compared: of how many directions it is, and whose is alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.running import Progress, Sequences, cached
from workbench.analyses.support import depends_on_length

TOKENS_AT_A_TIME = 64  # the outputs of all heads are held for so many


@torch.no_grad()
def compare_outputs(model: Any, sequences: Sequences, progress: Progress) -> tuple[np.ndarray, np.ndarray]:
    """Correlation of what any two heads write, [head, head'], and the effective rank of what each does, [layer, head].

    The output of a head is z W_O [token, d_model], less its mean over tokens; the first token of a sequence, where
    every head can only read itself, is left out. The correlation of two heads is the sum over tokens of the inner
    product of their outputs, over the root of the product of their squared lengths: 1 where both write the same.
    The effective rank is (Σ λ)² / Σ λ² of the covariance's eigenvalues λ, 1 for a single direction, d_head at most.
    NaN for a head whose output never changes.
    """
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(n_layers)]
    W_O = torch.stack([model.blocks[layer].attn.W_O for layer in range(n_layers)]).double()  # [layer, head, d_head, d]
    products = torch.zeros(n_layers * n_heads, n_layers * n_heads, dtype=torch.float64, device=W_O.device)
    sums = torch.zeros(n_layers * n_heads, W_O.shape[-1], dtype=torch.float64, device=W_O.device)
    second = torch.zeros(n_layers, n_heads, W_O.shape[2], W_O.shape[2], dtype=torch.float64, device=W_O.device)
    z_sums = torch.zeros(n_layers, n_heads, W_O.shape[2], dtype=torch.float64, device=W_O.device)
    n = n_done = 0
    for batch in sequences.batches(1024, one_length=depends_on_length(model)):
        batch = batch.to(model.cfg.device)
        values = cached(model, batch, names)
        counted = batch.real.clone()
        counted[:, 0] = False
        z = torch.stack([values[name][counted] for name in names]).double()  # [layer, token, head, d_head]
        for some in z.split(TOKENS_AT_A_TIME, dim=1):
            written = torch.einsum("lthe,lhed->lhtd", some, W_O).flatten(0, 1)  # [layer · head, token, d_model]
            products += written.flatten(1) @ written.flatten(1).T
            sums += written.sum(dim=1)
        second += torch.einsum("lthe,lthf->lhef", z, z)
        z_sums += z.sum(dim=1)
        n, n_done = n + z.shape[1], n_done + len(batch)
        progress(n_done / len(sequences), f"outputs of {n_done} of {len(sequences)} sequences")
    covariance = second / n - torch.einsum("lhe,lhf->lhef", z_sums, z_sums) / n**2
    correlations = _correlations(products / n - sums @ sums.T / n**2, products.diagonal() / n)
    changes = np.isfinite(correlations.diagonal()).reshape(n_layers, n_heads)
    return correlations, np.where(changes, _ranks(covariance, W_O), np.nan)


def _correlations(centred: Tensor, squares: Tensor) -> np.ndarray:
    """Of products [head, head'] less those of the means; ``squares`` are the mean squared lengths before that."""
    variance = centred.diagonal()
    varies = variance > 1e-10 * squares  # below, what is left of the difference is rounding
    length = torch.where(varies, variance, torch.nan).sqrt()
    return (centred / length[:, None] / length).clamp(-1, 1).cpu().numpy()


def _ranks(covariance: Tensor, W_O: Tensor) -> np.ndarray:
    """Effective rank of outputs, from the covariance of z, [layer, head, d_head, d_head].

    The eigenvalues of W_Oᵀ C W_O other than 0 are those of C W_O W_Oᵀ.
    """
    product = covariance @ (W_O @ W_O.transpose(-1, -2))
    trace = product.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    of_square = (product @ product).diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return (trace.square() / of_square).cpu().numpy()
