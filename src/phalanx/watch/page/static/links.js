// Who talks to whom: ranks by ranks, the stronger a cell the more bytes go from the row's rank to the column's in a step.
import { bytes, make, number, picture, replace, seconds, sharp, table } from "./words.js";
import { colour, shadeBar, shades } from "./theme.js";

const EDGE = 34;

export class LinkMap {
  #place = null;

  constructor(section, place, beside, select, scale, tables) {
    Object.assign(this, { section, beside, select, scale }, picture(place, tables, () => this.#pairs()));
    this.canvas.setAttribute("aria-label", "Bytes from rank to rank");
    this.select.addEventListener("change", () => this.#draw());
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#leave());
  }

  show(links) {
    this.links = links;
    const names = Object.keys(links.axes);
    this.section.hidden = !names.length;
    if (!names.length) return;
    if (names.join() !== this.select.dataset.names) {
      this.select.dataset.names = names.join();
      const all = names.length > 1 ? [make("option", { value: "", text: "all axes" })] : [];
      replace(this.select, ...all, ...names.map((name) => make("option", { value: name, text: name })));
    }
    this.#axes();
    this.#draw();
  }

  redraw() {
    if (this.links && !this.section.hidden) this.#draw();
  }

  get #chosen() {
    return Object.entries(this.links.axes).filter(([name]) => !this.select.value || name === this.select.value);
  }

  // What each axis carries, in words.
  #axes() {
    const { axes, first, last } = this.links;
    const rows = Object.entries(axes).map(([name, axis]) => {
      const waits = axis.waits.map((value, rank) => [value, rank]).filter(([value]) => value !== null).sort((a, b) => b[0] - a[0]);
      const sent = axis.sent.flat().reduce((sum, value) => sum + value, 0);
      const middle = waits[Math.floor(waits.length / 2)]?.[0];
      return [
        name, `${number(axis.groups)} of ${number(axis.size)}`, number(Math.round(axis.calls * 10) / 10), bytes(sent),
        waits.length ? seconds(middle) : "on a GPU", waits.length ? `${seconds(waits[0][0])}, rank ${waits[0][1]}` : "on a GPU",
      ];
    });
    replace(this.beside, table(
      `A step, of steps ${number(first + 1)} to ${number(last)}, the last in the flight records`,
      ["Axis", "Groups of ranks", "Collectives", "Sent by all", "Rank waits", "Longest wait"], rows, [2, 3, 4, 5],
    ));
  }

  #draw() {
    const grids = this.#chosen.map(([, axis]) => axis.sent);
    this.cells = grids[0].map((row, from) => row.map((_, to) => grids.reduce((sum, grid) => sum + grid[from][to], 0)));
    const size = this.cells.length;
    const most = Math.max(...this.cells.flat());
    const bar = make("i", { class: "shades", "aria-hidden": "true" });
    const rows = this.links.ranks_a_row > 1 ? `; a row is ${number(this.links.ranks_a_row)} ranks` : "";
    replace(this.scale, "0 B", bar, `${bytes(most)} a step${rows}`);
    shadeBar(bar);
    const wide = Math.min(this.canvas.parentElement.clientWidth - 16, 440);
    const each = Math.max(2, (wide - EDGE) / size);
    this.box = { each, size };
    this.canvas.style.width = `${EDGE + each * size}px`;
    const ctx = sharp(this.canvas, EDGE + each * size);
    const palette = shades();
    this.cells.forEach((row, from) => row.forEach((value, to) => {
      const part = most ? Math.sqrt(value / most) : 0;
      ctx.fillStyle = value ? `rgb(${palette[Math.round(40 + part * 215)].join(" ")})` : colour("shade");
      ctx.fillRect(EDGE + to * each, EDGE + from * each, each - (each > 6 ? 1 : 0), each - (each > 6 ? 1 : 0));
    }));
    this.#labels(ctx);
    const heaviest = this.#chosen.flatMap(([, axis]) => axis.pairs.slice(0, 1)).sort((a, b) => b[2] - a[2])[0];
    const told = heaviest ? `; most from rank ${heaviest[0]} to rank ${heaviest[1]}, ${bytes(heaviest[2])} a step` : "";
    this.canvas.setAttribute("aria-label", `Bytes from rank to rank, ${number(this.links.ranks)} ranks, ${this.select.value || "all axes"}${told}. Arrows move from cell to cell.`);
    this.twin.refill();
  }

  #labels(ctx) {
    const { each, size } = this.box;
    ctx.fillStyle = colour("quiet");
    ctx.font = "11px system-ui";
    ctx.textBaseline = "middle";
    const every = Math.ceil(26 / each);
    for (let at = 0; at < size; at += every) {
      const text = number(at * this.links.ranks_a_row);
      ctx.textAlign = "right";
      ctx.fillText(text, EDGE - 5, EDGE + (at + 0.5) * each);
      ctx.textAlign = "center";
      ctx.fillText(text, EDGE + (at + 0.5) * each, EDGE - 9);
    }
    if (!this.#place) return;
    ctx.strokeStyle = colour("mark");
    ctx.lineWidth = 2;
    ctx.strokeRect(EDGE + this.#place.to * each, EDGE + this.#place.from * each, each, each);
  }

  #tell({ from, to }) {
    const { ranks_a_row: share, hosts } = this.links;
    const who = (at) => (share > 1 ? `ranks ${at * share} to ${(at + 1) * share - 1}` : `rank ${at}${hosts[at] ? ` on ${hosts[at]}` : ""}`);
    const by = this.#chosen.map(([name, axis]) => [name, axis.sent[from][to]]).filter(([, value]) => value > 0);
    const told = by.length ? by.map(([name, value]) => `${bytes(value)} over ${name}`).join(", ") : "nothing";
    this.tip.textContent = `${who(from)} to ${who(to)}: ${told}`;
  }

  #point(event) {
    if (!this.box) return;
    const [to, from] = [event.offsetX, event.offsetY].map((at) => Math.floor((at - EDGE) / this.box.each));
    if (to < 0 || from < 0 || to >= this.box.size || from >= this.box.size) { this.tip.textContent = ""; return; }
    this.#tell({ from, to });
    this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 14, this.canvas.parentElement.clientWidth - this.tip.offsetWidth - 8))}px`;
    this.tip.style.top = `${event.offsetY + 18}px`;
  }

  #key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!this.box || !moves[event.key]) return;
    event.preventDefault();
    const [dx, dy] = moves[event.key];
    const bound = (value) => Math.max(0, Math.min(this.box.size - 1, value));
    this.#place = this.#place ? { from: bound(this.#place.from + dy), to: bound(this.#place.to + dx) } : { from: 0, to: Math.min(1, this.box.size - 1) };
    this.#tell(this.#place);
    Object.assign(this.tip.style, { left: `${EDGE}px`, top: `${EDGE + this.box.size * this.box.each + 10}px` });
    this.#draw();
  }

  #leave() {
    this.tip.textContent = "";
    if (this.#place) { this.#place = null; this.#draw(); }
  }

  #pairs() {
    const rows = this.#chosen.flatMap(([name, axis]) => axis.pairs.map(([from, to, sent]) => [from, to, name, bytes(sent), sent])).sort((a, b) => b[4] - a[4]);
    return table("Pairs of ranks that send most, a step", ["From rank", "To rank", "Axis", "Sent"], rows.map((row) => row.slice(0, 4)), [0, 1, 3]);
  }
}
