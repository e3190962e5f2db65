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
    return plot && map >= 0 ? { plot, trace: plot.data[map], drawn: plot.calcdata && plot.calcdata[map] } : null;
  }

  // The weights of one query, in the order of the keys. customdata holds them where the colour is a square root.
  function weightsOf(row) {
    const found = patternPlot();
    if (!found || !found.drawn) return null;
    const full = found.plot._fullData.find((trace) => trace.type === "heatmap");
    const rows = full.customdata || full.z;
    return rows[row] ? Array.from(rows[row]) : null;
  }

  function chooseQuery(token) {
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
    crosshair(Number(token.dataset.q), token.dataset.k);
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

  // Frames a row of the map, and the column of the same token.
  function crosshair(row, column) {
    const found = patternPlot();
    forgetQuery();
    if (!found) return;
    const { _offset: left, _length: width } = found.plot._fullLayout.xaxis3;
    const { _offset: top, _length: height } = found.plot._fullLayout.yaxis3;
    const { z } = found.plot._fullData.find((trace) => trace.type === "heatmap");
    const [cellHeight, cellWidth] = [height / z.length, width / z[0].length];
    frame(left, top + row * cellHeight, width, Math.max(3, cellHeight));
    if (column !== undefined) frame(left + column * cellWidth, top, Math.max(3, cellWidth), height);

    function frame(x, y, w, h) {
      const box = document.createElement("div");
      box.className = "crosshair";
      box.style.cssText = `left:${x}px;top:${y}px;width:${w}px;height:${h}px`;
      found.plot.closest(".graph").append(box);
    }
  }

  function forgetQuery() {
    document.querySelectorAll(".crosshair").forEach((frame) => frame.remove());
    document.getElementById("token-line").replaceChildren();
  }

  // Pointing at a cell of the map chooses its query too.
  function listenToMap() {
    const { plot } = patternPlot() || {};
    if (!plot || plot.chosenByPointing) return;
    plot.chosenByPointing = true;
    plot.on("plotly_hover", function ({ points: [point] }) {
      if (point.data.type !== "heatmap") return;
      chooseQuery(document.querySelector(`#tokens .token[data-q="${point.pointNumber[0]}"]`));
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

  document.addEventListener("keydown", function (event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || event.target.id !== "tokens") return;
    event.preventDefault();
    const tokens = Array.from(event.target.querySelectorAll(".token[data-q]"));
    const place = tokens.findIndex((token) => token.classList.contains("query")) + step;
    const token = tokens[Math.max(0, Math.min(tokens.length - 1, place))];
    chooseQuery(token);
    if (token) token.scrollIntoView({ block: "nearest" });
  });
})();
