// A card with figures fills the window, and Escape puts it back.
(function () {
  "use strict";

  function fill(card, fills) {
    card.classList.toggle("maximised", fills);
    document.documentElement.classList.toggle("has-maximised", fills);
    const button = card.querySelector(".maximise");
    button.setAttribute("aria-pressed", String(fills));
    button.focus();
    window.dispatchEvent(new Event("resize")); // figures are as large as their place
  }

  const maximised = () => document.querySelector(".card.maximised");

  document.addEventListener("click", function (event) {
    const button = event.target.closest(".maximise");
    if (button) return fill(button.closest(".card"), !button.closest(".maximised"));
    const card = maximised();
    if (card && event.target.closest(".nav")) fill(card, false);
  });

  document.addEventListener(
    "keydown",
    function (event) {
      const card = maximised();
      // What is open in front of the card closes first.
      const inFront = document.querySelector("dialog[open]") || event.target.getAttribute("aria-expanded") === "true";
      if (event.key !== "Escape" || !card || inFront) return;
      event.preventDefault();
      event.stopPropagation();
      fill(card, false);
    },
    true
  );
})();
