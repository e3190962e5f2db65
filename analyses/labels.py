"""What per-head scores are called where people read them, in the order in which they are offered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

HEAD_SCORES = {
    "prefix_matching": "Prefix matching",
    "previous_token": "Previous token",
    "duplicate_token": "Duplicate token",
    "sink_mass": "Sink mass",
    "virtual_sink_mass": "Virtual sink mass",
    "self_weight": "Self weight",
    "entropy": "Entropy",
    "relative_entropy": "Relative entropy",
    "max_weight": "Maximum weight",
    "mean_distance": "Mean distance",
    "key_concentration": "Key concentration",
    "prefix_matching_latest": "Prefix matching, latest",
    "prefix_matching_per_entry": "Prefix matching, per entry",
}
INDUCTION_SCORES = {name: label for name, label in HEAD_SCORES.items() if name.startswith(("prefix", "prev", "dup"))}
SINK_SCORES = {
    "sink_weight": "Weight on the sink",
    "head_sink_rate": "Sink rate of the head",
    "sink_mass": "Mass on the first tokens",
    "virtual_sink_mass": "Mass on the virtual sink",
    "value_norm_ratio": "Value norm, sink / median",
    "output_norm_ratio": "Output norm, sink / median",
}
GENERATION_SCORES = {
    "generated_mass": "On generated tokens",
    "prompt_mass": "On the prompt",
    "first_token": "On the first token",
    "previous_token": "On the previous token",
    "self_weight": "On itself",
    "prefix_matching": "Prefix matching",
    "max_weight": "Largest weight",
    "virtual_sink_mass": "On the virtual sink",
    "entropy": "Entropy",
    "mean_distance": "Mean distance",
}
COPYING_SCORES = {
    "in_situ": "Logit gain of the attended token",
    "eigenvalues": "Copying by eigenvalues",
    "eigenvalues_of_weights": "Copying by eigenvalues, weights as they are",
    "top_share": "Attended tokens among the top 5 logits",
}
TASKS = {  # by the function of workbench.analyses that makes their prompts
    "factual_recall": "Facts",
    "subject_verb_agreement": "Subject–verb agreement",
    "greater_than": "Greater than",
    "indirect_objects": "Indirect objects",
}
ABLATIONS = {"zero": "Zero ablation", "mean": "Mean ablation", "resample": "Resample ablation"}
ATTENTION_MEASURES = {
    "max_weight": "Largest weight",
    "off_sink_mass": "Weight off the first token",
    "entropy": "Entropy",
    "value_weighted": "Norm of the output",
    "gradient_output": "Gradient × output",
    "gradient_attention": "Gradient × attention",
}


def number_or_dash(value: float | np.ndarray, spec: str = ".3f") -> str:
    """A number as text, and a dash where there is none (NaN)."""
    return "–" if math.isnan(value) else f"{value:{spec}}"
