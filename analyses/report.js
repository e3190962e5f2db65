(() => {
  const PRINTED_WIDTH = 660; // pixels: what a page of A4 or Letter holds beside its margins
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const nodes = [...document.querySelectorAll(".plot")];
  const button = document.getElementById("theme");
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // "light", "dark", or whatever the system has

  // The dark figure is what it changes of the light one; arrays of one length are changed entry by entry.
  const changed = (before, change) => {
    if (change === null || typeof change !== "object" || Array.isArray(change)) return change;
    const after = Array.isArray(before) ? [...before] : { ...before };
    for (const [key, value] of Object.entries(change)) after[key] = changed(before?.[key], value);
    return after;
  };

  const draw = (theme, width) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    nodes.forEach((node, i) => {
      const { light, dark, config } = figures[i];
      const { data, layout } = changed(light, theme === "dark" ? dark : {});
      Plotly.react(node, data, width ? { ...layout, width: Math.min(width, layout.width ?? width) } : layout, config);
    });
  };

  const show = () => draw(chosen ?? (systemIsDark.matches ? "dark" : "light"));
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    show();
  });
  systemIsDark.addEventListener("change", show);

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((details) => (details.open = true));
    draw("light", PRINTED_WIDTH);
  });
  addEventListener("afterprint", () => {
    closed.forEach((details) => (details.open = false));
    show();
  });
  show();
})();
