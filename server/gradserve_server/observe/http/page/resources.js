// Bytes by way and memory by purpose: lines with bars.

import { bar, drawBar } from "./bar.js";
import { byId, html, setText } from "./elements.js";
import { bytes, number, plural } from "./format.js";
import { Keyed } from "./keyed.js";
import { drawSparkline, sparkline } from "./sparkline.js";

const WAYS = { grpc: "gRPC", bulk: "Bulk sockets", shared_memory: "Shared memory" };

export const words = (name) => name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");

/** What comes and goes by each way. */
export class Traffic {
  constructor() {
    this.lines = new Keyed(byId("traffic"), () => this.#create(), (line, item) => this.#fill(line, item));
  }

  show(traffic, rates) {
    this.rates = rates;
    this.lines.update(traffic, (way) => way.way);
  }

  #create() {
    const line = { name: html("h3"), calls: html("span", { class: "note" }), received: direction("Received"), sent: direction("Sent") };
    return { ...line, node: html("div", { class: "way" }, html("div", { class: "way-head" }, line.name, line.calls), line.received.node, line.sent.node) };
  }

  #fill(line, item) {
    setText(line.name, WAYS[item.way] ?? words(item.way));
    setText(line.calls, plural(number(item.calls), "call"));
    for (const [part, counter] of [[line.received, number(item.received_bytes)], [line.sent, number(item.sent_bytes)]]) {
      const key = `way ${item.way} ${part.name}`;
      const rate = this.rates.rate(key, counter);
      setText(part.rate, `${bytes(rate)}/s`);
      setText(part.total, `${bytes(counter)} in all`);
      drawSparkline(part.spark, this.rates.remember(key, rate));
    }
  }
}

function direction(name) {
  const parts = { name, rate: html("span", { class: "amount" }), total: html("span", { class: "note" }), spark: sparkline() };
  return { ...parts, node: html("div", { class: "direction" }, html("span", { class: "direction-name" }, name), parts.spark.node, parts.rate, parts.total) };
}

/** What is in use of each limit. */
export class Memory {
  constructor() {
    this.lines = new Keyed(byId("memory"), () => this.#create(), (line, item) => this.#fill(line, item));
  }

  show(memory) {
    this.largest = Math.max(1, ...memory.map((one) => number(one.num_bytes)));
    this.lines.update(memory, (one) => one.purpose);
  }

  #create() {
    const line = { name: html("h3"), amount: html("span", { class: "amount" }), limit: html("span", { class: "note" }), bar: bar("fill") };
    return { ...line, node: html("div", { class: "purpose" }, html("div", { class: "way-head" }, line.name, html("span", {}, line.amount, " ", line.limit)), line.bar.node) };
  }

  #fill(line, item) {
    const used = number(item.num_bytes);
    const most = number(item.max_bytes);
    setText(line.name, words(item.purpose));
    setText(line.amount, bytes(used));
    setText(line.limit, most ? `of ${bytes(most)}` : "no limit of its own");
    line.node.classList.toggle("alarm", most > 0 && used > 0.9 * most);
    drawBar(line.bar, most ? used / most : used / this.largest);
    line.bar.node.classList.toggle("unlimited", !most);
  }
}

