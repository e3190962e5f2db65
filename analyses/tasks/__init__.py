"""Tasks with known right answers."""

from workbench.analyses.tasks.prompt_set import PromptSet as PromptSet
