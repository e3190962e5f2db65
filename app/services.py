"""What the pages compute: tasks on a model and a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from dash import Input, State
from dash.exceptions import PreventUpdate

from workbench.app.estimates import weigh
from workbench.app.jobs import Job, JobRunner, Task
from workbench.app.models import ModelStore
from workbench.app.opened import OpenedResults
from workbench.app.recipes import AnyRecipe, Compared, Opened, Recipe
from workbench.app.state import TextStore, View, from_query


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
        self.opened = OpenedResults()
        self._memory: tuple[str, Any] | None = None

    def view(self, query: str) -> View:
        """The view behind the string that the pages pass around."""
        return from_query(query, self.default)[0]

    def view_on(self, page: str, query: str) -> View:
        """The view, for a callback that draws a page. Raises PreventUpdate where another page is open, or where the
        model has no such head, which is about to be replaced by one that it has."""
        view = self.view(query)
        if not query or view.page != page or self.nearest_head(view) is not None:
            raise PreventUpdate
        return view

    def nearest_head(self, view: View) -> tuple[int, int] | None:
        """The head closest to the view's, where its model is in memory and has no such head; else None."""
        model = self.models.loaded(view.model)
        if model is None or view.layer is None or view.head is None:
            return None
        nearest = min(view.layer, model.cfg.n_layers - 1), min(view.head, model.cfg.n_heads - 1)
        return None if nearest == (view.layer, view.head) else nearest

    def memory_of(self, model_name: str) -> Any:
        """What is kept of the text whose patterns were looked at last, so that zooming in runs no layer again.

        By the model's name, as results are: a model in memory that was changed is shown under a new one.
        """
        from workbench.analyses.attention.cells import ScoreMemory

        if self._memory is None or self._memory[0] != model_name:
            self._memory = model_name, ScoreMemory()
        return self._memory[1]

    def task(self, view: View, recipe: AnyRecipe, *, optional: bool = False) -> Task:
        """What computes a recipe for a view. The same result is the same task.

        Args:
            optional: its card says what it fails with, and the page goes on without it.
        """
        if isinstance(recipe, Opened):
            return Task(recipe.key(view), recipe.title, lambda job: self.opened.get(recipe.name))
        if isinstance(recipe, Compared):
            return Task(recipe.key(view), recipe.title, lambda job: self._compare(view, recipe, job), optional)
        model_name = recipe.model_of(view)

        def work(job: Job) -> Any:
            model = self.models.get(model_name, job)
            with self.models.computing(model, job), stoppable(model, job):
                before = partial(weigh, job, str(model.cfg.device), recipe.to_take_less)
                return recipe.run(model, view, self.text(view, recipe), job.report, self.memory_of(model_name), before)

        return Task(recipe.key(view), recipe.title, work, optional)

    def _compare(self, view: View, recipe: Compared, job: Job) -> Any:
        """Puts two results beside each other, and computes first what of them there is not."""
        results = []
        for part in recipe.parts:
            kept = self.jobs.result(part.key(view))
            results.append(self.task(view, part).work(job) if kept is None else kept)
        return recipe.run(results)

    def text(self, view: View, recipe: AnyRecipe) -> Any:
        """The words that a recipe reads, of a comparison those of both sides.

        Raises:
            WorkbenchError: this server no longer has them.
        """
        from workbench.analyses.inputs import shuffled_words

        if isinstance(recipe, Compared):
            return tuple(self.text(view, part) for part in recipe.parts)
        words = self.texts.get(recipe.text_of(view))
        return shuffled_words(words) if isinstance(recipe, Recipe) and recipe.shuffled else words

    def result(self, view: View, recipe: AnyRecipe) -> Any:
        """The result of a recipe. Raises PreventUpdate where it is not done, as its page is drawn once it is."""
        result = self.jobs.result(recipe.key(view))
        if result is None:
            raise PreventUpdate
        return result


def when_drawn(page: str) -> tuple[Input, State, State]:
    """For a callback that draws a page: it is called when there is something new to draw, and only on the open page.

    Its arguments are what is ready, the view's query, and the colour scheme.
    """
    return Input(f"draw-{page}", "data"), State("view", "data"), State("scheme", "data")


@contextmanager
def stoppable(model: Any, job: Job) -> Iterator[None]:
    """Lets a job be cancelled between any two layers of the model."""

    def check(value: Any, hook: Any) -> None:
        job.check()

    hooks = [(f"blocks.{layer}.hook_resid_post", check) for layer in range(model.cfg.n_layers)]
    with model.hooks(fwd_hooks=hooks):
        yield
