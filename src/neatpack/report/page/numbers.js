// Everything that counts all rows: the header, figures, histograms, overflow and ranks.
const S = DATA.summary;
const NAMES = { best_fit: "best fit", in_order: "in order", wrapped: "wrapped" };
const cutAnywhere = S.strategy === "wrapped" || (S.overflow === "split" && S.counts.split > 0);

function drawHeader() {
  byId("kind").textContent = S.kind === "plan" ? "· a plan" : "· a packed folder";
  byId("path").textContent = S.path;
  const parts = [`${plural(S.rows, "row")} of ${plural(S.capacity, "token")}, packed ${NAMES[S.strategy] || S.strategy}`];
  if (S.source) parts.push(`from ${S.source}`);
  if (S.tokenizer) parts.push(`tokenizer ${S.tokenizer}`);
  byId("lede").textContent = parts.join(" · ");
  byId("notes").append(...S.notes.map((note) => element("li", {}, note)));
}

function drawFigures() {
  const saved = S.attention_dense ? S.attention_pairs / S.attention_dense : 1;
  const bytes = S.source_bytes_per_token;
  const figures = [
    ["Filled", percent(S.efficiency), `${plural(S.padding, "token")} of padding`],
    ["Rows", compact.format(S.rows), S.rows <= S.lower_bound ? "the fewest possible" : `no plan has fewer than ${whole.format(S.lower_bound)}`],
    ["Documents", compact.format(S.counts.documents), cutAnywhere ? `${plural(S.pieces, "piece")} in rows` : `${whole.format(S.pieces)} in rows`],
    ["Tokens", compact.format(S.tokens), bytes === null ? "in rows" : `${bytes.toFixed(2)} bytes of source each`],
    ["Documents a row", S.docs_per_row.toFixed(S.docs_per_row < 100 ? 1 : 0), `${whole.format(S.max_docs_in_row)} at most`],
    ["Attention work", percent(saved), "of causal attention over whole rows"],
  ];
  figures.forEach(([name, value, note], at) =>
    byId("figures").append(element("div", at ? {} : { class: "lead" }, element("dt", {}, name),
      element("dd", {}, value, element("span", { class: "note" }, note)))));
}

function drawSaved() {
  const alone = S.tokens + S.padding_alone;
  const what = cutAnywhere ? "piece" : "document";
  byId("saved-note").textContent = S.padding_saved > 0
    ? `${compact.format(S.padding_saved)} tokens of padding less than with one ${what} a row: ${(alone / (S.tokens + S.padding)).toFixed(1)} times fewer tokens to compute.`
    : `Nothing: every ${what} fills a row by itself.`;
  const row = (label, rows, padding) => stackRow(byId("saved"), label,
    [[S.tokens, "fill-accent", `${percent(S.tokens / Math.max(S.tokens + padding, 1))} tokens`],
     [padding, "fill-pad", `${percent(padding / Math.max(S.tokens + padding, 1))} padding`]], alone, plural(rows, "row"));
  row(`One ${what} a row`, S.pieces, S.padding_alone);
  row("Packed", S.rows, S.padding);
}

// "256 to 383", or one number.
const between = (edges, at) =>
  edges[at + 1] - edges[at] === 1 ? whole.format(edges[at]) : `${whole.format(edges[at])} to ${whole.format(edges[at + 1] - 1)}`;

function drawHistograms() {
  const { document_length: lengths, row_tokens: fill, documents_in_row: docs } = S.histograms;
  const what = cutAnywhere ? "pieces" : "documents";
  drawHistogram(byId("lengths"), { label: "Document lengths, in tokens", edges: lengths.edges, series: [lengths.counts, lengths.sums],
    tick: (edge) => compact.format(edge),
    say: (at) => `${between(lengths.edges, at)} tokens: ${percent(lengths.counts[at] / S.pieces)} of ${what} (${whole.format(lengths.counts[at])}), ${percent(lengths.sums[at] / S.tokens)} of tokens`,
    summary: `Mean ${whole.format(Math.round(S.tokens / Math.max(S.pieces, 1)))} tokens. Point at a bar, or walk with the arrow keys.` });
  byId("lengths").append(element("ul", { class: "legend" },
    element("li", {}, element("i", { class: "fill-accent" }), `share of ${what}`),
    element("li", {}, element("i", { class: "fill-tokens" }), "share of tokens")));
  const part = (tokens) => percent(Math.min(tokens / S.capacity, 1));
  drawHistogram(byId("fill"), { label: "Fill per row", edges: fill.edges, series: [fill.counts],
    tick: (edge) => `${Number(((100 * edge) / S.capacity).toFixed(1))}%`,
    say: (at) => fill.edges[at] >= S.capacity
      ? `full: ${plural(fill.counts[at], "row")} (${percent(fill.counts[at] / S.rows)})`
      : `${part(fill.edges[at])} to ${part(fill.edges[at + 1] - 1)} full: ${plural(fill.counts[at], "row")} (${percent(fill.counts[at] / S.rows)})`,
    summary: fullRows(fill) });
  drawHistogram(byId("docs"), { label: "Documents per row", edges: docs.edges, series: [docs.counts],
    tick: (edge) => compact.format(edge),
    say: (at) => `${between(docs.edges, at)} ${docs.edges[at] === 1 && docs.edges[at + 1] === 2 ? "document" : what}: ${plural(docs.counts[at], "row")} (${percent(docs.counts[at] / S.rows)})`,
    summary: `${S.docs_per_row.toFixed(1)} on average, ${whole.format(S.max_docs_in_row)} at most.` });
}

