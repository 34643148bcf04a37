// What the server has told, by kind and id, and whether it is still true.
//
// The server sends `begin`, all rows, `synced`, and then what changes. Until `synced` the rows before
// stay shown. Nothing here grows with time: a row that is gone is removed.

const KINDS = ["model", "source", "load", "pull", "ended"];
// The server sends something every five seconds.
const SILENT_MS = 15000;
const RETRY_MS = 2000;

function maps() {
  return Object.fromEntries(KINDS.map((kind) => [kind, new Map()]));
}

export class Store {
  constructor(changed) {
    this.rows = maps();
    // Numbers that change with the rows of a kind.
    this.versions = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    this.connection = null; // what the server says of the coordinator
    this.offset = 0; // the server's clock less ours, in seconds
    this.lostAt = null; // since when the server itself does not answer
    this.synced = false;
    this.changed = changed;
    this.next = null;
    this.events = null;
    this.watchdog = 0;
    this.open();
  }

  open() {
    const events = (this.events = new EventSource("/events"));
    const on = (name, take) =>
      events.addEventListener(name, (event) => {
        if (events !== this.events) return;
        this.heard();
        take(JSON.parse(event.data));
        this.changed();
      });
    on("begin", () => (this.next = maps()));
    on("rows", (rows) => this.apply(this.next ?? this.rows, rows));
    on("synced", () => {
      this.rows = this.next ?? this.rows;
      this.next = null;
      this.synced = true;
      for (const kind of KINDS) this.versions[kind] += 1;
    });
    on("connection", (connection) => {
      this.connection = connection;
      this.tick(connection.now);
    });
    on("tick", ({ now }) => this.tick(now));
    events.onerror = () => events === this.events && this.again();
    this.heard(false);
  }

  apply(rows, { put, gone }) {
    for (const [kind, id, row] of put) rows[kind]?.set(id, row);
    for (const [kind, id] of gone) rows[kind]?.delete(id);
    for (const [kind] of [...put, ...gone]) this.versions[kind] += 1;
  }

  tick(now) {
    this.offset = now - performance.now() / 1000;
  }

  // The server's clock, by which its times are.
  now() {
    return performance.now() / 1000 + this.offset;
  }

  heard(answers = true) {
    if (answers) this.lostAt = null;
    clearTimeout(this.watchdog);
    this.watchdog = setTimeout(() => this.again(), SILENT_MS);
  }

  // The connection ended, or nothing comes through it any more.
  again() {
    this.events.close();
    this.events = null;
    this.next = null;
    this.lostAt ??= new Date();
    clearTimeout(this.watchdog);
    this.watchdog = setTimeout(() => this.open(), RETRY_MS);
    this.changed();
  }
}
