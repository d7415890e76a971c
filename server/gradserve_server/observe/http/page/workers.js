// The workers of the selected accumulator, ranked.

import { bar, drawBar } from "./bar.js";
import { byId, html, setText } from "./elements.js";
import { ago, count, plural, seconds } from "./format.js";
import { Sortable } from "./sortable.js";
import { Table } from "./table.js";

const MOST_ROWS = 50;

const VALUES = {
  name: (worker) => worker.id,
  cost: (worker) => worker.cost,
  last: (worker) => worker.last,
  waited: (worker) => worker.waitedFor,
  stale: (worker) => worker.stale,
  missed: (worker) => worker.missed,
  seen: (worker) => worker.lastSeen,
};

export class Workers {
  #workers = [];
  #uptime = 0;

  constructor() {
    this.sortable = new Sortable(byId("workers"), "cost", () => this.#draw());
    this.table = new Table("workers", [
      { class: "id", write: (worker) => worker.id || "(no id)", title: (worker) => worker.id },
      { class: "round", picture: lateness, draw: (parts, worker) => {
        drawBar(parts.bar, worker.mean / this.longest);
        setText(parts.text, worker.came + worker.stale ? `+${seconds(worker.mean)}` : "never came");
      } },
      { class: "number", write: (worker) => count(worker.last) },
      { class: "number optional", write: (worker) => seconds(worker.waitedFor) },
      { class: "number", write: (worker) => count(worker.stale), mark: (worker) => worker.stale > 0 },
      { class: "number", write: (worker) => count(worker.missed), mark: (worker) => worker.missed > 0 },
      { class: "number optional", write: (worker) => (worker.lastSeen ? ago(this.#uptime - worker.lastSeen) : "–") },
    ]);
  }

  /** Shows workers as `analyse` ranks them. */
  show(workers, uptime) {
    this.#workers = workers;
    this.#uptime = uptime;
    this.#draw();
  }

  #draw() {
    this.longest = Math.max(1e-9, ...this.#workers.map((worker) => worker.mean));
    const rows = this.sortable.sorted(this.#workers, VALUES).slice(0, MOST_ROWS);
    this.table.show(rows, (worker) => worker.id);
    const hidden = this.#workers.length - rows.length;
    byId("workers-more").hidden = hidden <= 0;
    setText(byId("workers-more"), `${plural(hidden, "more worker")} below these.`);
  }
}

function lateness(cell) {
  const parts = { bar: bar("fill"), text: html("span", { class: "amount" }) };
  cell.append(html("span", { class: "gauge" }, parts.bar.node, parts.text));
  return parts;
}
