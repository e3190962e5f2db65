// The view: what the page shows, as the address says it. It is kept here. Controls change it, and it changes them where
// something else does: the address, a submission, or the server, which may know better.
(function () {
  "use strict";

  let fields = []; // see workbench.app.controls
  const view = {}; // field → value
  let told = ""; // the address that was told last
  let open = ""; // the page
  let mounted = []; // pages whose components there are

  const same = () => window.dash_clientside.no_update;

  function written(value) {
    if (value === null || value === undefined) return "";
    if (Array.isArray(value)) return value.join(typeof value[0] === "number" ? "-" : ",");
    return typeof value === "number" ? String(Number(value.toFixed(4))) : value;
  }

  // As workbench.app.state.to_query writes it. A control that is empty leaves the field's first value.
  function address() {
    const pairs = new URLSearchParams({ v: "1" });
    for (const { field, name, initial, id } of fields) {
      const isEmpty = id && view[field] === "";
      const text = written(isEmpty ? initial : view[field]);
      if (text !== written(initial)) pairs.set(name, text);
    }
    return "?" + pairs;
  }

  // Puts the values of some fields into the controls that hold them.
  function setControls(names) {
    for (const { field, page, id, property } of fields) {
      if (!id || !names.includes(field) || (page && !mounted.includes(page))) continue;
      const value = view[field] === null && property === "value" ? "" : view[field];
      window.dash_clientside.set_props(id, { [property]: value });
    }
  }

  // The address, the page that is open, and the page whose components are missing, as far as they are new.
  function tell() {
    const [before, now] = [told, address()];
    told = now;
    if (view.page === open) return [now === before ? same() : now, same(), same()];
    open = view.page;
    if (!mounted.includes(open)) return [now, open, open];
    setControls(fields.filter(({ page }) => page === open).map(({ field }) => field));
    return [now, open, same()];
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    view: {
      // What controls hold.
      collect: function () {
        for (const { prop_id, value } of window.dash_clientside.callback_context.triggered) {
          const held = fields.find(({ id, property }) => `${id}.${property}` === prop_id);
          if (held) view[held.field] = value;
        }
        return tell();
      },
      // What other things say, each as field → value. An address or a submission starts anew what has failed.
      amend: function (...given) {
        fields = given.at(-1);
        const { triggered } = window.dash_clientside.callback_context;
        const changes = Object.assign({}, ...triggered.map(({ value }) => value));
        const names = fields.map(({ field }) => field).filter((field) => field in changes);
        for (const field of names) view[field] = changes[field];
        setControls(names);
        const isAnew = triggered.some(({ prop_id }) => ["address.data", "input.data"].includes(prop_id));
        return [...tell(), isAnew ? Date.now() : same()];
      },
      go: function () {
        const { triggered_id } = window.dash_clientside.callback_context;
        return { page: triggered_id === "open-pattern" ? "pattern" : triggered_id.replace("go-", "") };
      },
      showPage: function (page) {
        const { outputs_list } = window.dash_clientside.callback_context;
        document.title = `${document.getElementById(`go-${page}`).textContent} · Attention Workbench`;
        return outputs_list.map(({ id, property }) =>
          property === "hidden" ? id !== `page-${page}` : id === `go-${page}` ? "page" : "false"
        );
      },
      // Tells the open page, once it is there, that there is something to draw: what is ready starts with the address.
      tellPage: function (ready, scheme, pages) {
        const { outputs_list } = window.dash_clientside.callback_context;
        mounted = pages;
        const page = new URLSearchParams(ready.split("\n", 1)[0]).get("page");
        const isTold = ({ id }) => id === `draw-${page}` && scheme && mounted.includes(page);
        return outputs_list.map((output) => (isTold(output) ? `${scheme}\n${ready}` : same()));
      },
      ask: function (clicks, asked) {
        const { triggered_id } = window.dash_clientside.callback_context;
        return clicks ? [...asked, triggered_id.replace("ask-", "")] : same();
      },
    },
  });
})();
