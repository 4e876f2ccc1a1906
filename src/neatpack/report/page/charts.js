// Histograms and stacked bars, of elements: sharp, read aloud, and walked with the arrow keys.

// A histogram; `series` are arrays of counts, `say(index)` tells a bar in words, `tick(edge)` labels an edge.
function drawHistogram(place, { label, edges, series, say, tick, summary }) {
  const most = series.map((counts) => Math.max(...counts, 1));
  const count = series[0].length;
  const readout = element("p", { class: "readout muted", role: "status" }, summary);
  const bars = series[0].map((_, index) => {
    const bar = element("div", { class: "bar" });
    series.forEach((counts, at) => {
      // what is not nothing is seen, however small
      bar.append(element("span", { height: counts[index] ? `max(2px, ${(100 * counts[index]) / most[at]}%)` : "0" }));
    });
    bar.addEventListener("pointerenter", () => show(index));
    return bar;
  });
  const chart = element("div", { class: "chart", tabindex: "0", role: "slider", "aria-label": label, "aria-orientation": "horizontal",
    "aria-valuemin": "1", "aria-valuemax": String(count) }, element("div", { class: "bars" }, ...bars), ticks(edges, tick));
  let active = -1;

  function show(index) {
    if (active >= 0) bars[active].classList.remove("active");
    active = index;
    if (index >= 0) bars[index].classList.add("active");
    readout.textContent = index < 0 ? summary : say(index);
    readout.classList.toggle("muted", index < 0);
    const at = Math.max(index, 0);
    chart.setAttribute("aria-valuenow", String(at + 1));
    chart.setAttribute("aria-valuetext", say(at));
  }
  chart.addEventListener("pointerleave", () => show(-1));
  chart.addEventListener("blur", () => show(-1));
  chart.addEventListener("focus", () => chart.matches(":focus-visible") && show(0));
  chart.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: active - 1, ArrowRight: active + 1, Home: 0, End: count - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(Math.min(Math.max(to, 0), count - 1));
  });
  show(-1);
  place.append(chart, readout);
}

// As many labels below the bars as there is room for.
function ticks(edges, tick) {
  const bars = edges.length - 1;
  const every = Math.max(1, Math.ceil(bars / 8));
  const axis = element("div", { class: "ticks", "aria-hidden": "true" });
  for (let at = 0; at < bars; at += every) {
    const each = element("span", {}, tick(edges[at]));
    each.style.left = `${(100 * (at + (bars <= 24 ? 0.5 : 0))) / bars}%`;
    if (at === 0 && bars <= 24) each.style.transform = "translateX(-50%)";
    axis.append(each);
  }
  return axis;
}

// A row of a stack: `parts` are [value, class, words]; `total` is the length of the whole track.
function stackRow(place, label, parts, total, value) {
  const words = parts.filter(([size]) => size > 0).map(([, , said]) => said).join(", ");
  const track = element("div", { class: "track", role: "img", "aria-label": `${label}: ${words}`, title: words });
  for (const [size, look] of parts) {
    if (size > 0) track.append(element("span", { class: `part ${look}`, width: `max(1px, ${(100 * size) / Math.max(total, 1e-12)}%)` }));
  }
  place.append(element("span", { class: "label" }, label), track, element("span", { class: "value" }, value));
}
