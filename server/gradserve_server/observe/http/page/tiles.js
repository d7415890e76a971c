// The server as a whole: a number and its last minute each.

import { html, setText } from "./elements.js";
import { bytes, count, number, rate } from "./format.js";
import { Keyed } from "./keyed.js";
import { drawSparkline, sparkline } from "./sparkline.js";

const sum = (items, pick) => items.reduce((total, item) => total + number(pick(item)), 0);
const failures = (method) => sum(Object.entries(method.handled ?? {}), ([code, calls]) => (code === "OK" ? 0 : calls));

/** The tiles of a document. */
function tilesOf(status, rates) {
  const { traffic = [], methods = [], accumulators = [], parameters = [] } = status;
  const listed = [...accumulators, ...parameters];
  const totals = Object.fromEntries(["rounds", "accepted", "stale", "refused"].map((name) => [name, sum([status.totals, status.update_totals], (one) => one?.[name])]));
  const moved = (name, pick) => ({ name, unit: "/s", value: rates.rate(`tile ${name}`, sum(traffic, pick)), write: bytes, note: `${bytes(sum(traffic, pick))} so far` });
  const dropped = number(totals.stale) + number(totals.refused);
  const all = dropped + number(totals.accepted);
  return [
    { name: "Rounds", unit: "/s", value: rates.rate("tile rounds", number(totals.rounds)), write: rate, note: `${count(number(totals.rounds))} so far` },
    { name: "Gradients", unit: "/s", value: rates.rate("tile gradients", number(totals.accepted)), write: rate,
      note: dropped ? `${((100 * dropped) / all).toFixed(1)}% late or refused` : "none late or refused" },
    moved("Received", (way) => way.received_bytes),
    moved("Sent", (way) => way.sent_bytes),
    { name: "Waiting", unit: "", value: sum(listed, (one) => one.num_waiting), write: count,
      note: listed.length < number(status.num_accumulators) + number(status.num_parameters) ? "calls in the list below" : "calls wait for rounds" },
    { name: "Failed calls", unit: "/s", value: rates.rate("tile failed", sum(methods, failures)), write: rate,
      note: `${count(sum(methods, failures))} so far`, alarming: true },
  ];
}

export class Tiles {
  constructor(list) {
    this.tiles = new Keyed(list, () => this.#create(), (tile, item) => this.#fill(tile, item));
  }

  show(status, rates) {
    this.rates = rates;
    this.tiles.update(tilesOf(status, rates), (tile) => tile.name);
  }

  #create() {
    const parts = { name: html("span", { class: "tile-name" }), value: html("span", { class: "tile-value" }), note: html("span", { class: "tile-note" }), spark: sparkline() };
    return { ...parts, node: html("li", { class: "tile" }, parts.name, parts.value, parts.note, parts.spark.node) };
  }

  #fill(tile, item) {
    setText(tile.name, item.name);
    setText(tile.value, item.write(item.value) + item.unit);
    setText(tile.note, item.note ?? "");
    tile.node.classList.toggle("alarm", Boolean(item.alarming && item.value > 0));
    drawSparkline(tile.spark, this.rates.remember(`tile ${item.name}`, item.value));
  }
}
