// Parameters that the server holds: their list, and what they have beside the rounds of an accumulator.

import { keyOf, titleOf } from "./accumulators.js";
import { byId, html, setText } from "./elements.js";
import { bytes, count, number, rate } from "./format.js";
import { Table } from "./table.js";

export const PARAMETERS = "parameters";

/** The part of all weight that may be missing because sums are rounded. */
const ENOUGH = 1e-9;

/** Parameters as what describes rounds takes an accumulator. */
export const asAccumulator = (one) => ({ ...one, global_step: one.step, num_accumulated: one.num_updates });

/** The list of parameters; `select(parameters)` is called with those that are chosen. */
export class ParametersList {
  constructor(select) {
    const named = (cell) => {
      const button = html("button", { type: "button", class: "name" });
      cell.append(button);
      return button;
    };
    const name = (button, one) => {
      setText(button, titleOf(one));
      button.title = one.rules ?? "";
      button.onclick = () => select(one);
      const selected = this.selected !== undefined && keyOf(one) === keyOf(this.selected);
      button.closest("tr").classList.toggle("selected", selected);
      if (selected) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    };
    this.table = new Table("parameters", [
      { picture: named, draw: name },
      { class: "number", write: (one) => count(number(one.step)) },
      { class: "number", write: (one) => rate(number(one.rounds_per_second)) },
      { class: "number", write: (one) => `${count(number(one.num_updates))}/${count(number(one.num_required))}` },
      { class: "number optional", write: (one) => count(number(one.num_waiting)) },
      { class: "number", write: participation },
      { class: "number optional", write: (one) => bytes(number(one.num_bytes)) },
    ]);
  }

  /** Shows the parameters of a document; `selected` are those that the page describes, if they are parameters. */
  show(status, selected) {
    this.selected = selected;
    const shown = status.parameters ?? [];
    this.table.show(shown, keyOf);
    const all = number(status.num_parameters);
    setText(byId("parameters-count"), shown.length < all ? `${count(shown.length)} of ${count(all)}` : count(all));
  }
}

/** How many of the live workers were in the latest round. */
export function participation(one) {
  const live = number(one.num_live);
  return live ? `${count(number(one.num_counted))}/${count(live)}` : "–";
}

const weight = (value) => Number(value.toPrecision(6)).toString();

/** Where all weight went, and whether the equation holds. */
export function weightOf({ weights = {} }) {
  const [accepted, applied, pending, dropped] = ["accepted", "applied", "pending", "dropped"].map((name) => number(weights[name]));
  const parts = [`${weight(applied)} applied`, `${weight(pending)} pending`, ...(dropped ? [`${weight(dropped)} dropped`] : [])];
  const holds = Math.abs(accepted - (applied + pending + dropped)) <= ENOUGH * accepted;
  return `${weight(accepted)} accepted ${holds ? "=" : "≠"} ${parts.join(" + ")}`;
}

/** What `named` counts, as "3 stale, 1 already counted". */
const listed = (named = {}) => Object.entries(named).map(([name, value]) => `${weight(number(value))} ${name}`).join(", ") || "–";

/** The facts that accumulators do not have. */
export function factsOfParameters(one) {
  return [
    { name: "Optimizer", value: one.optimizer ?? "" },
    { name: "Learning rate", value: weight(number(one.learning_rate)) },
    { name: "A round ends after", value: one.rules ?? "" },
    { name: "Rounds ended by", value: listed(one.num_ended) },
    { name: "Live workers in the latest round", value: participation(one) },
    { name: "Workers that have left", value: one.gone?.length ? one.gone.join(", ") : "–" },
    { name: "Weight", value: weightOf(one) },
    { name: "Weight refused", value: listed(one.weights?.refused) },
  ];
}
