"""Hook points: the only module that imports transformer_lens, whose base classes and cache the model builds on."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from transformer_lens.ActivationCache import ActivationCache as BaseActivationCache
from transformer_lens.hook_points import HookPoint as BaseHookPoint
from transformer_lens.HookedRootModule import HookedRootModule

from workbench.config import TransformerConfig

__all__ = [
    "ActivationCache",
    "HookPoint",
    "HookedModel",
    "RunPositions",
    "ReadOnlyHookPoint",
    "fresh",
    "hook_shape",
    "select_hook_names",
]

NamesFilter = str | Collection[str] | Callable[[str], bool] | None
Hooks = Sequence[tuple[str | Callable[[str], bool], Callable]]

# Hook points that cost memory: the configuration flag that lets them fire, and its setter.
_OPTIONAL_HOOKS = {
    "hook_result": ("use_attn_result", "set_use_attn_result"),
    "hook_q_input": ("use_split_qkv_input", "set_use_split_qkv_input"),
    "hook_k_input": ("use_split_qkv_input", "set_use_split_qkv_input"),
    "hook_v_input": ("use_split_qkv_input", "set_use_split_qkv_input"),
}


@dataclass(eq=False)
class RunPositions:
    """Where the tokens of the present forward pass stand in their texts; all hook points of a model share it.

    queries, keys: int64 [batch, pos], the rank of each among the real tokens of its row, evicted ones included.
    """

    queries: Tensor | None = None
    keys: Tensor | None = None


class _KnowsPositions(BaseHookPoint):
    run = RunPositions()

    def remove_hooks(self, *args: Any, **kwargs: Any) -> None:
        """As in TransformerLens, which takes milliseconds to clear a model's thousand points that have no hooks."""
        if self.has_hooks():
            super().remove_hooks(*args, **kwargs)

    @property
    def position_ids(self) -> Tensor | None:
        """The absolute positions int64 [batch, pos] of the tokens in the pos or query axis, while a model runs."""
        return self.run.queries

    @property
    def key_position_ids(self) -> Tensor | None:
        """Those of the key axis [batch, key]: all that the queries may see, remembered ones included."""
        return self.run.keys


class HookPoint(_KnowsPositions):
    """TransformerLens' hook point. What a hook returns takes the value's place: same shape, dtype and device.

    A hook that edits single positions finds them in ``hook.position_ids``, also while a cache feeds the text in pieces.

    Raises (when called):
        ValueError: a hook returned something else, which broadcasting might carry on in silence.
    """

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        if y is not x and (not isinstance(y, Tensor) or _form(y) != _form(x)):
            found = _form(y) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"a hook on {self.name} must return a tensor of the shape {_form(x)}, or None to leave the value; "
                f"got {found}"
            )
        return y


def _form(x: Tensor) -> str:
    return f"{list(x.shape)} in {x.dtype} on {x.device}"


class ReadOnlyHookPoint(_KnowsPositions):
    """A hook point whose value the model reports but does not use; a hook that edits it raises.

    Raises (when called):
        ValueError: a hook returned a value, or changed the tensor in place.
    """

    def __call__(self, x: Tensor) -> Tensor:
        before = torch.nan_to_num(x) if x.is_inference() else None  # inference tensors count no versions
        version = x._version if before is None else 0
        replaced = super().__call__(x) is not x
        changed = x._version != version if before is None else not torch.equal(torch.nan_to_num(x), before)
        if replaced or changed:
            raise ValueError(
                f"{self.name} is read-only: it reports a statistic, so an edit would change nothing. "
                "Return None from the hook; to intervene, hook attn.hook_pattern, attn.hook_z or attn.hook_v."
            )
        return x


class ActivationCache(BaseActivationCache):
    """transformer_lens' cache, which says what it holds when asked for something else."""

    def __getitem__(self, key: Any) -> Tensor:
        try:
            return super().__getitem__(key)
        except KeyError as missing:
            name = str(missing.args[0])
            closest = difflib.get_close_matches(name, self.cache_dict, n=2)
            advice = f"did you mean {' or '.join(closest)}? " if closest else ""
            raise KeyError(
                f"{name} is not in this cache; {advice}Statistics, results and split inputs of heads are kept where "
                "they are asked for: run_with_cache(…, names_filter=…), or model.hook_dict for what there is"
            ) from None


