// Who reads from whom: origins on the left, what reads from them to the right of them.
//
// A drawing has a bounded number of elements, which are used again: columns that are too long end with
// how many more there are.

import { attribute, Nothing, svg, text } from "./dom.js";
import { many, whole } from "./format.js";

const MOST_IN_COLUMN = 80;
const MOST_EDGES = 600;
const MOST_COLUMNS = 5;
const HEIGHT = 460;

function process(row) {
  return `${row.host || "a host"}, process ${row.pid}`;
}

// Returns the nodes by id, with what each reads from, of the pulls that run.
export function network(rows, pulls) {
  const byEndpoint = new Map();
  for (const [id, row] of rows.source) byEndpoint.set(row.endpoint, id);
  const nodes = new Map();
  const node = (id, name, share) => {
    let made = nodes.get(id);
    if (!made) nodes.set(id, (made = { id, name, share, from: [], readers: 0, depth: -1 }));
    return made;
  };
  for (const [id, row] of pulls) {
    if (row.phase !== "running" || !row.sources.length) continue;
    const reader = node(id, process(row), 0);
    reader.share = row.bytes ? row.done / row.bytes : 0;
    for (const endpoint of row.sources) {
      const sourceId = byEndpoint.get(endpoint) ?? `at ${endpoint}`;
      if (sourceId === id) continue;
      const known = rows.source.get(sourceId);
      const share = known ? (known.layers ? known.held / known.layers : 1) : 0;
      const source = node(sourceId, known?.host ? process(known) : endpoint, share);
      source.readers += 1;
      reader.from.push(source);
    }
  }
  return nodes;
}

// Gives each node its column: how many reads lie between it and one that reads from nothing. Peers may
// read from one another, so the shortest way counts.
function columns(nodes) {
  let wave = [...nodes.values()].filter((node) => !node.from.length);
  for (const node of wave) node.depth = 0;
  const readers = new Map();
  for (const node of nodes.values()) {
    for (const source of node.from) {
      if (!readers.has(source)) readers.set(source, []);
      readers.get(source).push(node);
    }
  }
  while (wave.length) {
    const next = [];
    for (const node of wave) {
      for (const reader of readers.get(node) ?? []) {
        if (reader.depth >= 0) continue;
        reader.depth = Math.min(MOST_COLUMNS - 1, node.depth + 1);
        next.push(reader);
      }
    }
    wave = next;
  }
  const found = [];
  for (const node of nodes.values()) {
    if (node.depth < 0) node.depth = 0; // a ring of peers without an origin
    (found[node.depth] ??= []).push(node);
  }
  return found.filter(Boolean);
}

// Chooses what is drawn of each column, and where. From the right, so that what is left out of a column
// is what those that are drawn do not read from; each is at the height of those that read from it.
function arrange(found, gap, step, longest) {
  const drawn = [];
  const rests = [];
  const readBy = new Map();
  for (let index = found.length - 1; index >= 0; index -= 1) {
    const order = [...found[index]].sort((a, b) => (readBy.get(b)?.length ?? 0) - (readBy.get(a)?.length ?? 0));
    const visible = order.slice(0, MOST_IN_COLUMN);
    const height = (node) => {
      const ys = readBy.get(node);
      return ys ? ys.reduce((sum, y) => sum + y, 0) / ys.length : Infinity;
    };
    const heights = new Map(visible.map((node) => [node, height(node)]));
    visible.sort((a, b) => (heights.get(a) === heights.get(b) ? 0 : heights.get(a) - heights.get(b)));
    const top = ((longest - visible.length) * step) / 2;
    visible.forEach((node, at) => {
      node.x = index * gap;
      node.y = top + at * step;
      drawn.push(node);
      for (const source of node.from) {
        if (!readBy.has(source)) readBy.set(source, []);
        readBy.get(source).push(node.y);
      }
    });
    const rest = order.length - visible.length;
    if (rest) rests.push([index * gap, `and ${whole(rest)} more`]);
  }
  return { drawn, rests };
}

class Pool {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.items = [];
  }

  // Returns the first `count` items; the others are removed.
  take(count) {
    while (this.items.length < count) {
      const made = this.make();
      this.items.push(made);
      this.parent.append(made.node ?? made);
    }
    for (const item of this.items.splice(count)) (item.node ?? item).remove();
    return this.items;
  }
}

