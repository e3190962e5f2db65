// The attention pattern: reading it on the text, and its map.
(function () {
  "use strict";

  const ready = setInterval(function () {
    const tokens = document.getElementById("tokens");
    if (tokens) {
      clearInterval(ready);
      new MutationObserver(forgetQuery).observe(tokens, { childList: true });
    }
  }, 30);

  document.addEventListener("keydown", function (event) {
    if (event.key === "Enter" && event.target.closest(".zoom input")) document.getElementById("zoom-in").click();
  });

  // Reading a pattern on the text: a chosen query shades the tokens that it attends to.
  const LEAST_WEIGHT = 0.005; // a key with less is not named

  function patternPlot() {
    const plot = document.querySelector("#pattern-map .js-plotly-plot");
    const map = plot && plot.data && plot.data.findIndex((trace) => trace.type === "heatmap");
    if (!plot || !(map >= 0) || !plot.calcdata || !plot.calcdata[map]) return null;
    return { plot, trace: plot._fullData[map], isMosaic: !plot._fullLayout.xaxis3 };
  }

  // The weights of one query, in the order of the keys. customdata holds them where the colour is a square root.
  function weightsOf(row) {
    const found = patternPlot();
    if (!found || found.isMosaic) return null;
    const rows = found.trace.customdata || found.trace.z;
    return rows[row] ? Array.from(rows[row]) : null;
  }

  function chooseQuery(token, column) {
    const panel = document.getElementById("tokens");
    panel.querySelectorAll(".query").forEach((other) => {
      other.classList.remove("query");
      other.setAttribute("aria-selected", "false");
    });
    if (!token || token.dataset.q === undefined) return;
    const weights = weightsOf(Number(token.dataset.q));
    if (!weights) return;
    token.classList.add("query");
    token.setAttribute("aria-selected", "true");
    const keys = [];
    panel.querySelectorAll(".token").forEach((key) => {
      const weight = Number.isFinite(weights[key.dataset.k]) ? weights[key.dataset.k] : 0;
      key.style.setProperty("--w", Math.sqrt(Math.min(1, weight)).toFixed(3));
      key.classList.toggle("strong", weight > 0.4);
      if (key.dataset.k !== undefined) keys.push([weight, key]);
    });
    keys.sort((one, other) => other[0] - one[0]);
    crosshair(Number(token.dataset.q), column === undefined ? token.dataset.k : column);
    say(token, keys.slice(0, 5).filter(([weight]) => weight >= LEAST_WEIGHT));
  }

  function say(token, keys) {
    const name = (of) => of.textContent.trim() + " (" + of.dataset.position + ")";
    const line = document.getElementById("token-line");
    const strongest = keys.map(([weight, key]) => name(key) + " " + weight.toFixed(3)).join(" · ");
    const bold = document.createElement("b");
    bold.textContent = name(token);
    line.replaceChildren(bold, " looks at " + (strongest || "nothing shown here"));
  }

  // Frames a row of the map, and a column: that of the same token, or the cursor's.
  function crosshair(row, column) {
    const found = patternPlot();
    forgetQuery();
    if (!found) return;
    const { _offset: left, _length: width } = found.plot._fullLayout.xaxis3;
    const { _offset: top, _length: height } = found.plot._fullLayout.yaxis3;
    const { z } = found.trace;
    const [cellHeight, cellWidth] = [height / z.length, width / z[0].length];
    frame(found, left, top + row * cellHeight, width, Math.max(3, cellHeight));
    if (column !== undefined) frame(found, left + column * cellWidth, top, Math.max(3, cellWidth), height);
  }

  function frame({ plot }, x, y, w, h) {
    const box = document.createElement("div");
    box.className = "crosshair";
    box.style.cssText = `left:${x}px;top:${y}px;width:${w}px;height:${h}px`;
    plot.closest(".graph").append(box);
  }

  function forgetQuery() {
    document.querySelectorAll(".crosshair").forEach((frame) => frame.remove());
    document.getElementById("token-line").replaceChildren();
  }

  // Pointing at a cell of the map chooses its query too; a click puts the cursor there.
  function listenToMap() {
    const { plot } = patternPlot() || {};
    if (!plot || plot.chosenByPointing) return;
    plot.chosenByPointing = true;
    const point = ({ points: [{ data, pointNumber }] }) => data.type === "heatmap" && pointNumber;
    const tokenAt = (row) => document.querySelector(`#tokens .token[data-q="${row}"]`);
    plot.on("plotly_hover", function (event) {
      const [row, column] = point(event) || [];
      if (row !== undefined) chooseQuery(tokenAt(row), column);
    });
    plot.on("plotly_click", function (event) {
      const found = patternPlot();
      const [row, column] = point(event) || [];
      if (row === undefined || !found || found.isMosaic) return;
      cursor = { of: found.plot.data, row, column };
      document.getElementById("pattern-cells").focus({ preventScroll: true });
      showCursor(found);
      chooseQuery(tokenAt(row), column);
    });
  }

  document.addEventListener("dblclick", function (event) {
    if (event.target.closest("#pattern-map")) document.getElementById("zoom-out").click();
  });

  document.addEventListener("mouseover", function (event) {
    if (event.target.classList.contains("token")) chooseQuery(event.target);
    if (event.target.closest("#pattern-map")) listenToMap();
  });

  document.addEventListener("focusin", function (event) {
    if (event.target.id === "tokens" && !event.target.querySelector(".query")) {
      chooseQuery(event.target.querySelector(".token[data-q]"));
    }
  });

  const STEPS = { ArrowRight: [0, 1], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowUp: [-1, 0] };

  document.addEventListener("keydown", function (event) {
    const step = STEPS[event.key];
    if (!step || event.target.id !== "tokens") return;
    event.preventDefault();
    const tokens = Array.from(event.target.querySelectorAll(".token[data-q]"));
    const place = tokens.findIndex((token) => token.classList.contains("query")) + step[0] + step[1];
    const token = tokens[Math.max(0, Math.min(tokens.length - 1, place))];
    chooseQuery(token);
    if (token) token.scrollIntoView({ block: "nearest" });
  });

  // A cursor that walks over the map: over cells in the pattern of a head, over heads in those of a layer.
  let cursor = null;
  const plain = (label) => new DOMParser().parseFromString(label, "text/html").body.textContent;
  const within = (value, end) => Math.max(0, Math.min(end - 1, value));
  const sayCell = (text) => (document.getElementById("pattern-cell").textContent = text);

  const isOf = ({ plot }) => cursor !== null && cursor.of === plot.data;

  function walk([down, right], fast) {
    const found = patternPlot();
    if (!found) return;
    if (found.isMosaic) return walkHeads(found, down, right);
    const { z } = found.trace;
    const [rows, columns] = [z.length, z[0].length];
    const by = fast ? 10 : 1;
    const from = isOf(found) ? cursor : { row: rows - 1, column: 0 };
    const [row, column] = [within(from.row + by * down, rows), within(from.column + by * right, columns)];
    cursor = { of: found.plot.data, row, column };
    showCursor(found);
  }

  function showCursor(found) {
    const { row, column } = cursor;
    crosshair(row, column);
    const weight = (found.trace.customdata || found.trace.z)[row][column];
    const [query, key] = [plain(found.trace.y[row]), plain(found.trace.x[column])];
    const digits = weight > 0 && weight < 0.001 ? weight.toExponential(1) : Number(weight).toFixed(4);
    const value = Number.isFinite(weight) ? digits : "hidden by the mask";
    sayCell(`Query ${query} → key ${key}: ${value}`);
  }

  function walkHeads(found, down, right) {
    const panels = found.plot._fullLayout.shapes.filter((shape) => shape.layer === "below");
    const across = panels.filter((panel) => panel.y0 === panels[0].y0).length;
    const [x, y] = [found.plot._fullLayout.xaxis, found.plot._fullLayout.yaxis];
    const from = isOf(found) ? cursor.head : Number(document.getElementById("head").value) || 0;
    cursor = { of: found.plot.data, head: within(from + across * down + right, panels.length) };
    const panel = panels[cursor.head];
    forgetQuery();
    const [left, top] = [x._offset + x.l2p(panel.x0), y._offset + y.l2p(panel.y0)];
    frame(found, left - 3, top - 3, x.l2p(panel.x1) - x.l2p(panel.x0) + 6, y.l2p(panel.y1) - y.l2p(panel.y0) + 6);
    sayCell(`Head ${cursor.head} of layer ${document.getElementById("layer").value}. Enter opens it.`);
  }

  const LEAST_PART = 8; // tokens a side

  // A quarter of what is shown, around the cursor.
  function zoomIn() {
    const found = patternPlot();
    if (!found || !isOf(found)) return;
    const { set_props } = window.dash_clientside;
    if (found.isMosaic) return set_props("opened-head", { data: cursor.head });
    const around = (edges, place) => {
      const [first, end] = [edges[0], edges.at(-1)];
      const size = Math.min(end - first, Math.max(LEAST_PART, Math.ceil((end - first) / 4)));
      const middle = (edges[place] + edges[place + 1]) / 2;
      const start = Math.max(first, Math.min(end - size, Math.round(middle - size / 2)));
      return [start, start + size];
    };
    const { queries, keys } = found.trace.meta;
    set_props("queries", { data: around(queries, cursor.row) });
    set_props("keys", { data: around(keys, cursor.column) });
  }

  document.addEventListener("keydown", function (event) {
    if (event.target.id !== "pattern-cells" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (STEPS[event.key]) walk(STEPS[event.key], event.shiftKey);
    else if (event.key === "Enter") zoomIn();
    else if (event.key === "Escape") document.getElementById("zoom-out").click();
    else return;
    event.preventDefault();
  });

  document.addEventListener("focusin", function (event) {
    if (event.target.id === "pattern-cells" && event.target.matches(":focus-visible")) walk([0, 0]);
  });

  // A token of the text as it is read on the page, never as markup.
  function tokenOf(piece) {
    const token = document.createElement("span");
    if (!piece) {
      token.className = "muted";
      token.textContent = " … ";
      return [token];
    }
    token.className = "token";
    token.setAttribute("role", "option");
    token.textContent = piece.text;
    token.dataset.position = piece.position;
    for (const side of ["q", "k"]) if (piece[side] !== null) token.dataset[side] = piece[side];
    return piece.ends ? [token, document.createElement("br")] : [token];
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    pattern: {
      showTokens: function (pieces) {
        document.getElementById("tokens").replaceChildren(...pieces.flatMap(tokenOf));
      },
      // A click on a panel of a layer's map, or Enter on it, opens its head.
      openHead: function (event, opened, show) {
        const { no_update, callback_context } = window.dash_clientside;
        const clicked = event && event.points && event.points[0] && event.points[0].customdata;
        const head = callback_context.triggered_id === "opened-head" ? opened : clicked && clicked[0];
        return show === "layer" && Number.isInteger(head) && head >= 0 ? { head, show: "head" } : no_update;
      },
      isByTokens: (show) => show === "layer", // always, there
    },
  });
})();
