"""What a page shows and the code that it gives for it are the same: every page's code is run, on the demo model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import nbformat
import numpy as np
import plotly.graph_objects as go
import pytest
from dash import dcc, html
from nbclient import NotebookClient

from workbench import HookedTransformer
from workbench.app import registry
from workbench.app.models import ModelStore
from workbench.app.notebooks import _new_lines, notebook
from workbench.app.recipes import HEAD_STATISTICS, Code, Recipe, Shown, pattern_of
from workbench.app.services import Services
from workbench.app.state import ON_DEMAND, View
from workbench.errors import WorkbenchError

TEXT = "Mara met Tomas at the harbour. Mara gave Tomas a map. Tomas gave Mara the map again."
HOSTILE = (
    "Mara <script>alert(1)</script> \"><img src=x onerror=alert(2)> 'it''s' \\n \u202eright\u200b "
    '\U0001f469\u200d\U0001f52c {0} %s\n""" Mara'
)
QUICK = ("circuit", "copying", "massive")  # of ON_DEMAND; the others take a minute
WITHOUT_WORK = ("attribution", "result")  # half a minute of work; nothing to compute


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def services(demo: HookedTransformer) -> Services:
    chosen = {"layer": 2, "head": 3, "queries": (2, 9), "off": ("L1H1", "L0:>0"), "asked": QUICK}
    default = View(text=TEXT, length=8, sequences=2, new_tokens=3, **chosen)
    return Services(ModelStore(load=lambda source, job, make_room: demo), default, {})


def computed(services: Services, view: View) -> None:
    """Everything that a page shows of a view is computed, as when the page is open."""
    done: set[str] = set()
    while waiting := [task for task in registry.BY_NAME[view.page].tasks(services, view) if task.key not in done]:
        job = services.jobs.request("test", waiting[0])
        assert job.wait(120) and job.error is None, job.error
        done.add(waiting[0].key)


def result_of(services: Services, view: View, recipe: Recipe) -> Any:
    job = services.jobs.request("test", services.task(view, recipe))
    assert job.wait(60) and job.error is None, job.error
    return job.result


