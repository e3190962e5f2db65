// Files of what is shown: asked of the server, drawn here where they are pictures of pixels or lines, and saved.
(function () {
  "use strict";

  const MOST_BYTES = 32e6; // of the files of a result (opened.py)

  let opener = null; // the button whose figure the panel is about

  document.addEventListener("click", function (event) {
    const button = event.target.closest(".export-button");
    const item = event.target.closest("[data-export]");
    if (item) exportFigure(item.dataset.export, opener ? opener.dataset.figure : "");
    if (button && button !== opener) openPanel(button);
    else if (opener && (item || button || !event.target.closest("#export-panel"))) closePanel();
    if (event.target.closest("#open-result")) chooseFiles();
    if (event.target.closest("#close-code")) document.getElementById("code-dialog").close();
    if (event.target.closest("#copy-code")) copyCode();
  });

  document.addEventListener("keydown", function (event) {
    if (!opener) return;
    if (event.key === "Escape") closePanel();
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const items = Array.from(document.querySelectorAll("#export-panel [data-export]"));
    const place = items.indexOf(document.activeElement);
    if (!step || place < 0) return;
    event.preventDefault();
    items[(place + step + items.length) % items.length].focus();
  });

  // The panel is no part of a card: who tabs out of it has left it.
  document.addEventListener("focusin", function (event) {
    if (opener && event.target !== opener && !event.target.closest("#export-panel")) closePanel(false);
  });

  function openPanel(button) {
    if (opener) closePanel(false);
    const panel = document.getElementById("export-panel");
    opener = button;
    opener.setAttribute("aria-expanded", "true");
    panel.hidden = false;
    const { bottom, right } = button.getBoundingClientRect();
    const below = Math.min(bottom + 6, Math.max(8, window.innerHeight - panel.offsetHeight - 8));
    panel.style.top = `${below + window.scrollY}px`;
    panel.style.left = `${Math.max(8, right - panel.offsetWidth) + window.scrollX}px`;
    panel.querySelector("[data-export]").focus({ preventScroll: true });
  }

  function closePanel(returns = true) {
    document.getElementById("export-panel").hidden = true;
    opener.setAttribute("aria-expanded", "false");
    if (returns) opener.focus({ preventScroll: true });
    opener = null;
  }

  async function exportFigure(format, figure) {
    const preset = document.querySelector("#export-size input:checked").value;
    const asked = new URLSearchParams(window.location.search);
    for (const [name, value] of Object.entries({ "export-format": format, figure, preset })) asked.set(name, value);
    say("");
    try {
      const answer = await fetch("/export?" + asked, { cache: "no-store" });
      const attachment = answer.headers.get("Content-Disposition");
      if (!attachment) return say(await answer.text()); // a message in place of a file
      const name = attachment.match(/filename="([^"]+)/)[1];
      if (format === "py") showCode(await answer.text());
      else save(format === "svg" || format === "png" ? await drawn(await answer.json(), format) : await answer.blob(), name);
    } catch (error) {
      say(`The file could not be made: ${error.message}. Is the dashboard’s server still running?`);
    }
  }

  // The server lays the picture out for its size on paper; the page that is open anyway draws it.
  async function drawn({ figure, options }, format) {
    const picture = await window.Plotly.toImage(figure, { ...options, format });
    return await (await fetch(picture)).blob();
  }

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  function say(text) {
    window.dash_clientside.set_props("export-problem", { data: text });
  }

  function showCode(code) {
    document.getElementById("code-text").textContent = code;
    document.getElementById("code-copied").textContent = "";
    document.getElementById("code-dialog").showModal();
  }

  function copyCode() {
    const said = document.getElementById("code-copied");
    navigator.clipboard.writeText(document.getElementById("code-text").textContent).then(
      () => (said.textContent = "Copied"),
      () => (said.textContent = "Select the code and copy it")
    );
  }

  function chooseFiles() {
    const chooser = Object.assign(document.createElement("input"), {
      type: "file",
      multiple: true,
      accept: ".zip,.json,.npz",
    });
    chooser.addEventListener("change", () => openFiles(Array.from(chooser.files)));
    chooser.click();
  }

  async function openFiles(files) {
    const size = files.reduce((sum, file) => sum + file.size, 0);
    if (size > MOST_BYTES) {
      return say(`These files have ${Math.round(size / 1e6)} MB, and the page takes 32. Start the dashboard with: workbench app --open FILE`);
    }
    say("");
    const read = (file) =>
      new Promise(function (resolve, reject) {
        const reader = new FileReader();
        reader.onload = () => resolve({ name: file.name, content: reader.result.split(",")[1] || "" });
        reader.onerror = () => reject(reader.error);
        reader.readAsDataURL(file);
      });
    try {
      window.dash_clientside.set_props("chosen-files", { data: await Promise.all(files.map(read)) });
    } catch (error) {
      say(`The files could not be read: ${error.message}`);
    }
  }
})();
