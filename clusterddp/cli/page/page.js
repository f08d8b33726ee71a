"use strict";
// The page is whole without this: it adds a read-out to the charts, and lets runs be shown and hidden.
const number = (value, percent) => percent ? (100 * value).toFixed(2) + " %" : String(Number(value.toPrecision(5)));
for (const svg of document.querySelectorAll("svg[data-x]")) {
  const [x0, x1, y0, y1] = [...svg.dataset.x.split(" "), ...svg.dataset.y.split(" ")].map(Number);
  const [left, top, right, bottom] = svg.dataset.box.split(" ").map(Number);
  const out = svg.parentElement.querySelector("output"), cursor = svg.querySelector(".cursor");
  const step = x => x0 + (x - left) / (right - left) * (x1 - x0);
  const value = y => {
    const inside = y0 + (bottom - y) / (bottom - top) * (y1 - y0);
    return "log" in svg.dataset ? 10 ** inside : inside;
  };
  const nearest = (points, x) => {
    let low = 0, high = points.numberOfItems - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points.getItem(middle).x < x) low = middle; else high = middle;
    }
    const a = points.getItem(low), b = points.getItem(high);
    return x - a.x < b.x - x ? a : b;
  };
  let at = right;
  const show = x => {
    at = Math.min(right, Math.max(left, x));
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.style.visibility = "visible";
    const lines = [...svg.querySelectorAll("polyline:not(.off)")].map(line => {
      const point = nearest(line.points, at);
      return `${line.dataset.name}: ${number(value(point.y), "percent" in svg.dataset)} at step ${Math.round(step(point.x))}`;
    });
    out.textContent = lines.slice(0, 12).join("\n");
  };
  const hide = () => { cursor.style.visibility = "hidden"; out.textContent = ""; };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    show((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("focus", () => show(at));
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const move = { ArrowLeft: -4, ArrowRight: 4, Home: -1e6, End: 1e6 }[event.key];
    if (move) { show(at + move); event.preventDefault(); }
  });
}
for (const box of document.querySelectorAll("input[data-run]")) {
  box.addEventListener("change", () => {
    for (const line of document.querySelectorAll(`.r${box.dataset.run}`)) line.classList.toggle("off", !box.checked);
  });
}
