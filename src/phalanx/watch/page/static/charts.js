// Line charts: of each number its least and its most in every column, with marks where something happened.
import { LINES, MARKS, bytes, make, number, replace, seconds, table, twin } from "./words.js";
import { colour } from "./theme.js";

const TITLES = {
  loss: "Loss", "held out": "Held out", grad_norm: "Gradient norm", lr: "Learning rate", "samples a second": "Samples a second",
  "terms a second": "Terms of the loss a second",
  "seconds a step": "Seconds a step, slowest rank", sent: "Bytes that a rank sends a step",
  exposed: "Seconds that a rank waits for others, by axis", clip_factor: "Clip factor",
};
const ORDER = ["loss", "held out", "grad_norm", "lr", "samples a second", "terms a second", "seconds a step", "exposed", "sent"];
const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const AMOUNTS = ["slots", "count"]; // of a step: told as rates

// Which chart a number belongs to: those that are read together share one, any other has its own.
function chartOf(name) {
  if (name === "loss" || name.startsWith("loss of ") || name.startsWith("losses/")) return "loss";
  const [head] = name.split("/");
  return head === "sent" || head === "exposed" || head === "held out" ? head : name;
}

function formatOf(chart) {
  return chart === "sent" ? bytes : chart.startsWith("seconds") || chart === "exposed" ? seconds : number;
}

function isConstant(sets, name) {
  const values = sets.flatMap(({ charts }) => charts.series[name]?.low.filter((value) => value !== null) ?? []);
  return values.length > 1 && values.every((value) => value === values[0])
    && !sets.some(({ charts }) => charts.series[name]?.high);
}

export class Charts {
  #figures = new Map();

  constructor(place, constants, zoomed) {
    this.place = place;
    this.constants = constants;
    this.zoomed = zoomed;
  }