function box() {
  const made = { node: svg("g"), title: svg("title"), back: svg("rect", "box"), fill: svg("rect", "fill"), label: svg("text", "label") };
  made.node.append(made.title, made.back, made.fill, made.label);
  return made;
}

export class Graph {
  constructor(section) {
    this.svg = section.querySelector("svg");
    this.nothing = new Nothing(section, "read");
    this.count = section.querySelector(".count");
    const edges = svg("g");
    const boxes = svg("g");
    const rests = svg("g");
    this.svg.append(edges, boxes, rests);
    this.edges = new Pool(edges, () => svg("path", "edge"));
    this.boxes = new Pool(boxes, box);
    this.rests = new Pool(rests, () => svg("text", "rest"));
  }

  // `there` says whether there are reads without the filter.
  show(nodes, there, filter) {
    const width = this.svg.parentElement.clientWidth;
    const found = columns(nodes);
    const reads = [...nodes.values()].reduce((sum, node) => sum + node.from.length, 0);
    this.nothing.show(nodes.size > 0, there, filter);
    text(this.count, nodes.size ? `${nodes.size} processes, ${many(reads, "read")}` : "");
    attribute(this.svg, "aria-label", nodes.size ? `${many(reads, "read")} between ${nodes.size} processes; the list of pulls names them` : "No reads now");
    if (!nodes.size || !width) {
      for (const pool of [this.edges, this.boxes, this.rests]) pool.take(0);
      this.svg.setAttribute("height", "0");
      return;
    }
    const longest = Math.min(MOST_IN_COLUMN, Math.max(...found.map((column) => column.length)));
    const step = Math.max(5, Math.min(30, Math.floor(HEIGHT / longest)));
    const height = longest * step + (found.some((column) => column.length > MOST_IN_COLUMN) ? 22 : 0);
    const boxWidth = step > 12 ? Math.min(260, (width / found.length) * 0.62) : Math.min(110, (width / found.length) * 0.3);
    const gap = found.length > 1 ? (width - boxWidth - 26) / (found.length - 1) : 0;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", String(height));

    const { drawn, rests } = arrange(found, gap, step, longest);
    const size = step > 12 ? step - 6 : step - 1;
    const boxes = this.boxes.take(drawn.length);
    drawn.forEach((node, at) => this.place(boxes[at], node, boxWidth, size));
    const visible = new Set(drawn);
    const pairs = [];
    for (const node of drawn) {
      for (const source of node.from) if (visible.has(source)) pairs.push([source, node]);
    }
    const kept = pairs.slice(0, MOST_EDGES);
    const edges = this.edges.take(kept.length);
    const thick = kept.length > 200 ? 0.7 : kept.length > 60 ? 1 : 1.6;
    kept.forEach(([source, reader], at) => {
      const x1 = source.x + boxWidth;
      const y1 = source.y + size / 2;
      const y2 = reader.y + size / 2;
      const aside = reader.x <= source.x; // beside it or before it: around on the right
      const x2 = aside ? reader.x + boxWidth : reader.x;
      const bend = aside ? 24 : (x2 - x1) / 2;
      attribute(edges[at], "d", `M${x1} ${y1}C${x1 + bend} ${y1} ${aside ? x2 + bend : x2 - bend} ${y2} ${x2} ${y2}`);
      attribute(edges[at], "stroke-width", thick);
    });
    const texts = this.rests.take(rests.length);
    rests.forEach(([x, words], at) => {
      attribute(texts[at], "x", x);
      attribute(texts[at], "y", height - 5);
      text(texts[at], words);
    });
  }

  place(made, node, width, size) {
    attribute(made.node, "class", node.share >= 1 ? "whole" : null);
    attribute(made.node, "transform", `translate(${node.x.toFixed(1)} ${node.y.toFixed(1)})`);
    for (const rect of [made.back, made.fill]) {
      attribute(rect, "height", size);
      attribute(rect, "rx", Math.min(4, size / 3));
    }
    attribute(made.back, "width", width);
    attribute(made.fill, "width", (width * Math.min(1, node.share)).toFixed(1));
    text(made.title, `${node.name}: ${Math.floor(100 * node.share)} %, ${node.readers} read from it`);
    const chars = Math.floor((width - 12) / 6.4);
    const name = node.name.length <= chars ? node.name : node.name.replace(", process", "");
    const shown = name.length <= chars ? name : `${name.slice(0, chars - 1)}…`;
    text(made.label, size >= 13 ? shown : "");
    attribute(made.label, "x", 7);
    attribute(made.label, "y", size / 2);
  }
}
