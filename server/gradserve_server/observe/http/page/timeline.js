// The last rounds as a picture: a column per round, a lane per worker, a mark where its gradient came.

import { svg } from "./elements.js";
import { ends, plural, seconds } from "./format.js";
import { density } from "./rounds.js";

const LANE = 20;
const STRIP = 34;
const HEAD = 44;
const NARROWEST = 28;
const INSET = 5;
const CHARACTER = 6.7;

/** Where things are in a picture of this width. */
function layoutOf(width, numRounds, workers) {
  const longest = Math.max(10, ...workers.map((worker) => worker.id.length));
  const label = Math.round(Math.min(longest * CHARACTER + 14, Math.max(84, width * 0.25)));
  const value = 68;
  const shown = Math.max(1, Math.min(numRounds, Math.floor((width - label - value) / NARROWEST)));
  const column = (width - label - value) / shown;
  return { width, label, value, shown, column, right: width - value };
}

function mark(kind, x, y) {
  switch (kind) {
    case "last": return svg("path", { class: "last", d: `M${x} ${y - 5}l5 5-5 5-5-5Z` });
    case "stale": return svg("path", { class: "stale", d: `M${x - 4} ${y - 4}h8v8h-8Z` });
    case "missing": return svg("path", { class: "missing", d: `M${x - 3.5} ${y - 3.5}l7 7m-7 0 7-7` });
    case "expected": return svg("circle", { class: "expected", cx: x, cy: y, r: 3.5 });
    default: return svg("circle", { class: "came", cx: x, cy: y, r: 3.5 });
  }
}

/**
 * Draws the slowest of the workers of an analysis.
 *
 * Returns {node, cellAt}: `cellAt(x, y)` is the text of what lies there, or undefined.
 */
export function drawTimeline(analysis, workers, width) {
  const layout = layoutOf(width, analysis.rounds.length, workers);
  const first = analysis.rounds.length - layout.shown;
  const rounds = analysis.rounds.slice(first);
  const top = HEAD + STRIP;
  const height = top + workers.length * LANE + 6;
  const node = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary(analysis, workers, layout.shown) });
  const xOf = (place, after) => layout.label + place * layout.column + INSET + Math.min(1, after / analysis.scale) * (layout.column - 2 * INSET);

  const every = Math.ceil(62 / layout.column);
  const texts = [];
  rounds.forEach((round, place) => {
    const x = layout.label + place * layout.column;
    if (place % 2 === 0 || round.open) node.append(svg("rect", { class: round.open ? "column open" : "column", x, y: HEAD - 40, width: layout.column, height: height - HEAD + 40 }));
    if ((rounds.length - 1 - place) % every) return;
    const middle = x + layout.column / 2;
    const step = round.open ? "open" : ends(String(round.step), Math.floor((layout.column * every) / CHARACTER) - 1);
    texts.push(svg("text", { class: "step", x: middle, y: 17 }, step), svg("text", { class: "took", x: middle, y: 33 }, seconds(round.duration)));
  });
  node.append(...texts);
  node.append(...strip(analysis, rounds, layout, top));
  workers.forEach((worker, lane) => node.append(...laneOf(worker, rounds, first, top + lane * LANE + LANE / 2, layout, xOf)));
  const cellAt = (x, y) => {
    const place = Math.floor((x - layout.label) / layout.column);
    const lane = Math.floor((y - top) / LANE);
    if (place >= layout.shown || !(place >= 0)) return workers[lane] && lane >= 0 ? describeWorker(workers[lane]) : undefined;
    return lane < 0 ? describeRound(rounds[place]) : workers[lane] && describeCell(workers[lane], rounds[place], first + place);
  };
  return { node, cellAt };
}

/** The gradients of all workers, so that a few slow ones are seen among 500. */
function strip(analysis, rounds, layout, top) {
  const parts = Math.max(4, Math.min(24, Math.floor(layout.column / 4)));
  const counts = density(rounds, analysis.scale, parts);
  const most = Math.max(1, ...counts.flat());
  const part = (layout.column - 2 * INSET) / parts;
  let bars = "";
  counts.forEach((column, place) => column.forEach((number, at) => {
    const high = number && Math.max(1.5, Math.sqrt(number / most) * (STRIP - 8));
    if (high) bars += `M${(layout.label + place * layout.column + INSET + at * part).toFixed(1)} ${top - 5}v${(-high).toFixed(1)}h${Math.max(1, part - 1).toFixed(1)}v${high.toFixed(1)}Z`;
  }));
  return [
    svg("text", { class: "lane-label all", x: 0, y: top - 9 }, plural(analysis.workers.length, "worker")),
    svg("path", { class: "density", d: bars }),
    svg("path", { class: "rule", d: `M0 ${top - 4.5}H${layout.width}` }),
    svg("text", { class: "value head", x: layout.width, y: top - 9 }, "mean"),
  ];
}

function laneOf(worker, rounds, first, y, layout, xOf) {
  const nodes = [svg("text", { class: "lane-label", x: 0, y: y + 4 }, ends(worker.id || "(no id)", Math.floor((layout.label - 10) / CHARACTER)))];
  let stems = "";
  const marks = [];
  rounds.forEach((round, place) => {
    const cell = worker.cells[first + place];
    if (!cell) return;
    const absent = cell.kind === "missing" || cell.kind === "expected";
    const x = absent ? layout.label + (place + 1) * layout.column - INSET - 2 : xOf(place, cell.after);
    if (!absent) stems += `M${(layout.label + place * layout.column + INSET).toFixed(1)} ${y}H${x.toFixed(1)}`;
    marks.push(mark(cell.kind, Number(x.toFixed(1)), y));
  });
  nodes.push(svg("path", { class: "stem", d: stems }), ...marks);
  nodes.push(svg("text", { class: "value", x: layout.width, y: y + 4 }, worker.came + worker.stale ? `+${seconds(worker.mean)}` : "–"));
  return nodes;
}

function summary(analysis, workers, shown) {
  if (!workers.length) return "No workers in the last rounds.";
  const [slowest] = workers;
  return `The last ${plural(shown, "round")} of ${plural(analysis.workers.length, "worker")}, the slowest first: ${slowest.id || "a worker without an id"} comes ` +
    `${seconds(slowest.mean)} after the first on average. The same follows as a table.`;
}

function describeCell(worker, round, place) {
  const cell = worker.cells[place];
  const where = round.open ? "the open round" : `the round to step ${round.step}`;
  const who = worker.id || "(no id)";
  if (!cell) return `${who}: not in ${where}`;
  const after = `${seconds(cell.after)} after the first`;
  return {
    came: `${who}: came ${after} for ${where}`,
    last: `${who}: came last, ${after}, for ${where}, which waited ${seconds(round.waitedFor)} for it alone`,
    stale: `${who}: came too late for ${where}, ${after}`,
    missing: `${who}: missing in ${where}`,
    expected: `${who}: still expected in ${where}, which began ${seconds(cell.after)} ago`,
  }[cell.kind];
}

function describeRound(round) {
  const name = round.open ? `Open round, ${seconds(round.duration)} old` : `Round to step ${round.step}: took ${seconds(round.duration)}`;
  return `${name}, ${plural(round.numCame, "gradient")}${round.last ? `, ${round.last.worker_id || "(no id)"} came last` : ""}`;
}

function describeWorker(worker) {
  return `${worker.id || "(no id)"}: ${seconds(worker.mean)} after the first on average, last in ${plural(worker.last, "round")}`;
}