  // sets: one of each run that is shown, {run, charts}; marks: of the first of them.
  show(sets, marks) {
    const names = [...new Set(sets.flatMap(({ charts }) => Object.keys(charts.series)))].filter((n) => !AMOUNTS.includes(n));
    const known = (name) => ORDER.includes(chartOf(name));
    const fixed = names.filter((name) => !known(name) && isConstant(sets, name));
    const ids = [...new Set(names.filter((name) => !fixed.includes(name)).map(chartOf))];
    ids.sort((a, b) => (ORDER.indexOf(a) + 1 || 99) - (ORDER.indexOf(b) + 1 || 99) || a.localeCompare(b));
    for (const [id, figure] of this.#figures) {
      if (!ids.includes(id)) { figure.remove(); this.#figures.delete(id); }
    }
    for (const id of ids) {
      if (!this.#figures.has(id)) this.#figures.set(id, new Chart(id, this.zoomed));
      this.#figures.get(id).show(sets, names.filter((name) => chartOf(name) === id), marks);
    }
    const wanted = ids.map((id) => this.#figures.get(id).element);
    if (wanted.some((element, at) => this.place.children[at] !== element)) replace(this.place, ...wanted);
    const value = (name) => number(sets[0].charts.series[name]?.low.find((each) => each !== null));
    this.constants.textContent = fixed.length ? `The same in all of them: ${fixed.map((n) => `${n} ${value(n)}`).join(", ")}` : "";
  }

  redraw() {
    for (const figure of this.#figures.values()) figure.renew();
  }
}

class Chart {
  #plot = null;
  #shape = "";

  constructor(id, zoomed) {
    this.id = id;
    this.zoomed = zoomed;
    this.format = formatOf(id);
    this.title = Object.hasOwn(TITLES, id) ? TITLES[id] : id.replace(/^logged\//, "");
    this.now = make("span", { class: "now" });
    this.legend = make("ul", { class: "legend" });
    this.area = make("div", { class: "plot", role: "img", "aria-label": this.title });
    this.twin = twin("As a table", () => this.#table());
    const caption = make("figcaption", {}, make("span", { text: this.title }), this.now);
    this.element = make("figure", { "data-chart": id }, caption, this.area, this.legend, this.twin);
    this.observer = new ResizeObserver(() => this.#plot?.setSize(this.#size()));
    this.observer.observe(this.area);
  }

  remove() {
    this.observer.disconnect();
    this.#plot?.destroy();
    this.element.remove();
  }

  renew() {
    this.#shape = "";
    this.show(this.sets, this.names, this.marks);
  }

  show(sets, names, marks) {
    Object.assign(this, { sets, names, marks });
    this.lines = sets.flatMap(({ run, charts }) => names.filter((name) => charts.series[name]).map((name) => ({
      label: [...(sets.length > 1 ? [run] : []), ...(names.length > 1 || sets.length === 1 ? [name.replace(/^(sent|exposed|held out)\//, "")] : [])].join(" "),
      steps: charts.steps, ...charts.series[name],
    })));
    const tables = this.lines.map((line) => [line.steps.map((step) => step + 1), line.low, ...(line.high ? [line.high] : [])]);
    this.data = tables.length ? uPlot.join(tables) : [[]];
    this.range = [Math.min(...sets.map(({ charts }) => charts.first)) + 1, Math.max(...sets.map(({ charts }) => charts.last))];
    const shape = JSON.stringify(this.lines.map((line) => [line.label, Boolean(line.high)]));
    if (shape !== this.#shape) this.#build(shape);
    else this.#plot.setData(this.data);
    this.#told(null);
    this.twin.refill();
  }

  #size() {
    return { width: Math.max(120, this.area.clientWidth), height: 190 };
  }

  #build(shape) {
    this.#shape = shape;
    this.#plot?.destroy();
    const series = [{}];
    const bands = [];
    this.lines.forEach((line, at) => {
      const stroke = LINES[at % LINES.length];
      const few = this.id === "held out" || line.steps.length < 40;
      const own = { stroke, width: 1.4, spanGaps: this.sets.length > 1 || this.id === "held out", points: { show: few, size: 5 } };
      series.push({ ...own, label: line.label });
      if (line.high) {
        for (const each of series.slice(-1)) each.width = 0.7;
        series.push({ ...own, width: 0.7, label: line.label });
        bands.push({ series: [series.length - 1, series.length - 2], fill: `${stroke}40` });
      }
    });
    replace(this.legend, ...(this.lines.length > 1 ? this.lines : []).map((line, at) => {
      const swatch = make("i");
      swatch.style.background = LINES[at % LINES.length];
      return make("li", {}, swatch, line.label);
    }));
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const options = {
      ...this.#size(), series, bands, legend: { show: false },
      scales: { x: { time: false, range: () => this.range } },
      axes: [{ ...axis, size: 26 }, { ...axis, size: 58, ...(this.id === "sent" ? { incrs: POWERS } : {}), values: (_, splits) => splits.map((value) => this.format(value)) }],
      cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "steps" }, points: { size: 6 } },
      hooks: {
        draw: [(plot) => this.#drawMarks(plot)],
        setCursor: [(plot) => this.#told(plot.cursor.idx)],
        setSelect: [(plot) => this.#selected(plot)],
      },
    };
    this.#plot = new uPlot(options, this.data, this.area);
  }

  #selected(plot) {
    if (plot.select.width < 4) return;
    const [from, to] = [plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoomed(Math.max(0, Math.round(from) - 1), Math.round(to));
  }

  #drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.step, "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      const small = mark.kind === "checkpoint" || mark.kind === "left out";
      ctx.strokeStyle = MARKS[mark.kind] ?? colour("quiet");
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash(small ? [] : [4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, small ? bbox.top + bbox.height - 6 * devicePixelRatio : bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // In words: the values under the cursor, or the last ones.
  #told(at) {
    const words = this.lines.map((line) => {
      if (at === null || at === undefined) return this.format(line.low.findLast((value) => value !== null));
      const found = line.steps.indexOf(this.data[0][at] - 1);
      const [low, high] = [line.low[found], (line.high ?? line.low)[found]];
      return low === high ? this.format(low) : `${this.format(low)} to ${this.format(high)}`;
    });
    const step = at === null || at === undefined ? "" : `step ${number(this.data[0][at])}: `;
    this.now.textContent = step + words.slice(0, 4).join(", ");
    if (!step) this.area.setAttribute("aria-label", `${this.title}: now ${words.join(", ")}`);
  }

  #table() {
    const heads = ["Step", ...this.lines.flatMap((line) => (line.high ? [`${line.label}, least`, `${line.label}, most`] : [line.label]))];
    const every = Math.max(1, Math.ceil(this.data[0].length / 200));
    const rows = this.data[0].map((_, at) => this.data.map((column, place) => (place ? this.format(column[at]) : number(column[at]))));
    const shown = rows.filter((_, at) => at % every === 0 || at === rows.length - 1);
    return table(`${this.title}${every > 1 ? `, every ${every}th column` : ""}`, heads, shown, heads.keys().toArray?.() ?? [...heads.keys()]);
  }
}
