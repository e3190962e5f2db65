"""Questions asked of a model. Each analysis is a function that returns a typed result; see ``Result``.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.analyses.attention.circuits import HeadCircuits as HeadCircuits
    from workbench.analyses.attention.circuits import head_circuits as head_circuits
    from workbench.analyses.attention.comparison import HeadComparison as HeadComparison
    from workbench.analyses.attention.comparison import PatternComparison as PatternComparison
    from workbench.analyses.attention.comparison import compare_heads as compare_heads
    from workbench.analyses.attention.comparison import compare_patterns as compare_patterns
    from workbench.analyses.attention.heads import HeadStatistics as HeadStatistics
    from workbench.analyses.attention.heads import head_statistics as head_statistics
    from workbench.analyses.attention.mosaics import LayerPatterns as LayerPatterns
    from workbench.analyses.attention.mosaics import layer_patterns as layer_patterns
    from workbench.analyses.attention.patterns import HeadPattern as HeadPattern
    from workbench.analyses.attention.patterns import head_pattern as head_pattern
    from workbench.analyses.attention.zoo import HeadZoo as HeadZoo
    from workbench.analyses.attention.zoo import head_zoo as head_zoo
    from workbench.analyses.attribution.alternatives import AlternativeAttention as AlternativeAttention
    from workbench.analyses.attribution.alternatives import alternative_attention as alternative_attention
    from workbench.analyses.attribution.heads import AttributionAgreement as AttributionAgreement
    from workbench.analyses.attribution.heads import attribution_agreement as attribution_agreement
    from workbench.analyses.attribution.joint import JointAblation as JointAblation
    from workbench.analyses.attribution.joint import joint_ablation as joint_ablation
    from workbench.analyses.attribution.patching import AttributionPatching as AttributionPatching
    from workbench.analyses.attribution.patching import attribution_patching as attribution_patching
    from workbench.analyses.attribution.pruning import HeadPruning as HeadPruning
    from workbench.analyses.attribution.pruning import head_pruning as head_pruning
    from workbench.analyses.attribution.sources import SourceAttribution as SourceAttribution
    from workbench.analyses.attribution.sources import source_attribution as source_attribution
    from workbench.analyses.attribution.token_gradients import IntegratedGradients as IntegratedGradients
    from workbench.analyses.attribution.token_gradients import integrated_gradients as integrated_gradients
    from workbench.analyses.induction.circuit import InductionCircuit as InductionCircuit
    from workbench.analyses.induction.circuit import induction_circuit as induction_circuit
    from workbench.analyses.induction.composition import HeadComposition as HeadComposition
    from workbench.analyses.induction.composition import head_composition as head_composition
    from workbench.analyses.induction.conditions import PrefixMatchingConditions as PrefixMatchingConditions
    from workbench.analyses.induction.conditions import prefix_matching_conditions as prefix_matching_conditions
    from workbench.analyses.induction.context_loss import InContextLearning as InContextLearning
    from workbench.analyses.induction.context_loss import in_context_learning as in_context_learning
    from workbench.analyses.induction.copying import CopyingScores as CopyingScores
    from workbench.analyses.induction.copying import copying_scores as copying_scores
    from workbench.analyses.induction.function_vectors import FunctionVectorHeads as FunctionVectorHeads
    from workbench.analyses.induction.function_vectors import function_vector_heads as function_vector_heads
    from workbench.analyses.induction.heads import InductionHeads as InductionHeads
    from workbench.analyses.induction.heads import induction_heads as induction_heads
    from workbench.analyses.induction.natural_text import PrefixMatchingInText as PrefixMatchingInText
    from workbench.analyses.induction.natural_text import prefix_matching_in_text as prefix_matching_in_text
    from workbench.analyses.predictions.direct import DirectLogitAttribution as DirectLogitAttribution
    from workbench.analyses.predictions.direct import direct_logit_attribution as direct_logit_attribution
    from workbench.analyses.predictions.generation import Generation as Generation
    from workbench.analyses.predictions.generation import generation_statistics as generation_statistics
    from workbench.analyses.predictions.lens import LogitLens as LogitLens
    from workbench.analyses.predictions.lens import logit_lens as logit_lens
    from workbench.analyses.predictions.without import SwitchedOff as SwitchedOff
    from workbench.analyses.predictions.without import what_if as what_if
    from workbench.analyses.prompts import RepeatedTokens as RepeatedTokens
    from workbench.analyses.prompts import chunked_text as chunked_text
    from workbench.analyses.prompts import repeated_random_tokens as repeated_random_tokens
    from workbench.analyses.report import write_report as write_report
    from workbench.analyses.result import Provenance as Provenance
    from workbench.analyses.result import Quantity as Quantity
    from workbench.analyses.result import Result as Result
    from workbench.analyses.result import ResultFileError as ResultFileError
    from workbench.analyses.result import load_result as load_result
    from workbench.analyses.sinks.first_token import FirstTokenSinks as FirstTokenSinks
    from workbench.analyses.sinks.first_token import first_token_sinks as first_token_sinks
    from workbench.analyses.sinks.massive import MassiveActivations as MassiveActivations
    from workbench.analyses.sinks.massive import massive_activations as massive_activations
    from workbench.analyses.sinks.purpose import SinkInterventions as SinkInterventions
    from workbench.analyses.sinks.purpose import sink_interventions as sink_interventions
    from workbench.analyses.sinks.rates import AttentionSinks as AttentionSinks
    from workbench.analyses.sinks.rates import attention_sinks as attention_sinks
    from workbench.analyses.sinks.streaming import Streaming as Streaming
    from workbench.analyses.sinks.streaming import streaming_perplexity as streaming_perplexity
    from workbench.analyses.tasks import PromptFileError as PromptFileError
    from workbench.analyses.tasks import PromptSet as PromptSet
    from workbench.analyses.tasks import WordPairs as WordPairs
    from workbench.analyses.tasks import YearPrompts as YearPrompts
    from workbench.analyses.tasks import factual_recall as factual_recall
    from workbench.analyses.tasks import few_shot_prompts as few_shot_prompts
    from workbench.analyses.tasks import greater_than as greater_than
    from workbench.analyses.tasks import indirect_objects as indirect_objects
    from workbench.analyses.tasks import parse_prompts as parse_prompts
    from workbench.analyses.tasks import read_prompts as read_prompts
    from workbench.analyses.tasks import subject_verb_agreement as subject_verb_agreement

_MODULE_OF = {
    "AlternativeAttention": "attribution.alternatives",
    "AttentionSinks": "sinks.rates",
    "AttributionAgreement": "attribution.heads",
    "AttributionPatching": "attribution.patching",
    "CopyingScores": "induction.copying",
    "DirectLogitAttribution": "predictions.direct",
    "FirstTokenSinks": "sinks.first_token",
    "HeadComparison": "attention.comparison",
    "HeadComposition": "induction.composition",
    "FunctionVectorHeads": "induction.function_vectors",
    "Generation": "predictions.generation",
    "HeadCircuits": "attention.circuits",
    "HeadPattern": "attention.patterns",
    "HeadPruning": "attribution.pruning",
    "HeadStatistics": "attention.heads",
    "HeadZoo": "attention.zoo",
    "InContextLearning": "induction.context_loss",
    "InductionCircuit": "induction.circuit",
    "InductionHeads": "induction.heads",
    "IntegratedGradients": "attribution.token_gradients",
    "JointAblation": "attribution.joint",
    "LayerPatterns": "attention.mosaics",
    "LogitLens": "predictions.lens",
    "MassiveActivations": "sinks.massive",
    "PatternComparison": "attention.comparison",
    "PrefixMatchingConditions": "induction.conditions",
    "PrefixMatchingInText": "induction.natural_text",
    "PromptFileError": "tasks",
    "PromptSet": "tasks",
    "Provenance": "result",
    "Quantity": "result",
    "RepeatedTokens": "prompts",
    "Result": "result",
    "ResultFileError": "result",
    "SinkInterventions": "sinks.purpose",
    "SourceAttribution": "attribution.sources",
    "Streaming": "sinks.streaming",
    "SwitchedOff": "predictions.without",
    "WordPairs": "tasks",
    "YearPrompts": "tasks",
    "alternative_attention": "attribution.alternatives",
    "attention_sinks": "sinks.rates",
    "attribution_agreement": "attribution.heads",
    "attribution_patching": "attribution.patching",
    "chunked_text": "prompts",
    "compare_heads": "attention.comparison",
    "compare_patterns": "attention.comparison",
    "copying_scores": "induction.copying",
    "direct_logit_attribution": "predictions.direct",
    "factual_recall": "tasks",
    "few_shot_prompts": "tasks",
    "first_token_sinks": "sinks.first_token",
    "function_vector_heads": "induction.function_vectors",
    "generation_statistics": "predictions.generation",
    "greater_than": "tasks",
    "head_composition": "induction.composition",
    "head_circuits": "attention.circuits",
    "head_pattern": "attention.patterns",
    "head_pruning": "attribution.pruning",
    "head_statistics": "attention.heads",
    "head_zoo": "attention.zoo",
    "in_context_learning": "induction.context_loss",
    "indirect_objects": "tasks",
    "induction_circuit": "induction.circuit",
    "induction_heads": "induction.heads",
    "integrated_gradients": "attribution.token_gradients",
    "joint_ablation": "attribution.joint",
    "layer_patterns": "attention.mosaics",
    "load_result": "result",
    "logit_lens": "predictions.lens",
    "massive_activations": "sinks.massive",
    "parse_prompts": "tasks",
    "prefix_matching_conditions": "induction.conditions",
    "prefix_matching_in_text": "induction.natural_text",
    "read_prompts": "tasks",
    "repeated_random_tokens": "prompts",
    "sink_interventions": "sinks.purpose",
    "source_attribution": "attribution.sources",
    "streaming_perplexity": "sinks.streaming",
    "subject_verb_agreement": "tasks",
    "what_if": "predictions.without",
    "write_report": "report",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
