// Small helpers: elements without innerHTML (what comes from the API is text, never markup), and figures for people.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

// A picture that says in words what it shows.
export function picture(title, described, width, height, ...marks) {
  const id = title.toLowerCase().replaceAll(/[^a-z]+/g, "-");
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": `${id}-t ${id}-d` },
    svg("title", { id: `${id}-t` }, title),
    svg("desc", { id: `${id}-d` }, described),
    ...marks,
  );
}

// Rows of cells; a cell is a text, a node, or {number: text}.
export function table(target, columns, rows, nothing) {
  const caption = target.querySelector("caption");
  const head = columns.map((column) => el("th", { scope: "col", class: column.number ? "number" : null }, column.name ?? column));
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      row.map((cell, at) => {
        const number = columns[at].number ? "number" : columns[at].why ? "why" : null;
        return el(at === 0 ? "th" : "td", { scope: at === 0 ? "row" : null, class: number }, cell ?? "–");
      }),
    ),
  );
  if (!rows.length) body.push(el("tr", {}, el("td", { colspan: columns.length }, nothing)));
  target.replaceChildren(...(caption ? [caption] : []), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

const UNITS = ["", "K", "M", "G", "T"];

export function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  let at = 0;
  let left = Math.abs(value);
  while (left >= 1000 && at < UNITS.length - 1) {
    left /= 1000;
    at += 1;
  }
  return `${Math.sign(value) < 0 ? "−" : ""}${Number(left.toPrecision(digits))}${UNITS[at]}`;
}

export const seconds = (value) =>
  value === null || value === undefined ? "–" : value < 1 ? `${Number((value * 1000).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`;
export const share = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);
export const rate = (bytes) => (bytes === null || bytes === undefined ? "–" : `${short(bytes * 8)}bit/s`);
export const time = (unix) => new Date(unix * 1000).toLocaleTimeString();
