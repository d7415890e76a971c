// Rates from the differences between documents, and their last two minutes.

const SAMPLES = 120;

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

  /** The rate of a counter since the last document; 0 for one that is new. */
  rate(key, value) {
    const before = this.#counters.get(key);
    this.#counters.set(key, value);
    const rate = before === undefined || this.#elapsed <= 0 ? 0 : Math.max(0, value - before) / this.#elapsed;
    return rate;
  }

  /** Remembers a value and returns the last ones, the newest last. */
  remember(key, value) {
    const history = this.#histories.get(key) ?? [];
    if (!this.#histories.has(key)) this.#histories.set(key, history);
    history.push(value);
    if (history.length > SAMPLES) history.shift();
    return history;
  }
}
