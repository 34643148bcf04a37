// Lists that show the first rows of many, and keep the elements of those that stay.

import { attribute, element, Nothing, Strip, text } from "./dom.js";
import { bytes, many, rate, seconds, whole } from "./format.js";

const STEP = 60;
const MOST = 400;

export class List {
  // `Row` makes the element of a row, and shows it again when it changed. `first` are shown at first.
  constructor(section, Row, first, context) {
    this.first = first;
    this.list = section.querySelector("ul");
    this.nothing = new Nothing(section, section.id.slice(0, -1));
    this.count = section.querySelector(".count");
    this.more = section.querySelector(".more");
    this.Row = Row;
    this.context = context;
    this.shown = new Map();
    this.length = 0;
    this.limit = first;
    this.more.addEventListener("click", () => {
      const all = this.limit >= MOST || this.limit >= this.length;
      this.limit = all ? first : Math.min(MOST, this.limit + STEP);
      context.changed();
    });
  }

  // `entries` are [id, row] in the order to show; `total` is how many there are without the filter.
  show(entries, total, filter) {
    const visible = entries.slice(0, this.limit);
    const ids = new Set(visible.map(([id]) => id));
    for (const [id, row] of this.shown) {
      if (!ids.has(id)) {
        row.node.remove();
        this.shown.delete(id);
      }
    }
    let at = this.list.firstElementChild;
    for (const [id, data] of visible) {
      let row = this.shown.get(id);
      if (!row) {
        row = new this.Row(this.context);
        this.shown.set(id, row);
      }
      row.show(data, this.context);
      if (row.node === at) at = at.nextElementSibling;
      else this.list.insertBefore(row.node, at);
    }
    const rest = entries.length - visible.length;
    this.length = entries.length;
    this.nothing.show(entries.length > 0, total > 0, filter);
    text(this.count, entries.length === total ? whole(total) : `${whole(entries.length)} of ${whole(total)}`);
    this.more.hidden = entries.length <= this.first;
    let words = "Show fewer";
    if (rest && this.limit >= MOST) words = `Show fewer; the filter finds the other ${whole(rest)}`;
    else if (rest) words = rest <= STEP ? `Show ${rest} more` : `Show ${STEP} of ${whole(rest)} more`;
    text(this.more, words);
  }
}

function modelButton(context) {
  const button = element("button", "link name");
  button.type = "button";
  button.addEventListener("click", () => context.choose(button.dataset.model));
  return button;
}

function showModel(button, row) {
  text(button, row.title);
  attribute(button, "data-model", row.name);
  attribute(button, "title", `${row.title}: show only this model`);
}

export class PullRow {
  constructor(context) {
    this.model = modelButton(context);
    this.by = element("div", "sub");
    this.strip = new Strip("layers that are ready");
    this.from = element("div", "sub");
    this.amount = element("div");
    this.pace = element("div", "sub");
    this.phase = element("div", "phase");
    this.took = element("div", "sub");
    this.node = element(
      "li",
      "",
      element("div", "", this.model, this.by),
      element("div", "strip-cell", this.strip.node, this.from),
      element("div", "numbers", this.amount, this.pace),
      element("div", "num", this.phase, this.took),
    );
  }

  show(row, { now }) {
    const percent = row.bytes ? Math.floor((100 * row.done) / row.bytes) : 0;
    const running = row.phase === "running";
    attribute(this.node, "data-phase", row.phase);
    attribute(this.node, "class", row.at === undefined ? null : "ended");
    showModel(this.model, row);
    text(this.by, `into ${row.host || "a host"}, process ${row.pid}`);
    this.strip.show(row.marks, row.ready, row.layers);
    const names = row.sources.slice(0, 3).join(", ");
    const others = row.sources.length - 3;
    const reads = names && `reads from ${names}${others > 0 ? ` and ${others} more` : ""}`;
    text(this.from, running ? reads : row.requests ? `takes requests at ${row.requests}` : "");
    text(this.amount, `${row.ready} of ${many(row.layers, "layer")} ready`);
    const retries = row.retries ? `, ${row.retries} read again` : "";
    text(this.pace, `${bytes(row.done)} of ${bytes(row.bytes)}${retries}`);
    text(this.phase, running ? rate(row.rate) || (row.sources.length ? `${percent} %` : "waiting") : row.phase);
    const ago = row.at === undefined ? "" : `, ${seconds(Math.max(1, Math.round(now - row.at)))} ago`;
    text(this.took, `${running ? "for" : "in"} ${seconds(row.seconds)}${ago}`);
  }
}

export class ModelRow {
  constructor(context) {
    this.model = modelButton(context);
    this.note = element("div", "sub");
    this.size = element("div", "num");
    this.layers = element("div", "num");
    this.sources = element("div", "num");
    this.pin = element("div", "pin sub mono");
    this.node = element(
      "li",
      "",
      element("div", "model", this.model, this.note),
      this.size,
      this.layers,
      this.sources,
      this.pin,
    );
  }

  show(row) {
    showModel(this.model, row);
    text(this.note, row.pinOnly ? "found by its pin only: the name stands for other weights" : "");
    text(this.size, row.layers ? bytes(row.bytes) : "size unknown");
    text(this.layers, row.layers ? many(row.layers, "layer") : "");
    text(this.sources, many(row.sources, "source"));
    text(this.pin, `@${row.pin.slice(0, 16)}`);
    attribute(this.pin, "title", row.pin);
  }
}

export class SourceRow {
  constructor(context) {
    this.model = modelButton(context);
    this.pin = element("div", "sub mono");
    this.host = element("div");
    this.endpoint = element("div", "sub");
    this.strip = new Strip("layers that it holds");
    this.held = element("div", "sub");
    this.role = element("div");
    this.ways = element("div", "sub");
    this.readers = element("div");
    this.lease = element("div", "sub");
    this.node = element(
      "li",
      "",
      element("div", "", this.model, this.pin),
      element("div", "", this.host, this.endpoint),
      element("div", "strip-cell", this.strip.node, this.held),
      element("div", "", this.role, this.ways),
      element("div", "num", this.readers, this.lease),
    );
  }

  show(row, { store }) {
    const load = store.rows.load.get(row.id);
    attribute(this.node, "data-state", row.state);
    showModel(this.model, row);
    text(this.pin, `@${row.pin}${row.pinOnly ? ", by pin only" : ""}`);
    text(this.host, row.host || row.endpoint);
    text(this.endpoint, row.endpoint);
    this.strip.show(row.marks, row.held, row.layers);
    const where = row.devices.join(" and ");
    text(this.held, `${row.held === row.layers ? "all" : `${row.held} of`} ${many(row.layers, "layer")}${where ? `, on the ${where}` : ""}`);
    text(this.role, row.state === "serving" ? row.role : `${row.role}, ${row.state}`);
    text(this.ways, row.transports.join(", "));
    const given = load?.rate ? ` · ${rate(load.rate)}` : "";
    text(this.readers, load ? `${load.readers ? many(load.readers, "reader") : "no readers"}${given}` : "");
    const late = load?.lease ?? null;
    text(this.lease, late === null ? "" : `lease ends in ${late} s`);
    attribute(this.lease, "class", late === null ? "sub" : "sub late");
  }
}
