// Draws what the store has, at most a few times a second, and only what changed.

import { attribute, text } from "./dom.js";
import { clockTime, rate, seconds, whole } from "./format.js";
import { Graph, network } from "./graph.js";
import { List, ModelRow, PullRow, SourceRow } from "./lists.js";
import { Store } from "./store.js";

const LEAST_MS = 250;
const at = (id) => document.getElementById(id);

const filter = at("filter");
const sort = at("sort");
const context = { choose, changed, now: 0, store: null };
const lists = {
  pulls: new List(at("pulls"), PullRow, 12, context),
  models: new List(at("models"), ModelRow, 12, context),
  sources: new List(at("sources"), SourceRow, 20, context),
};
const graph = new Graph(at("reads"));
let due = 0;
let drawnAt = 0;
const store = (context.store = new Store(changed));

filter.value = new URLSearchParams(location.search).get("filter") ?? "";
filter.addEventListener("input", changed);
sort.addEventListener("change", changed);
document.addEventListener("visibilitychange", changed);
document.addEventListener("mouseover", ({ target }) => {
  const isCut = target.scrollWidth > target.clientWidth && !target.childElementCount;
  if (isCut) target.title = target.textContent;
});
new ResizeObserver(changed).observe(document.body);
setInterval(changed, 1000); // ages

function choose(model) {
  filter.value = filter.value === model ? "" : model;
  changed();
}

function changed() {
  if (due || document.hidden) return;
  due = setTimeout(() => requestAnimationFrame(draw), Math.max(0, drawnAt + LEAST_MS - performance.now()));
}

// The words of a row that the filter looks at; made once for each form of a row.
function words(row) {
  row.words ??= [row.title, row.host, row.endpoint, ...(row.sources instanceof Array ? row.sources : [])].join("\n").toLowerCase();
  return row.words;
}

// The filter is in the page's address, so that it can be sent to others and survives a reload.
function keepFilter() {
  const url = new URL(location);
  if (filter.value) url.searchParams.set("filter", filter.value);
  else url.searchParams.delete("filter");
  if (url.href !== location.href) history.replaceState(null, "", url);
}

function matching(rows) {
  const wanted = filter.value.trim().toLowerCase();
  const found = [...rows];
  return wanted ? found.filter(([, row]) => words(row).includes(wanted)) : found;
}

const ORDERS = {
  name: (a, b) => compare(a.title, b.title) || compare(a.host, b.host) || compare(a.endpoint, b.endpoint),
  host: (a, b) => compare(a.host, b.host) || compare(a.endpoint, b.endpoint),
  readers: (a, b) => of(b, "readers") - of(a, "readers") || ORDERS.name(a, b),
  rate: (a, b) => of(b, "rate") - of(a, "rate") || ORDERS.name(a, b),
};
const { compare } = new Intl.Collator("en", { numeric: true });
const of = (row, what) => store.rows.load.get(row.id)?.[what] ?? 0;

// Sorting a thousand rows takes longer than drawing those that are seen: only when it may differ.
let sorted = { key: "", rows: [] };

function orderedSources() {
  const { source, load } = store.versions;
  const byLoad = sort.value === "readers" || sort.value === "rate";
  const key = [source, byLoad ? load : 0, sort.value, filter.value].join("\n");
  if (key !== sorted.key) {
    const rows = matching(store.rows.source);
    for (const [id, row] of rows) row.id = id;
    sorted = { key, rows: rows.sort(([, a], [, b]) => ORDERS[sort.value](a, b)) };
  }
  return sorted.rows;
}

function draw() {
  due = 0;
  drawnAt = performance.now();
  const { model, source, pull, ended } = store.rows;
  context.now = store.now();

  keepFilter();
  showState();
  attribute(document.body, "data-synced", store.synced);
  const running = [...pull.values()].filter((row) => row.phase === "running");
  text(at("total-models"), store.synced ? whole(model.size) : "–");
  text(at("total-sources"), store.synced ? whole(source.size) : "–");
  text(at("total-pulls"), store.synced ? whole(running.length) : "–");
  const moving = running.reduce((sum, row) => sum + row.rate, 0);
  text(at("total-rate"), store.synced ? rate(moving) || "nothing" : "–");

  const [first] = model.values();
  text(document.querySelector(".example"), first?.name ?? "MODEL");
  const pulls = matching(pull);
  pulls.sort(([, a], [, b]) => (b.phase === "running") - (a.phase === "running") || a.order - b.order);
  const late = matching(ended).sort(([, a], [, b]) => b.at - a.at);
  const wanted = filter.value.trim();
  lists.pulls.show([...pulls, ...late], pull.size + ended.size, wanted);
  lists.models.show(matching(model).sort(([, a], [, b]) => compare(a.title, b.title)), model.size, wanted);
  lists.sources.show(orderedSources(), source.size, wanted);
  graph.show(network(store.rows, pulls), running.some((row) => row.sources.length), wanted);
}

function showState() {
  const { connection, lostAt } = store;
  let state = "waiting";
  let word = "connecting";
  let trouble = "";
  if (lostAt) {
    state = "lost";
    word = "no answer";
    trouble = `mx web has not answered since ${clockTime(lostAt)}. What is shown is old; this page goes on trying.`;
  } else if (connection?.up) {
    state = "live";
    word = "live";
  } else if (connection?.why) {
    state = "lost";
    word = "no answer";
    const ago = Math.max(0, store.now() - connection.since);
    const since = clockTime(new Date(Date.now() - 1000 * ago));
    trouble = `The coordinator has not answered since ${since}, for ${seconds(Math.max(1, ago))}: ${connection.why}. What is shown is old; this page goes on by itself when it answers.`;
  }
  attribute(at("state"), "data-state", state);
  text(at("state"), word);
  // Screen readers read the state out when it changes, and not this, which changes each second.
  at("trouble").hidden = !trouble;
  text(at("trouble"), trouble);
  attribute(document.body, "class", trouble ? "old" : null);
  if (connection) for (const node of document.querySelectorAll(".address")) text(node, connection.address);
  text(document.querySelector("title"), connection ? `mx · ${connection.address}` : "mx");
}
