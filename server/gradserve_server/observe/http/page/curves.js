// Curves of what the workers of parameters have measured: the means of rounds as a line, evaluations of versions as marks.

import { html, svg } from "./elements.js";
import { count } from "./format.js";
import { Keyed } from "./keyed.js";

const WIDTH = 240;
const HEIGHT = 64;
const INSET = 5;

/** A value as a document gives it: NaN and infinities are texts. */
const valueOf = (value) => Number(value);

/** A metric with up to four significant digits. */
export const metric = (value) => (Number.isFinite(value) ? Number(value.toPrecision(4)).toString() : String(value));

/** Metrics by name, as "accuracy 0.9, loss 0.3". */
export const listed = (metrics = {}) =>
  Object.entries(metrics).sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, value]) => `${name} ${metric(valueOf(value))}`).join(", ");

/**
 * The curves of rounds and of evaluations, by name.
 *
 * Returns [{name, means, evaluated}], each of both an array of {step, value}, by step.
 */
export function curvesOf(rounds, evaluations) {
  const curves = new Map();
  const add = (kind, step, metrics) => {
    for (const [name, value] of Object.entries(metrics ?? {})) {
      if (!curves.has(name)) curves.set(name, { name, means: [], evaluated: [] });
      curves.get(name)[kind].push({ step, value: valueOf(value) });
    }
  };
  for (const round of rounds) if (!round.open) add("means", round.step, round.metrics);
  for (const one of evaluations) add("evaluated", Number(one.step ?? 0), one.metrics);
  return [...curves.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
}

/** The places of a curve in its picture; what is not finite has none, and breaks the line. */
export function pathsOf({ means, evaluated }) {
  const all = [...means, ...evaluated];
  const finite = all.map((one) => one.value).filter(Number.isFinite);
  if (!finite.length) return { line: "", marks: [] };
  const [lowest, highest] = [Math.min(...finite), Math.max(...finite)];
  const steps = all.map((one) => one.step);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const x = ({ step }) => Number((INSET + ((step - first) / (last - first || 1)) * (WIDTH - 2 * INSET)).toFixed(1));
  const y = ({ value }) => Number((HEIGHT - INSET - (highest > lowest ? (value - lowest) / (highest - lowest) : 0.5) * (HEIGHT - 2 * INSET)).toFixed(1));
  let line = "";
  let pen = "M";
  for (const one of means) {
    if (Number.isFinite(one.value)) line += `${pen}${x(one)} ${y(one)}${pen === "M" ? "h0" : ""}`; // a point alone is a dot
    pen = Number.isFinite(one.value) ? "L" : "M";
  }
  return { line, marks: evaluated.filter((one) => Number.isFinite(one.value)).map((one) => ({ x: x(one), y: y(one) })) };
}

/** A curve in words. */
export function described({ name, means, evaluated }) {
  const parts = [];
  if (means.length) {
    const latest = means.at(-1);
    const since = means.length > 1 ? `, ${metric(means[0].value)} in that to step ${count(means[0].step)}` : "";
    parts.push(`${metric(latest.value)} in the round to step ${count(latest.step)}${since}`);
  }
  if (evaluated.length) parts.push(`${metric(evaluated.at(-1).value)} evaluated at step ${count(evaluated.at(-1).step)}`);
  return `${name}: ${parts.join("; ")}.`;
}

/** The curves of the selected parameters, one beside the other. */
export class Curves {
  constructor(node) {
    this.node = node;
    this.keyed = new Keyed(node, made, draw);
  }

  show(curves) {
    this.node.hidden = !curves.length;
    this.keyed.update(curves, (one) => one.name);
  }
}

function made() {
  const line = svg("path", { class: "line" });
  const marks = svg("g");
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }, line, marks);
  const name = html("span", { class: "name" });
  const latest = html("span", { class: "latest" });
  return { line, marks, picture, name, latest, node: html("li", {}, name, latest, picture) };
}

function draw(parts, curve) {
  const { line, marks } = pathsOf(curve);
  parts.name.textContent = curve.name;
  const latest = [curve.means.at(-1), curve.evaluated.at(-1)].map((one) => (one ? metric(one.value) : ""));
  parts.latest.textContent = latest[1] ? `${latest[0]} (evaluated ${latest[1]})`.trim() : latest[0];
  parts.picture.setAttribute("aria-label", described(curve));
  parts.line.setAttribute("d", line);
  parts.marks.replaceChildren(...marks.map(({ x, y }) => svg("path", { class: "evaluated", d: `M${x} ${y - 4}l4 4-4 4-4-4Z` })));
}
