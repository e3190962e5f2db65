"""Tasks with known right answers: prompts that any model with a tokenizer can be scored on."""

from workbench.analyses.tasks.builders import factual_recall as factual_recall
from workbench.analyses.tasks.builders import indirect_objects as indirect_objects
from workbench.analyses.tasks.builders import subject_verb_agreement as subject_verb_agreement
from workbench.analyses.tasks.files import PromptFileError as PromptFileError
from workbench.analyses.tasks.files import parse_prompts as parse_prompts
from workbench.analyses.tasks.files import read_prompts as read_prompts
from workbench.analyses.tasks.prompt_set import PromptSet as PromptSet
from workbench.analyses.tasks.prompt_set import YearPrompts as YearPrompts
from workbench.analyses.tasks.word_pairs import WordPairs as WordPairs
from workbench.analyses.tasks.word_pairs import few_shot_prompts as few_shot_prompts
from workbench.analyses.tasks.years import greater_than as greater_than
