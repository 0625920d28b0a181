// A rank's memory by what it is for: areas on top of each other, and the most that it held.
import { LINES, bytes, make, number, replace, table, twin } from "./words.js";
import { colour } from "./theme.js";

const PART_COLOURS = { weights: "#4c7fb0", gradients: "#3a9a8c", optimizer: "#8a6fb0", activations: "#cf8a3d", other: "#a39e93" };
const PART_WORDS = { optimizer: "optimizer state", other: "everything else" };
const STEPS_OF_BYTES = Array.from({ length: 50 }, (_, power) => 2 ** power);

export class MemoryChart {
  #plot = null;
  #shape = "";

  constructor(section, place, legend, tables, select, changed) {
    Object.assign(this, { section, place, legend, select });
    this.twin = twin("As a table", () => this.#table());
    replace(tables, this.twin);
    this.now = make("p", { class: "quiet", role: "status" });
    this.area = make("div", { class: "plot tall", role: "img", "aria-label": "Memory" });
    replace(place, this.area);
    new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(this.area);
    select.addEventListener("change", () => changed(Number(select.value)));
  }

  show(memory, hosts) {
    this.memory = memory;
    const names = Object.keys(memory.parts);
    this.section.hidden = !names.length;
    if (!names.length) return;
    if (memory.ranks.join() !== this.select.dataset.ranks) {
      this.select.dataset.ranks = memory.ranks.join();
      replace(this.select, ...memory.ranks.map((rank) => make("option", { value: rank, text: `${rank}${hosts[rank] ? ` on ${hosts[rank]}` : ""}` })));
    }
    this.select.value = memory.rank;
    let below = memory.steps.map(() => 0);
    const stacked = names.map((name) => { below = below.map((sum, at) => sum + (memory.parts[name][at] ?? 0)); return below; });
    const whole = memory.wholes.peak ? [memory.wholes.peak] : [];
    this.data = [memory.steps.map((step) => step + 1), ...stacked.reverse(), ...whole];
    const shape = JSON.stringify([names, whole.length]);
    if (shape !== this.#shape) this.#build(shape, names);
    else this.#plot.setData(this.data);
    this.#tell(null);
    this.twin.refill();
  }

  redraw() {
    if (!this.memory || this.section.hidden) return;
    this.#shape = "";
    this.show(this.memory, []);
  }

  #size() {
    return { width: Math.max(120, this.area.clientWidth), height: 240 };
  }

  #colour(name, at) {
    return Object.hasOwn(PART_COLOURS, name) ? PART_COLOURS[name] : LINES[at % LINES.length];
  }

  #build(shape, names) {
    this.#shape = shape;
    this.#plot?.destroy();
    const areas = names.map((name, at) => ({ stroke: this.#colour(name, at), fill: this.#colour(name, at), width: 0, points: { show: false } })).reverse();
    const most = this.memory.wholes.peak ? [{ stroke: colour("ink"), width: 1.2, dash: [5, 4], points: { show: false } }] : [];
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    this.#plot = new uPlot({
      ...this.#size(), series: [{}, ...areas, ...most], legend: { show: false },
      scales: { x: { time: false, range: () => [this.memory.first + 1, Math.max(this.memory.last, this.memory.first + 2)] }, y: { range: (_, __, high) => [0, high * 1.05 || 1] } },
      axes: [{ ...axis, size: 26 }, { ...axis, size: 64, incrs: STEPS_OF_BYTES, values: (_, splits) => splits.map(bytes) }],
      cursor: { drag: { x: false, y: false }, sync: { key: "steps" }, points: { show: false } },
      hooks: { setCursor: [(plot) => this.#tell(plot.cursor.idx)] },
    }, this.data, this.area);
  }

  // The legend says the bytes of each part: under the cursor, or the last.
  #tell(at) {
    const { parts, wholes, rank, steps } = this.memory;
    const place = at ?? steps.length - 1;
    const names = Object.keys(parts);
    const item = (name, swatch, values) => make("li", {}, swatch, `${Object.hasOwn(PART_WORDS, name) ? PART_WORDS[name] : name} `, make("b", { text: bytes(values[place]) }));
    const items = names.map((name, order) => {
      const swatch = make("i");
      swatch.style.background = this.#colour(name, order);
      return item(name, swatch, parts[name]);
    });
    if (wholes.peak) items.push(item("peak", make("i", { class: "dashed" }), wholes.peak));
    replace(this.legend, make("li", { class: "quiet", text: at === null || at === undefined ? "last:" : `step ${number(steps[place] + 1)}:` }), ...items);
    if (at !== null && at !== undefined) return;
    const words = names.map((name) => `${name} ${bytes(parts[name].at(-1))}`).join(", ");
    this.area.setAttribute("aria-label", `Memory of rank ${rank} by what it is for, last: ${words}`);
  }

  #table() {
    const { parts, wholes, steps } = this.memory;
    const columns = [...Object.entries(parts), ...Object.entries(wholes)];
    const every = Math.max(1, Math.ceil(steps.length / 100));
    const rows = steps.map((step, at) => [number(step + 1), ...columns.map(([, values]) => bytes(values[at]))]).filter((_, at) => at % every === 0 || at === steps.length - 1);
    return table(`Bytes of rank ${this.memory.rank} by what they are for`, ["Step", ...columns.map(([name]) => name)], rows, columns.map((_, at) => at + 1).concat(0));
  }
}
