// What is compared: the boxes of B are read when they are submitted.
(function () {
  "use strict";

  let submissions = 0;

  document.addEventListener("keydown", function (event) {
    if (event.key === "Enter" && event.target.id === "other-model") document.getElementById("compare").click();
  });

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    compare: {
      typedOther: function () {
        const typed = (id) => document.getElementById(id).value;
        return { model: typed("other-model"), text: typed("other-text"), number: ++submissions };
      },
    },
  });
})();
