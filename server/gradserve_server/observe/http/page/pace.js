// How often a part of the page that can be opened asks the server.

/** Lets a part ask while it is open: at once for something else than before, otherwise every now and then. */
export class Pace {
  #node;
  #pause;
  #asked;
  #at = 0;

  constructor(node, pauseSeconds) {
    this.#node = node;
    this.#pause = pauseSeconds;
  }

  /** Returns whether something else was asked for last. */
  isNew(key) {
    return key !== this.#asked;
  }

  /** Returns whether to ask now, which is then noted. */
  begins(key, now) {
    if (!this.#node.open || (!this.isNew(key) && now - this.#at < this.#pause)) return false;
    this.#asked = key;
    this.#at = now;
    return true;
  }
}
