// A small line of the last values.

import { svg } from "./elements.js";

const WIDTH = 120;
const HEIGHT = 28;
const SAMPLES = 60;

/** A picture without words: what it shows stands beside it as a number. */
export function sparkline() {
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  const node = svg("svg", { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  return { node, area, line };
}

export function drawSparkline({ area, line }, values) {
  if (!values.length) {
    line.removeAttribute("d");
    area.removeAttribute("d");
    return;
  }
  const highest = Math.max(...values, 1e-9);
  const from = SAMPLES - values.length;
  const points = values.map((value, i) => {
    const x = ((from + i) / (SAMPLES - 1)) * WIDTH;
    return `${x.toFixed(1)} ${(HEIGHT - 1.5 - (value / highest) * (HEIGHT - 4)).toFixed(1)}`;
  });
  line.setAttribute("d", `M${points.join("L")}`);
  const left = ((from / (SAMPLES - 1)) * WIDTH).toFixed(1);
  area.setAttribute("d", `M${left} ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`);
}