function fullRows(fill) {
  const last = fill.edges[fill.edges.length - 2] >= S.capacity ? fill.counts[fill.counts.length - 1] : 0;
  return last ? `${percent(last / S.rows)} of rows have no padding at all.` : "Bars are finer the fuller the rows.";
}

const POLICIES = {
  error: "A document longer than a row is refused; there was none.",
  drop: "Documents longer than a row were left out.",
  truncate: "Documents longer than a row were cut off.",
  split: "Documents longer than a row lie in several pieces, each a document of its own.",
};

function drawOverflow() {
  const c = S.counts;
  byId("overflow-note").textContent = S.strategy === "wrapped"
    ? "Rows are cut from one stream: documents lie across row ends." : POLICIES[S.overflow] || S.overflow;
  const fates = [
    [c.kept_whole, "fill-accent", "whole"], [c.split, "fill-good", "in pieces"], [c.truncated, "fill-hatch", "cut off"],
    [c.dropped, "fill-warm", "left out"], [c.empty, "fill-pad", "empty, in no row"],
  ].map(([count, look, name]) => [count, look, `${whole.format(count)} ${name}`, name]);
  stackRow(byId("overflow"), "Documents", fates, c.documents, compact.format(c.documents));
  const lost = [[S.tokens, "fill-accent", `${whole.format(S.tokens)} in rows`], [c.truncated_tokens, "fill-hatch", `${whole.format(c.truncated_tokens)} cut off`],
    [c.dropped_tokens, "fill-warm", `${whole.format(c.dropped_tokens)} left out`]];
  stackRow(byId("overflow"), "Tokens", lost, S.tokens + c.truncated_tokens + c.dropped_tokens, compact.format(c.tokens));
  const gone = c.truncated_tokens + c.dropped_tokens;
  byId("overflow-legend").append(
    ...fates.filter(([count]) => count).map(([count, look, , name]) =>
      element("li", {}, element("i", { class: look }), element("b", {}, whole.format(count)), ` ${name}`)));
  byId("overflow-legend").after(element("p", { class: "readout" },
    gone ? `${plural(gone, "token")} (${percent(gone / c.tokens)}) are in no row.` : "Every token is in a row: nothing was lost."));
}

function drawRanks() {
  const { ranks } = S;
  if (!ranks.before) {
    byId("ranks-note").textContent = `Not compared: ${ranks.reason}.`;
    byId("ranks-legend").remove();
    return;
  }
  const idle = (side) => 1 - 1 / side.spread;
  byId("ranks-note").textContent = `${ranks.world_size} ranks, ${plural(ranks.batch_rows, "row")} each a step, ${plural(ranks.steps, "step")}. ` +
    `Waiting for the slowest rank takes ${percent(idle(ranks.before))} of the time as the rows lie, and ${percent(idle(ranks.after))} in the order of balance_rows.`;
  const longest = Math.max(ranks.before.spread, ranks.after.spread);
  for (const [title, side] of [["As the rows lie", ranks.before], ["After balance_rows", ranks.after]]) {
    const stack = element("div", { class: "stack" });
    const shown = Math.min(ranks.world_size, 16);
    for (let rank = 0; rank < shown; rank++) {
      stackRow(stack, `rank ${rank}`, [[side.work[rank], "fill-accent", `work ${side.work[rank].toFixed(3)} of the mean`],
        [side.waiting[rank], "fill-hatch", `waiting ${side.waiting[rank].toFixed(3)}`]], longest, side.work[rank].toFixed(2));
    }
    const more = ranks.world_size > shown ? [element("p", { class: "readout muted" }, `and ${ranks.world_size - shown} more ranks`)] : [];
    byId("ranks").append(element("div", {}, element("h3", {}, `${title}: ${side.spread.toFixed(2)} × the mean`), stack, ...more));
  }
}
