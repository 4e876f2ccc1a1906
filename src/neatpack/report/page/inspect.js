// The page of `neatpack inspect`: draw everything, then listen.

function describeSample() {
  const parts = [];
  if (R.total > rowCount) {
    parts.push(DATA.wanted ? `Rows ${whole.format(R.rows[0])} to ${whole.format(R.rows[rowCount - 1])} of ${whole.format(R.total)}.`
      : `A sample: ${whole.format(rowCount)} of ${whole.format(R.total)} rows, drawn at random, and those that stand out. Everything else on this page counts all rows.`);
  } else {
    parts.push(`All ${plural(rowCount, "row")}.`);
  }
  if (R.cut) parts.push("The last row has more documents than fit this page, and ends early.");
  if (R.excerpt) parts.push(`Of longer documents the first ${whole.format(R.excerpt)} characters are here, to read and to search.`);
  if (S.kind === "folder") parts.push("Documents are numbered through the rows.");
  byId("rows-note").textContent = parts.join(" ");
}

function bindRows() {
  const names = { emptiest: "emptiest row", most_documents: "most documents", longest_document: "longest document" };
  for (const [mark, row] of Object.entries(R.marks)) {
    byId("jump").append(element("option", { value: String(R.rows.indexOf(row)) }, `${names[mark]} (row ${whole.format(row)})`));
  }
  byId("jump").addEventListener("change", (event) => {
    if (event.target.value !== "") select(R.offsets[Number(event.target.value)]);
  });
  byId("colour").addEventListener("change", (event) => {
    view.byLength = event.target.value === "length";
    select(view.selected, { scroll: false, speak: false });
  });
  viewport.addEventListener("scroll", requestDraw);
  viewport.addEventListener("keydown", keyOnRows);
  viewport.addEventListener("pointermove", (event) => point(documentAt(event)));
  viewport.addEventListener("pointerleave", () => point(-1));
  viewport.addEventListener("click", (event) => select(documentAt(event), { scroll: false }));
  new ResizeObserver(requestDraw).observe(viewport);
}

function point(at) {
  if (at === view.pointed) return;
  view.pointed = at;
  const shown = at < 0 ? view.selected : at;
  if (shown >= 0) showDetail(shown);
  requestDraw();
}

// The row among the first that has most to see.
function firstLook() {
  let best = 0;
  for (let row = 0; row < Math.min(rowCount, 16); row++) {
    if (R.offsets[row + 1] - R.offsets[row] > R.offsets[best + 1] - R.offsets[best]) best = row;
  }
  return rowCount ? R.offsets[best] : -1;
}

drawHeader();
drawFigures();
drawSaved();
drawHistograms();
drawOverflow();
drawRanks();
describeSample();
bindSearch();
bindRows();
view.selected = firstLook();
onTheme(() => {
  readTheme();
  select(view.selected, { scroll: false, speak: false });
});
if (!rowCount) byId("document").textContent = "No rows";
byId("footer").textContent = `Made by neatpack ${DATA.version}. This page is one file and loads nothing.`;
document.documentElement.dataset.ready = "true";
