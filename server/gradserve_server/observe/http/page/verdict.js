// One sentence on who holds an accumulator up, and one on whether its workers have equal weights.

import { count, number, plural, seconds } from "./format.js";

const NAMES = 3;
const OFTEN = 0.4;
const MUCH = 0.2;
const DEVIATIONS = 3;
const LONG = 3;
const LONG_SECONDS = 2;

const named = (worker) => worker.id || "A worker without an id";

function list(workers) {
  const names = workers.slice(0, NAMES).map(named);
  if (workers.length > NAMES) return `${names.join(", ")} and ${plural(workers.length - NAMES, "other")}`;
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0];
}

/** How often one worker must come last to stand out: of equal ones, chance makes it one of a few in most rounds. */
function oftenLast(ended) {
  const chances = ended.filter((round) => round.last).map((round) => 1 / round.numCame);
  const expected = chances.reduce((sum, chance) => sum + chance, 0);
  const deviation = Math.sqrt(chances.reduce((sum, chance) => sum + chance * (1 - chance), 0));
  return Math.max(OFTEN * ended.length, expected + DEVIATIONS * deviation);
}

/** The usual time from the end of a round to that of the next, of which a wait is a part. */
function periodOf(ended) {
  const ends = ended.map((round) => round.began + round.duration);
  const periods = ends.slice(1).map((end, place) => end - ends[place]).sort((one, other) => one - other);
  return periods.length ? periods[Math.floor(periods.length / 2)] : ended[0].duration;
}

/** Returns {text, alarming} for the accumulator and the analysis of its rounds. */
export function verdict(accumulator, { rounds, workers }) {
  const ended = rounds.filter((round) => !round.open);
  const open = rounds.find((round) => round.open);
  if (!ended.length) return { text: open ? "The first round is open." : "No round has ended yet, or none lately.", alarming: false };
  const median = number(accumulator.median_round_seconds);
  const expected = workers.filter((worker) => worker.cells.at(-1)?.kind === "expected");
  if (open && expected.length && number(accumulator.num_waiting) && open.duration > Math.max(LONG * median, median + LONG_SECONDS)) {
    return { text: `The open round has lasted ${seconds(open.duration)}, while others took ${seconds(median)}: not here yet ${expected.length > 1 ? "are" : "is"} ${list(expected)}.`, alarming: true };
  }
  const often = oftenLast(ended);
  const costly = workers.filter((worker) => worker.last >= often && worker.waitedFor >= MUCH * periodOf(ended) * ended.length);
  if (costly.length) {
    const [worker] = costly.sort((one, other) => other.waitedFor - one.waitedFor);
    return { text: `${named(worker)} holds the others up: it came last in ${worker.last} of ${plural(ended.length, "round")}, which waited ${seconds(worker.waitedFor / worker.last)} each for it alone.`, alarming: true };
  }
  const late = workers.filter((worker) => worker.stale + worker.missed >= OFTEN * ended.length);
  if (late.length) {
    return { text: `${list(late)} ${late.length > 1 ? "are" : "is"} often missing or too late: the rounds end without ${late.length > 1 ? "them" : "it"}.`, alarming: true };
  }
  return { text: `No worker stands out in the last ${plural(ended.length, "round")}.`, alarming: false };
}

/** Returns {text, alarming} on the weights of the workers of an accumulator; undefined if none were compared. */
export function comparison(accumulator) {
  const workers = number(accumulator.num_compared);
  const step = count(number(accumulator.compared_step));
  if (!workers) return undefined;
  const different = Object.keys(accumulator.different ?? {});
  if (!different.length) return { text: `Weights equal on ${plural(workers, "worker")} at step ${step}.`, alarming: false };
  const named = different.slice(0, NAMES).map((id) => differs(id, accumulator));
  if (different.length > NAMES) named.push(plural(different.length - NAMES, "other"));
  return { text: `Weights differ on ${count(different.length)} of ${plural(workers, "worker")} at step ${step}: ${named.join(", ")}.`, alarming: true };
}

function differs(id, accumulator) {
  const equal = number(accumulator.different[id]);
  const since = `${id} since step ${count(number(accumulator.different_since?.[id]))}`;
  return equal >= 0 ? `${since} (equal at step ${count(equal)} at last)` : since;
}
