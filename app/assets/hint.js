// What to do first, said on the very first visit and never again.
(function () {
  "use strict";

  const SEEN = "workbench-hint-seen";

  function isFirstVisit() {
    try {
      if (localStorage.getItem(SEEN)) return false;
      localStorage.setItem(SEEN, "yes");
      return true;
    } catch (error) {
      return false; // what cannot be remembered would be said every time
    }
  }

  const ready = setInterval(function () {
    const hint = document.getElementById("hint");
    if (!hint) return;
    clearInterval(ready);
    if (isFirstVisit()) hint.hidden = false;
  }, 30);

  document.addEventListener("click", function (event) {
    if (event.target.id !== "close-hint") return;
    document.getElementById("hint").hidden = true;
    document.getElementById("main").focus({ preventScroll: true });
  });
})();
