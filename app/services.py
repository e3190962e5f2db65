"""What the pages compute: tasks on a model and a text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dash.exceptions import PreventUpdate

from workbench.app.jobs import Job, JobRunner, Task
from workbench.app.models import ModelStore
from workbench.app.state import TextStore, View, from_query

SINK_LENGTH = 64  # tokens of a sequence in which sinks are counted (Gu et al. 2024)
SHORTEN = "shorten it, or keep its beginning with the field “Shorten to”"


class Services:
    """One server's models, jobs and texts.

    Args:
        default: what a page shows whose address says nothing.
        known_models: the names that the model field suggests, and what each is.
    """

    def __init__(self, models: ModelStore, default: View, known_models: Mapping[str, str]) -> None:
        self.models = models
        self.default = default
        self.known_models = dict(known_models)
        self.jobs = JobRunner()
        self.texts = TextStore()

    def view(self, query: str) -> View:
        """The view behind the string that the pages pass around."""
        return from_query(query, self.default)[0]

    def view_on(self, page: str, query: str) -> View:
        """The view, for a callback that draws a page. Raises PreventUpdate where another page is open."""
        view = self.view(query)
        if not query or view.page != page:
            raise PreventUpdate
        return view

    def finished(self, task: Task) -> Any:
        """The result of a task. Raises PreventUpdate where it is not done, as its page is drawn once it is."""
        result = self.jobs.result(task.key)
        if result is None:
            raise PreventUpdate
        return result

    def nearest_head(self, view: View) -> tuple[int, int] | None:
        """The head closest to the view's, where its model is in memory and has no such head; else None."""
        model = self.models.loaded(view.model)
        if model is None or view.layer is None or view.head is None:
            return None
        nearest = min(view.layer, model.cfg.n_layers - 1), min(view.head, model.cfg.n_heads - 1)
        return None if nearest == (view.layer, view.head) else nearest

    def head_statistics(self, view: View) -> Task:
        """The statistics of all heads on the view's text."""

        def run(model: Any, job: Job) -> Any:
            from workbench.analyses import head_statistics

            return head_statistics(model, self._tokens(model, view), progress=job.report)

        return self._task("Head statistics", view, (view.text, view.max_tokens), run)

    def head_pattern(self, view: View, max_cells: int = 320) -> Task:
        """The pattern of the view's head, or the part of it that the view shows, in at most so many cells a side.

        The map must have a pixel for each of them, in a narrow window too: what falls between pixels is not drawn.
        """
        if not view.has_head:
            raise PreventUpdate

        def run(model: Any, job: Job) -> Any:
            return self._pattern(model, view, max_cells)

        chosen = (view.text, view.max_tokens, view.layer, view.head, view.queries, view.keys, view.pooling, max_cells)
        return self._task(f"Pattern of L{view.layer}H{view.head}", view, chosen, run)

    def attribution(self, view: View) -> Task:
        """What attention, gradients and ablation say of each head on the view's task."""

        def run(model: Any, job: Job) -> Any:
            from workbench.analyses import attribution_agreement

            return attribution_agreement(model, _prompts(model, view), progress=job.report)

        return self._task("Ablation of every head", view, (view.task,), run)

    def source_attribution(self, view: View) -> Task:
        """What attention, gradients and knock-out say of each token of the view's task."""

        def run(model: Any, job: Job) -> Any:
            from workbench.analyses import source_attribution

            return source_attribution(model, _prompts(model, view), progress=job.report)

        return self._task("Knock-out of every token", view, (view.task,), run)

    def logit_lens(self, view: View) -> Task:
        """What every depth of the model predicts on the view's text."""

        def run(model: Any, job: Job) -> Any:
            from workbench.analyses import logit_lens

            return logit_lens(model, self._tokens(model, view))

        return self._task("Logit lens", view, (view.text, view.max_tokens), run)

    def what_if(self, view: View) -> Task:
        """What the view's text is followed by, as it is and with parts of the model switched off."""

        def run(model: Any, job: Job) -> Any:
            from workbench.analyses import what_if

            return what_if(model, self._tokens(model, view), view.off, position=view.position)

        return self._task("What if", view, (view.text, view.max_tokens, view.off, view.position), run)

    def pattern_switched_off(self, view: View, max_cells: int) -> Task:
        """As ``head_pattern``, with ``view.off`` switched off."""
        if not view.off:
            return self.head_pattern(view, max_cells)

        def run(model: Any, job: Job) -> Any:
            from workbench.analyses.interventions.switches import switched_off

            off = switched_off(model, view.off, self._tokens(model, view).tokens.shape[-1])
            with model.hooks(fwd_hooks=list(off.edits.items())):
                return self._pattern(model, view, max_cells)

        chosen = (view.text, view.max_tokens, view.layer, view.head, view.off, max_cells)
        return self._task(f"Pattern of L{view.layer}H{view.head}, switched off", view, chosen, run)

    def attention_sinks(self, view: View) -> Task:
        """Where attention rests in the view's text."""

        def run(model: Any, job: Job) -> Any:
            from workbench.analyses import attention_sinks
            from workbench.analyses.inputs import text_to_sequences

            text = self.texts.get(view.text)
            tokens = text_to_sequences(model, text, view.max_tokens, length=SINK_LENGTH)
            return attention_sinks(model, tokens, n_tokens=SINK_LENGTH, progress=job.report)

        return self._task("Attention sinks", view, (view.text, view.max_tokens), run)

    def induction_heads(self, view: View) -> Task:
        """Induction scores of all heads on repeated random tokens, and what their ablation costs."""

        def run(model: Any, job: Job) -> Any:
            from workbench.analyses import induction_heads

            return induction_heads(
                model, length=view.length, n_sequences=view.sequences, seed=view.seed, progress=job.report
            )

        return self._task("Induction heads", view, (view.length, view.sequences, view.seed), run)

    def _pattern(self, model: Any, view: View, max_cells: int) -> Any:
        from workbench.analyses import head_pattern

        assert view.layer is not None and view.head is not None
        return head_pattern(
            model,
            self._tokens(model, view),
            view.layer,
            view.head,
            queries=view.queries,
            keys=view.keys,
            max_cells=max_cells,
            pooling=view.pooling,
        )

    def _tokens(self, model: Any, view: View) -> Any:
        from workbench.analyses.inputs import text_to_tokens

        return text_to_tokens(model, self.texts.get(view.text), view.max_tokens, shorten=SHORTEN)

    def _task(self, title: str, view: View, chosen: tuple, run: Callable[[Any, Job], Any]) -> Task:
        """``run`` on the view's model; ``chosen`` is all else that the result depends on."""
        key = hashlib.sha256(repr((title, view.model, *chosen)).encode()).hexdigest()

        def work(job: Job) -> Any:
            model = self.models.get(view.model, job)
            with self.models.computing(model, job), stoppable(model, job):
                return run(model, job)

        return Task(key, title, work)


def _prompts(model: Any, view: View) -> Any:
    """The prompts of the view's task, in the model's own words."""
    from workbench import analyses
    from workbench.analyses.support import check_model

    check_model(model, predicts=True)  # before words are sought, of which such a model may have none
    return getattr(analyses, view.task)(model)


@contextmanager
def stoppable(model: Any, job: Job) -> Iterator[None]:
    """Lets a job be cancelled between any two layers of the model."""

    def check(value: Any, hook: Any) -> None:
        job.check()

    hooks = [(f"blocks.{layer}.hook_resid_post", check) for layer in range(model.cfg.n_layers)]
    with model.hooks(fwd_hooks=hooks):
        yield
