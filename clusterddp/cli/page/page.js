"use strict";
// A page of `report` is whole without this: it adds a read-out to the charts, and lets runs be shown and hidden.
const attach = () => {
const number = value => String(Number(value.toPrecision(5)));
for (const svg of document.querySelectorAll("svg[data-x]")) {
  const [x0, x1, y0, y1] = [...svg.dataset.x.split(" "), ...svg.dataset.y.split(" ")].map(Number);
  const [left, top, right, bottom] = svg.dataset.box.split(" ").map(Number);
  const out = svg.parentElement.querySelector("output"), cursor = svg.querySelector(".cursor");
  const step = x => x0 + (x - left) / (right - left) * (x1 - x0);
  const value = y => y0 + (bottom - y) / (bottom - top) * (y1 - y0);
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
      return `${line.dataset.name}: ${number(value(point.y))} at step ${Math.round(step(point.x))}`;
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
};
attach();
// A page of `clusterddp dash` asks its server for itself, and every few seconds again, and shows what has changed.
// The key comes behind the # of the printed address, which no browser sends; the tab keeps it for this origin only.
if ("live" in document.documentElement.dataset) {
  if (location.hash.length > 1) {
    sessionStorage.setItem("key", location.hash.slice(1));
    history.replaceState(null, "", location.pathname + location.search);
  }
  addEventListener("hashchange", () => location.reload());
  const key = sessionStorage.getItem("key");
  let tag = null, offset = 0;
  const pause = () => new Promise(done => setTimeout(done, document.hidden ? 15000 : 3000));
  const show = (kind, text) => {
    const line = document.querySelector("#live");
    if (line) { line.className = kind; line.textContent = text; }
  };
  const ask = async path => {
    const headers = { "X-Clusterddp-Key": key, ...(tag && { "If-None-Match": tag }) };
    let answer = null, problem = "the dashboard does not answer; is it still running?";
    try {
      answer = await fetch(path, { headers });
      problem = answer.ok || answer.status === 304 ? "" : await answer.text();
    } catch { answer = null; }
    show(problem ? "BAD" : "soft", problem);
    return answer?.ok ? answer : null;
  };
  const renew = async () => {
    const answer = await ask(location.href);
    if (!answer) return;
    tag = answer.headers.get("ETag");
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = [...document.querySelectorAll("details")].map(part => part.open);
    const checked = new Set([...document.querySelectorAll("form input:checked")].map(box => box.value));
    document.title = fresh.title;
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    document.querySelectorAll("details").forEach((part, at) => { if (open[at]) part.open = true; });
    document.querySelectorAll("form input").forEach(box => { if (checked.has(box.value)) box.checked = true; });
    attach();
  };
  const follow = async (log, path) => {
    const answer = await ask(`${path}&offset=${offset}`);
    if (!answer) return;
    const news = await answer.json();
    if (news.offset < offset) log.textContent = "";
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    offset = news.offset;
    if (news.text) log.append(news.text);
    if (log.textContent.length > 400000) log.textContent = log.textContent.slice(-200000);
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  const find = () => document.querySelector("pre[data-log]");
  (async () => {
    while (key) {
      if (!find()) await renew();
      if (find()) await follow(find(), find().dataset.log);
      await pause();
    }
    show("BAD", "open the address that clusterddp dash has printed, in this tab: it has the key");
  })();
}
