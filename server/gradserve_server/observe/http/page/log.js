// The latest lines of the server's log, for admins of all containers.

import { fetchLog } from "./connection.js";
import { byId, setText } from "./elements.js";
import { Pace } from "./pace.js";
import { Table } from "./table.js";

const MOST = 200;
const PAUSE_SECONDS = 2;
const ALARMING = new Set(["WARNING", "ERROR", "CRITICAL"]);

const at = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour12: false });

/** Asks the server while its part of the page is open: at once for other wishes, otherwise every other second. */
export class Log {
  #pace;

  constructor(ask) {
    const node = byId("log");
    this.#pace = new Pace(node, PAUSE_SECONDS);
    this.table = new Table("log-lines", [
      { class: "at", write: (line) => at(line.time), title: (line) => new Date(1000 * line.time).toISOString() },
      { class: "code", write: (line) => line.level, mark: (line) => ALARMING.has(line.level) },
      { class: "message", write: (line) => line.message, title: (line) => line.logger },
      { class: "id", write: (line) => line.request_id || "–" },
    ]);
    node.addEventListener("toggle", ask);
    byId("log-filter").addEventListener("input", ask);
    byId("log-level").addEventListener("change", ask);
  }

  async show(token, now = performance.now() / 1000) {
    const query = { level: byId("log-level").value, contains: byId("log-filter").value.trim(), max_lines: MOST };
    const key = JSON.stringify(query);
    if (!this.#pace.begins(key, now)) return;
    const lines = await fetchLog(query, token);
    if (this.#pace.isNew(key)) return;
    this.table.show([...(lines ?? [])].reverse(), (line) => line.number);
    setText(byId("log-lines-empty"), lines ? "No line of the log fits." : "The log is for admins of all containers.");
  }
}
