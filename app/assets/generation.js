// Stepping through generated tokens: by buttons, slider, arrow keys, and clicks on text and figures.
(function () {
  "use strict";

  const strip = () => document.getElementById("step-text");
  let latest = { step: 0, when: -Infinity };
  const QUICK = 700; // milliseconds: while choices follow each other so fast, the field is behind
  const inField = () => Number(document.getElementById("step").value) || 0;
  const current = () => (performance.now() - latest.when < QUICK ? latest.step : inField());
  const lastStep = () => strip().querySelectorAll("[data-step]").length - 1;
  const within = (step) => Math.max(0, Math.min(lastStep(), step));

  function chosen(step) {
    latest = { step: within(step), when: performance.now() };
    return { step: latest.step };
  }

  const goTo = (step) => window.dash_clientside.set_props("chosen", { data: chosen(step) });

  document.addEventListener("click", function (event) {
    const token = event.target.closest("#step-text [data-step]");
    if (token) goTo(Number(token.dataset.step));
  });

  document.addEventListener("keydown", function (event) {
    if (event.target.id !== "step-text") return;
    const [back, on] = [current() - 1, current() + 1];
    const to = { ArrowRight: on, ArrowDown: on, ArrowLeft: back, ArrowUp: back, Home: 0, End: lastStep() }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    goTo(to);
  });

  // The last number that a figure's event stands for: a column of the map, or a point of a curve.
  const clicked = (event) => event && event.points.length && Math.round(event.points[0].x);

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    generation: {
      chooseStep: function (typed, slider, back, on, curves, head) {
        const { no_update, callback_context } = window.dash_clientside;
        if (!callback_context.triggered_id || callback_context.triggered_id === "step") {
          return [no_update, Number(typed) || 0];
        }
        const to = {
          "step-slider": slider,
          "step-back": current() - 1,
          "step-on": current() + 1,
          "step-curves": clicked(curves),
          "step-head": clicked(head),
        }[callback_context.triggered_id];
        if (!Number.isInteger(to) || within(to) === current()) return [no_update, no_update];
        return [chosen(to), within(to)];
      },
    },
  });
})();
