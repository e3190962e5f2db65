// A text file is read by the browser and put into the text field; nothing is sent before it is analysed.
(function () {
  "use strict";

  const MOST_BYTES = 2_000_000;

  // The same rules as those of workbench.analyses.inputs.read_text.
  function problemOf(bytes) {
    const isUtf16 = (bytes[0] === 0xff && bytes[1] === 0xfe) || (bytes[0] === 0xfe && bytes[1] === 0xff);
    if (isUtf16) return "is UTF-16; save it as UTF-8";
    const inNoText = (byte) => byte < 32 && ![9, 10, 11, 12, 13, 27].includes(byte);
    if (bytes.some(inNoText)) return "does not look like text; choose a UTF-8 text file";
    return "is not UTF-8; save it as UTF-8";
  }

  async function read(file) {
    const said = document.getElementById("text-file");
    const say = (text, isProblem) => {
      said.textContent = text;
      said.classList.toggle("problem", isProblem);
    };
    if (file.size > MOST_BYTES) {
      say(`${file.name} has more than ${MOST_BYTES / 1e6} MB; cut it, or start with: workbench app --text FILE`, true);
      return;
    }
    const bytes = new Uint8Array(await file.arrayBuffer());
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes); // without the mark at its beginning
      if (!text.trim()) throw new RangeError("is empty; choose another file");
      if (text.includes("\0")) throw new RangeError("does not look like text; choose a UTF-8 text file");
      window.dash_clientside.set_props("text", { value: text.replace(/\r\n?/g, "\n") });
      say(file.name, false);
    } catch (error) {
      say(`${file.name} ${error instanceof RangeError ? error.message : problemOf(bytes)}`, true);
    }
  }

  const chooser = document.createElement("input");
  chooser.type = "file";
  chooser.id = "text-file-chooser";
  chooser.hidden = true;
  chooser.addEventListener("change", function () {
    if (chooser.files.length) read(chooser.files[0]);
    chooser.value = ""; // so that the same file can be chosen again
  });
  document.body.append(chooser);

  document.addEventListener("click", function (event) {
    if (event.target.id === "open-text") chooser.click();
  });
})();
