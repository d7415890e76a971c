// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** The number that a document gives; some of them are written as strings. */
export const number = (value) => Number(value ?? 0) || 0;

/** Three significant digits, without an exponent. */
function short(value) {
  if (value >= 100) return WHOLE.format(value);
  if (value >= 10) return value.toFixed(1);
  return value.toFixed(2);
}

export function count(value) {
  return value >= 1e9 ? `${short(value / 1e9)} G` : value >= 1e7 ? `${short(value / 1e6)} M` : WHOLE.format(value);
}

export function rate(value) {
  if (value === 0) return "0";
  return value < 0.005 ? "<0.01" : short(value);
}

export function bytes(value) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${short(value / size)} ${unit}`;
  }
  return `${WHOLE.format(value)} B`;
}

/** A duration, in the two largest units that it has. */
export function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.001) return `${WHOLE.format(value * 1e6)} µs`;
  if (value < 1) return `${value < 0.01 ? (value * 1e3).toFixed(1) : WHOLE.format(value * 1e3)} ms`;
  if (value < 60) return `${short(value)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => value >= size);
  return units.slice(first, first + 2).reduce(([text, left], [unit, size]) => {
    const whole = Math.floor(left / size);
    return [whole ? `${text} ${whole} ${unit}` : text, left - whole * size];
  }, ["", Math.round(value)])[0].trim();
}

/** A duration in whole seconds. */
export const wholeSeconds = (value) => (value < 60 ? `${Math.floor(value)} s` : seconds(value));

/** How long ago something was. */
export const ago = (value) => (value < 1 ? "now" : `${wholeSeconds(value)} ago`);

export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

/** A name that may be long, with its ends: workers' ids often differ at the end. */
export function ends(text, length) {
  const characters = [...text];
  if (characters.length <= length) return text;
  const tail = Math.ceil((length - 1) / 2);
  return `${characters.slice(0, length - 1 - tail).join("")}…${characters.slice(-tail).join("")}`;
}
