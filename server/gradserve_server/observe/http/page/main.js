// The status page: receives documents from the server and gives them to the parts of the page.

import { AccumulatorList, keyOf, PAGE, titleOf } from "./accumulators.js";
import { Connection, fetchStatus, TokenWanted } from "./connection.js";
import { Detail } from "./detail.js";
import { byId, setText } from "./elements.js";
import { ago, bytes, count, number, wholeSeconds } from "./format.js";
import { Log } from "./log.js";
import { Methods } from "./methods.js";
import { asAccumulator, PARAMETERS, ParametersList } from "./parameters.js";
import { PastRuns } from "./past.js";
import { Rates } from "./rates.js";
import { Memory, Traffic } from "./resources.js";
import { Table } from "./table.js";
import { Tiles } from "./tiles.js";
import { token, TokenForm } from "./token.js";
import { readView, writeView } from "./view.js";
import { WhatIf } from "./whatif.js";
import { Workers } from "./workers.js";

const TYPING_MILLISECONDS = 250;
const NAMESAKES = 10;
const MOST_BYTES = 1024; // of a part of a name that the server looks for
const BYTES_OF_CHARACTER = 4;

const view = { ...readView(), limit: PAGE };
const rates = new Rates();
let latest;
let paused = false;
let connection;
let asking = false;

const workers = new Workers();
const whatIf = new WhatIf();
const past = new PastRuns();
const log = new Log(() => showLog());
const detail = new Detail((ranked, uptime) => workers.show(ranked, uptime));
const tiles = new Tiles(byId("tiles"));
const traffic = new Traffic();
const memory = new Memory();
const methods = new Methods();
const layers = new Table("layers", [
  { class: "id", write: (layer) => titleOf(layer) },
  { class: "number", write: (layer) => count(number(layer.num_forwards)) },
  { class: "number", write: (layer) => bytes(number(layer.num_bytes)) },
]);
const errors = new Table("errors", [
  { class: "code", write: (error) => error.code },
  { class: "id", write: (error) => error.method.split(/[./]/).at(-1), title: (error) => error.method },
  { class: "number count", write: (error) => count(number(error.count)) },
  { class: "number at", write: (error) => ago(number(latest.uptime) - number(error.at)) },
  { class: "message", write: (error) => error.message },
]);
const parameters = new ParametersList((one) => select(one, PARAMETERS));
const list = new AccumulatorList({
  select: (accumulator) => select(accumulator, ""),
  order(order) {
    view.order = order;
    writeView(view);
    connect();
  },
  more() {
    view.limit += PAGE;
    connect();
  },
});
const form = new TokenForm(connect);

function select({ container, name }, kind) {
  view.selected = { kind, container: container ?? "", name };
  writeView(view);
  show();
  showDetail();
  if (byId("detail").getBoundingClientRect().top > window.innerHeight * 0.6) byId("detail").scrollIntoView({ block: "start" });
}

function connect() {
  connection?.close();
  byId("forget").hidden = !token();
  const query = { order: view.order, max_accumulators: view.limit, max_rounds: 1, max_workers: 1 };
  if (view.filter) query.name_contains = view.filter;
  connection = new Connection(query, token(), {
    status(status) {
      state("live", paused ? "Paused" : "Live");
      byId("lost").hidden = true;
      byId("content").hidden = byId("pause").hidden = false;
      if (paused) return;
      latest = status;
      rates.begin(status.incarnation, number(status.uptime));
      view.selected ??= first(status);
      show(true);
      showDetail();
      showPast();
      showLog();
    },
    lost(reason, pause) {
      state("lost", "No connection");
      byId("lost").hidden = false;
      setText(byId("lost-text"), `${latest ? "What you see is no longer live: " : ""}${reason}. The next attempt follows in ${Math.ceil(pause)} s.`);
    },
    token: wantToken,
  });
}

function wantToken(error) {
  connection?.close();
  state("token", "Token needed");
  byId("lost").hidden = true;
  byId("content").hidden = true;
  byId("pause").hidden = true;
  form.ask(error);
  byId("forget").hidden = true;
}

