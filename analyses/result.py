"""What every analysis returns: named arrays that say what they are and where they come from, and their files."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from workbench.analyses.files import write_together
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

FORMAT, FORMAT_VERSION = "attention-workbench result", 3

# Where each kind of result lives: a file names its kind, never a module.
_CLASSES = {
    "alternative_attention": ("workbench.analyses.attribution.alternatives", "AlternativeAttention"),
    "attention_sinks": ("workbench.analyses.sinks.rates", "AttentionSinks"),
    "attribution_agreement": ("workbench.analyses.attribution.heads", "AttributionAgreement"),
    "attribution_patching": ("workbench.analyses.attribution.patching", "AttributionPatching"),
    "direct_logit_attribution": ("workbench.analyses.predictions.direct", "DirectLogitAttribution"),
    "first_token_sinks": ("workbench.analyses.sinks.first_token", "FirstTokenSinks"),
    "function_vector_heads": ("workbench.analyses.induction.function_vectors", "FunctionVectorHeads"),
    "generation": ("workbench.analyses.predictions.generation", "Generation"),
    "head_comparison": ("workbench.analyses.attention.comparison", "HeadComparison"),
    "head_circuits": ("workbench.analyses.attention.circuits", "HeadCircuits"),
    "head_pattern": ("workbench.analyses.attention.patterns", "HeadPattern"),
    "head_pruning": ("workbench.analyses.attribution.pruning", "HeadPruning"),
    "head_statistics": ("workbench.analyses.attention.heads", "HeadStatistics"),
    "head_zoo": ("workbench.analyses.attention.zoo", "HeadZoo"),
    "induction_circuit": ("workbench.analyses.induction.circuit", "InductionCircuit"),
    "induction_heads": ("workbench.analyses.induction.heads", "InductionHeads"),
    "integrated_gradients": ("workbench.analyses.attribution.token_gradients", "IntegratedGradients"),
    "joint_ablation": ("workbench.analyses.attribution.joint", "JointAblation"),
    "layer_patterns": ("workbench.analyses.attention.mosaics", "LayerPatterns"),
    "logit_lens": ("workbench.analyses.predictions.lens", "LogitLens"),
    "pattern_comparison": ("workbench.analyses.attention.comparison", "PatternComparison"),
    "massive_activations": ("workbench.analyses.sinks.massive", "MassiveActivations"),
    "sink_interventions": ("workbench.analyses.sinks.purpose", "SinkInterventions"),
    "streaming": ("workbench.analyses.sinks.streaming", "Streaming"),
    "switched_off": ("workbench.analyses.predictions.without", "SwitchedOff"),
    "source_attribution": ("workbench.analyses.attribution.sources", "SourceAttribution"),
    "copying_scores": ("workbench.analyses.induction.copying", "CopyingScores"),
    "head_composition": ("workbench.analyses.induction.composition", "HeadComposition"),
    "in_context_learning": ("workbench.analyses.induction.context_loss", "InContextLearning"),
    "prefix_matching_conditions": ("workbench.analyses.induction.conditions", "PrefixMatchingConditions"),
    "prefix_matching_in_text": ("workbench.analyses.induction.natural_text", "PrefixMatchingInText"),
}


class ResultFileError(WorkbenchError, ValueError):
    """A result that cannot be written, or files that are no result, damaged, or not of the same save."""


@dataclass(frozen=True, eq=False)
class Quantity:
    """One array of a result.

    Args:
        values: numbers, truth values or text; kept as a read-only copy.
        axes: one name per axis, such as ("layer", "head").
        unit: "nats", "share of 1", "tokens", …; empty where there is none.
        definition: one line that says what a value is and over what it is averaged.
    """

    values: np.ndarray
    axes: tuple[str, ...]
    unit: str
    definition: str

    def __post_init__(self) -> None:
        values = np.array(self.values)
        if values.dtype.kind not in "biufU":
            raise ValueError(f"values must be numbers, truth values or text, got {values.dtype}")
        if values.ndim != len(self.axes):
            raise ValueError(f"values have {values.ndim} axes, but axes names {len(self.axes)}: {self.axes}")
        values.setflags(write=False)
        object.__setattr__(self, "values", values)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Which model, which weights, which tokens and which software a result comes from."""

    model_name: str
    revision: str | None
    weights: str  # precision and quantisation, in words
    inputs: str  # what the sequences are, in words
    inputs_sha256: str  # of token ids (int64) and mask (bool), row after row, pads as 0
    n_sequences: int  # 0 where nothing is read but the weights
    n_tokens: int  # real tokens, BOS included
    bos: str  # whether the sequences start with BOS, in words
    versions: Mapping[str, str]

    def sentence(self) -> str:
        """One line for summaries and figure captions."""
        revision = f", revision {self.revision}" if self.revision else ""
        plural = "s" if self.n_sequences > 1 else ""
        if not self.n_sequences:
            return f"{self.model_name} ({self.weights}{revision}); {self.inputs}."
        return (
            f"{self.model_name} ({self.weights}{revision}); {self.inputs}; {self.n_sequences:,} sequence{plural}, "
            f"{self.n_tokens:,} token{'s' if self.n_tokens > 1 else ''}, {self.bos}."
        )


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, what it shows in a few words, and what else one must know to read it, in sentences."""

    figure: go.Figure
    title: str
    note: str


def _in_words(name: str) -> str:
    """A quantity's name as a sentence begins with it."""
    words = [word.upper() if word in ("kl", "mlp") else word for word in name.split("_")]
    return " ".join([words[0][0].upper() + words[0][1:], *words[1:]])


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Base of all results. ``result["entropy"]`` is the array, ``result.quantities["entropy"]`` also says what it is.

    Args:
        quantities: name → Quantity; axes of the same name have the same length.
        coordinates: axis → the labels or numbers of its entries, where they are not 0, 1, 2, ….
        settings: the options of the analysis, seeds included, as JSON types.
        coverage: name → share of the real query rows (of the real keys, for a rate of keys) that a mean is taken over.
        provenance: model, inputs and software.
    """

    kind: ClassVar[str]
    all_figure_kinds: ClassVar[tuple[str, ...]]  # the first is the default
    frame_axes: ClassVar[tuple[str, ...]]  # of the default frame
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # name → axes of what the default frame leaves out

    quantities: Mapping[str, Quantity]
    provenance: Provenance
    settings: Mapping[str, Any] = field(default_factory=dict)
    coverage: Mapping[str, float] = field(default_factory=dict)
    coordinates: Mapping[str, Sequence[str | int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {axis: len(entries) for axis, entries in self.coordinates.items()}
        for name, quantity in self.quantities.items():
            for axis, size in zip(quantity.axes, quantity.values.shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(f"{name} has {size} entries along {axis}, elsewhere there are {sizes[axis]}")
        for name in ("settings", "coverage", "coordinates"):
            plain = json.loads(json.dumps(dict(getattr(self, name)), allow_nan=False, default=_plain))
            object.__setattr__(self, name, MappingProxyType(plain))
        object.__setattr__(self, "quantities", MappingProxyType(dict(self.quantities)))

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        """The figures that this result can draw, the default first."""
        return self.all_figure_kinds

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.quantities:
            raise KeyError(f"{name!r} is not in this result; it holds {', '.join(self.quantities)}")
        return self.quantities[name].values

    def __contains__(self, name: object) -> bool:
        return name in self.quantities

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.provenance.model_name}: {', '.join(self.quantities)})"

    def define(self, *names: str) -> str:
        """Sentences that say what these quantities are."""
        return " ".join(f"{_in_words(name)}: {self.quantities[name].definition}." for name in names)

    def names(self, *axes: str) -> list[str]:
        """The quantities that have exactly these axes, in order."""
        return [name for name, quantity in self.quantities.items() if quantity.axes == axes]

    def to_frame(self, *axes: str) -> pd.DataFrame:
        """A tidy table: one row per combination of the axes, one column per quantity that has exactly these axes.

        Without arguments the table of the result's main axes (``frame_axes``).

        Raises:
            ValueError: no quantity has these axes.
        """
        import pandas as pd

        axes = axes or self.frame_axes
        names = self.names(*axes)
        if not names:
            known = sorted({" × ".join(quantity.axes) for quantity in self.quantities.values() if quantity.axes})
            raise ValueError(f"no quantity has the axes {' × '.join(axes)}; there are {', '.join(known)}")
        shape = self[names[0]].shape
        entries = [self.coordinates.get(axis, range(size)) for axis, size in zip(axes, shape, strict=True)]
        index = pd.MultiIndex.from_product(entries, names=axes)
        return pd.DataFrame({name: self[name].reshape(-1) for name in names}, index=index).reset_index()

    def tables(self) -> dict[str, pd.DataFrame]:
        """What summary and figures show, as tidy tables: ``to_frame()`` under the name "", and those beside it."""
        further = {name: axes for name, axes in self.further_tables.items() if self.names(*axes)}
        return {"": self.to_frame()} | {name: self.to_frame(*axes) for name, axes in further.items()}

    def figure(self, kind: str | None = None, *, captioned: bool = False, **options: Any) -> go.Figure:
        """A plotly figure; ``figure_kinds`` lists the kinds. Every kind takes ``theme="light" | "dark"``.

        Args:
            captioned: adds a title and a caption that says which model, inputs and quantities these are, for a figure
                that must stand by itself.

        Raises:
            ValueError: an unknown kind, or an option that the data cannot serve.
        """
        from workbench.analyses import figures

        drawing = self.drawing(kind, **options)
        if not captioned:
            return drawing.figure
        return figures.captioned(drawing.figure, drawing.title, drawing.note, self.provenance.sentence())

    def drawing(self, kind: str | None = None, **options: Any) -> Drawing:
        """The same figure with its title and what one must know to read it beside it, as text."""
        kind = self.figure_kinds[0] if kind is None else kind
        if kind not in self.figure_kinds:
            raise ValueError(f"kind must be one of {', '.join(map(repr, self.figure_kinds))}, got {kind!r}")
        drawing: Drawing = getattr(self, f"_draw_{kind}")(**options)
        return drawing

    def write_figure(
        self,
        path: str | os.PathLike,
        kind: str | None = None,
        *,
        preset: str = "two-column",
        captioned: bool = False,
        **options: Any,
    ) -> Path:
        """Writes a figure as SVG, PDF, PNG, HTML or CSV, whichever the path's suffix names, and returns the path.

        Args:
            preset: the size of pictures: "one-column" (3.3 inches), "two-column" (6.9 inches) or "slide".

        The rest is as in ``figure``, the errors also those of ``figures.write_figure``.
        """
        from workbench.analyses import figures

        return figures.write_figure(self.figure(kind, captioned=captioned, **options), path, preset=preset)

    def summary(self) -> str:
        """The numbers that matter, as a few lines of text."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike) -> Path:
        """Writes ``path.npz`` (the arrays) and ``path.json`` (all the rest); an earlier result of that name goes.

        Both files are complete before either takes its name. Returns the path of the JSON file.

        Raises:
            ResultFileError: the files cannot be written; nothing is left behind.
        """
        stem = _stem(path)
        files = {_with_suffix(stem, suffix): content for suffix, content in self.to_files().items()}
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            write_together(files)
        except OSError as error:
            raise ResultFileError(f"cannot write {stem.parent}: {error.strerror}") from error
        return _with_suffix(stem, ".json")

    def to_files(self) -> dict[str, bytes]:
        """What ``save`` writes, by suffix: ".npz" holds the arrays, ".json" all the rest. ``parse_result`` reads it."""
        buffer = io.BytesIO()
        values: dict[str, Any] = {name: quantity.values for name, quantity in self.quantities.items()}
        np.savez_compressed(buffer, **values)
        arrays = buffer.getvalue()
        description = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "arrays_sha256": hashlib.sha256(arrays).hexdigest(),
            "quantities": {
                name: {"axes": quantity.axes, "unit": quantity.unit, "definition": quantity.definition}
                for name, quantity in self.quantities.items()
            },
            "provenance": asdict(self.provenance),
            **{name: dict(getattr(self, name)) for name in ("settings", "coverage", "coordinates")},
        }
        description["sha256"] = _digest(description)
        text = json.dumps(description, indent=1, ensure_ascii=False, allow_nan=False)
        return {".npz": arrays, ".json": text.encode()}


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON type")


