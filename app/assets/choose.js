// What a click on a figure or a table chooses.
(function () {
  "use strict";

  const nothing = () => window.dash_clientside.no_update;

  // Layer and head of a point with a name, a table's row, or a cell of a map.
  function clickedHead(event) {
    const point = event && event.points && event.points[0];
    const named = /^L(\d+)H(\d+)$/.exec((point ? point.customdata : event && event.rowId) || "");
    if (named) return [Number(named[1]), Number(named[2])];
    const isCell = point && Number.isFinite(point.x) && Number.isFinite(point.y);
    return isCell ? [Math.round(point.y), Math.round(point.x)] : null;
  }

  const lastClick = () => (window.dash_clientside.callback_context.triggered[0] || {}).value;

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    choose: {
      head: () => clickedHead(lastClick()) || [nothing(), nothing()],
      // Of two maps side by side: the first chooses the one head, the second the other.
      oneOfTwoHeads: function (event) {
        const head = clickedHead(event);
        const left = [nothing(), nothing()];
        if (!head) return [...left, ...left];
        return event.points[0].curveNumber === 1 ? [...left, ...head] : [...head, ...left];
      },
      // A place on the horizontal axis: a number, or a label that ends with one.
      position: function (event) {
        const x = event && event.points && event.points[0] && event.points[0].x;
        const [digits] = (typeof x === "string" && /\d+$/.exec(x)) || [];
        const number = digits === undefined ? x : Number(digits);
        return Number.isFinite(number) ? Math.round(number) : nothing();
      },
    },
  });
})();
