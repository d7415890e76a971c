// Children of an element by key, so that what is focused or selected survives updates.

/** Keeps one child per item in a parent. `create(item)` returns {node, ...}; `fill(child, item)` brings it up to date. */
export class Keyed {
  #children = new Map();

  constructor(parent, create, fill) {
    this.parent = parent;
    this.create = create;
    this.fill = fill;
  }

  /** Shows these items in this order; `keyOf(item)` tells them apart. */
  update(items, keyOf) {
    const focused = document.activeElement;
    const children = new Map();
    for (const item of items) {
      const key = keyOf(item);
      const child = this.#children.get(key) ?? this.create(item);
      this.fill(child, item);
      children.set(key, child);
    }
    for (const [key, child] of this.#children) if (!children.has(key)) child.node.remove();
    let place = this.parent.firstElementChild;
    for (const { node } of children.values()) {
      if (node === place) place = place.nextElementSibling;
      else this.parent.insertBefore(node, place);
    }
    this.#children = children;
    if (focused && focused !== document.activeElement && this.parent.contains(focused)) focused.focus({ preventScroll: true });
  }

  get(key) {
    return this.#children.get(key);
  }
}