def load_result(path: str | os.PathLike) -> Result:
    """The result that ``save(path)`` wrote; ``path`` may also name either of its two files.

    Raises:
        ResultFileError: a file is missing, damaged, of another save than its companion, or no result at all.
    """
    stem = _stem(path)
    description_path, arrays_path = _with_suffix(stem, ".json"), _with_suffix(stem, ".npz")
    return parse_result(_read(description_path), _read(arrays_path), names=(str(description_path), str(arrays_path)))


def parse_result(description_file: bytes, arrays_file: bytes, *, names: tuple[str, str] = (".json", ".npz")) -> Result:
    """The result whose two files have these contents; ``names`` are what errors call them.

    Raises:
        ResultFileError: as ``load_result``.
    """
    description = _read_description(description_file, names[0])
    if hashlib.sha256(arrays_file).hexdigest() != description.get("arrays_sha256"):
        raise ResultFileError(
            f"{names[1]} is damaged, or was not saved together with {names[0]}; run the analysis again"
        )
    try:
        with np.load(io.BytesIO(arrays_file), allow_pickle=False) as arrays:
            quantities = {
                name: Quantity(arrays[name], tuple(about["axes"]), about["unit"], about["definition"])
                for name, about in description["quantities"].items()
            }
        return _class_of(description["kind"])(
            quantities=quantities,
            provenance=Provenance(**description["provenance"]),
            **{name: description[name] for name in ("settings", "coverage", "coordinates")},
        )
    except Exception as error:  # of numpy, zipfile, zlib, tokenize and more: files from elsewhere hold anything
        raise ResultFileError(f"{names[0]} does not describe {names[1]}: {error}; run the analysis again") from error


