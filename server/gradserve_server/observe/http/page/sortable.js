// Tables whose rows are sorted by the column that was chosen.

import { html } from "./elements.js";

/** Makes the heads with `data-sort` buttons; `onChange()` is called when another column or direction is chosen. */
export class Sortable {
  constructor(table, column, onChange) {
    this.column = column;
    this.descending = true;
    this.heads = [...table.querySelectorAll("th[data-sort]")];
    for (const head of this.heads) {
      const button = html("button", { type: "button" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        this.descending = this.column === head.dataset.sort ? !this.descending : head.dataset.sort !== "name";
        this.column = head.dataset.sort;
        this.#mark();
        onChange();
      });
    }
    this.#mark();
  }

  /** Returns the items in order; `values[column](item)` is what a column is sorted by. */
  sorted(items, values) {
    const value = values[this.column];
    const sign = this.descending ? -1 : 1;
    return [...items].sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      return a < b ? -sign : a > b ? sign : 0;
    });
  }

  #mark() {
    for (const head of this.heads) {
      const sorted = head.dataset.sort === this.column;
      head.toggleAttribute("data-sorted", sorted);
      if (sorted) head.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }
}
