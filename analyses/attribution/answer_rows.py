"""Other weights in the rows of attention that make a prediction: shuffled, even, and as far away as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from workbench.analyses.attribution.patching import TOKENS_PER_GRADIENT
from workbench.analyses.running import TOKENS_PER_RUN, cached
from workbench.analyses.support import check_one_length, emits_statistics
from workbench.analyses.tasks import PromptSet

HALVINGS = 10  # of the way from the original weights of a head to others
FIRST_STEP = 0.3  # of each head's weights
INWARD = 1.1  # steps along the border turn so much away from what would leave it
STEEPEST = 4.0  # of the divergence, whose slope has no bound where a weight is 0


class AnswerRows:
    """The rows of one layer's attention at the answer positions, and what would be predicted with other weights there.

    Attributes:
        weights: float64 [prompt, head, key].
        free: bool [prompt, head, key], the keys among which weight may move.
    """

    def __init__(self, model: Any, prompts: PromptSet, layer: int, *, keep_first: bool) -> None:
        check_one_length(model, prompts.real)
        self._model, self._layer, self._name = model, layer, f"blocks.{layer}.attn.hook_pattern"
        self._batch, self._rows = prompts.sequences.to(model.cfg.device), prompts.rows[:, 0].to(model.cfg.device)
        found = cached(model, self._batch, [f"blocks.{layer}.attn.hook_attn_scores", self._name])
        scores, pattern = found[f"blocks.{layer}.attn.hook_attn_scores"], found[self._name]
        at = torch.arange(len(prompts), device=pattern.device)
        if emits_statistics(model):
            self._stream = model(self._batch.tokens, attention_mask=self._batch.real, stop_at_layer=layer)
        self.weights = pattern[at, :, self._rows].double()
        hidden = torch.finfo(scores.dtype).min / 2  # some models mask by the least number in place of −∞
        self.free = scores[at, :, self._rows] > hidden
        if keep_first:
            self.free = self.free & (torch.arange(self.free.shape[-1], device=self.free.device) > 0)
        if int(self.free.sum(dim=-1).min()) < 2:
            raise ValueError("every answer position must see two tokens or more, or no weight can move; leave it out")
        with torch.no_grad():
            self._clean = self._predictions(self.weights[None], range(pattern.shape[1]))[0]

    @torch.no_grad()
    def distances(self, weights: Tensor, heads: Sequence[int]) -> Tensor:
        """Total variation distance of the prediction with other weights of some heads from the model's own.

        Args:
            weights: [variant, prompt, head, key].

        Returns:
            float64 [variant, prompt].
        """
        size = max(1, TOKENS_PER_RUN // self._batch.tokens.numel())
        return torch.cat([self._distances(some, heads) for some in weights.split(size)])

    @torch.enable_grad()
    def gradients(self, weights: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The same, and its gradient [variant, prompt, head, key] with respect to the weights."""
        found = []
        for some in weights.split(max(1, TOKENS_PER_GRADIENT // self._batch.tokens.numel())):
            some = some.detach().requires_grad_()
            distance = self._distances(some, heads)
            found.append((distance.detach(), torch.autograd.grad(distance.sum(), some)[0]))
        distances, slopes = zip(*found, strict=True)
        return torch.cat(distances), torch.cat(slopes)

    def _distances(self, weights: Tensor, heads: Sequence[int]) -> Tensor:
        return (self._predictions(weights, heads) - self._clean).abs().sum(dim=-1) / 2

    def _predictions(self, weights: Tensor, heads: Sequence[int]) -> Tensor:
        """Probabilities of the next token, float64 [variant, prompt, d_vocab]; a HookedTransformer restarts here."""
        model, n = self._model, len(weights)
        rows = self._rows.repeat(n)
        at = torch.arange(len(rows), device=rows.device)
        chosen = torch.tensor(list(heads), device=rows.device)

        def edit(pattern: Tensor, hook: Any) -> Tensor:  # [variant · prompt, head, query, key]
            pattern = pattern.clone()
            pattern[at[:, None], chosen, rows[:, None]] = weights.flatten(0, 1).to(pattern)
            return pattern

        if emits_statistics(model):
            real = self._batch.real
            mask = None if bool(real.all()) else real.repeat(n, 1)
            with model.hooks(fwd_hooks=[(self._name, edit)]):
                stream = model(
                    self._stream.repeat(n, 1, 1), attention_mask=mask, start_at_layer=self._layer,
                    stop_at_layer=model.cfg.n_layers,
                )  # fmt: skip
            logits = model.to_logits(stream[at, rows][:, None])[:, 0]
        else:
            tokens = self._batch.tokens.repeat(n, 1)
            logits = model.run_with_hooks(tokens, return_type="logits", fwd_hooks=[(self._name, edit)])[at, rows]
        return logits.double().softmax(dim=-1).unflatten(0, (n, -1))


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """½ Σ p log(p/m) + q log(q/m), m = (p + q) / 2, over the last axis, in nats."""
    middle = ((p + q) / 2).clamp(min=1e-300)
    return (torch.xlogy(p, p / middle) + torch.xlogy(q, q / middle)).sum(dim=-1) / 2


def shuffled(weights: Tensor, free: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """The free weights of every row in ``n`` random orders, [variant, prompt, head, key] from [prompt, head, key]."""
    noise = torch.rand((n, *weights.shape), generator=generator).to(weights.device)
    order = noise.masked_fill(~free, 2.0).argsort(dim=-1, stable=True)  # the free keys in any order, then the others
    places = (~free).byte().argsort(dim=-1, stable=True).expand_as(order)  # the same keys as they stand
    found = weights.expand_as(noise).clone()
    return found.scatter_(-1, places, weights.expand_as(noise).gather(-1, order))


def even(weights: Tensor, free: Tensor) -> Tensor:
    """The free weight of every row spread evenly, [prompt, head, key]."""
    share = (weights * free).sum(dim=-1, keepdim=True) / free.sum(dim=-1, keepdim=True)
    return torch.where(free, share, weights)


def furthest(
    weights: Tensor,
    free: Tensor,
    distances: Callable[[Tensor], Tensor],
    gradients: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    epsilon: float,
    n_starts: int,
    n_steps: int,
) -> Tensor:
    """Weights as far as could be found from the original with the prediction within ``epsilon`` of it.

    A start puts all of a head's free weight on one key: the first one on the key that is best by divergence less
    distance of the prediction, the next ones on the following keys. It stands beside what steps down
    the distance make of it. Each head is drawn back along the straight line to
    the original until the prediction is near enough. From there steps go up the divergence, along the border of what is
    near enough where that is reached, projected to weights that sum to the same; a step that leaves it is taken back,
    and the next is half as long.

    Args:
        weights, free: [prompt, head, key].
        distances, gradients: of the prediction under weights [variant, prompt, head, key], as in ``AnswerRows``.

    Returns:
        [prompt, head, key], the best of all starts by the mean divergence of the heads.
    """
    mass = (weights * free).sum(dim=-1, keepdim=True)
    order = _by_promise(weights, free, mass, distances)
    place = torch.arange(n_starts, device=weights.device) % free.sum(dim=-1, keepdim=True)  # [prompt, head, start]
    corners = one_hot(order.gather(-1, place), weights.shape[-1]).movedim(2, 0) * mass
    corners = torch.where(free, corners, weights)
    starts = torch.cat((corners, _mended(corners, weights, free, mass, gradients, epsilon, n_steps)))
    current = _drawn_back(starts, weights, distances, epsilon)
    found = jensen_shannon(current, weights).mean(dim=-1)  # [start, prompt]
    distance, slope = gradients(current)
    length = torch.full_like(found, FIRST_STEP)
    for _ in range(n_steps):
        direction = _uphill(current, weights, free, slope, distance > epsilon / 2)
        ahead = current + length[..., None, None] * direction
        ahead = torch.where(free, _projected(ahead, free, mass), weights)
        further, (new_distance, new_slope) = jensen_shannon(ahead, weights).mean(dim=-1), gradients(ahead)
        better = (new_distance <= epsilon) & (further > found)
        found, distance = torch.where(better, further, found), torch.where(better, new_distance, distance)
        current = torch.where(better[..., None, None], ahead, current)
        slope = torch.where(better[..., None, None], new_slope, slope)
        length = torch.where(better, (1.5 * length).clamp(max=1.0), length / 2)
    return current[found.argmax(dim=0), torch.arange(len(weights), device=weights.device)]


def _mended(
    current: Tensor, weights: Tensor, free: Tensor, mass: Tensor,
    gradients: Callable[[Tensor], tuple[Tensor, Tensor]], epsilon: float, n_steps: int,
) -> Tensor:  # fmt: skip
    """From weights that change the prediction, steps down its distance, and up the divergence where it is near enough
    (Polyak 1967), shorter and shorter ones."""
    for step in range(n_steps):
        distance, slope = gradients(current)
        slope = _centred(slope, free)
        down = -slope / slope.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        up = _uphill(current, weights, free, slope, torch.zeros_like(distance, dtype=torch.bool))
        direction = torch.where((distance <= epsilon)[..., None, None], up, down)
        ahead = current + FIRST_STEP * (1 - step / n_steps) * direction
        current = torch.where(free, _projected(ahead, free, mass), weights)
    return current


def _by_promise(weights: Tensor, free: Tensor, mass: Tensor, distances: Callable[[Tensor], Tensor]) -> Tensor:
    """For each head the keys in order of what is gained and lost by putting all of its free weight on one of them.

    Returns:
        [prompt, head, key].
    """
    n_heads, n_keys = weights.shape[1:]
    corners = (
        torch.eye(n_keys, dtype=weights.dtype, device=weights.device)[:, None, None] * mass
    )  # [key, prompt, head, key]
    corners = torch.where(free, corners, weights)
    found = []
    for head in range(n_heads):
        only = (torch.arange(n_heads, device=weights.device) == head)[:, None]
        gained = jensen_shannon(corners[:, :, head], weights[:, head])  # [key, prompt]
        found.append(gained - distances(torch.where(only, corners, weights)))
    promise = torch.stack(found, dim=-1).movedim(0, -1)  # [prompt, head, key]
    return promise.masked_fill(~free, -torch.inf).argsort(dim=-1, descending=True)


def _uphill(current: Tensor, weights: Tensor, free: Tensor, slope: Tensor, at_border: Tensor) -> Tensor:
    """Where the divergence of ``current`` from ``weights`` grows, a step of length 1 for each head.

    Args:
        slope: of the prediction's distance, [start, prompt, head, key].
        at_border: bool [start, prompt], where the way goes a little downhill for the distance.
    """
    ratio = current / ((current + weights) / 2).clamp(min=1e-300)
    growth = _centred(ratio.clamp(min=1e-300).log().clamp(min=-STEEPEST), free)
    growth = growth / growth.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    slope = _centred(slope, free)
    outward = (growth * slope).sum(dim=(-2, -1)) / slope.square().sum(dim=(-2, -1)).clamp(min=1e-300)
    outward = torch.where(at_border, outward.clamp(min=0), 0.0)
    return growth - INWARD * outward[..., None, None] * slope


def _centred(values: Tensor, free: Tensor) -> Tensor:
    """Values of the free keys less their mean, which no weights that sum to the same can follow; 0 elsewhere."""
    return (values - (values * free).sum(dim=-1, keepdim=True) / free.sum(dim=-1, keepdim=True)) * free


def _drawn_back(found: Tensor, weights: Tensor, distances: Callable[[Tensor], Tensor], epsilon: float) -> Tensor:
    """Weights on the way from the original to ``found`` [variant, prompt, head, key] with the prediction near enough.

    Head after head goes as far as it can, first those that move the prediction least by themselves.
    """
    n_heads = weights.shape[1]
    only = torch.eye(n_heads, dtype=torch.bool, device=weights.device)[..., None]  # [head, head, 1]
    alone = torch.stack([distances(torch.where(of_one, found, weights)) for of_one in only], dim=-1)
    shares = torch.zeros_like(alone)  # of the way, [variant, prompt, head]
    for head in alone.argsort(dim=-1).unbind(dim=-1):
        moves = one_hot(head, n_heads).bool()
        low, high = torch.zeros_like(alone[..., 0]), torch.ones_like(alone[..., 0])
        middle = high
        for _ in range(HALVINGS):
            tried = torch.where(moves, middle[..., None], shares)
            fits = distances(torch.lerp(weights.expand_as(found), found, tried[..., None])) <= epsilon
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
            middle = (low + high) / 2
        shares = torch.where(moves, low[..., None], shares)
    return torch.lerp(weights.expand_as(found), found, shares[..., None])


def _projected(values: Tensor, free: Tensor, mass: Tensor) -> Tensor:
    """The nearest weights ≥ 0 of the free keys that sum to ``mass`` (Duchi et al. 2008, figure 1); 0 elsewhere."""
    shut_out = -1e6  # so low that such a key gets nothing
    values = values.masked_fill(~free, shut_out)
    ordered = values.sort(dim=-1, descending=True).values
    over = (ordered.cumsum(dim=-1) - mass) / torch.arange(1, values.shape[-1] + 1, device=values.device)
    last = (ordered > over).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return (values - over.gather(-1, last)).clamp(min=0)
