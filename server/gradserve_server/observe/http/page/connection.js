// The connection to the server: a stream of documents that comes back by itself.

import { events } from "./events.js";

const SILENCE_SECONDS = 10;
const LONGEST_PAUSE_SECONDS = 10;

/** The server wants a token, or another one. */
export class TokenWanted extends Error {}

async function checked(path, query, token, signal) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(`${path}?${new URLSearchParams(query)}`, { headers, signal, cache: "no-store" });
  if (response.ok) return response;
  const said = (await response.json().catch(() => ({}))).error || `the server answers ${response.status} ${response.statusText}`.trim();
  throw response.status === 401 || response.status === 403 ? new TokenWanted(said) : new Error(said);
}

/** Fetches one document. */
export async function fetchStatus(query, token, signal) {
  return (await checked("api/status", query, token, signal)).json();
}

/** Fetches what rounds would have been under other rules. */
export async function fetchWhatIf(query, token) {
  return (await checked("api/what-if", query, token)).json();
}

/** Fetches the latest lines of the log, the oldest first; undefined if the token is not that of an admin of all containers. */
export async function fetchLog(query, token) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(`api/logs?${new URLSearchParams(query)}`, { headers, cache: "no-store" });
  if (response.status === 403) return undefined;
  if (!response.ok) throw new Error(`the server answers ${response.status}`);
  return (await response.json()).lines;
}

/**
 * Receives documents until it is closed. When the server is gone it tries again, less and less often.
 * `on.status(status)`, `on.lost(reason, seconds)` with the pause before the next attempt, `on.token(error)`, after which nothing more comes.
 */
export class Connection {
  #closing = new AbortController();
  #wake = () => {};

  constructor(query, token, on) {
    this.on = on;
    this.#run(query, token);
  }

  close() {
    this.#closing.abort();
  }

  retryNow() {
    this.#wake();
  }

  async #run(query, token) {
    const closed = this.#closing.signal;
    let failures = 0;
    while (!closed.aborted) {
      let reason = "the server ended the connection";
      try {
        for await (const status of this.#documents(query, token)) {
          if (closed.aborted) return;
          failures = 0;
          this.on.status(status);
        }
      } catch (error) {
        if (closed.aborted) return;
        if (error instanceof TokenWanted) return this.on.token(error);
        reason = error instanceof TypeError ? "the server cannot be reached" : error.message;
      }
      if (closed.aborted) return;
      const pause = Math.min(0.5 * 2 ** failures, LONGEST_PAUSE_SECONDS);
      failures += 1;
      this.on.lost(reason, pause);
      await this.#pause(pause);
    }
  }

  async *#documents(query, token) {
    const attempt = new AbortController();
    const abort = () => attempt.abort();
    this.#closing.signal.addEventListener("abort", abort);
    let watchdog;
    const watch = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => attempt.abort(new Error("nothing came from the server for a while")), SILENCE_SECONDS * 1000);
    };
    try {
      watch();
      const response = await checked("api/events", query, token, attempt.signal);
      for await (const data of events(response.body)) {
        watch();
        yield JSON.parse(data);
      }
    } finally {
      clearTimeout(watchdog);
      attempt.abort();
      this.#closing.signal.removeEventListener("abort", abort);
    }
  }

  #pause(seconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, seconds * 1000);
      const stop = () => {
        clearTimeout(timer);
        resolve();
      };
      this.#wake = stop;
      this.#closing.signal.addEventListener("abort", stop, { once: true });
    });
  }
}
