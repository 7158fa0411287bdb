"use strict";
(() => {
  const root = document.documentElement;
  const coarse = matchMedia("(pointer: coarse)").matches;
  // A4 less its margins, in pixels.
  const paper = 680;

  // Plotly knows no style sheet: names of colours are put in for it.
  const coloured = (value, style) => {
    if (typeof value === "string") {
      return value.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    }
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(
        Object.entries(value).map(([key, item]) => [key, coloured(item, style)])
      );
    }
    return value;
  };

  const draw = (width) => {
    const style = getComputedStyle(root);
    for (const data of document.querySelectorAll("script[data-chart]")) {
      const place = document.getElementById(data.dataset.chart);
      const figure = coloured(JSON.parse(data.textContent), style);
      if (width) figure.layout.width = width;
      // A finger that scrolls the page must not be caught by a chart.
      if (coarse) figure.layout.dragmode = false;
      const options = { displayModeBar: false, responsive: !width, displaylogo: false };
      try {
        Plotly.react(place, figure.data, figure.layout, options);
      } catch (error) {
        place.textContent = `This chart could not be drawn: ${error.message}`;
      }
    }
  };

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  let closed = [];
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const details of closed) details.open = true;
    draw(paper);
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    for (const details of closed) details.open = false;
    draw();
  });
})();
