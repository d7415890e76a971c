// The list of accumulators: which, in which order, and the one that is selected.

import { byId, html, setText, svg } from "./elements.js";
import { bytes, count, number, rate } from "./format.js";
import { Keyed } from "./keyed.js";

export const PAGE = 50;
const MOST = 1000;

const DEFAULT_CONTAINER = "default";

/** What people call an accumulator: its name, and before it the container, unless that is the default one. */
export const titleOf = ({ container, name }) => (container && container !== DEFAULT_CONTAINER ? `${container}/${name}` : name);

export const keyOf = ({ container, name }) => JSON.stringify([container, name]);

/** How many gradients the current round needs: if nobody waits for it, as many as the round before. */
export function required(accumulator) {
  return number(accumulator.num_required) || number(accumulator.rounds?.at(-1)?.num_required);
}

/** `on.select(accumulator)`, `on.order(order)`, `on.more(limit)`. */
export class AccumulatorList {
  #order = [];

  constructor(on) {
    this.on = on;
    this.table = byId("accumulators");
    this.body = this.table.tBodies[0];
    this.rows = new Keyed(this.body, (item) => this.#create(item), (row, item) => this.#fill(row, item));
    for (const head of this.table.querySelectorAll("th[data-order]")) {
      head.firstElementChild.addEventListener("click", () => on.order(head.dataset.order));
    }
    this.body.addEventListener("keydown", (event) => this.#move(event));
    byId("more").addEventListener("click", () => on.more());
  }

  /** Shows a document in this order, with this accumulator selected. */
  show(status, { order, selected, filter, limit }) {
    this.selected = selected;
    for (const head of this.table.querySelectorAll("th[data-order]")) {
      const sorted = head.dataset.order === order;
      head.toggleAttribute("data-sorted", sorted);
      if (sorted) head.setAttribute("aria-sort", order === "name" ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    this.rows.update(this.#steady(status.accumulators ?? [], order), keyOf);
    const shown = (status.accumulators ?? []).length;
    const all = number(status.num_accumulators);
    setText(byId("list-count"), shown < all ? `${count(shown)} of ${count(all)}` : count(all));
    byId("list-empty").hidden = shown > 0;
    setText(byId("list-empty"), filter ? `No accumulator has “${filter}” in its name.` : "There are no accumulators yet.");
    byId("more").hidden = shown >= all || limit >= MOST;
    setText(byId("more"), `Show ${Math.min(PAGE, all - shown)} more`);
  }

  /** Nothing moves away under the pointer or the focus: rows there keep their places until the order is changed. */
  #steady(accumulators, order) {
    const held = order === this.heldOrder && (this.body.matches(":hover") || this.body.contains(document.activeElement));
    this.heldOrder = order;
    if (held) {
      const places = new Map(this.#order.map((key, place) => [key, place]));
      const place = (one) => places.get(keyOf(one)) ?? places.size;
      accumulators = [...accumulators].sort((one, other) => place(one) - place(other));
    }
    this.#order = accumulators.map(keyOf);
    return accumulators;
  }

  #create(item) {
    const title = titleOf(item);
    const container = html("span", { class: "container" }, title.slice(0, title.length - item.name.length));
    const parts = item.name.split("/").flatMap((part, place) => (place ? ["/", html("wbr"), part] : [part]));
    const button = html("button", { type: "button", class: "name", title }, container, ...parts);
    const bar = svg("rect", { class: "fill", height: "100%", width: "0" });
    const cells = { step: html("td", { class: "number" }), rate: html("td", { class: "number" }), fill: html("span", { class: "amount" }), waiting: html("td", { class: "number" }), size: html("td", { class: "number optional" }) };
    const track = svg("svg", { class: "bar", "aria-hidden": "true" }, bar);
    const node = html("tr", {}, html("th", { scope: "row" }, button), cells.step, cells.rate,
      html("td", { class: "round" }, html("span", { class: "gauge" }, track, cells.fill)), cells.waiting, cells.size);
    const row = { node, button, bar, ...cells };
    node.addEventListener("click", () => this.on.select(row.item));
    return row;
  }

  #fill(row, item) {
    row.item = item;
    const needed = required(item);
    const gathered = number(item.num_accumulated);
    setText(row.step, count(number(item.global_step)));
    setText(row.rate, rate(number(item.rounds_per_second)));
    setText(row.fill, needed ? `${count(gathered)}/${count(needed)}` : count(gathered));
    row.bar.setAttribute("width", `${needed ? Math.min(100, (100 * gathered) / needed) : 0}%`);
    setText(row.waiting, count(number(item.num_waiting)));
    row.node.classList.toggle("idle", number(item.rounds_per_second) < 0.005 && !number(item.num_waiting));
    setText(row.size, bytes(number(item.num_bytes)));
    const selected = this.selected !== undefined && keyOf(item) === keyOf(this.selected);
    row.node.classList.toggle("selected", selected);
    if (selected) row.button.setAttribute("aria-current", "true");
    else row.button.removeAttribute("aria-current");
  }

  /** Arrow keys, Home and End move between the names. */
  #move(event) {
    const names = [...this.body.querySelectorAll("button.name")];
    const at = names.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (at < 0 || to === undefined || !names[to]) return;
    event.preventDefault();
    names[to].focus();
  }
}

/** The state of the open round. */
export function openRound(accumulator) {
  const needed = required(accumulator);
  const gathered = number(accumulator.num_accumulated);
  return needed ? `${count(gathered)} of ${count(needed)}` : count(gathered);
}
