// Horizontal bars; what they show stands beside them as text.

import { svg } from "./elements.js";

/** A bar of parts, each with a class. */
export function bar(...classes) {
  const parts = classes.map((name) => svg("rect", { class: name, height: "100%", width: "0", x: "0" }));
  return { node: svg("svg", { class: "bar", "aria-hidden": "true" }, ...parts), parts };
}

/** Draws the parts one after the other; shares of the whole width, from 0 to 1. */
export function drawBar({ parts }, ...shares) {
  let from = 0;
  parts.forEach((part, place) => {
    part.setAttribute("x", `${(100 * from).toFixed(2)}%`);
    part.setAttribute("width", `${(100 * Math.min(1 - from, shares[place])).toFixed(2)}%`);
    from = Math.min(1, from + shares[place]);
  });
}
