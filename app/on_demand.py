"""Cards that are computed when they are asked for: a button, what it costs, and the result in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dash_mantine_components as dmc
from dash import ClientsideFunction, Dash, Input, Output, State, html

from workbench.app.components import card
from workbench.app.jobs import Task
from workbench.app.messages import error_message
from workbench.app.recipes import AnyRecipe
from workbench.app.services import Services
from workbench.app.state import View


@dataclass(frozen=True)
class OnDemand:
    """One such card.

    Args:
        name: one of state.ON_DEMAND.
        title: of the card.
        button: what is done, as an order.
        about: what it shows, and how long it takes.
    """

    name: str
    title: str
    button: str
    about: str

    def card(self, *content: Any, controls: Sequence[Any] = (), note: Any = None, className: str = "") -> html.Section:
        ask = dmc.Button(self.button, id=f"ask-{self.name}", n_clicks=0, size="compact-md", variant="light")
        shown = [*content, *([html.Div(note, className="card-note")] if note is not None else [])]
        return card(
            self.title,
            html.Div([html.P(self.about, className="empty"), ask], id=f"{self.name}-ask", className="on-demand"),
            html.Div(id=f"{self.name}-message"),
            html.Div(shown, id=f"{self.name}-shown", hidden=True),
            controls=controls,
            className=className,
        )

    @property
    def outputs(self) -> tuple[Output, Output, Output]:
        """What ``state`` returns goes here."""
        return (
            Output(f"{self.name}-ask", "hidden"),
            Output(f"{self.name}-shown", "hidden"),
            Output(f"{self.name}-message", "children"),
        )

    def state(self, services: Services, view: View, recipe: AnyRecipe) -> tuple[tuple[bool, bool, Any], Any]:
        """What of the card is seen, and the result where there is one, else None."""
        if self.name not in view.asked:
            return (False, True, []), None
        error = services.jobs.error(recipe.key(view))
        if error is not None:
            return (True, True, error_message(error)), None
        result = services.jobs.result(recipe.key(view))
        return (result is not None, result is None, []), result

    def tasks(self, services: Services, view: View, recipe: AnyRecipe) -> list[Task]:
        """What must be computed for it: nothing before it is asked for."""
        return [services.task(view, recipe, optional=True)] if self.name in view.asked else []

    def register(self, app: Dash) -> None:
        """A click on the button asks for it."""
        app.clientside_callback(
            ClientsideFunction("view", "ask"),
            Output("asked", "data", allow_duplicate=True),
            Input(f"ask-{self.name}", "n_clicks"),
            State("asked", "data"),
        )