class HookedModel(HookedRootModule):
    """TransformerLens' root module, without its silences: a name or a filter that selects nothing is an error."""

    cfg: TransformerConfig
    hook_dict: dict[str, Any]
    to_tokens: Callable

    def setup(self) -> None:
        """Names the hook points, and tells them where to find the positions of a run."""
        super().setup()
        self.run_positions = RunPositions()
        for hook in self.hook_dict.values():
            hook.run = self.run_positions

    def run_with_cache(
        self, *model_args: Any, names_filter: NamesFilter = None, remove_batch_dim: bool = False, **kwargs: Any
    ) -> tuple[Any, ActivationCache]:
        """Runs the model and returns (output, ActivationCache), as in TransformerLens.

        Without ``names_filter`` the cache holds TransformerLens' hook points, attention patterns included; statistics
        are cached when they are named. ``names_filter`` is a name, a collection of names, or a predicate.

        Raises:
            ValueError: a name that is no hook point, or a filter that matches nothing.
            MemoryError: an unfiltered cache that would need more than half of the free memory.
        """
        names = self.active_hook_names(names_filter)
        if names_filter is None:
            names = [name for name in names if not isinstance(self.hook_dict[name], ReadOnlyHookPoint)]
            model_input = model_args[0] if model_args else kwargs.get("input")
            if model_input is None:
                model_input = kwargs.get("encoder_output")
            elif not isinstance(model_input, Tensor):
                model_input, _ = self.to_tokens(model_input, return_attention_mask=True)
            if isinstance(model_input, Tensor):  # else the call says what is missing
                batch, pos = torch.atleast_2d(model_input).shape[:2]
                _check_cache_memory(self.cfg, names, batch, pos, pos + len(kwargs.get("kv_cache") or ()))
        output, cache = super().run_with_cache(
            *model_args, names_filter=names, remove_batch_dim=remove_batch_dim, **kwargs
        )
        return output, ActivationCache(cache, self, has_batch_dim=not remove_batch_dim)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedModel]:
        """A context in which the hooks, pairs of (name or predicate, function(tensor, hook=…)), are active.

        Raises:
            ValueError: a name or predicate that selects no hook point; nothing is then installed.
        """
        forward, backward = (self._hooks_by_name(hooks) for hooks in (fwd_hooks, bwd_hooks))
        with super().hooks(forward, backward, reset_hooks_end, clear_contexts):
            yield self

    def add_hook(self, name: str | Callable[[str], bool], hook: Callable, *args: Any, **kwargs: Any) -> None:
        """Adds a hook that stays until ``reset_hooks``. Raises ValueError where ``name`` selects no hook point."""
        for hook_name in self.active_hook_names(name):
            super().add_hook(hook_name, hook, *args, **kwargs)

    def _hooks_by_name(self, hooks: Hooks) -> list[tuple[str | Callable, Callable]]:
        if not all(isinstance(pair, tuple) and len(pair) == 2 and callable(pair[1]) for pair in hooks):
            raise ValueError("hooks must be a list of pairs (name or predicate, function), such as [(name, function)]")
        return [(name, function) for names, function in hooks for name in self.active_hook_names(names)]

    def active_hook_names(self, names: NamesFilter) -> list[str]:
        """The selected hook points that fire under the present configuration."""
        switched_off = {
            suffix: setter for suffix, (flag, setter) in _OPTIONAL_HOOKS.items() if not getattr(self.cfg, flag)
        }
        selected = select_hook_names(names, self.hook_dict)
        active = [name for name in selected if _suffix(name) not in switched_off]
        silent = set(selected) - set(active)
        if silent and (not active or not (names is None or callable(names))):
            name = min(silent)
            raise ValueError(f"{name} does not fire yet; call model.{switched_off[_suffix(name)]}(True) first")
        return active


