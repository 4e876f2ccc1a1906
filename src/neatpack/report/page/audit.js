// The page of `neatpack audit`: for every attention implementation, who moves whom, and who would without boundaries.
const A = DATA;
const short = (size) => (typeof size === "string" ? size : size === 0 ? "0" : size >= 0.01 && size < 1000 ? size.toPrecision(2) : size.toExponential(0));

// Sizes from the tolerance to the largest one seen, on a logarithmic scale, for all maps of the page alike.
const finite = A.results.flatMap((result) => [result.map, result.removed]).filter(Boolean)
  .flatMap((map) => map.sizes.flat().filter((size) => typeof size === "number" && size > map.tolerance));
const [smallest, largest] = [Math.min(...finite, Infinity), Math.max(...finite, -Infinity)];

function heat(size, tolerance) {
  if (size !== "inf" && !(size > tolerance)) return null;
  const low = Math.log(Math.max(tolerance, 1e-12)), high = Math.log(largest);
  const part = size === "inf" || high <= low ? 1 : (Math.log(size) - low) / (high - low);
  return mix(colour("heat-0"), colour("heat-1"), Math.min(Math.max(part, 0), 1));
}

function drawHead() {
  byId("model").textContent = A.model;
  const weights = A.weights === "checkpoint" ? "with its own weights" : "as a small random model with the config's traits";
  byId("lede").textContent = `${A.model_type}, audited ${weights}, on ${plural(A.batch.rows, "row")} of ${plural(A.batch.row_length, "token")} (seed ${A.batch.seed}).`;
  for (const result of A.results) {
    byId("figures").append(element("div", {}, element("dt", {}, result.attention),
      element("dd", {}, element("span", { class: `verdict ${result.verdict}` }, result.verdict),
        element("span", { class: "note" }, result.meaning))));
  }
  byId("footer").textContent = `Made by neatpack ${A.version}. This page is one file and loads nothing.`;
}

function drawResult(result) {
  const card = element("section", { class: "card", "aria-label": `${result.attention}: ${result.verdict}` });
  const sent = result.payload ? `The contract sends: ${result.payload}.` : "";
  card.append(element("header", {}, element("h2", {}, result.attention),
    element("span", { class: `verdict ${result.verdict}` }, result.verdict), element("p", {}, `${result.meaning}. ${sent}`)));
  if (result.why) card.append(element("p", { class: "report" }, result.why));
  byId("results").append(card);
  if (!result.map) return;
  const maps = element("div", { class: "maps" });
  maps.append(drawMap("As the model takes the batch", "Every cell off the diagonal should be blank: at most the tolerance.", result, result.map));
  if (result.removed) {
    maps.append(drawMap("With every boundary removed", "The control: the same tokens as one document a row. What is dark here is what the boundaries must keep out.", result, result.removed));
  }
  card.append(maps, legend(result.map.tolerance), element("p", { class: "report" }, result.report));
}

function drawMap(title, note, result, map) {
  const count = map.sizes.length, readout = element("p", { class: "readout muted", role: "status" }, "Point at a cell, or walk with the arrow keys.");
  const moved = map.sizes.flat().filter((size) => size === "inf" || size > map.tolerance).length;
  const table = element("table", { class: "heat", role: "grid", "aria-label": `${title}: ${moved} of ${count * count - count} pairs above the tolerance` });
  const starts = (at) => at > 0 && result.documents[at].row !== result.documents[at - 1].row;
  const heads = result.documents.map((_, at) => element("th", { scope: "col", ...(starts(at) && { class: "row-start" }) }, `${at}`));
  table.append(element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "changed ↓ moves →"), ...heads)));
  const body = element("tbody");
  const cells = map.sizes.map((sizes, i) => sizes.map((size, j) => cell(size, i, j, starts(j), map.tolerance)));
  cells.forEach((row, i) => {
    const { row: place, length } = result.documents[i];
    body.append(element("tr", starts(i) ? { class: "row-start" } : {},
      element("th", { scope: "row" }, `${i} · row ${place}, ${length} tok`), ...row));
  });
  table.append(body);

  const say = (i, j) => {
    const size = map.sizes[i][j];
    return i === j ? `Document ${i} itself` : size === null ? `Document ${i} was not changed`
      : `Document ${i} moves document ${j} by ${short(size)}${size === "inf" || size > map.tolerance ? "" : size === 0 ? ": not by a bit" : ", within the tolerance"}`;
  };
  let [at, across] = [0, Math.min(1, count - 1)];
  const go = (i, j, focus) => {
    cells[at][across].tabIndex = -1;
    [at, across] = [Math.min(Math.max(i, 0), count - 1), Math.min(Math.max(j, 0), count - 1)];
    cells[at][across].tabIndex = 0;
    if (focus) cells[at][across].focus();
    readout.textContent = say(at, across);
    readout.classList.remove("muted");
  };
  cells[at][across].tabIndex = 0;
  cells.flat().forEach((each, place) => {
    const [i, j] = [Math.floor(place / count), place % count];
    each.setAttribute("aria-label", say(i, j));
    each.addEventListener("pointerenter", () => go(i, j, false));
    each.addEventListener("focus", () => go(i, j, false));
  });
  table.addEventListener("keydown", (event) => {
    const to = { ArrowUp: [at - 1, across], ArrowDown: [at + 1, across], ArrowLeft: [at, across - 1], ArrowRight: [at, across + 1],
      Home: [at, 0], End: [at, count - 1] }[event.key];
    if (!to) return;
    event.preventDefault();
    go(...to, true);
  });
  return element("div", {}, element("h3", {}, title), element("p", {}, note), element("div", { class: "scroll" }, table), readout);
}

function cell(size, i, j, start, tolerance) {
  const made = element("td", { role: "gridcell", tabindex: "-1", ...(start && { class: "row-start" }) });
  if (i === j) made.classList.add("self");
  else made.textContent = size === null ? "–" : short(size);
  const paint = heat(size, tolerance);
  if (paint && i !== j) {
    made.style.backgroundColor = paint;
    made.style.color = inkOn(paint);
  } else if (i !== j) made.classList.add("blank");
  return made;
}

function legend(tolerance) {
  const bar = element("canvas", { "aria-hidden": "true" });
  const context = sized(bar, 200, 12);
  const shown = finite.length ? largest : tolerance;
  for (let x = 0; x < 200; x++) {
    context.fillStyle = mix(colour("heat-0"), colour("heat-1"), x / 199);
    context.fillRect(x, 0, 1, 12);
  }
  return element("div", { class: "scale" }, "largest change of a logit:", element("span", { class: "key blank" }, "blank"),
    `up to the tolerance, ${short(tolerance)}`, bar, `to ${short(shown)} (logarithmic)`);
}

drawHead();
onTheme(() => {
  byId("results").replaceChildren();
  A.results.forEach(drawResult);
});
document.documentElement.dataset.ready = "true";
