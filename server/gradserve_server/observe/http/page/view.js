// What the page shows, kept in its address: a reload or a link shows the same.

/** Reads the view from the address. */
export function readView() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const name = fields.get("name");
  return {
    selected: name === null ? undefined : { kind: fields.get("kind") ?? "", container: fields.get("container") ?? "", name },
    filter: fields.get("filter") ?? "",
    order: ["name", "rate", "waiting", "bytes"].includes(fields.get("order")) ? fields.get("order") : "rate",
  };
}

/** Writes the view into the address, without a new entry in the history. */
export function writeView({ selected, filter, order }) {
  const fields = new URLSearchParams();
  if (selected) {
    if (selected.kind) fields.set("kind", selected.kind);
    if (selected.container) fields.set("container", selected.container);
    fields.set("name", selected.name);
  }
  if (filter) fields.set("filter", filter);
  if (order !== "rate") fields.set("order", order);
  history.replaceState(null, "", fields.size ? `#${fields}` : location.pathname + location.search);
}
