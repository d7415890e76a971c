// Rows of plain cells.

import { byId, html, setText } from "./elements.js";
import { Keyed } from "./keyed.js";

/** A table by its id; `columns` are {class, write(item)} each, and the first one is the head of its row. */
export class Table {
  constructor(id, columns) {
    this.columns = columns;
    this.empty = byId(`${id}-empty`);
    this.node = byId(id);
    this.rows = new Keyed(this.node.tBodies[0], () => this.#create(), (row, item) => this.#fill(row, item));
  }

  show(items, keyOf) {
    this.rows.update(items, keyOf);
    this.node.hidden = items.length === 0;
    if (this.empty) this.empty.hidden = items.length > 0;
  }

  #create() {
    const cells = this.columns.map((column, place) => html(place ? "td" : "th", { scope: place ? undefined : "row", class: column.class }));
    const extra = this.columns.map((column, place) => column.picture?.(cells[place]));
    return { node: html("tr", {}, ...cells), cells, extra };
  }

  #fill(row, item) {
    this.columns.forEach((column, place) => {
      if (column.draw) column.draw(row.extra[place], item);
      else setText(row.cells[place], column.write(item));
      if (column.title) row.cells[place].title = column.title(item);
      if (column.mark) row.cells[place].classList.toggle("alarm", column.mark(item));
    });
  }
}
