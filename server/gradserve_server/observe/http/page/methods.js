// The methods that were called: how often, and what their time went to.

import { bar, drawBar } from "./bar.js";
import { byId } from "./elements.js";
import { count, number, rate, seconds } from "./format.js";
import { Sortable } from "./sortable.js";
import { Table } from "./table.js";

const VALUES = {
  name: (row) => row.method,
  rate: (row) => row.rate,
  calls: (row) => row.started,
  now: (row) => row.now,
  failed: (row) => row.failed,
  work: (row) => row.working / Math.max(1, row.ended),
  wait: (row) => row.waiting / Math.max(1, row.ended),
  time: (row) => row.working,
};

function rowOf(method, rates) {
  const handled = Object.entries(method.handled ?? {});
  const name = `${method.service}/${method.method}`;
  const started = number(method.started);
  return {
    name, service: method.service.split(".").at(-1).replace(/Service$/, ""), method: method.method, started, rate: rates.rate(`method ${name}`, started), now: number(method.in_progress),
    ended: handled.reduce((sum, [, calls]) => sum + number(calls), 0), failed: handled.reduce((sum, [code, calls]) => sum + (code === "OK" ? 0 : number(calls)), 0),
    codes: handled.filter(([code]) => code !== "OK").map(([code, calls]) => `${code} ${count(number(calls))}`).join(", "),
    working: number(method.working_seconds), waiting: number(method.waiting_seconds),
  };
}

export class Methods {
  #rows = [];

  constructor() {
    this.sortable = new Sortable(byId("methods"), "time", () => this.#draw());
    this.table = new Table("methods", [
      { class: "id", write: (row) => row.method, title: (row) => row.name },
      { class: "service optional", write: (row) => row.service },
      { class: "number", write: (row) => rate(row.rate) },
      { class: "number optional", write: (row) => count(row.started) },
      { class: "number", write: (row) => count(row.now) },
      { class: "number", write: (row) => count(row.failed), mark: (row) => row.failed > 0, title: (row) => row.codes },
      { class: "number", write: (row) => (row.ended ? seconds(row.working / row.ended) : "–") },
      { class: "number optional", write: (row) => (row.ended ? seconds(row.waiting / row.ended) : "–") },
      { class: "share optional", picture: shares, draw: (parts, row) => {
        const all = Math.max(row.working + row.waiting, 1e-9);
        drawBar(parts, row.working / all, row.waiting / all);
      } },
    ]);
  }

  show(methods, rates) {
    this.#rows = methods.map((method) => rowOf(method, rates));
    this.#draw();
  }

  #draw() {
    this.table.show(this.sortable.sorted(this.#rows, VALUES), (row) => row.name);
  }
}

function shares(cell) {
  const parts = bar("working", "waiting");
  cell.append(parts.node);
  return parts;
}