def ran(code: str, model: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables of a script, which loads the model that is loaded already and shows its figures to nobody."""
    monkeypatch.setattr(HookedTransformer, "from_pretrained", lambda source: model)
    monkeypatch.setattr(go.Figure, "show", lambda figure: None)
    variables: dict[str, Any] = {}
    exec(code, variables)
    return variables


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other) and one.quantities.keys() == other.quantities.keys()
    for name in one.quantities:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert one.settings == other.settings and one.provenance.inputs_sha256 == other.provenance.inputs_sha256


@pytest.mark.parametrize("page", [page for page in registry.BY_NAME if page not in WITHOUT_WORK])
def test_the_code_of_every_figure_gives_the_result_and_the_figure_of_the_page(
    page: str, services: Services, demo: HookedTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = dataclasses.replace(services.default, page=page)
    computed(services, view)
    shown = registry.BY_NAME[page].figures(view)
    assert shown
    variables: dict[str, dict[str, Any]] = {}  # of the code of every recipe
    for figure in shown.values():
        key = figure.recipe.key(view)
        result = services.jobs.result(key)
        if result is None:
            assert page == "sinks" and figure.recipe.analysis in ("streaming_perplexity", "sink_interventions")
            continue
        code = figure.code(view, services.text(view, figure.recipe), result)
        if key not in variables:
            variables[key] = ran(code, demo, monkeypatch)
            assert_equal(variables[key]["result"], result)
        assert code.endswith(f"{figure.call(result)}.show()")
        remade = eval(figure.call(result), variables[key])
        assert remade.to_json() == figure.draw(result, "light").to_json()
    assert variables


def test_the_code_of_tasks_makes_their_prompts(demo: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(task="subject_verb_agreement")
    recipe = registry.BY_NAME["attribution"].figures(view)["sources-prompt"].recipe
    code = recipe.code(view, "")
    made = [line for line in code.result if not line.startswith("result = ")]
    variables = ran("\n".join([*code.imports, *code.model, *made]), demo, monkeypatch)
    (read,) = recipe._read(demo, view, "")
    assert (variables["prompts"].tokens == read.tokens).all()
    assert code.result[-1] == "result = source_attribution(model, prompts)"


@pytest.mark.parametrize("limit", [None, 9])
@pytest.mark.parametrize("off", [(), ("L1H1",)])
def test_code_is_python_whatever_the_text_says(
    limit: int | None,
    off: tuple[str, ...],
    services: Services,
    demo: HookedTransformer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = View(text=HOSTILE, max_tokens=limit, layer=1, head=2)
    recipe = pattern_of(view, 64, off)
    shown = Shown(recipe, "pattern", {"bars": False})
    result = result_of(services, view, recipe)
    variables = ran(shown.code(view, HOSTILE, result), demo, monkeypatch)
    assert variables["text"] == HOSTILE
    assert_equal(variables["result"], result)
    assert ("switched_off" in variables) == bool(off) and ("text_to_tokens" in variables) == bool(off or limit)


def test_parts_that_are_switched_off_stay_so_for_the_recipe_alone(services: Services) -> None:
    view = View(layer=2, head=1, text=TEXT)

    def weights(max_cells: int, off: tuple[str, ...]) -> np.ndarray:
        return result_of(services, view, pattern_of(view, max_cells, off))["weight"]

    before = weights(64, ())
    assert np.nanmax(np.abs(weights(64, ("L0", "M0")) - before)) > 0.01
    np.testing.assert_array_equal(weights(65, ()), before)  # another job, of as many cells


def test_a_recipe_is_another_for_what_it_reads_only() -> None:
    view = View()
    other_text, other_task = dataclasses.replace(view, text="x"), dataclasses.replace(view, task="greater_than")
    prompts, random = Recipe("a", "", reads="task"), Recipe("a", "", reads="nothing")
    assert HEAD_STATISTICS.key(view) == HEAD_STATISTICS.key(other_task) != HEAD_STATISTICS.key(other_text)
    assert prompts.key(view) == prompts.key(other_text) != prompts.key(other_task)
    assert random.key(view) == random.key(other_text) == random.key(other_task)
    keys = {
        recipe.key(view)
        for recipe in (
            random, prompts, Recipe("b", "", reads="nothing"), Recipe("a", "", options={"n": 1}, reads="nothing"),
            Recipe("a", "", arguments=(1,), reads="nothing"), Recipe("a", "", model="m", reads="nothing"),
        )
    }  # fmt: skip
    assert len(keys) == 6 and Recipe("a", "another title", reads="nothing").key(view) in keys


def test_every_figure_of_every_page_can_be_exported() -> None:
    """Its graph has a menu, and the page says what it shows."""
    view = View(layer=0, head=0, asked=ON_DEMAND)
    for page in registry.PAGES:
        parts = list(html.Div(page.layout(view))._traverse())
        graphs = {part.id for part in parts if isinstance(part, dcc.Graph)}
        menus = {getattr(part, "data-figure", None) for part in parts} - {None}
        assert menus == graphs, page.NAME
        if page.NAME != "result":  # whose figures come with it
            shown = set(page.figures(dataclasses.replace(view, page=page.NAME)))
            assert graphs == shown, page.NAME


def test_the_notebook_runs_from_top_to_bottom(demo: HookedTransformer) -> None:
    services = Services(ModelStore(load=lambda source, job, make_room: demo), View(text=HOSTILE, max_tokens=20), {})
    with pytest.raises(WorkbenchError, match="nothing is computed yet"):
        notebook(services, services.default)
    view = dataclasses.replace(services.default, layer=2, head=3, off=("L1H1",))
    computed(services, dataclasses.replace(view, page="what-if"))
    made = nbformat.reads(notebook(services, view).decode(), as_version=4)
    nbformat.validate(made)
    sources = [cell.source for cell in made.cells]
    assert sum(source.count("from_pretrained('demo')") for source in sources) == 1  # the model is loaded once
    assert sum(source.count("text = ") for source in sources) == 1
    assert [source for source in sources if source.startswith("#")][1:] == ["## What if"]  # all that is computed
    assert not any("<script>" in cell.source for cell in made.cells if cell.cell_type == "markdown")
    NotebookClient(made, timeout=120, kernel_name="python3").execute()
    drawn = [
        output for cell in made.cells if cell.cell_type == "code" for output in cell.outputs
        if output.output_type == "display_data"
    ]  # fmt: skip
    assert len(drawn) == len(registry.BY_NAME["what-if"].figures(view))
    said = json.dumps([cell.get("outputs", []) for cell in made.cells])
    result = services.jobs.result(registry.BY_NAME["what-if"].figures(view)["following"].recipe.key(view))
    assert json.dumps(result.summary().splitlines()[-1])[1:-1] in said


def test_a_notebook_sets_a_name_anew_where_what_it_is_made_of_has_changed() -> None:
    def of(model: str, text: str) -> Code:
        made = [f"text = {text}", "tokens = cut(model, text)", "with off:\n    result = f(tokens)"]
        return Code([], [f"model = load({model})"], made)

    done: dict[str, str] = {}
    assert len(_new_lines(of("a", "1"), done)) == 4
    assert _new_lines(of("a", "1"), done) == ["with off:\n    result = f(tokens)"]
    assert _new_lines(of("a", "2"), done) == of("a", "2").result
    assert len(_new_lines(of("b", "2"), done)) == 4
