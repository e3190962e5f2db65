"""Linear attention: a kernel feature map instead of the softmax, so that a fixed state replaces all earlier keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.components.heads import HeadWeights, project
from workbench.config import TransformerConfig
from workbench.context import AttentionContext
from workbench.hooks import HookPoint, ReadOnlyHookPoint

# S = Σ_j φ(k_j) v_jᵀ [batch, kv head, d_head, d_head] and s = Σ_j φ(k_j) [batch, kv head, d_head], of the keys so far.
LinearState = tuple[Tensor, Tensor]


class LinearAttention(HeadWeights):
    """z_i = φ(q_i)ᵀ S_i / φ(q_i)ᵀ s_i per head, S_i = Σ φ(k_j) v_jᵀ, s_i = Σ φ(k_j); out = Σ_heads z W_O + b_O.

    The sums run over the keys j that query i sees: all real ones up to i, or all real ones where attention is
    bidirectional (a window is not heeded). φ(x) = elu(x) + 1, elementwise. q is not scaled: ``attn_scale`` and
    ``attn_temperature`` are those of a softmax. QK-norm and rotary positions act before φ, which does not commute with
    rotations: here, unlike in a softmax layer, rotary scores are not of offsets alone.

    Time and memory grow linearly with the text. A hook on ``hook_pattern`` makes this layer compute the equal quadratic
    form instead: [batch, n_heads, query, key], rows sum to 1, and what the hook returns multiplies v.
    ``hook_state`` is read-only: the final S, [batch, n_key_value_heads, d_head, d_head]. There are no scores and no
    statistics' hooks. Rows of padding give z = 0.
    With a ``kv_cache`` the layer remembers its sums instead of keys and values.

    Source: Katharopoulos et al. 2020, equations 4 to 12.

    Raises (when called):
        ValueError: packed documents, which one running state cannot keep apart; a kv_cache with a window, which a state
            cannot obey; a hook on the pattern with ``attention_backend="flash"`` or with earlier keys in a kv_cache.
    """

    def __init__(self, cfg: TransformerConfig, layer: int) -> None:
        super().__init__(cfg, rotary=cfg.positional_embedding_type == "rotary")
        self.layer = layer
        self.hook_pattern, self.hook_state = HookPoint(), ReadOnlyHookPoint()

    def forward(
        self, q_input: Tensor, k_input: Tensor, v_input: Tensor, context: AttentionContext, *,
        rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Inputs [batch, pos, d_model], or with a head axis before d_model; returns [batch, pos, d_model], or with
        ``rows``, int64 [batch, row], the outputs of those positions alone."""
        q = self.hook_q(project(q_input, self.W_Q, self.b_Q))  # [batch, pos, n_heads, d_head]
        k = self.hook_k(project(k_input, self.W_K, self.b_K))  # [batch, pos, n_key_value_heads, d_head]
        v = self.hook_v(project(v_input, self.W_V, self.b_V))
        q, k = self._positioned(q, k, context)
        z = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context)
        return self.out(self.hook_z(z.transpose(1, 2)), rows)

    def _positioned(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Normalised and rotated as the configuration says; the keys of one pass stand where its queries stand."""
        first = self.cfg.qk_norm is not None and not self.cfg.qk_norm_after_rotary
        if first:
            q, k = self._normalise(q, self.q_norm), self._normalise(k, self.k_norm)
        rotation = context.positions.query_rotation
        if rotation is not None:
            q, k = self.hook_rot_q(self._rotate(q, rotation)), self.hook_rot_k(self._rotate(k, rotation))
        if self.cfg.qk_norm is not None and not first:
            q, k = self._normalise(q, self.q_norm), self._normalise(k, self.k_norm)
        return q, k

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """q [batch, n_heads, pos, d_head], k and v [batch, n_key_value_heads, pos, d_head] → z, of q's shape."""
        mask, cache = context.mask, context.cache
        if mask.documents is not None:
            raise ValueError(
                "linear attention keeps one running state, which cannot keep packed documents apart; "
                "pass each document as a row of its own, padded, instead of documents"
            )
        if cache is not None and cache.window is not None:
            raise ValueError("linear attention's state cannot forget a token, so its kv_cache must not have a window")
        state = None if cache is None else cache.state(self.layer)
        key_real = None if mask.key_padding is None else mask.key_padding[:, -k.shape[2] :]  # those of this pass
        with torch.autocast(q.device.type, enabled=False):  # sums stay wide
            if self._materialises(state):
                pattern = linear_attention_pattern(q, k, causal=mask.causal, key_real=key_real)
                z = _apply_pattern(self.hook_pattern(_real_rows(pattern, mask.query_padding)), v)
                state = linear_state(k, v, key_real=key_real)
            else:
                z, state = linear_attention(q, k, v, causal=mask.causal, key_real=key_real, state=state)
        if self.hook_state.has_hooks():
            self.hook_state(state[0].to(v.dtype))
        if cache is not None:
            cache.set_state(self.layer, state)
        return _real_rows(z, mask.query_padding)

    def _materialises(self, state: LinearState | None) -> bool:
        listens = self.hook_pattern.has_hooks()
        if listens and self.cfg.attention_backend == "flash":
            raise ValueError(
                f"{self.hook_pattern.name} has a hook, but attention_backend='flash' never builds the pattern. "
                "Use attention_backend='auto'."
            )
        if listens and state is not None:
            raise ValueError(
                f"{self.hook_pattern.name} has a hook, but of earlier keys a linear layer's kv_cache keeps only their "
                "sums. Leave that hook out, or run the whole text at once, without a kv_cache."
            )
        return listens or (self.cfg.attention_backend == "materialised" and state is None)


def feature_map(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1, that is x + 1 above zero and eˣ below (Katharopoulos et al. 2020, equation 7).

    Half-precision input gives float32. Where 1 + (eˣ − 1) would round to nothing, eˣ is kept, down to the smallest
    normal number: φ > 0 always, and so is every denominator that has a key.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    features = torch.where(wide > 0, wide + 1, wide.clamp(max=0).exp())
    return features.clamp(min=torch.finfo(wide.dtype).tiny)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_real: Tensor | None = None,
    state: LinearState | None = None,
    chunk: int = 64,
) -> tuple[Tensor, LinearState]:
    """z_i = φ(q_i)ᵀ S_i / φ(q_i)ᵀ s_i, in memory linear in the text's length.

    Causal: quadratic within each chunk of positions, and across chunks by the running sums. The numbers do not depend
    on the chunk, nor on the pieces in which a text is fed with the state handed on. Bidirectional: the sums run over
    ``state`` and all keys. Sums are float32, or float64 where k and v are.

    Args:
        q: [batch, head, query, d_head].
        k, v: [batch, kv head, key, d_head]; query head h reads kv head h // (n_heads // n_kv_heads).
        causal: query i sees keys up to i and those in ``state``; there are as many queries as keys.
        key_real: bool [batch, key], False at padding, which counts for nothing.
        state: what the earlier keys of the text left behind.
        chunk: positions in a chunk.

    Returns:
        z [batch, head, query, d_head] in q's type, 0 in rows that see no key; and the state after these keys.

    Raises:
        ValueError: sizes that do not fit.
    """
    _check(q, k, v, key_real)
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal linear attention needs a query for each key, got {q.shape[2]} for {k.shape[2]}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk must be a positive integer, got {chunk!r}")
    queries, keys, values = _query_features(q, k.shape[1]), _key_features(k, key_real), _values(v, key_real)
    before = None if state is None else _joined(*state)
    if causal:
        sums, total = _causal_sums(queries, keys, values, before, min(chunk, k.shape[2]))
    else:
        total = _total(keys, values, before)
        sums = queries @ total[:, :, None]
    return _divide(sums[..., :-1], sums[..., -1:]).flatten(1, 2).to(q.dtype), (total[..., :-1], total[..., -1])


def linear_state(
    k: Tensor, v: Tensor, *, key_real: Tensor | None = None, state: LinearState | None = None
) -> LinearState:
    """S = Σ_j φ(k_j) v_jᵀ [batch, kv head, d_head, d_head] and s = Σ_j φ(k_j) [batch, kv head, d_head], on top of
    ``state``; arguments as in ``linear_attention``."""
    before = None if state is None else _joined(*state)
    total = _total(_key_features(k, key_real), _values(v, key_real), before)
    return total[..., :-1], total[..., -1]


def linear_attention_pattern(q: Tensor, k: Tensor, *, causal: bool, key_real: Tensor | None = None) -> Tensor:
    """φ(q_i)·φ(k_j) / Σ_j φ(q_i)·φ(k_j) [batch, head, query, key]: what multiplies v, rows sum to 1.

    Arguments as in ``linear_attention``; causal, the last query sees the last key. Rows without keys are 0.
    float32, or float64 where q and k are.
    """
    _check(q, k, k, key_real)
    weights = _query_features(q, k.shape[1]) @ _key_features(k, key_real)[:, :, None].mT
    if causal:
        weights = weights.tril(k.shape[2] - q.shape[2])
    return _divide(weights, weights.sum(-1, keepdim=True)).flatten(1, 2)


# Below, the denominator is one more column of the numerator: that of a value which is 1 everywhere. So values are
# [batch, kv head, key, d_head + 1], and the sums [batch, kv head, d_head, d_head + 1] are S and s side by side.


def _joined(outer: Tensor, total: Tensor) -> Tensor:
    return torch.cat((outer, total[..., None]), dim=-1)


def _total(k: Tensor, values: Tensor, before: Tensor | None) -> Tensor:
    sums = k.mT @ values
    return sums if before is None else before + sums


def _causal_sums(q: Tensor, k: Tensor, values: Tensor, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """For features q [batch, kv head, group, query, d] and k [batch, kv head, key, d], what each query reads,
    [batch, kv head, group, query, d + 1], and the sums behind the last key."""
    n = k.shape[2]
    q, k, values = (
        nn.functional.pad(x, (0, 0, 0, -n % chunk)).unflatten(-2, (-1, chunk)) for x in (q, k, values)
    )  # [batch, kv head, (group,) chunk, position in chunk, width]
    of_chunk = k.mT @ values  # [batch, kv head, chunk, d, d + 1]
    first = torch.zeros_like(of_chunk[:, :, 0]) if before is None else before
    sums = torch.cat((first[:, :, None], of_chunk), dim=2).cumsum(2)
    within = (q @ k[:, :, None].mT).tril() @ values[:, :, None]
    across = q @ sums[:, :, None, :-1]
    return (within + across).flatten(-3, -2)[..., :n, :], sums[:, :, -1]


def _query_features(q: Tensor, kv_heads: int) -> Tensor:
    """[batch, head, query, d] → [batch, kv head, group, query, d], each row up to a factor, which z does not notice.

    The largest entry is 1, so that no denominator underflows.
    """
    features = feature_map(q).unflatten(1, (kv_heads, -1))
    return features / features.detach().amax(-1, keepdim=True)


def _key_features(k: Tensor, key_real: Tensor | None) -> Tensor:
    features = feature_map(k)
    return features if key_real is None else features.masked_fill(~key_real[:, None, :, None], 0)


def _values(v: Tensor, key_real: Tensor | None) -> Tensor:
    wide = v if v.dtype == torch.float64 else v.float()
    wide = wide if key_real is None else wide.masked_fill(~key_real[:, None, :, None], 0)
    return nn.functional.pad(wide, (0, 1), value=1.0)


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0 where a row saw no key, which is where its denominator is 0."""
    return numerator / denominator.masked_fill(denominator == 0, 1)


def _apply_pattern(pattern: Tensor, v: Tensor) -> Tensor:
    per_group = pattern.unflatten(1, (v.shape[1], -1))  # [batch, kv head, group, query, key]
    return (per_group.to(v.dtype) @ v[:, :, None]).flatten(1, 2)


def _real_rows(x: Tensor, query_real: Tensor | None) -> Tensor:
    """x [batch, head, query, width] with zeros in the rows of padding."""
    return x if query_real is None else x.masked_fill(~query_real[:, None, :, None], 0)


def _check(q: Tensor, k: Tensor, v: Tensor, key_real: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            "q, k and v must be [batch, head, position, d_head], k and v alike; "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q and k must agree in batch and d_head, and q's heads be a multiple of k's; "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    if key_real is not None and (key_real.dtype != torch.bool or key_real.shape != (k.shape[0], k.shape[2])):
        raise ValueError(
            f"key_real must be a bool tensor {[k.shape[0], k.shape[2]]}, got {list(key_real.shape)} in {key_real.dtype}"
        )
