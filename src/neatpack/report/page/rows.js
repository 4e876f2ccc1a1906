// The rows: a window on a canvas that draws only what is in sight, searched, selected and pointed at.
const R = DATA.rows;
const ROW = 26, RUN = 19, RULER = 24, GUTTER = 66, MARGIN = 58;
const rowCount = R.rows.length;
const rowOf = new Uint32Array(R.doc.length), left = new Float64Array(R.doc.length);
for (let row = 0; row < rowCount; row++) {
  for (let at = R.offsets[row], used = 0; at < R.offsets[row + 1]; at++) {
    [rowOf[at], left[at]] = [row, used];
    used += Math.ceil(R.length[at] / DATA.align) * DATA.align;
  }
}
const rowTokens = (row) => R.length.slice(R.offsets[row], R.offsets[row + 1]).reduce((sum, length) => sum + length, 0);

// Neighbours never share a hue, and a document has the same hue in every row.
const hues = new Uint8Array(R.doc.length);
for (let at = 0; at < hues.length; at++) {
  hues[at] = (Math.imul(R.doc[at] + 1, 2654435761) >>> 8) % 8;
  if (at && rowOf[at] === rowOf[at - 1] && hues[at] === hues[at - 1]) hues[at] = (hues[at] + 3) % 8;
}

const view = { selected: -1, pointed: -1, matches: [], marked: new Set(), byLength: false };
const viewport = byId("viewport"), canvas = byId("canvas");
let theme = {};

function readTheme() {
  theme = Object.fromEntries(["ink", "muted", "line", "surface", "pad", "length-0", "length-1"].map((name) => [name, colour(name)]));
  theme.runs = Array.from({ length: 8 }, (_, hue) => colour(`run-${hue}`));
  requestDraw();
}

function runColour(at) {
  if (!view.byLength) return theme.runs[hues[at]];
  return mix(theme["length-0"], theme["length-1"], Math.sqrt(R.length[at] / S.capacity));
}

const scaleOf = (width) => (width - GUTTER - MARGIN) / S.capacity;

let waiting = false;
function requestDraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function draw() {
  const width = viewport.clientWidth, height = viewport.clientHeight;
  byId("spacer").style.height = `${Math.max(0, RULER + rowCount * ROW + 6 - height)}px`;
  const context = sized(canvas, width, height);
  const scale = scaleOf(width), top = viewport.scrollTop;
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  const first = Math.floor(top / ROW), last = Math.min(rowCount, Math.ceil((top + height) / ROW));
  for (let row = first; row < last; row++) drawRow(context, row, RULER + row * ROW - top, scale, width);
  outline(context, view.pointed, scale, top, 1.5);
  outline(context, view.selected, scale, top, 2.5);
  drawRuler(context, scale, width);
}

function drawRow(context, row, y, scale, width) {
  context.textAlign = "right";
  const selected = view.selected >= 0 && rowOf[view.selected] === row;
  context.fillStyle = selected ? theme.ink : theme.muted;
  context.fillText(whole.format(R.rows[row]), GUTTER - 10, y + RUN / 2 + 1);
  const tokens = rowTokens(row);
  context.fillText(`${Math.floor((1000 * tokens) / S.capacity) / 10} %`, width - 8, y + RUN / 2 + 1);
  context.textAlign = "left";
  let end = 0;
  for (let at = R.offsets[row]; at < R.offsets[row + 1]; at++) {
    const x = GUTTER + left[at] * scale, wide = R.length[at] * scale;
    context.globalAlpha = view.marked.size && !view.marked.has(at) ? 0.22 : 1;
    const fill = runColour(at);
    context.fillStyle = fill;
    context.fillRect(x, y, Math.max(wide - (wide > 3 ? 1 : 0), 0.5), RUN);
    if (wide > 44 && context.globalAlpha === 1) label(context, at, x, y, wide, fill);
    end = left[at] + R.length[at];
  }
  context.globalAlpha = 1;
  hatch(context, GUTTER + end * scale, y, (S.capacity - end) * scale);
}

