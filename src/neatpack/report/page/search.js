// Search among the rows on the page: a document's number, `row:12`, or text.

function matchesOf(query) {
  const row = /^row:?\s*(\d+)$/i.exec(query);
  if (row) {
    const at = R.rows.indexOf(Number(row[1]));
    return at < 0 ? [] : Array.from({ length: R.offsets[at + 1] - R.offsets[at] }, (_, place) => R.offsets[at] + place);
  }
  const number = /^#?(\d+)$/.exec(query);
  const lower = query.toLowerCase(), found = [];
  for (let at = 0; at < R.doc.length; at++) {
    if (number && R.doc[at] === Number(number[1])) found.push(at);
    else if (R.texts && !query.startsWith("#") && R.texts[at].toLowerCase().includes(lower)) found.push(at);
  }
  // the document of that number first, then texts that mention it
  return number ? found.sort((a, b) => (R.doc[b] === Number(number[1])) - (R.doc[a] === Number(number[1])) || a - b) : found;
}

function runSearch() {
  const query = byId("search").value.trim();
  view.matches = query ? matchesOf(query) : [];
  view.marked = new Set(view.matches);
  view.place = -1;
  const none = !view.matches.length;
  byId("next").disabled = byId("previous").disabled = none;
  byId("found").textContent = query ? (none ? notFound(query) : "") : "";
  if (!none) step(1);
  requestDraw();
}

function notFound(query) {
  const sampled = rowCount < R.total || R.cut;
  if (!R.texts && !/^#?\d+$|^row/i.test(query)) return "There is no text here to search";
  return sampled ? "Not in the rows drawn here" : R.excerpt ? "Not in what is shown of documents" : "Not found";
}

function step(by) {
  const count = view.matches.length;
  if (!count) return;
  view.place = view.place < 0 ? 0 : (view.place + by + count) % count;
  byId("found").textContent = `${whole.format(view.place + 1)} of ${whole.format(count)}`;
  select(view.matches[view.place]);
}

function clearSearch() {
  byId("search").value = "";
  runSearch();
}

function bindSearch() {
  const field = byId("search");
  field.addEventListener("input", runSearch);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
    else if (event.key === "ArrowDown") viewport.focus();
    else if (event.key === "Escape") clearSearch();
    else return;
    event.preventDefault();
  });
  byId("next").addEventListener("click", () => step(1));
  byId("previous").addEventListener("click", () => step(-1));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    field.focus();
    field.select();
  });
}