def _read_description(content: bytes, name: str) -> dict[str, Any]:
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:  # a ValueError, too, of numbers with thousands of digits
        raise ResultFileError(f"{name} is not readable as JSON ({error}); it is damaged or no saved result") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ResultFileError(f"{name} is no saved result of this workbench")
    if description.get("format_version") != FORMAT_VERSION:
        raise ResultFileError(
            f"{name} has format version {description.get('format_version')!r}, this workbench reads {FORMAT_VERSION}"
        )
    if str(description.get("kind")) not in _CLASSES:
        raise ResultFileError(f"{name} holds a result of the unknown kind {description.get('kind')!r}")
    if description.get("sha256") != _digest({name: value for name, value in description.items() if name != "sha256"}):
        raise ResultFileError(f"{name} was edited or is damaged; run the analysis again")
    return description


def _digest(description: Mapping[str, Any]) -> str:
    """SHA-256 of a description, however its file is laid out."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def figure_kinds_of(kind: str) -> tuple[str, ...]:
    """The figures that results of a kind can draw; none of an unknown kind."""
    return _class_of(kind).all_figure_kinds if kind in _CLASSES else ()


def _class_of(kind: str) -> type[Result]:
    module, name = _CLASSES[kind]
    return getattr(importlib.import_module(module), name)


def _stem(path: str | os.PathLike) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".json", ".npz") else path


def _with_suffix(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)  # with_suffix would eat the end of a name such as "smollm2.v1"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ResultFileError(f"cannot read {path}: {error.strerror}; a result is a .json and an .npz file") from error