function first(status) {
  const [accumulator] = status.accumulators ?? [];
  const one = accumulator ?? status.parameters?.[0];
  return one && { kind: accumulator ? "" : PARAMETERS, container: one.container ?? "", name: one.name };
}

function state(name, text) {
  byId("connection").dataset.state = name;
  document.body.dataset.state = name;
  setText(byId("connection"), text);
}

/** Shows the latest document; rates are computed only once for each. */
function show(isNew = false) {
  const isParameters = view.selected?.kind === PARAMETERS;
  list.show(latest, isParameters ? { ...view, selected: undefined } : view);
  parameters.show(latest, isParameters ? view.selected : undefined);
  if (!isNew) return;
  setText(byId("server"), `${location.host} · ${latest.version} · ${latest.device}${latest.ops_prepared === false ? ", kernels of ops are being prepared" : ""} · up ${wholeSeconds(number(latest.uptime))}`);
  tiles.show(latest, rates);
  traffic.show(latest.traffic ?? [], rates);
  memory.show(latest.memory ?? []);
  methods.show(latest.methods ?? [], rates);
  layers.show(latest.layers ?? [], (layer) => JSON.stringify([layer.container, layer.name]));
  errors.show(latest.errors ?? [], (error) => `${error.method} ${error.code}`);
}

async function showLog() {
  // If the server cannot be asked, the stream finds that too, and says so.
  await log.show(token()).catch(() => {});
}

async function showPast() {
  try {
    await past.show(view.filter, token());
  } catch (error) {
    if (error instanceof TokenWanted) wantToken(error);
    // Whatever else is wrong, the stream finds it too, and says so.
  }
}

/** Asks for all rounds of what is selected alone: those of all would be much. */
async function showDetail() {
  const wanted = view.selected;
  if (!wanted) return detail.show(undefined, undefined, 0);
  if (asking) return;
  asking = true;
  try {
    const { found, uptime } = await fetchSelected(wanted);
    if (view.selected === wanted && !paused) {
      detail.show(found, wanted, uptime);
      if (found) await whatIf.show(wanted, { ...queryOf(wanted), max_accumulators: NAMESAKES }, token());
    }
  } catch (error) {
    if (error instanceof TokenWanted) wantToken(error);
    // Whatever else is wrong, the stream finds it too, and says so.
  } finally {
    asking = false;
    if (view.selected !== wanted) showDetail();
  }
}

function queryOf(wanted) {
  const whole = `${wanted.container}/${wanted.name}`;
  const part = new TextEncoder().encode(whole).length > MOST_BYTES ? [...whole].slice(-MOST_BYTES / BYTES_OF_CHARACTER).join("") : whole;
  return { container: wanted.container, name_contains: part, order: "name", max_workers: 1 };
}

/** By name, the wanted one comes before those whose names go on; a few others can have the same name in capitals. */
async function fetchSelected(wanted) {
  for (const most of [1, NAMESAKES]) {
    const status = await fetchStatus({ ...queryOf(wanted), max_accumulators: most }, token());
    const [listed, all] = wanted.kind === PARAMETERS
      ? [(status.parameters ?? []).map(asAccumulator), status.num_parameters]
      : [status.accumulators ?? [], status.num_accumulators];
    const found = listed.find((one) => keyOf(one) === keyOf(wanted));
    if (found || most === NAMESAKES || number(all) < 2) return { found, uptime: number(status.uptime) };
  }
}

function pause() {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Resume" : "Pause");
  if (document.body.dataset.state === "live") state("live", paused ? "Paused" : "Live");
}

let typing;
byId("filter").value = view.filter;
byId("filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    view.filter = byId("filter").value.trim();
    view.limit = PAGE;
    writeView(view);
    connect();
  }, TYPING_MILLISECONDS);
});
byId("pause").addEventListener("click", pause);
byId("retry").addEventListener("click", () => connection.retryNow());
byId("forget").addEventListener("click", () => {
  form.forget();
  connect();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  if (event.key === "/") {
    event.preventDefault();
    byId("filter").focus();
  } else if (event.key === "p") {
    pause();
  }
});
byId("what-if").addEventListener("toggle", () => showDetail());
byId("past").addEventListener("toggle", () => showPast());
document.title = `${location.host} · gradserve`;
connect();
