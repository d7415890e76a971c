// What lies under the pointer, in words.

import { byId, setText } from "./elements.js";

/** Shows `textAt(x, y)` beside the pointer while it is over an element. */
export class Tooltip {
  #pointer;

  constructor(element, textAt) {
    this.element = element;
    this.textAt = textAt;
    this.node = byId("tooltip");
    element.addEventListener("pointermove", (event) => {
      this.#pointer = event;
      this.refresh();
    });
    element.addEventListener("pointerleave", () => {
      this.#pointer = undefined;
      this.refresh();
    });
  }

  /** Asks again what lies under the pointer. */
  refresh() {
    const place = this.element.getBoundingClientRect();
    const pointer = this.#pointer;
    const text = pointer && this.textAt(pointer.clientX - place.left, pointer.clientY - place.top);
    this.node.hidden = !text;
    if (!text) return;
    setText(this.node, text);
    const { offsetWidth, offsetHeight } = this.node;
    const left = Math.max(8, Math.min(pointer.clientX + 14, document.documentElement.clientWidth - offsetWidth - 8));
    const above = pointer.clientY + 18 + offsetHeight > window.innerHeight;
    this.node.style.left = `${left}px`;
    this.node.style.top = `${above ? pointer.clientY - offsetHeight - 12 : pointer.clientY + 18}px`;
  }
}
