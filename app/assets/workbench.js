// What needs no server: the colour scheme, the address bar, and keys.
(function () {
  "use strict";

  // The figures follow the colour scheme that Mantine has chosen.
  function tellScheme() {
    const scheme = document.documentElement.getAttribute("data-mantine-color-scheme");
    if (scheme === "light" || scheme === "dark") {
      window.dash_clientside.set_props("scheme", { data: scheme });
    }
  }

  // The address that the page was opened with, and each to which one goes back or forward.
  function tellAddress() {
    const { pathname, search } = window.location;
    window.dash_clientside.set_props("visited", { data: { path: pathname, search } });
  }

  const ready = setInterval(function () {
    if (document.getElementById("main") && window.dash_clientside && window.dash_clientside.set_props) {
      clearInterval(ready);
      tellAddress();
      window.addEventListener("popstate", tellAddress);
      tellScheme();
      new MutationObserver(tellScheme).observe(document.documentElement, {
        attributeFilter: ["data-mantine-color-scheme"],
      });
    }
  }, 30);

  // What stands in the boxes, and what stood there when the text on the page was analysed.
  let analysed = null;
  let submissions = 0;

  function boxes() {
    const typed = (id) => document.getElementById(id).value;
    return { model: typed("model"), text: typed("text"), limit: parseInt(typed("max-tokens"), 10) || null };
  }

  // Boxes change in many ways (keys, arrows, undo, options), not all of which send an event.
  setInterval(function () {
    if (!analysed) return;
    const now = boxes();
    const changed = Object.keys(now).some((name) => now[name] !== analysed[name]);
    document.documentElement.toggleAttribute("data-changed", changed);
  }, 200);

  document.addEventListener("keydown", function (event) {
    if (event.key !== "Enter") return;
    if (event.ctrlKey || event.metaKey) document.getElementById("analyse").click();
    const closeList = new KeyboardEvent("keydown", { key: "Escape", code: "Escape", bubbles: true });
    if (event.target.id === "model") setTimeout(() => event.target.dispatchEvent(closeList));
  });

  // The server may stop, and start again without what it held for this page.
  let started = null;

  async function checkServer() {
    if (document.hidden || !document.getElementById("connection")) return;
    const answer = await fetch("/_started", { cache: "no-store" }).then(
      (response) => response.text(),
      () => null
    );
    started = started || answer;
    document.getElementById("connection").hidden = answer === started;
    document.getElementById("reload").hidden = answer === null;
    document.getElementById("connection-text").textContent =
      answer === null ? "The dashboard’s server does not answer. Is it still running?" : "The server was restarted.";
  }

  setInterval(checkServer, 2000);

  document.addEventListener("click", function (event) {
    if (event.target.id === "reload") window.location.reload();
  });

  // A downloaded figure stands by itself: with its title, its caption, and a name that says what it is.
  document.addEventListener(
    "click",
    function (event) {
      const button = event.target.closest('.modebar-btn[data-title^="Download"]');
      const { data, layout } = (button && button.closest(".js-plotly-plot")) || {};
      if (!layout || !layout.meta) return;
      event.stopPropagation();
      const { download } = layout.meta;
      const model = new URLSearchParams(window.location.search).get("model");
      const title = download.title.text.replace(/<[^>]*>/g, " ");
      const filename = `${model} ${title}`.replace(/[^\p{L}\p{N}.]+/gu, "-").replace(/^-|-$/g, "");
      const figure = { data, layout: { ...layout, ...download } };
      window.Plotly.downloadImage(figure, { format: "svg", width: 1000, height: download.height, filename });
    },
    true
  );

  document.addEventListener("click", function (event) {
    if (event.target.id !== "copy-link") return;
    const said = document.getElementById("copied");
    const say = (text) => {
      said.textContent = text;
      setTimeout(() => (said.textContent = ""), 2500);
    };
    navigator.clipboard.writeText(window.location.href).then(
      () => say("Copied"),
      () => say("Copy it from the address bar")
    );
  });

  const switchedOff = []; // what was switched off, one state after the other

  // The model field offers all known models whatever it holds, and says what each is.
  window.dashMantineFunctions = Object.assign({}, window.dashMantineFunctions, {
    everyModel: ({ options }) => options,
    modelOption: function ({ option }, { about }) {
      const line = (className, text) => window.React.createElement("div", { className }, text);
      return window.React.createElement(
        "div",
        null,
        line("option-name", option.value),
        line("option-about", about[option.value])
      );
    },
  });

  // Tab leaves a table at once; arrow keys walk through its cells.
  window.dashAgGridFunctions = Object.assign({}, window.dashAgGridFunctions, { leaveTable: () => false });

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    workbench: {
      submit: function (clicks, enters, model, known) {
        const { triggered } = window.dash_clientside.callback_context;
        const picked = triggered.every(({ prop_id }) => prop_id === "model.value");
        if (picked && (!known.includes(model) || !analysed || model === analysed.model)) {
          return window.dash_clientside.no_update;
        }
        analysed = boxes();
        if (picked) analysed.model = model;
        return { ...analysed, number: ++submissions };
      },
      // What comes from the address is analysed at once.
      showsTheBoxes: function (address, model, text, limit) {
        analysed = { model, text: text.replace(/\r\n?/g, "\n"), limit: limit || null };
      },
      typedText: (clicks, id) => document.getElementById(id).value,
      typedNumbers: (clicks, fields) => fields.map((id) => parseInt(document.getElementById(id).value, 10)),
      // Takes back the last change of what is switched off, whatever made it.
      undo: function (clicks, off) {
        const { no_update, callback_context } = window.dash_clientside;
        if (callback_context.triggered_id !== "off-undo") {
          const is = (state) => state && String(state) === String(off || []);
          if (is(switchedOff.at(-2))) switchedOff.pop(); // taken back by hand, or refused
          else if (!is(switchedOff.at(-1))) switchedOff.push(off || []);
          return no_update;
        }
        if (switchedOff.length < 2) return no_update;
        switchedOff.pop();
        return switchedOff.at(-1);
      },
      askAgain: function (when) {
        if (when) setTimeout(() => window.dash_clientside.set_props("tick", { data: when }), 50);
      },
    },
  });
})();
