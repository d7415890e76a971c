// Rates from the differences between documents, and their last minute.

const SAMPLES = 60;

/** Turns counters that grow into rates per second. */
export class Rates {
  #counters = new Map();
  #histories = new Map();
  #uptime = 0;
  #elapsed = 0;
  #incarnation;

  /** Begins a document; a server that was started again counts from zero. */
  begin(incarnation, uptime) {
    if (incarnation !== this.#incarnation || uptime < this.#uptime) {
      this.#counters.clear();
      this.#histories.clear();
      this.#elapsed = 0;
    } else {
      this.#elapsed = uptime - this.#uptime;
    }
    this.#incarnation = incarnation;
    this.#uptime = uptime;
  }

  /** Whether rates are known: not before the second document. */
  get known() {
    return this.#elapsed > 0;
  }

  /** The rate of a counter since the last document; 0 for one that is new. */
  rate(key, value) {
    const before = this.#counters.get(key);
    this.#counters.set(key, value);
    return before === undefined || !this.known ? 0 : Math.max(0, value - before) / this.#elapsed;
  }

  /** Remembers a value, if rates are known, and returns the last ones, the newest last. */
  remember(key, value) {
    const history = this.#histories.get(key) ?? [];
    if (!this.#histories.has(key)) this.#histories.set(key, history);
    if (this.known) history.push(value);
    if (history.length > SAMPLES) history.shift();
    return history;
  }
}
