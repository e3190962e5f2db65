// What a click on a figure or a table chooses, as field of the view → value.
(function () {
  "use strict";

  // Layer and head of a point with a name, a table's row, or a cell of a map.
  function clickedHead(event) {
    const point = event && event.points && event.points[0];
    const named = /^L(\d+)H(\d+)$/.exec((point ? point.customdata : event && event.rowId) || "");
    if (named) return [Number(named[1]), Number(named[2])];
    const isCell = point && Number.isFinite(point.x) && Number.isFinite(point.y);
    return isCell ? [Math.round(point.y), Math.round(point.x)] : null;
  }

  const lastClick = () => (window.dash_clientside.callback_context.triggered[0] || {}).value;

  function chosenHead(event, layer = "layer", head = "head") {
    const found = clickedHead(event);
    return found ? { [layer]: found[0], [head]: found[1] } : window.dash_clientside.no_update;
  }

  // A place on the horizontal axis: a number, or a label that ends with one.
  const place = (field) => (event) => {
    const x = event && event.points && event.points[0] && event.points[0].x;
    const [digits] = (typeof x === "string" && /\d+$/.exec(x)) || [];
    const number = digits === undefined ? x : Number(digits);
    return Number.isFinite(number) ? { [field]: Math.round(number) } : window.dash_clientside.no_update;
  };

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    choose: {
      head: () => chosenHead(lastClick()),
      // Of two maps side by side: the first chooses the one head, the second the other.
      oneOfTwoHeads: function (event) {
        const isSecond = clickedHead(event) && event.points[0].curveNumber === 1;
        return isSecond ? chosenHead(event, "other_layer", "other_head") : chosenHead(event);
      },
      position: place("position"),
      lens_position: place("lens_position"),
    },
  });
})();
