"""Rotary positions in Hugging Face's words: ``rope_parameters``, or before that ``rope_theta`` and ``rope_scaling``.

What a scaling derives from a context it derives from the checkpoint's, so that a caller's n_ctx changes no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.config import RopeScaling
from workbench.loading.families.common import MAX_SIZE, ConfigAttributes

_ORIGINAL = "original_max_position_embeddings"

# What each type of scaling reads: (needed, optional).
_PARAMETERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        (),
        (
            "factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_ORIGINAL,)),
    "longrope": (("short_factor", "long_factor"), ("factor", _ORIGINAL, "attention_factor")),
}  # fmt: skip
_GENERAL = ("rope_theta", "partial_rotary_factor")


def take_rotary(
    attributes: ConfigAttributes,
    d_head: int,
    trained_context: int,
    *,
    default_base: float = 10_000.0,
    default_share: float = 1.0,
    partial: bool = False,
    aliases: Mapping[str, str] | None = None,
    older_names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The options of a ``TransformerConfig`` that describe rotary positions.

    Args:
        trained_context: ``max_position_embeddings``.
        default_share: of a head's dimensions that rotate.
        partial: the architecture may rotate only some dimensions of a head.
        aliases: names that the architecture has for types of scaling.
        older_names: attributes of the whole model that go by another name -> the usual name.

    Raises:
        UnsupportedModelError: a type or parameter that is not known, or statements that contradict each other.
    """
    top = {name: attributes.take(name, None) for name in (*_GENERAL, _ORIGINAL)}
    nested = [(name, attributes.take(name, None)) for name in ("rope_scaling", "rope_parameters")]
    older = [(name, {usual: attributes.take(name, None)}) for name, usual in (older_names or {}).items()]
    statements = _Statements(attributes, [("", top), *older, *nested], aliases or {})
    base = statements.take("rope_theta", default_base)
    share_said_as = statements.name("partial_rotary_factor")
    share = statements.take("partial_rotary_factor", default_share)
    if share > 1.0 or (share != 1.0 and not partial):
        advice = "it must not exceed 1" if partial else "every dimension of a head must rotate"
        raise attributes.refusal(share_said_as, share, advice)
    return {
        "positional_embedding_type": "rotary",
        "rotary_base": float(base),
        "rotary_dim": None if share == 1.0 else int(d_head * share),
        "rope_scaling": statements.scaling(trained_context),
    }


def take_rotary_of_layer_types(
    attributes: ConfigAttributes, trained_context: int, *, default_base: float, default_local_base: float
) -> dict[str, Any]:
    """As ``take_rotary``, where layers with a window have a base of their own and are not scaled (Gemma 3).

    Raises:
        UnsupportedModelError: as ``take_rotary``; also a scaling of the layers with a window.
    """
    kinds = _table(attributes, "rope_parameters", attributes.take("rope_parameters", None))
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise attributes.refusal("rope_parameters", unknown, "expected full_attention and sliding_attention")
    top, top_local = {"rope_theta": attributes.take("rope_theta", None)}, attributes.take("rope_local_base_freq", None)
    everywhere = _Statements(
        attributes,
        [
            ("", top),
            ("rope_scaling", attributes.take("rope_scaling", None)),
            ("rope_parameters.full_attention", kinds.get("full_attention")),
        ],
        {},
    )
    local = _Statements(
        attributes,
        [
            ("rope_local_base_freq", {"rope_theta": top_local}),
            ("rope_parameters.sliding_attention", kinds.get("sliding_attention")),
        ],
        {},
    )
    base, local_base = everywhere.take("rope_theta", default_base), local.take("rope_theta", default_local_base)
    if local.kind != "default":
        raise attributes.refusal("rope_parameters.sliding_attention", local.kind, "layers with a window are not scaled")
    local.scaling(trained_context)  # refuses what is left over
    return {
        "positional_embedding_type": "rotary",
        "rotary_base": float(base),
        "rotary_base_local": float(local_base),
        "rope_scaling": everywhere.scaling(trained_context),
    }


def _table(attributes: ConfigAttributes, name: str, given: Any) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise attributes.refusal(name, given, "expected names and values")
    return given or {}