def select_hook_names(names: NamesFilter, available: Iterable[str]) -> list[str]:
    """The hook names that ``names`` (a name, a collection of names or a predicate) selects, in the model's order.

    Raises:
        ValueError: a name that is no hook point (the message offers near ones), or a filter that matches nothing.
    """
    available = list(available)
    if names is None:
        return available
    if callable(names):
        selected = [name for name in available if names(name)]
        if not selected:
            raise ValueError("the hook filter matches no hook point of this model; model.hook_dict lists them")
        return selected
    if not isinstance(names, (str, Collection)):
        raise ValueError(f"hook names must be a name, a collection of names or a predicate, got {names!r}")
    wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise ValueError("the list of hook names is empty; name a hook point or leave the filter out")
    for name in wanted:
        if name not in available:
            near = difflib.get_close_matches(name, available, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; model.hook_dict lists them"
            raise ValueError(f"no hook point is called {name!r}{hint}")
    return [name for name in available if name in set(wanted)]


def fresh(x: Tensor, n_copies: int) -> Tensor:
    """[batch, pos, d] → [batch, pos, n_copies, d], writable: a hook may edit one copy in place."""
    return x[:, :, None].expand(-1, -1, n_copies, -1).clone(memory_format=torch.contiguous_format)


def _suffix(hook_name: str) -> str:
    return hook_name.rpartition(".")[2]


def hook_shape(cfg: TransformerConfig, name: str, batch: int, pos: int, key_pos: int | None = None) -> tuple[int, ...]:
    """The shape of an activation at a hook point (statistics, whose width a request decides, aside).

    ``key_pos`` counts the keys where they are not the queries: an encoder's tokens in cross-attention.
    """
    suffix = _suffix(name)
    keys = pos if key_pos is None else key_pos
    if "_norm." in name:
        return batch, *_query_key_norm_shape(cfg, name, pos, keys)
    widths: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("hook_pattern", "hook_attn_scores"), (cfg.n_heads, pos, keys)),
        **dict.fromkeys(("hook_q", "hook_rot_q", "hook_z"), (pos, cfg.n_heads, cfg.d_head)),
        **dict.fromkeys(("hook_k", "hook_rot_k", "hook_v"), (keys, cfg.n_key_value_heads, cfg.d_head)),
        **dict.fromkeys(("hook_result", "hook_q_input"), (pos, cfg.n_heads, cfg.d_model)),
        **dict.fromkeys(("hook_k_input", "hook_v_input"), (pos, cfg.n_key_value_heads, cfg.d_model)),
        **dict.fromkeys(("hook_pre", "hook_pre_linear", "hook_post"), (pos, cfg.d_mlp)),
        "hook_state": (cfg.n_key_value_heads, cfg.d_head, cfg.d_head),
        "hook_scale": (pos, 1),
    }
    if cfg.moe is not None:
        chosen = (pos, cfg.moe.n_experts_per_token)
        widths |= {"hook_router_logits": (pos, cfg.moe.n_experts)}
        widths |= {"hook_expert_weights": chosen, "hook_expert_indices": chosen}
    return batch, *widths.get(suffix, (pos, cfg.d_model))


def _query_key_norm_shape(cfg: TransformerConfig, name: str, pos: int, keys: int) -> tuple[int, ...]:
    is_query = ".q_norm." in name
    n_heads = cfg.n_heads if is_query else cfg.n_key_value_heads
    per_head = cfg.qk_norm == "per_head"
    width = 1 if name.endswith("hook_scale") else cfg.d_head if per_head else n_heads * cfg.d_head
    return (pos if is_query else keys, n_heads, width) if per_head else (pos if is_query else keys, width)


def _check_cache_memory(cfg: TransformerConfig, names: list[str], batch: int, pos: int, key_pos: int) -> None:
    needed = cfg.dtype.itemsize * sum(math.prod(hook_shape(cfg, name, batch, pos, key_pos)) for name in names)
    free = torch.cuda.mem_get_info(cfg.device)[0] if cfg.device.type == "cuda" else psutil.virtual_memory().available
    if needed > free / 2:
        raise MemoryError(
            f"caching every hook point of {batch} × {pos} tokens needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
            "are free. Pass names_filter with what you need, for example "
            "names_filter=lambda name: name.endswith('hook_z'), or use run_with_statistics for attention statistics."
        )
