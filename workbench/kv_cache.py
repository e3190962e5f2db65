"""Keys and values of the tokens that a model has read, so that a further token costs one query against them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import TransformerConfig


@dataclass(eq=False)
class _Layer:
    """keys (before rotation) and values [batch, pos, n_key_value_heads, d_head], or a linear layer's state."""

    keys: Tensor | None = None
    values: Tensor | None = None
    state: Any = None


@dataclass(eq=False)
class KVCache:
    """What one model remembers of one batch of texts; pass it to the model with each piece of them.

    ``model(piece, kv_cache=cache)`` returns the logits of the piece and remembers it, whatever the size of the pieces.
    A hook that fires while a token is read changes what is remembered of it, as it would change what later tokens see
    in one pass over the whole text. Later hooks do not reach back to remembered keys (before rotation) and values;
    hook_rot_k fires on all of them, as each step rotates them anew.

    Three policies say what is kept, counted in tokens per layer:

    - everything: ``KVCache()``
    - the last ``window`` tokens: ``KVCache(window=…)``
    - the first ``n_sink_tokens`` and the last ``window - n_sink_tokens``: StreamingLLM (Xiao et al. 2023, section 3.2)

    ``sink_start`` keeps as many tokens from that position of each text on in place of the first ones: a control that
    has the same budget.

    With a window, positions (rotary, ALiBi, relative, a layer's own window, distances in statistics) count within the
    cache, so that a text of any length stays within the trained context; learned and sinusoidal positions are part of
    the embedding and count on. A query then sees at most ``window`` tokens, its own included.

    A run that is refused leaves the cache as it was. One that fails later, in a hook for example, leaves it unusable.

    Attributes:
        n_seen: int64 [batch], the real tokens that each row has read, kept or not.
        real: bool [batch, pos], which remembered columns hold a token.
        tokens: int64 [batch, pos], the remembered tokens.
        previous: int64 [batch, pos], the token before each in its text, kept or not; −1 where there is none.
        positions: int64 [batch, pos], their positions in their texts, evicted tokens counted.

    Raises:
        ValueError: a window that leaves no room for recent tokens, sink tokens without a window, or a start of none.
    """

    window: int | None = None
    n_sink_tokens: int = 0
    sink_start: int = 0
    n_seen: Tensor | None = field(default=None, init=False)
    real: Tensor | None = field(default=None, init=False)
    tokens: Tensor | None = field(default=None, init=False)
    previous: Tensor | None = field(default=None, init=False)
    positions: Tensor | None = field(default=None, init=False)
    _is_running: bool = field(default=False, init=False)
    _owner: Any = field(default=None, init=False)  # a weak reference to the model whose keys these are
    _layers: dict[int, _Layer] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name in ("window", "n_sink_tokens", "sink_start"):
            size = getattr(self, name)
            if name == "window" and size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(f"{name} must be a whole number, not negative, got {size!r}")
        if self.n_sink_tokens and self.window is None:
            raise ValueError("n_sink_tokens are what a window keeps beside recent tokens; give window=…")
        if self.sink_start and not self.n_sink_tokens:
            raise ValueError("sink_start says where the n_sink_tokens begin; give n_sink_tokens=…")
        if self.window is not None and self.window <= self.n_sink_tokens:
            raise ValueError(
                f"window must exceed n_sink_tokens, so that recent tokens have a place; "
                f"got {self.window} and {self.n_sink_tokens}"
            )

    def __len__(self) -> int:
        """The remembered columns, pads included."""
        return 0 if self.real is None else self.real.shape[1]

    @property
    def nbytes(self) -> int:
        """The memory that keys, values and states take."""
        held: list[Tensor] = []
        for layer in self._layers.values():
            held += [tensor for tensor in (layer.keys, layer.values) if tensor is not None]
            held += layer.state or ()
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def bytes_per_token(self, cfg: TransformerConfig) -> int:
        """What one more token of one row takes in a model: two vectors for each layer and key/value head."""
        softmax_layers = sum(kind != "linear" for kind in cfg.layer_types)
        return 2 * softmax_layers * cfg.n_key_value_heads * cfg.d_head * cfg.dtype.itemsize

    def pieces(self, n_tokens: int) -> Iterable[slice]:
        """How a piece of text is read: at once while everything is kept, else so that no query sees an evicted key."""
        if self.window is None:
            return [slice(0, n_tokens)]
        first = max(1, min(n_tokens, self.window - len(self)))
        return [slice(0, first), *(slice(i, i + 1) for i in range(first, n_tokens))]

    def length(self, new_real: Tensor | None = None, *, with_evicted: bool = False) -> int:
        """The tokens that the longest row has read and kept, once it has read ``new_real`` [batch, new] as well."""
        n_seen = 0 if self.n_seen is None else self.n_seen
        n_new = 0 if new_real is None else new_real.sum(dim=1)
        longest = int(torch.as_tensor(n_seen + n_new).max())
        return longest if self.window is None or with_evicted else min(longest, self.window)

    def check(self, new_real: Tensor) -> None:
        """Whether the texts can go on with the tokens and pads of ``new_real``, bool [batch, new].

        Raises:
            ValueError: another batch than before, a pad behind a real token, or a cache that a failed run left behind.
        """
        if self._is_running:
            raise ValueError(
                "a run with this kv_cache failed halfway, so some layers may lack tokens that others hold; "
                "start with a new cache"
            )
        started = torch.zeros_like(new_real[:, :1])
        if self.n_seen is not None:
            if len(self.n_seen) != len(new_real):
                raise ValueError(f"the kv_cache holds {len(self.n_seen)} texts, but the input has {len(new_real)}")
            started = self.n_seen[:, None] > 0
        started = torch.cat((started, new_real[:, :-1]), dim=1).cummax(dim=1).values
        if bool((started & ~new_real).any()):
            raise ValueError("with a kv_cache pads must come before the first real token of a row: pad on the left")

    def claim(self, model: Any) -> None:
        """Refuses, once it holds something, any model but the one that put it there."""
        if len(self) and self._owner is not None and self._owner() is not model:
            raise ValueError("this kv_cache holds another model's keys and values; start with a new one")
        self._owner = weakref.ref(model)

    def start(self, tokens: Tensor, real: Tensor) -> None:
        """Makes room for new tokens [batch, new] and remembers them and which are ``real``; layers then extend."""
        self._is_running = True
        if self.real is None or self.tokens is None or self.previous is None or self.positions is None:
            self.n_seen = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
            self.real, nothing = real[:, :0], tokens[:, :0]
            self.tokens = self.previous = self.positions = nothing
        assert self.n_seen is not None
        labels = torch.cat((self.tokens.masked_fill(~self.real, -1), tokens.masked_fill(~real, -1)), dim=1)
        before = nn.functional.pad(labels, (1, 0), value=-1)[:, len(self) : -1]
        positions = self.n_seen[:, None] + real.long().cumsum(dim=1) - real.long()
        self._evict(tokens.shape[1])
        self.n_seen = self.n_seen + real.sum(dim=1)
        self.real = torch.cat((self.real, real), dim=1)
        self.tokens = torch.cat((self.tokens, tokens), dim=1)
        self.previous = torch.cat((self.previous, before), dim=1)
        self.positions = torch.cat((self.positions, positions), dim=1)

    def finish(self) -> None:
        """All layers have read what was started; without this the next ``check`` refuses."""
        self._is_running = False

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Remembers new keys and values [batch, new, n_key_value_heads, d_head]; returns those of all columns."""
        held = self._layers.setdefault(layer, _Layer())
        held.keys = keys if held.keys is None else torch.cat((held.keys, keys), dim=1)
        held.values = values if held.values is None else torch.cat((held.values, values), dim=1)
        return held.keys, held.values

    def state(self, layer: int) -> Any:
        """What a linear layer has summed up so far, or None."""
        return self._layers.setdefault(layer, _Layer()).state

    def set_state(self, layer: int, state: Any) -> None:
        """Remembers a linear layer's sums."""
        self._layers.setdefault(layer, _Layer()).state = state

    def _evict(self, n_new: int) -> None:
        """Drops the oldest columns but the sink tokens, so that ``n_new`` more fit the window."""
        assert self.real is not None and self.tokens is not None
        assert self.previous is not None and self.positions is not None
        surplus = 0 if self.window is None else len(self) + n_new - self.window
        if surplus <= 0:
            return
        length = len(self)
        # Sink tokens stay first, then the more recent the better, and pads, which lie on the left, last.
        is_sink = self.real & (self.positions >= self.sink_start)
        is_sink &= self.positions < self.sink_start + self.n_sink_tokens
        age = torch.arange(length, 0, -1, device=self.real.device)
        age = age + length * ((~self.real).long() - is_sink.long())
        columns = age.argsort(dim=1, stable=True)[:, : length - surplus].sort(dim=1).values
        self.real = self.real.gather(1, columns)
        self.tokens, self.previous, self.positions = (
            held.gather(1, columns) for held in (self.tokens, self.previous, self.positions)
        )
        wide = columns[:, :, None, None]
        for layer in self._layers.values():
            if layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys.gather(1, wide.expand(-1, -1, *layer.keys.shape[2:]))
                layer.values = layer.values.gather(1, wide.expand(-1, -1, *layer.values.shape[2:]))
