"""The pages, in the order in which they are offered.

Each is a module with a NAME (in the URL), TITLE, EXPLANATION, DEFINITIONS, and

- ``CONTROLS``: field of the view → (component, property) of the control that holds it,
- ``layout(view)``: its components,
- ``figures(view)``: id of a graph → what it shows (recipes.Shown), for drawing, export and code alike,
- ``tasks(services, view)``: what must be computed for it, in order,
- ``register(app, services)``: its callbacks.
"""

from workbench.app.pages import (
    attribution,
    compare,
    generation,
    heads,
    induction,
    lens,
    pattern,
    result,
    sinks,
    what_if,
)

PAGES = (heads, pattern, induction, sinks, attribution, what_if, lens, generation, compare, result)
BY_NAME = {page.NAME: page for page in PAGES}
