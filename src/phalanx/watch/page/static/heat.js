// A map of ranks by steps: the brighter a cell, the longer its longest step took.
import { number, picture, seconds, table } from "./words.js";
import { isDark } from "./theme.js";

const LIGHT = [[243, 241, 237], [158, 193, 217], [47, 111, 171], [24, 42, 82]];
const DARK = [[34, 39, 44], [43, 82, 119], [111, 168, 214], [246, 230, 180]];

function colours() {
  const stops = isDark() ? DARK : LIGHT;
  return Array.from({ length: 256 }, (_, value) => {
    const at = (Math.max(0, value - 1) / 254) * (stops.length - 1);
    const from = Math.min(stops.length - 2, Math.floor(at));
    return stops[from].map((low, part) => Math.round(low + (stops[from + 1][part] - low) * (at - from)));
  });
}

export class HeatMap {
  #cell = null;
  #drag = null;

  constructor(place, scale, tables, zoomed) {
    Object.assign(this, { scale, zoomed }, picture(place, tables, () => this.#table()));
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#told(null));
    this.canvas.addEventListener("pointerdown", (event) => { this.#drag = this.#at(event); });
    this.canvas.addEventListener("pointerup", (event) => this.#drop(event));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#told(null));
  }

  show(heat) {
    this.heat = heat;
    const text = atob(heat.cells);
    this.cells = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    this.scale.textContent = heat.rows
      ? `dark to bright: ${seconds(heat.low)} to ${seconds(heat.top)}; longest ${seconds(heat.most)}; a column is ${number(heat.width)} step${heat.width > 1 ? "s" : ""}`
      : "no step has been done yet";
    if (isDark() === false) this.scale.textContent = this.scale.textContent.replace("dark to bright", "light to dark");
    const slowest = heat.ranks.reduce((most, each) => (each.most > (most?.most ?? 0) ? each : most), null);
    this.canvas.setAttribute("aria-label", `Seconds in ${heat.phase} of ${number(heat.rows)} rows of ranks over steps `
      + `${heat.first + 1} to ${heat.last}` + (slowest ? `; longest: rank ${slowest.rank} in step ${slowest.step}, ${seconds(slowest.most)}` : ""));
    this.redraw();
    this.twin.refill();
  }

  redraw() {
    const { rows, columns } = this.heat;
    if (!rows || !columns) { this.canvas.height = 0; return; }
    const palette = colours();
    const image = new ImageData(columns, rows);
    this.cells.forEach((value, at) => image.data.set([...palette[value], value ? 255 : 0], at * 4));
    const small = new OffscreenCanvas(columns, rows);
    small.getContext("2d").putImageData(image, 0, 0);
    const height = rows * Math.max(3, Math.min(22, Math.floor(320 / rows)));
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.max(1, this.canvas.clientWidth * devicePixelRatio);
    this.canvas.height = height * devicePixelRatio;
    const ctx = this.canvas.getContext("2d");
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(small, 0, 0, this.canvas.width, this.canvas.height);
    if (this.#cell) {
      const [wide, high] = [this.canvas.width / columns, this.canvas.height / rows];
      ctx.strokeStyle = "#d9822b";
      ctx.lineWidth = 2 * devicePixelRatio;
      ctx.strokeRect(this.#cell.column * wide, this.#cell.row * high, Math.max(wide, 3), high);
    }
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const place = (value, size, count) => Math.max(0, Math.min(count - 1, Math.floor((value / size) * count)));
    return {
      column: place(event.clientX - box.left, box.width, this.heat.columns),
      row: place(event.clientY - box.top, box.height, this.heat.rows),
    };
  }

  #steps(from, to) {
    const begin = this.heat.first - (this.heat.first % this.heat.width);
    return [Math.max(this.heat.first, begin + from * this.heat.width), Math.min(this.heat.last, begin + (to + 1) * this.heat.width)];
  }

  #point(event) {
    if (!this.heat?.rows) return;
    this.#told(this.#at(event));
    this.tip.style.left = `${Math.min(event.offsetX + 14, this.canvas.clientWidth - 180)}px`;
    this.tip.style.top = `${event.offsetY + 18}px`;
  }

  #drop(event) {
    if (!this.#drag) return;
    const [from, to] = [this.#drag.column, this.#at(event).column].sort((a, b) => a - b);
    this.#drag = null;
    if (to > from) this.zoomed(...this.#steps(from, to));
  }

  #key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!this.heat?.rows) return;
    const cell = this.#cell ?? { column: this.heat.columns - 1, row: 0 };
    if (event.key === "Enter") {
      this.zoomed(...this.#steps(Math.max(0, cell.column - 2), Math.min(this.heat.columns - 1, cell.column + 2)));
    } else if (moves[event.key]) {
      const [dx, dy] = moves[event.key];
      this.#cell = {
        column: Math.max(0, Math.min(this.heat.columns - 1, cell.column + dx)),
        row: Math.max(0, Math.min(this.heat.rows - 1, cell.row + dy)),
      };
      this.#told(this.#cell);
      Object.assign(this.tip.style, { left: "12px", top: "8px" });
      this.redraw();
    } else return;
    event.preventDefault();
  }

  #told(cell) {
    if (!cell) { this.tip.textContent = ""; this.#cell = null; return; }
    const { heat } = this;
    const value = this.cells[cell.row * heat.columns + cell.column];
    const [first, last] = this.#steps(cell.column, cell.column);
    const ranks = heat.ranks_a_row > 1 ? `ranks ${cell.row * heat.ranks_a_row} and on` : `rank ${cell.row}`;
    const steps = last - first > 1 ? `steps ${number(first + 1)} to ${number(last)}` : `step ${number(first + 1)}`;
    const bound = value === 255 ? "at least" : value === 1 ? "at most" : "about";
    const took = value ? `${bound} ${seconds(heat.low + ((value - 1) / 254) * (heat.top - heat.low))}` : "nothing noted";
    this.tip.textContent = `${ranks}, ${steps}: ${took}`;
  }

  #table() {
    const rows = this.heat.ranks.map((each) => [each.rank, seconds(each.usual), seconds(each.most), number(each.step)]);
    return table(`Seconds in ${this.heat.phase} by rank`, ["Rank", "Usual", "Longest", "In step"], rows, [0, 1, 2, 3]);
  }
}
