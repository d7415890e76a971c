// The selected accumulator: its numbers, its last rounds, and which workers the others wait for.

import { openRound, titleOf } from "./accumulators.js";
import { Curves, curvesOf, listed } from "./curves.js";
import { byId, html, setText } from "./elements.js";
import { bytes, count, number, plural, rate, seconds } from "./format.js";
import { Keyed } from "./keyed.js";
import { factsOfParameters, PARAMETERS } from "./parameters.js";
import { analyse } from "./rounds.js";
import { Table } from "./table.js";
import { drawTimeline } from "./timeline.js";
import { Tooltip } from "./tooltip.js";
import { comparison, verdict } from "./verdict.js";

/** `onWorkers(workers, uptime)` gets the ranked workers whenever another document is shown. */
export class Detail {
  #shown;

  constructor(onWorkers) {
    this.onWorkers = onWorkers;
    this.picture = byId("timeline");
    this.facts = new Keyed(byId("facts"), fact, (one, { name, value }) => {
      setText(one.name, name);
      setText(one.value, value);
    });
    this.table = new Table("rounds", [
      { class: "number", write: (round) => (round.open ? "open" : count(round.step)) },
      { class: "number", write: (round) => seconds(round.duration) },
      { class: "number", write: (round) => count(round.numCame) },
      { class: "number", write: (round) => count(round.numStale) },
      { class: "id", write: (round) => (round.last ? round.last.worker_id || "(no id)" : "–") },
      { class: "number", write: (round) => seconds(round.waitedFor) },
      { class: "ids", write: (round) => (round.missing.length ? few(round.missing, 6) : "–") },
    ]);
    this.records = new Table("records", [
      { class: "number", write: (round) => (round.open ? "open" : count(round.step)) },
      { class: "code", write: (round) => round.reason || "–" },
      { class: "number", write: (round) => seconds(round.duration) },
      { class: "number", write: (round) => (round.open ? "–" : seconds(round.applied)) },
      { class: "number", write: (round) => count(round.numCame) },
      { class: "number", write: (round) => count(round.staleness) },
      { class: "number", write: (round) => count(round.numStale) },
      { class: "id", write: (round) => (round.last ? round.last.worker_id || "(no id)" : "–") },
      { class: "ids", write: (round) => (round.missing.length ? few(round.missing, 6) : "–") },
      { class: "ids", write: (round) => listed(round.metrics) || "–" },
    ]);
    this.curves = new Curves(byId("curves"));
    this.tooltip = new Tooltip(this.picture, (x, y) => this.cellAt?.(x, y));
    new ResizeObserver(() => this.#draw()).observe(this.picture);
    byId("worker-filter").addEventListener("input", () => this.#draw());
    byId("lanes").addEventListener("change", () => this.#draw());
  }

  /** Shows an accumulator, or parameters as one; undefined for what is gone. */
  show(accumulator, selected, uptime) {
    byId("detail-body").hidden = !accumulator;
    byId("detail-empty").hidden = Boolean(accumulator);
    setText(byId("detail-title"), selected ? titleOf(selected) : "Rounds");
    setText(byId("detail-empty"), selected ? gone(selected) : "Select an accumulator or parameters to see their rounds.");
    if (!accumulator) {
      this.#shown = undefined;
      this.onWorkers([], uptime);
      return;
    }
    const analysis = analyse(accumulator.rounds ?? [], accumulator.missing ?? [], uptime);
    this.#shown = analysis;
    const isParameters = selected.kind === PARAMETERS;
    this.facts.update([...factsOf(accumulator), ...(isParameters ? factsOfParameters(accumulator) : [])], (one) => one.name);
    const { text, alarming } = verdict(accumulator, analysis);
    setText(byId("verdict"), text);
    byId("verdict").classList.toggle("alarm", alarming);
    const compared = comparison(accumulator);
    byId("weights").hidden = !compared;
    setText(byId("weights"), compared?.text ?? "");
    byId("weights").classList.toggle("alarm", Boolean(compared?.alarming));
    const newestFirst = [...analysis.rounds].reverse();
    const key = (round) => `${round.step} ${round.open}`;
    this.table.show(isParameters ? [] : newestFirst, key);
    this.records.show(isParameters ? newestFirst : [], key);
    this.curves.show(isParameters ? curvesOf(analysis.rounds, accumulator.evaluations ?? []) : []);
    this.#draw();
    this.onWorkers(analysis.workers, uptime);
  }

  #draw() {
    const width = Math.floor(this.picture.clientWidth);
    if (!this.#shown || width < 100) return;
    const wanted = byId("worker-filter").value.trim().toLowerCase();
    const found = wanted ? this.#shown.workers.filter((worker) => worker.id.toLowerCase().includes(wanted)) : this.#shown.workers;
    const { node, cellAt } = drawTimeline(this.#shown, found.slice(0, Number(byId("lanes").value)), width);
    this.cellAt = cellAt;
    this.picture.replaceChildren(node);
    this.tooltip.refresh();
  }
}

const gone = ({ kind }) => (kind === PARAMETERS ? "These parameters do not exist, or not any longer." : "This accumulator does not exist, or not any longer.");

function fact() {
  const parts = { name: html("dt"), value: html("dd") };
  return { ...parts, node: html("div", {}, parts.name, parts.value) };
}

function factsOf(accumulator) {
  const median = number(accumulator.median_round_seconds);
  return [
    { name: "Step", value: count(number(accumulator.global_step)) },
    { name: "Rounds/s", value: rate(number(accumulator.rounds_per_second)) },
    { name: "Median round", value: median ? seconds(median) : "–" },
    { name: "Open round", value: openRound(accumulator) },
    { name: "Waiting", value: plural(number(accumulator.num_waiting), "call") },
    { name: "Accepted", value: count(number(accumulator.accepted)) },
    { name: "Too late", value: count(number(accumulator.stale)) },
    { name: "Duplicate", value: count(number(accumulator.duplicate)) },
    { name: "Refused", value: count(number(accumulator.refused)) },
    { name: "Memory", value: bytes(number(accumulator.num_bytes)) },
  ];
}

/** The first of some names, and how many more there are. */
export function few(names, most) {
  const shown = names.slice(0, most).map((name) => name || "(no id)").join(", ");
  return names.length > most ? `${shown} and ${count(names.length - most)} more` : shown;
}
