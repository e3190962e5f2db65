"""Questions asked of a model. Each analysis is a function that returns a typed result; see ``Result``.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.analyses.attribution import AttributionAgreement as AttributionAgreement
    from workbench.analyses.attribution import attribution_agreement as attribution_agreement
    from workbench.analyses.direct_attribution import DirectLogitAttribution as DirectLogitAttribution
    from workbench.analyses.direct_attribution import direct_logit_attribution as direct_logit_attribution
    from workbench.analyses.first_token import FirstTokenSinks as FirstTokenSinks
    from workbench.analyses.first_token import first_token_sinks as first_token_sinks
    from workbench.analyses.gradients import AttributionPatching as AttributionPatching
    from workbench.analyses.gradients import attribution_patching as attribution_patching
    from workbench.analyses.heads import HeadStatistics as HeadStatistics
    from workbench.analyses.heads import head_statistics as head_statistics
    from workbench.analyses.induction import InductionHeads as InductionHeads
    from workbench.analyses.induction import induction_heads as induction_heads
    from workbench.analyses.lens import LogitLens as LogitLens
    from workbench.analyses.lens import logit_lens as logit_lens
    from workbench.analyses.massive import MassiveActivations as MassiveActivations
    from workbench.analyses.massive import massive_activations as massive_activations
    from workbench.analyses.patterns import HeadPattern as HeadPattern
    from workbench.analyses.patterns import head_pattern as head_pattern
    from workbench.analyses.prompts import RepeatedTokens as RepeatedTokens
    from workbench.analyses.prompts import chunked_text as chunked_text
    from workbench.analyses.prompts import repeated_random_tokens as repeated_random_tokens
    from workbench.analyses.pruning import HeadPruning as HeadPruning
    from workbench.analyses.pruning import head_pruning as head_pruning
    from workbench.analyses.result import Provenance as Provenance
    from workbench.analyses.result import Quantity as Quantity
    from workbench.analyses.result import Result as Result
    from workbench.analyses.result import ResultFileError as ResultFileError
    from workbench.analyses.result import load_result as load_result
    from workbench.analyses.sink_purpose import SinkInterventions as SinkInterventions
    from workbench.analyses.sink_purpose import sink_interventions as sink_interventions
    from workbench.analyses.sinks import AttentionSinks as AttentionSinks
    from workbench.analyses.sinks import attention_sinks as attention_sinks
    from workbench.analyses.source_tokens import SourceAttribution as SourceAttribution
    from workbench.analyses.source_tokens import source_attribution as source_attribution
    from workbench.analyses.streaming import Streaming as Streaming
    from workbench.analyses.streaming import streaming_perplexity as streaming_perplexity
    from workbench.analyses.tasks import PromptFileError as PromptFileError
    from workbench.analyses.tasks import PromptSet as PromptSet
    from workbench.analyses.tasks import YearPrompts as YearPrompts
    from workbench.analyses.tasks import factual_recall as factual_recall
    from workbench.analyses.tasks import greater_than as greater_than
    from workbench.analyses.tasks import indirect_objects as indirect_objects
    from workbench.analyses.tasks import read_prompts as read_prompts
    from workbench.analyses.tasks import subject_verb_agreement as subject_verb_agreement
    from workbench.analyses.token_gradients import IntegratedGradients as IntegratedGradients
    from workbench.analyses.token_gradients import integrated_gradients as integrated_gradients

_MODULE_OF = {
    "AttentionSinks": "sinks",
    "AttributionAgreement": "attribution",
    "AttributionPatching": "gradients",
    "DirectLogitAttribution": "direct_attribution",
    "FirstTokenSinks": "first_token",
    "HeadPattern": "patterns",
    "HeadPruning": "pruning",
    "HeadStatistics": "heads",
    "InductionHeads": "induction",
    "IntegratedGradients": "token_gradients",
    "LogitLens": "lens",
    "MassiveActivations": "massive",
    "PromptFileError": "tasks",
    "PromptSet": "tasks",
    "Provenance": "result",
    "Quantity": "result",
    "RepeatedTokens": "prompts",
    "Result": "result",
    "ResultFileError": "result",
    "SinkInterventions": "sink_purpose",
    "SourceAttribution": "source_tokens",
    "Streaming": "streaming",
    "YearPrompts": "tasks",
    "attention_sinks": "sinks",
    "attribution_agreement": "attribution",
    "attribution_patching": "gradients",
    "chunked_text": "prompts",
    "direct_logit_attribution": "direct_attribution",
    "factual_recall": "tasks",
    "first_token_sinks": "first_token",
    "greater_than": "tasks",
    "head_pattern": "patterns",
    "head_pruning": "pruning",
    "head_statistics": "heads",
    "indirect_objects": "tasks",
    "induction_heads": "induction",
    "integrated_gradients": "token_gradients",
    "load_result": "result",
    "logit_lens": "lens",
    "massive_activations": "massive",
    "read_prompts": "tasks",
    "repeated_random_tokens": "prompts",
    "sink_interventions": "sink_purpose",
    "source_attribution": "source_tokens",
    "streaming_perplexity": "streaming",
    "subject_verb_agreement": "tasks",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
