// Numbers and times as people read them, and elements made of text alone.

export const PHASES = {
  data: "#8a6fb0", forward: "#4c7fb0", backward: "#3a9a8c", wait: "#b9b3a6", reduce: "#cf8a3d", update: "#b8566b",
  checkpoint: "#6b7a2f",
};
const OTHER = ["#7d8597", "#a0785a", "#5f9ea0", "#9c6ade"];
export const LINES = ["#2f6fab", "#c2662d", "#2e8b6f", "#9054a8", "#b0406a", "#7a7f2a", "#4a9bb5", "#8c6d46"];
export const MARKS = {
  checkpoint: "#8a8f98", restart: "#c98a1b", failure: "#c0392b", rollback: "#c98a1b", bad: "#c0392b",
  corrupted: "#c0392b", damaged: "#c0392b", "left out": "#8a8f98",
};

export function phaseColour(name, place) {
  return Object.hasOwn(PHASES, name) ? PHASES[name] : OTHER[place % OTHER.length];
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "none";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return Number(value.toPrecision(4)).toExponential();
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 5 : size < 100 ? 4 : 1 });
}

export function seconds(value) {
  if (value === null || value === undefined) return "none";
  if (value === 0) return "0 s";
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return value >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "none";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${value < 100 ? Number(value.toPrecision(3)) : Math.round(value)} ${units[at]}`;
}

export function clock(time) {
  return time ? new Date(time * 1000).toLocaleString("en-GB") : "";
}

// An element: text is text and never markup, whatever a run has in its names.
export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// A table: what a picture shows, for whoever reads or hears it.
export function table(caption, heads, rows, numbers = []) {
  const cell = (tag, text, at) => {
    const node = text instanceof Node ? make(tag, {}, text) : make(tag, { text: String(text ?? "") });
    if (numbers.includes(at)) node.className = "number";
    if (tag === "th") node.scope = "col";
    return node;
  };
  const head = make("thead", {}, make("tr", {}, ...heads.map((text, at) => cell("th", text, at))));
  const body = make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((text, at) => cell("td", text, at)))));
  const whole = make("table", {}, make("caption", { text: caption }), head, body);
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
}

// A table that is made when it is first opened, and again whenever it is open and what it shows is new.
export function twin(title, build) {
  const details = make("details", {}, make("summary", { text: title }));
  const fill = () => {
    if (!details.open) return;
    while (details.children.length > 1) details.lastChild.remove();
    details.append(build());
  };
  details.addEventListener("toggle", fill);
  details.refill = fill;
  return details;
}

// A picture that says in words what the pointer is at, and has a table for whoever does not see it.
export function picture(place, tables, build) {
  const canvas = make("canvas", { tabindex: "0", role: "img" });
  const tip = make("div", { class: "tip", role: "status" });
  const table = twin("As a table", build);
  replace(place, canvas, tip);
  replace(tables, table);
  return { canvas, tip, twin: table };
}

// A canvas of this height as fine as the screen is, empty; drawn on in the page's own pixels.
export function sharp(canvas, height) {
  canvas.style.height = `${height}px`;
  canvas.width = Math.max(1, Math.round(canvas.clientWidth * devicePixelRatio));
  canvas.height = Math.round(height * devicePixelRatio);
  const ctx = canvas.getContext("2d");
  ctx.scale(devicePixelRatio, devicePixelRatio);
  return ctx;
}

export const NARROW = 560; // pixels below which hosts are left out beside ranks

// How wide the labels of rows are, ranks with their hosts; on a narrow screen hosts are left out.
export function lane(ctx, width, labels) {
  ctx.font = "11px system-ui";
  const hosts = new Set(labels.map((label) => label.host).filter(Boolean));
  const widest = Math.max(0, ...[...hosts].map((host) => ctx.measureText(host).width));
  const ranks = Math.max(0, ...labels.map((label) => ctx.measureText(label.text).width));
  return Math.ceil(ranks) + 14 + (hosts.size && width >= NARROW ? Math.min(130, Math.ceil(widest) + 12) : 0);
}

// Round numbers from the first to the last, about so many.
// Ranks and their hosts beside the rows of a picture, each `tall`, their names `middle` below a row's top.
export function drawLane(ctx, width, labels, { left, tall }, middle) {
  const every = Math.ceil(13 / tall);
  let before = null;
  ctx.font = "11px system-ui";
  ctx.textBaseline = "middle";
  labels.forEach(({ text, host }, row) => {
    if (row % every) return;
    ctx.textAlign = "right";
    ctx.fillText(text, left - 6, row * tall + middle);
    ctx.textAlign = "left";
    if (width >= NARROW && host !== before) ctx.fillText(host, 0, row * tall + middle, left - 34);
    before = host;
  });
}

export function ticks(first, last, count) {
  const rough = (last - first) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const whole = Number.isInteger(first) && Number.isInteger(last) ? Math.max(1, Math.round(step)) : step;
  const found = [];
  for (let at = Math.ceil(first / whole) * whole; at <= last + whole * 1e-9; at += whole) found.push(at);
  return found;
}

export function replace(place, ...children) {
  place.replaceChildren(...children);
}