function label(context, at, x, y, wide, fill) {
  context.fillStyle = inkOn(fill);
  context.save();
  context.beginPath();
  context.rect(x, y, wide - 7, RUN);
  context.clip();
  const text = wide > 150 && R.texts ? `  ${R.texts[at].slice(0, Math.ceil(wide / 5)).replace(/\s+/g, " ")}` : "";
  context.fillText(`${whole.format(R.doc[at])}${text}`, x + 6, y + RUN / 2 + 1);
  context.restore();
}

function hatch(context, x, y, wide) {
  if (wide < 1) return;
  context.save();
  context.beginPath();
  context.rect(x, y, wide, RUN);
  context.clip();
  context.strokeStyle = theme.pad;
  context.lineWidth = 2;
  context.beginPath();
  for (let at = x - RUN; at < x + wide; at += 6) {
    context.moveTo(at, y + RUN);
    context.lineTo(at + RUN, y);
  }
  context.stroke();
  context.restore();
}

function outline(context, at, scale, top, width) {
  if (at < 0) return;
  context.strokeStyle = theme.ink;
  context.lineWidth = width;
  const wide = Math.max(R.length[at] * scale - 1, 2);
  context.strokeRect(GUTTER + left[at] * scale - 0.5, RULER + rowOf[at] * ROW - top - 0.5, wide + 1, RUN + 1);
}

function drawRuler(context, scale, width) {
  context.fillStyle = theme.surface;
  context.fillRect(0, 0, width, RULER - 4);
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  context.fillText("row", GUTTER - 10, 10);
  context.fillText("fill", width - 8, 10);
  for (let part = 0; part <= 4; part += scale * S.capacity < 320 ? 2 : 1) {
    const tokens = Math.round((S.capacity * part) / 4), x = GUTTER + tokens * scale;
    context.textAlign = part === 0 ? "left" : part === 4 ? "right" : "center";
    context.fillText(whole.format(tokens), x, 10);
    context.fillRect(Math.min(x, width - MARGIN - 1), RULER - 6, 1, 4);
  }
}

// The document under a point of the window, or -1.
function documentAt(event) {
  const box = viewport.getBoundingClientRect();
  const y = event.clientY - box.top - viewport.clientTop, token = (event.clientX - box.left - viewport.clientLeft - GUTTER) / scaleOf(viewport.clientWidth);
  const row = Math.floor((y - RULER + viewport.scrollTop) / ROW);
  return y < RULER - 4 || row < 0 || row >= rowCount || token < 0 ? -1 : inRow(row, token, false);
}

// The document of a row that holds a position; past the last one, that one or (strictly) none.
function inRow(row, token, nearest = true) {
  let low = R.offsets[row], high = R.offsets[row + 1] - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (left[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return nearest || token < left[low] + R.length[low] ? low : -1;
}

function select(at, { scroll = true, speak = true } = {}) {
  if (at < 0) return;
  view.selected = at;
  if (scroll) intoSight(rowOf[at]);
  showDetail(at);
  if (speak) byId("announce").textContent = inWords(at);
  requestDraw();
}

function intoSight(row) {
  const room = viewport.clientHeight - RULER, y = row * ROW;
  if (y < viewport.scrollTop) viewport.scrollTop = y;
  else if (y + ROW > viewport.scrollTop + room) viewport.scrollTop = y + ROW - room;
}

function inWords(at) {
  const text = R.texts && R.texts[at] ? ` ${R.texts[at].slice(0, 120)}` : "";
  return `Row ${R.rows[rowOf[at]]}, document ${R.doc[at]}, ${plural(R.length[at], "token")} from ${left[at]}.${text}`;
}

function move(rows) {
  const row = Math.min(Math.max(rowOf[view.selected] + rows, 0), rowCount - 1);
  select(inRow(row, left[view.selected] + R.length[view.selected] / 2));
}

function keyOnRows(event) {
  if (view.selected < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
  const page = Math.max(1, Math.floor((viewport.clientHeight - RULER) / ROW) - 1);
  const action = {
    ArrowLeft: () => select(Math.max(view.selected - 1, 0)),
    ArrowRight: () => select(Math.min(view.selected + 1, R.doc.length - 1)),
    ArrowUp: () => move(-1),
    ArrowDown: () => move(1),
    PageUp: () => move(-page),
    PageDown: () => move(page),
    Home: () => select(0),
    End: () => select(R.offsets[rowCount - 1]),
    n: () => step(1),
    p: () => step(-1),
    Escape: clearSearch,
  }[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}
