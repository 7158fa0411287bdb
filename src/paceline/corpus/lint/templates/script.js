"use strict";
(() => {
  const buttons = [...document.querySelectorAll("button[data-show]")];
  const cards = [...document.querySelectorAll("[data-tags]")];
  const told = document.getElementById("shown");
  const show = (tag) => {
    let count = 0;
    for (const card of cards) {
      const fits = tag === "" || card.dataset.tags.split(" ").includes(tag);
      card.hidden = !fits;
      count += fits;
    }
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(button.dataset.show === tag));
    }
    told.textContent = `${count} of ${cards.length} shown`;
  };
  for (const button of buttons) {
    button.addEventListener("click", () => show(button.dataset.show));
  }
  document.getElementById("filters").hidden = false;
  show("");
  addEventListener("beforeprint", () => show(""));
})();
