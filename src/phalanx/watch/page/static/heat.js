// A map of ranks by steps: the stronger a cell, the longer its longest step took.
import { drawLane, lane, make, number, picture, replace, seconds, sharp, table, ticks } from "./words.js";
import { colour, shadeBar, shades } from "./theme.js";

const FOOT = 20;
const NAMES = { own: "own time, without waiting for others", total: "whole step, waiting included" };

export function phaseName(phase) {
  return Object.hasOwn(NAMES, phase) ? NAMES[phase] : phase;
}

export class HeatMap {
  #cell = null;
  #drag = null;
  #hosts = [];

  constructor(place, scale, tables, zoomed, whole) {
    Object.assign(this, { scale, zoomed, whole }, picture(place, tables, () => this.#table()));
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    this.canvas.addEventListener("pointerdown", (event) => { if (this.heat?.rows) this.#drag = this.#at(event); });
    this.canvas.addEventListener("pointerup", (event) => this.#drop(event));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#leave());
  }

  show(heat, hosts) {
    this.heat = heat;
    this.#hosts = hosts;
    const text = atob(heat.cells);
    this.cells = new Uint16Array(text.length / 2);
    for (let at = 0; at < this.cells.length; at += 1) this.cells[at] = text.charCodeAt(2 * at) + 256 * text.charCodeAt(2 * at + 1);
    this.#scale();
    const slowest = heat.ranks.reduce((most, each) => (each.most > (most?.most ?? 0) ? each : most), null);
    const longest = slowest ? `; longest: rank ${slowest.rank} in step ${number(slowest.step)}, ${seconds(slowest.most)}` : "";
    this.canvas.setAttribute("aria-label", `Map of ranks by steps ${number(heat.first + 1)} to ${number(heat.last)}, `
      + `${phaseName(heat.phase)}${longest}. Arrows move from cell to cell, Enter zooms to it, Escape shows all steps.`);
    this.redraw();
    this.twin.refill();
  }

  #scale() {
    const { heat } = this;
    if (!heat.rows || !heat.columns) { replace(this.scale, "no step has been done yet"); return; }
    this.bar = make("i", { class: "shades", "aria-hidden": "true" });
    const most = heat.most > heat.top ? `; longest ${seconds(heat.most)}` : "";
    const column = heat.width > 1 ? `; a column is ${number(heat.width)} steps` : "";
    replace(this.scale, seconds(heat.low), this.bar, `${seconds(heat.top)}${most}${column}`);
  }

  redraw() {
    const { rows, columns } = this.heat ?? {};
    if (!rows || !columns) { this.canvas.height = 0; this.canvas.style.height = "0"; return; }
    shadeBar(this.bar);
    const palette = shades();
    const image = new ImageData(columns, rows);
    this.cells.forEach((value, at) => { if (value) image.data.set([...palette[this.#shade(value)], 255], at * 4); });
    const small = new OffscreenCanvas(columns, rows);
    small.getContext("2d").putImageData(image, 0, 0);
    const tall = Math.max(3, Math.min(22, Math.floor(320 / rows)));
    const ctx = sharp(this.canvas, rows * tall + FOOT);
    const left = lane(ctx, this.canvas.clientWidth, this.#labels());
    const wide = this.canvas.clientWidth - left;
    this.box = { left, wide, tall, high: rows * tall };
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(small, left, 0, wide, rows * tall);
    this.#axes(ctx);
    if (!this.#cell) return;
    ctx.strokeStyle = colour("mark");
    ctx.lineWidth = 2;
    ctx.strokeRect(left + (this.#cell.column * wide) / columns, this.#cell.row * tall, Math.max(wide / columns, 3), tall);
  }

  // Of a value its colour: those below and above what is told apart have the least and the most.
  #shade(value) {
    const { low, top } = this.heat;
    return Math.max(0, Math.min(255, Math.round(((this.#seconds(value) - low) / (top - low || 1)) * 255)));
  }

  #seconds(value) {
    return this.heat.least + ((value - 1) / 65534) * (this.heat.most - this.heat.least);
  }

  #labels() {
    const share = this.heat.ranks_a_row;
    return Array.from({ length: this.heat.rows }, (_, row) => ({ text: number(row * share), host: this.#hosts[row * share] ?? "" }));
  }

  #axes(ctx) {
    const { left, wide, tall, high } = this.box;
    ctx.fillStyle = colour("quiet");
    drawLane(ctx, this.canvas.clientWidth, this.#labels(), this.box, Math.min(tall, 13) / 2);
    const { first, last } = this.heat;
    ctx.textAlign = "center";
    for (const step of ticks(first + 1, last, Math.max(2, Math.floor(wide / 110)))) {
      const x = left + ((step - 0.5 - first) / (last - first)) * wide;
      ctx.fillText(number(step), Math.max(left + 8, Math.min(left + wide - 18, x)), high + FOOT / 2 + 2);
    }
  }

  #at(event) {
    const { left, wide, tall } = this.box;
    const place = (value, size, count) => Math.max(0, Math.min(count - 1, Math.floor((value / size) * count)));
    return { column: place(event.offsetX - left, wide, this.heat.columns), row: place(event.offsetY, this.heat.rows * tall, this.heat.rows) };
  }

  #steps(from, to) {
    const begin = this.heat.first - (this.heat.first % this.heat.width);
    return [Math.max(this.heat.first, begin + from * this.heat.width), Math.min(this.heat.last, begin + (to + 1) * this.heat.width)];
  }

  #point(event) {
    if (!this.heat?.rows || !this.box) return;
    const cell = this.#at(event);
    this.#tell(cell);
    if (this.#drag && this.#drag.column !== cell.column) {
      const [from, to] = this.#steps(...[this.#drag.column, cell.column].sort((a, b) => a - b));
      this.tip.textContent = `zoom to steps ${number(from + 1)} to ${number(to)}`;
    }
    this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 14, this.canvas.clientWidth - this.tip.offsetWidth))}px`;
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
    } else if (event.key === "Escape") {
      this.whole();
    } else if (moves[event.key]) {
      const [dx, dy] = moves[event.key];
      this.#cell = {
        column: Math.max(0, Math.min(this.heat.columns - 1, cell.column + dx)),
        row: Math.max(0, Math.min(this.heat.rows - 1, cell.row + dy)),
      };
      this.#tell(this.#cell);
      Object.assign(this.tip.style, { left: `${this.box.left + 6}px`, top: `${this.box.high + FOOT + 10}px` });
      this.redraw();
    } else return;
    event.preventDefault();
  }

  #leave() {
    this.tip.textContent = "";
    this.#drag = null;
    if (this.#cell) { this.#cell = null; this.redraw(); }
  }

  #tell(cell) {
    const { heat } = this;
    const value = this.cells[cell.row * heat.columns + cell.column];
    const [first, last] = this.#steps(cell.column, cell.column);
    const rank = cell.row * heat.ranks_a_row;
    const host = this.#hosts[rank] ? ` on ${this.#hosts[rank]}` : "";
    const ranks = heat.ranks_a_row > 1 ? `ranks ${rank} to ${rank + heat.ranks_a_row - 1}` : `rank ${rank}${host}`;
    const steps = last - first > 1 ? `longest of steps ${number(first + 1)} to ${number(last)}` : `step ${number(first + 1)}`;
    this.tip.textContent = `${ranks}, ${steps}: ${value ? seconds(this.#seconds(value)) : "nothing noted"}`;
  }

  #table() {
    const rows = this.heat.ranks.map((each) => [each.rank, this.#hosts[each.rank] ?? "", seconds(each.usual), seconds(each.most), number(each.step)]);
    return table(`Seconds by rank: ${phaseName(this.heat.phase)}`, ["Rank", "Host", "Usual", "Longest", "In step"], rows, [0, 2, 3, 4]);
  }
}