class _Statements:
    """What a configuration says about rotary positions, in up to three places, which must agree."""

    def __init__(
        self, attributes: ConfigAttributes, places: Iterable[tuple[str, Any]], aliases: Mapping[str, str]
    ) -> None:
        self._attributes = attributes
        self._said: dict[str, tuple[str, Any]] = {}  # parameter → where it is said, and its value
        for place, given in places:
            for name, value in _table(attributes, place, given).items():
                if value is not None:
                    where = f"{place}.{name}" if place else name
                    self._add("rope_type" if name == "type" else name, where, value, aliases)
        self.kind: str = self.take("rope_type", "default")

    def _add(self, key: str, where: str, value: Any, aliases: Mapping[str, str]) -> None:
        if key == "rope_type" and isinstance(value, str):
            value = aliases.get(value, value)
        value = self._checked(key, where, value)
        first, known = self._said.setdefault(key, (where, value))
        if known != value:
            advice = f"it contradicts {where} = {value!r}: keep the one that the model was trained with"
            raise self._attributes.refusal(first, known, advice)

    def _checked(self, key: str, where: str, value: Any) -> Any:
        refusal = self._attributes.refusal
        if key == "rope_type":
            if not isinstance(value, str) or value not in _PARAMETERS:
                raise refusal(where, value, f"supported are {', '.join(_PARAMETERS)}")
        elif key == "truncate":
            if not isinstance(value, bool):
                raise refusal(where, value, "expected true or false")
        elif key in ("short_factor", "long_factor"):
            if not isinstance(value, (list, tuple)):
                raise refusal(where, value, "expected a list of numbers")
            return tuple(float(self._attributes.checked_number(where, factor)) for factor in value)
        elif key == _ORIGINAL:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_SIZE:
                raise refusal(where, value, f"expected a whole number from 1 to {MAX_SIZE:,}")
        else:
            return self._attributes.checked_number(where, value)
        return value

    def name(self, key: str) -> str:
        """The attribute in which a parameter is given."""
        return self._said.get(key, (key, None))[0]

    def take(self, key: str, default: Any) -> Any:
        """What is said about a parameter, which counts as handled from here on."""
        return self._said.pop(key, ("", default))[1]

    def scaling(self, trained_context: int) -> RopeScaling | None:
        """The scaling; what it does not read is refused.

        Source: ``transformers.modeling_rope_utils`` for what stands in for parameters that are absent.
        """
        needed, optional = _PARAMETERS[self.kind]
        if self.kind == "default" and self._said.get(_ORIGINAL, ("", None))[0] == _ORIGINAL:
            self.take(_ORIGINAL, None)  # an attribute of the whole model (Phi-3), read only by scalings
        for key, (where, value) in self._said.items():
            if key not in needed + optional:
                raise self._attributes.refusal(where, value, f"rotary positions of type {self.kind!r} do not read it")
        for key in needed:
            if key not in self._said:
                raise self._attributes.refusal("rope_scaling", self.kind, f"this type needs {key}")
        if self.kind == "default":
            return None
        original = self.take(_ORIGINAL, trained_context)
        fields = {key: self.take(key, None) for key in needed + optional if key != _ORIGINAL}
        if fields.get("factor") is None:
            fields["factor"] = trained_context / original
        mscale, mscale_all_dim = fields.pop("mscale", None), fields.pop("mscale_all_dim", None)
        if mscale is not None and mscale_all_dim is not None and fields["attention_factor"] is None:
            magnitude, whole = (_magnitude(fields["factor"], weight) for weight in (mscale, mscale_all_dim))
            fields["attention_factor"] = magnitude / whole
        given = {key: value for key, value in fields.items() if value is not None}
        try:
            return RopeScaling(
                type=self.kind,  # type: ignore[arg-type]  # one of _PARAMETERS
                original_context=None if self.kind == "linear" else original,
                **given,
            )
        except ValueError as error:
            raise self._attributes.refusal("rope_scaling", self.kind, str(error)) from None


def _magnitude(factor: float, weight: float) -> float:
    """YaRN's sqrt(1 / t) for a factor (Peng et al. 2023, section 3.4), with the weight that DeepSeek gives it."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
