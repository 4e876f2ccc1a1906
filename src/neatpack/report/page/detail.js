// One document in words, and its row's attention mask with what it saves.

function showDetail(at) {
  const row = rowOf[at], length = R.length[at], start = R.start ? R.start[at] : 0;
  byId("swatch").style.background = runColour(at);
  byId("document").textContent = `Document ${whole.format(R.doc[at])}`;
  byId("of").textContent = `${at - R.offsets[row] + 1} of ${R.offsets[row + 1] - R.offsets[row]} in row ${whole.format(R.rows[row])}`;
  const facts = [["Length", plural(length, "token")], ["In the row", `tokens ${whole.format(left[at])} to ${whole.format(left[at] + length - 1)}`],
    ["In the document", S.kind === "folder" && cutAnywhere ? "may be a piece: a folder does not say" : `tokens ${whole.format(start)} to ${whole.format(start + length - 1)}`],
    ["Row", `${plural(rowTokens(row), "token")}, ${whole.format(S.capacity - rowTokens(row))} of padding`]];
  byId("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  const text = byId("text");
  text.textContent = R.texts ? R.texts[at] : "No text: see the note at the top of the page.";
  text.classList.toggle("none", !R.texts);
  text.scrollTop = 0;
  drawMask(row, at);
}

const pairs = (tokens) => (tokens * (tokens + 1)) / 2;
const BLOCK = 128;

// Blocks of 128 queries by 128 keys that hold any pair: what block-sparse kernels compute.
function blocksOf(row) {
  let found = 0;
  const runs = [];
  for (let at = R.offsets[row]; at < R.offsets[row + 1]; at++) runs.push([left[at], left[at] + R.length[at]]);
  for (let first = 0, run = 0; first < S.capacity; first += BLOCK) {
    while (run < runs.length && runs[run][1] <= first) run++;
    if (run === runs.length || runs[run][0] >= first + BLOCK) continue;
    found += Math.floor(first / BLOCK) - Math.floor(runs[run][0] / BLOCK) + 1;
  }
  return found;
}

function drawMask(row, chosen) {
  const mask = byId("mask"), size = 168, context = sized(mask, size, size), scale = size / S.capacity;
  context.fillStyle = theme.line;
  triangle(context, 0, size);
  let sum = 0;
  for (let at = R.offsets[row]; at < R.offsets[row + 1]; at++) {
    context.fillStyle = runColour(at);
    triangle(context, left[at] * scale, R.length[at] * scale);
    sum += pairs(R.length[at]);
  }
  context.strokeStyle = theme.ink;
  context.lineWidth = 1.5;
  triangle(context, left[chosen] * scale, R.length[chosen] * scale, true);
  const dense = pairs(S.capacity), all = Math.ceil(S.capacity / BLOCK), blocks = blocksOf(row);
  byId("saving").replaceChildren(
    element("p", {}, "Attention of this row", element("b", {}, percent(sum / dense)), "of dense causal"),
    element("p", { class: "muted" }, `${compact.format(sum)} of ${compact.format(dense)} pairs; ${whole.format(blocks)} of ${whole.format(pairs(all))} blocks of ${BLOCK}`));
  mask.setAttribute("aria-label", `Attention mask of row ${R.rows[row]}: ${R.offsets[row + 1] - R.offsets[row]} causal blocks on the diagonal, ` +
    `${percent(sum / dense)} of the pairs of dense causal attention`);
}

function triangle(context, at, size, stroke = false) {
  context.beginPath();
  context.moveTo(at, at);
  context.lineTo(at, at + size);
  context.lineTo(at + size, at + size);
  context.closePath();
  if (stroke) context.stroke();
  else context.fill();
}
