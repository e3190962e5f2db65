// The view: what the page shows, as the address says it. It is kept here. Controls change it, and it changes them where
// something else does: the address, a submission, or the server, which may know better.
(function () {
  "use strict";

  let fields = []; // see workbench.app.controls
  const view = {}; // field → value
  let told = ""; // the address that was told last
  let open = ""; // the page
  let mounted = []; // pages whose components there are
  let isNoStep = false; // whether the last change was no one's doing: an address as it is read, or a correction

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
      const value = id && view[field] === "" ? initial : view[field];
      const isSaid = value !== null && value !== undefined;
      if (isSaid && (initial === null || written(value) !== written(initial))) pairs.set(name, written(value));
    }
    return "?" + pairs;
  }

  const isThere = ({ page }) => !page || mounted.includes(page);

  // A box waits for a pause in typing before it reports what is in it. It reports what was put there by others too, and
  // that may be late: after something else was put there. So a report counts only if someone has been at the box.
  const touched = new Set(); // boxes that someone has been at since something was put there
  const boxAt = (part) => part && part.closest && part.closest(".typed");
  const isEcho = ({ id, field }, value) =>
    boxAt(document.getElementById(id)) && !touched.has(id) && written(value) !== written(view[field]);

  // Nor does it report what it has reported last, whatever was put there since. So a box that someone has been at is
  // compared with the view once every wait is over.
  const LONGEST_WAIT = 1000; // milliseconds
  const timers = {};

  function settle(id) {
    const [box, held] = [document.getElementById(id), fields.find((field) => field.id === id)];
    if (!box || !held || box.value === written(view[held.field])) return;
    const isLeft = document.activeElement !== box;
    if (!isUnfinished(held, box.value) && written(reported(held, box.value)) !== written(view[held.field])) {
      window.dash_clientside.set_props(id, { value: reported(held, box.value) });
    } else if (isLeft) setControls([held]);
  }

  for (const kind of ["input", "keydown", "paste", "pointerdown", "pointerup", "focusout"]) {
    const touch = function ({ target, key }) {
      if (!boxAt(target)) return;
      const { id } = boxAt(target).querySelector("input");
      const isStep = key === "ArrowUp" || key === "ArrowDown" || (kind.startsWith("pointer") && target.closest("button"));
      if (isStep || kind === "input" || kind === "paste") touched.add(id);
      clearTimeout(timers[id]);
      timers[id] = setTimeout(() => settle(id), LONGEST_WAIT);
    };
    document.addEventListener(kind, touch, true);
  }

  // The value of a field as a control gives it; a number as one, but "1." while it is typed.
  function reported({ initial }, value) {
    const isNumber = typeof initial !== "string" && typeof value === "string" && value.trim() !== "";
    return isNumber && Number.isFinite(Number(value)) ? Number(value) : value;
  }

  // Nothing in the box of a head, of which one is chosen always; "." or "-" in that of a number.
  function isUnfinished(held, value) {
    const isNothing = !held.page && value === "";
    return isNothing || (typeof held.initial !== "string" && /^[-.]+$/.test(value));
  }

  const waiting = {}; // what has been chosen since amend ran last: it is held back while the server reads a submission

  // Puts the values of some fields into the controls that hold them.
  function setControls(some) {
    for (const { field, id, property } of some.filter((held) => held.id && isThere(held))) {
      const value = view[field] === null && property === "value" ? "" : view[field];
      touched.delete(id);
      window.dash_clientside.set_props(id, { [property]: value });
    }
  }

  // The address, the page that is open, and the page whose components are missing, as far as they are new.
  function tell() {
    if (!("model" in view)) return [same(), same(), same()]; // the address has not been read yet
    const [before, now] = [told, address()];
    told = now;
    if (view.page === open) return [now === before ? same() : now, same(), same()];
    open = view.page;
    return [now, open, mounted.includes(open) ? same() : open];
  }

  // A new page, input or head is a step that the back button undoes; other changes replace the address.
  // The head that a text begins with is no step.
  const HEAD = ["layer", "head"];
  const STEPS = ["page", "model", "text", "max", "off", ...HEAD];

  function isStep(before, after) {
    const [old, now] = [new URLSearchParams(before), new URLSearchParams(after)];
    return STEPS.some((name) => old.get(name) !== now.get(name) && !(HEAD.includes(name) && !old.has(name)));
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    view: {
      // What controls report.
      collect: function () {
        for (const { prop_id, value } of window.dash_clientside.callback_context.triggered) {
          const held = fields.find(({ id, property }) => `${id}.${property}` === prop_id);
          if (!held || !isThere(held)) continue; // a page that is just being inserted is not newer than the view
          if (isEcho(held, value)) {
            setControls([held]);
            continue;
          }
          if (isUnfinished(held, value)) continue; // who empties a box is about to type
          const found = reported(held, value);
          if (written(found) !== written(view[held.field])) delete waiting[held.field]; // which was chosen before
          view[held.field] = found;
        }
        return tell();
      },
      // What is chosen otherwise than in its control, one thing after the other.
      choose: (chosen) => Object.assign({}, Object.assign(waiting, chosen)),
      // What other things say, each as field → value. An address or a submission starts anew what has failed.
      amend: function (...given) {
        [fields] = given.slice(-1);
        const { triggered } = window.dash_clientside.callback_context;
        // A correction is of the address that it names; what has been chosen since then stays.
        const inTime = triggered.filter(({ value }) => !value.of || value.of === told);
        const chosen = inTime.some(({ prop_id }) => prop_id === "choices.data") ? { ...waiting } : {};
        for (const field of Object.keys(chosen)) delete waiting[field];
        const rest = inTime.filter(({ prop_id }) => prop_id !== "choices.data").map(({ value }) => value);
        const changes = Object.assign(chosen, ...rest);
        const differs = ({ field, id }) => touched.has(id) || written(changes[field]) !== written(view[field]);
        const some = fields.filter((held) => held.field in changes && differs(held));
        for (const { field } of fields) if (field in changes) view[field] = changes[field];
        setControls(some);
        const isAnew = ({ prop_id }) => ["address.data", "input.data"].includes(prop_id);
        const found = tell();
        const isTold = ({ prop_id }) => ["address.data", "correction.data"].includes(prop_id);
        isNoStep = found[0] !== same() && inTime.every(isTold);
        return [...found, triggered.some(isAnew) ? Date.now() : same()];
      },
      writeAddress: function (query) {
        // What the server knows better takes the place of what was asked for.
        if (query && query !== window.location.search) {
          const first = !new URLSearchParams(window.location.search).has("v");
          const isNew = !first && !isNoStep && isStep(window.location.search, query);
          window.history[isNew ? "pushState" : "replaceState"](null, "", window.location.pathname + query);
        }
        isNoStep = false;
      },
      // A page's components are there now; what has changed since they were asked for is put into its controls.
      mount: function (pages) {
        const fresh = pages.filter((page) => !mounted.includes(page));
        mounted = pages;
        setControls(fields.filter(({ page }) => fresh.includes(page)));
      },
      go: function () {
        const { triggered_id } = window.dash_clientside.callback_context;
        window.dash_clientside.set_props("notice", { children: [] }); // it was of the page before
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
        const page = new URLSearchParams(ready.split("\n", 1)[0]).get("page");
        const isTold = ({ id }) => id === `draw-${page}` && scheme && pages.includes(page);
        return outputs_list.map((output) => (isTold(output) ? `${scheme}\n${ready}` : same()));
      },
      ask: function (clicks, asked) {
        const { triggered_id } = window.dash_clientside.callback_context;
        return clicks ? [...asked, triggered_id.replace("ask-", "")] : same();
      },
    },
  });
})();
