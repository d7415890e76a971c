// The accumulators and parameters that are gone.

import { titleOf } from "./accumulators.js";
import { fetchStatus } from "./connection.js";
import { listed } from "./curves.js";
import { byId, setText } from "./elements.js";
import { count, number } from "./format.js";
import { Pace } from "./pace.js";
import { Table } from "./table.js";

const MOST = 256;
const PAUSE_SECONDS = 10;

/** A time in seconds since 1970, in the time zone of the reader; the year only if it is not the present one. */
function at(seconds) {
  if (!seconds) return "–";
  const time = new Date(1000 * seconds);
  const year = time.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return time.toLocaleString([], { year, month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
}

/** Asks the server while its part of the page is open: at once for another filter, otherwise every now and then. */
export class PastRuns {
  #pace = new Pace(byId("past"), PAUSE_SECONDS);

  constructor() {
    this.table = new Table("past-runs", [
      { class: "id", write: (run) => titleOf(run), title: (run) => run.incarnation },
      { class: "code optional", write: (run) => run.kind },
      { class: "number", write: (run) => (number(run.step) ? count(number(run.step)) : "–") },
      { class: "number optional", write: (run) => at(number(run.begun)) },
      { class: "number", write: (run) => at(number(run.ended)) },
      { class: "ids", write: (run) => listed(run.metrics ?? {}) || "–" },
      { class: "message", write: (run) => run.reason },
    ]);
  }

  /** Shows those whose names contain a text. */
  async show(filter, token, now = performance.now() / 1000) {
    if (!this.#pace.begins(filter, now)) return;
    const query = { max_past_runs: MOST, max_accumulators: 1, max_rounds: 1, max_workers: 1, ...(filter ? { name_contains: filter } : {}) };
    const { past_runs: found = [] } = await fetchStatus(query, token);
    if (this.#pace.isNew(filter)) return;
    this.table.show(found, (run) => `${run.kind} ${run.incarnation} ${run.container}/${run.name}`);
    setText(byId("past-runs-empty"), filter ? `No past run has “${filter}” in its name.` : "Nothing has been deleted.");
  }
}
