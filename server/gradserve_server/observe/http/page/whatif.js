// What the rounds of the selected accumulator would have been under other rules, as the server replays them.

import { keyOf } from "./accumulators.js";
import { fetchWhatIf } from "./connection.js";
import { byId, setText } from "./elements.js";
import { count, number, plural, seconds } from "./format.js";
import { Pace } from "./pace.js";
import { PARAMETERS } from "./parameters.js";
import { Table } from "./table.js";

const PAUSE_SECONDS = 10;

/** Asks the server while its part of the page is open, every now and then. */
export class WhatIf {
  #pace = new Pace(byId("what-if"), PAUSE_SECONDS);

  constructor() {
    this.table = new Table("rules", [
      { class: "number", write: (rule) => count(rule.required) },
      { class: "number", write: (rule) => (rule.grace ? seconds(rule.grace) : "–") },
      { class: "number", write: (rule) => seconds(rule.seconds) },
      { class: "number", write: (rule) => (rule.isBase ? "as required" : percent(rule.faster)) },
      { class: "number", write: (rule) => percent(rule.late) },
      { class: "number", write: (rule) => rule.perSecond.toPrecision(3) },
    ]);
  }

  /** Shows the rounds of what is selected; `query` is one with which the server finds it. */
  async show(selected, query, token, now = performance.now() / 1000) {
    const key = `${selected.kind} ${keyOf(selected)}`;
    if (this.#pace.isNew(key)) this.#draw(undefined);
    if (!this.#pace.begins(key, now)) return;
    const found = await fetchWhatIf(query, token);
    if (this.#pace.isNew(key)) return;
    const listed = selected.kind === PARAMETERS ? found.parameters : found.accumulators;
    this.#draw(listed.find((one) => keyOf(one) === keyOf(selected))?.what_if);
  }

  #draw(found) {
    setText(byId("what-if-text"), found ? sentence(found) : "Replayed from the arrivals of at least 5 rounds of workers with ids.");
    this.table.show(found ? rulesOf(found) : [], (rule) => `${rule.required} ${rule.grace}`);
  }
}

const percent = (part) => `${Math.round(100 * part)} %`;

/** The rules of a document, most gradients first, with how much faster rounds are than with the number that is required. */
export function rulesOf({ as_required: base, alternatives }) {
  return [base, ...alternatives].map((rule) => described(rule, base)).sort((one, other) => other.required - one.required || one.grace - other.grace);
}

const described = (rule, base) => ({
  required: number(rule.num_required), grace: number(rule.grace), seconds: number(rule.seconds), late: number(rule.late), perSecond: number(rule.per_second),
  isBase: rule === base, faster: number(base.seconds) ? 1 - number(rule.seconds) / number(base.seconds) : 0,
});

/** The better rule in words. */
export function sentence(found) {
  if (!found.better) return `No other rule would have let a tenth more gradients count in the last ${plural(number(found.num_rounds), "round")}.`;
  const [base, best] = [found.as_required, found.better].map((rule) => described(rule, found.as_required));
  const grace = best.grace ? ` and a grace of ${seconds(best.grace)}` : "";
  return `With ${count(best.required)} of ${count(number(found.num_workers))} gradients${grace}, a round would have taken ${seconds(best.seconds)} in place of ${seconds(base.seconds)}, ${percent(best.late)} of the gradients would have come too late, and ${(best.perSecond / base.perSecond).toFixed(1)} times as many would have counted.`;
}
