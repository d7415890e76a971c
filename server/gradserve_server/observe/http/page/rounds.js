// What the last rounds say about each worker.

import { number } from "./format.js";

const WIDEST = 3;

/** A worker of some rounds; `cells` has what it did in each of them. */
class Worker {
  constructor(id, numRounds) {
    this.id = id;
    this.cells = new Array(numRounds);
    this.lateness = this.came = this.last = this.stale = this.missed = this.waitedFor = 0;
    this.lastSeen = 0;
  }
}

/**
 * Analyses rounds as the server describes them.
 *
 * Returns {rounds, workers, scale}: rounds with `duration` in seconds and `counts`; workers, those for which the others wait longest
 * first, with `mean` seconds after the first gradient and a cell {kind, after} per round; `scale`, the seconds that a round is wide.
 * Kinds: came, last (after whom the round ended), stale, missing, expected (not here yet, in the open round).
 */
export function analyse(rounds, expected, uptime) {
  const described = rounds.map((round) => describe(round, uptime));
  const workers = new Map();
  const of = (id) => {
    if (!workers.has(id)) workers.set(id, new Worker(id, rounds.length));
    return workers.get(id);
  };
  described.forEach((round, place) => {
    for (const arrival of round.arrivals) addArrival(of(arrival.worker_id), place, round, arrival);
    const missing = round.open ? expected : round.missing;
    for (const id of missing) addMissing(of(id), place, round);
  });
  const scale = scaleOf(described);
  const ranked = [...workers.values()].map((worker) => finish(worker, scale));
  ranked.sort((one, other) => other.cost - one.cost || (one.id < other.id ? -1 : 1));
  return { rounds: described, workers: ranked, scale };
}

function describe(round, uptime) {
  const arrivals = (round.arrivals ?? []).map((one) => ({ worker_id: one.worker_id ?? "", after: number(one.after), stale: Boolean(one.stale), staleness: number(one.staleness) }));
  const accepted = arrivals.filter((one) => !one.stale);
  const open = !number(round.ended);
  const last = accepted.length > 1 && !open ? accepted.at(-1) : undefined;
  return {
    step: number(round.step), began: number(round.began), open, arrivals, last, missing: round.missing ?? [], required: number(round.num_required),
    duration: Math.max(0, (open ? uptime : number(round.ended)) - number(round.began)),
    waitedFor: last ? last.after - accepted.at(-2).after : 0,
    numCame: accepted.length, numStale: arrivals.length - accepted.length,
    reason: round.reason ?? "", applied: number(round.apply_seconds), staleness: Math.max(0, ...accepted.map((one) => one.staleness)), metrics: round.metrics ?? {},
  };
}

function addArrival(worker, place, round, arrival) {
  worker.lastSeen = Math.max(worker.lastSeen, round.began + arrival.after);
  worker.lateness += arrival.after;
  if (arrival.stale) {
    worker.stale += 1;
    worker.cells[place] = { kind: "stale", after: arrival.after };
    return;
  }
  worker.came += 1;
  const last = arrival === round.last;
  if (last) {
    worker.last += 1;
    worker.waitedFor += round.waitedFor;
  }
  if (worker.cells[place]?.kind !== "stale") worker.cells[place] = { kind: last ? "last" : "came", after: arrival.after };
}

function addMissing(worker, place, round) {
  if (worker.cells[place]) return;
  if (!round.open) worker.missed += 1;
  worker.cells[place] = { kind: round.open ? "expected" : "missing", after: round.duration };
}

/** All rounds have one scale, so that marks can be compared; one that took much longer than the others is cut off. */
function scaleOf(rounds) {
  const durations = rounds.filter((round) => !round.open && round.duration).map((round) => round.duration).sort((one, other) => one - other);
  if (!durations.length) return Math.max(...rounds.map((round) => round.duration), 1e-6);
  const median = durations[Math.floor(durations.length / 2)];
  return Math.min(durations.at(-1), WIDEST * median);
}

function finish(worker, scale) {
  const seen = worker.came + worker.stale;
  worker.mean = seen ? worker.lateness / seen : 0;
  const waiting = worker.cells.at(-1)?.kind === "expected" ? worker.cells.at(-1).after : 0;
  worker.cost = (worker.lateness + worker.missed * scale + waiting) / Math.max(1, seen + worker.missed + (waiting ? 1 : 0));
  return worker;
}

/** How many gradients came in each part of each round: an array of counts per round. */
export function density(rounds, scale, numParts) {
  return rounds.map((round) => {
    const counts = new Array(numParts).fill(0);
    for (const { after } of round.arrivals) counts[Math.min(numParts - 1, Math.floor((after / scale) * numParts))] += 1;
    return counts;
  });
}
