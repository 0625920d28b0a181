// The time line: what each rank did when, phase by phase, in a few steps; a part of it can be looked at closely.
import { drawLane, lane, make, number, phaseColour, picture, replace, seconds, sharp, table, ticks } from "./words.js";
import { colour } from "./theme.js";

const BELOW = 20;

export class TimeLine {
  #part = null; // [from, to] in seconds; null: all of it
  #chosen = null; // {row, at}: a step of a rank, by the keyboard
  #pressed = null;
  #hosts = [];

  constructor(place, note, legend, tables, back) {
    Object.assign(this, { note, legend, back }, picture(place, tables, () => this.#table()));
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    this.canvas.addEventListener("pointerdown", (event) => { this.#pressed = event.offsetX; });
    this.canvas.addEventListener("pointerup", (event) => this.#drop(event));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#leave());
    back.addEventListener("click", () => this.#close(null));
  }

  show(spans, hosts) {
    const same = this.spans && this.spans.first === spans.first && this.spans.last === spans.last;
    if (!same) { this.#part = null; this.#chosen = null; }
    this.spans = spans;
    this.#hosts = hosts;
    const some = spans.rows.length < spans.of_ranks ? `, ${number(spans.rows.length)} of ${number(spans.of_ranks)} ranks` : "";
    const last = spans.first > spans.asked ? "the last steps of those shown above: " : "";
    this.note.textContent = spans.rows.length
      ? `${last}steps ${number(spans.first + 1)} to ${number(spans.last)}${some}, ${seconds(spans.seconds)}; each rank by its host's clock`
      : "no step has been done yet";
    const names = [...spans.phases, ...(spans.checkpoints.length ? ["checkpoint"] : [])];
    replace(this.legend, ...names.map((name, at) => {
      const swatch = make("i");
      swatch.style.background = phaseColour(name, at);
      return make("li", {}, swatch, name === "checkpoint" ? "checkpoint, written behind the steps" : name);
    }));
    this.canvas.setAttribute("aria-label", `Time line of ${number(spans.rows.length)} ranks: ${this.note.textContent}. `
      + "Arrows move from step to step and rank to rank, Enter zooms to a step, Escape back. The table below has its sums.");
    this.redraw();
    this.twin.refill();
  }

  get #shown() { return this.#part ?? [0, this.spans.seconds || 1]; }

  redraw() {
    if (!this.spans) return;
    const { rows } = this.spans;
    this.back.hidden = this.#part === null;
    const tall = Math.max(5, Math.min(24, Math.floor(360 / Math.max(1, rows.length))));
    if (!rows.length) { this.canvas.height = 0; this.canvas.style.height = "0"; return; }
    const ctx = sharp(this.canvas, rows.length * tall + BELOW);
    const labels = rows.map((row) => ({ text: number(row.rank), host: this.#hosts[row.rank] ?? "" }));
    const left = lane(ctx, this.canvas.clientWidth, labels);
    const [from, to] = this.#shown;
    this.box = { left, tall, wide: (this.canvas.clientWidth - left) / (to - from) };
    this.#axes(ctx, labels);
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, 0, this.canvas.clientWidth - left, rows.length * tall);
    ctx.clip();
    rows.forEach((row, place) => this.#drawRow(ctx, row, place));
    this.#drawCheckpoints(ctx);
    this.#drawChosen(ctx);
    ctx.restore();
  }

  #x(time) { return this.box.left + (time - this.#shown[0]) * this.box.wide; }

  #drawRow(ctx, row, place) {
    const { tall, wide } = this.box;
    const { phases } = this.spans;
    const [from, to] = this.#shown;
    const top = place * tall;
    for (const [, begun, ...took] of row.steps) {
      const all = took.reduce((sum, spent) => sum + spent, 0);
      if (begun > to || begun + all < from) continue;
      let x = this.#x(begun);
      took.forEach((spent, at) => {
        const size = spent * wide;
        ctx.fillStyle = phaseColour(phases[at], at);
        ctx.fillRect(x, top + 1, Math.max(size - (size > 3 ? 0.5 : 0), 0.25), tall - 2);
        if (tall >= 14 && size > 8 * phases[at].length) {
          ctx.fillStyle = "#ffffff";
          ctx.fillText(phases[at], Math.max(x, this.box.left) + 5, top + tall / 2);
        }
        x += size;
      });
    }
  }

  #drawCheckpoints(ctx) {
    const { rows, checkpoints } = this.spans;
    const { tall, wide } = this.box;
    for (const saved of checkpoints) {
      const place = rows.findIndex((row) => row.rank === saved.rank);
      if (place < 0) continue;
      ctx.fillStyle = phaseColour("checkpoint", 0);
      ctx.fillRect(this.#x(saved.begun), place * tall + tall - 4, Math.max(2, saved.seconds * wide), 3);
    }
  }

  #drawChosen(ctx) {
    if (!this.#chosen) return;
    const [from, to] = this.#span(this.#chosen);
    ctx.strokeStyle = colour("mark");
    ctx.lineWidth = 2;
    ctx.strokeRect(this.#x(from), this.#chosen.row * this.box.tall + 1, Math.max(3, (to - from) * this.box.wide), this.box.tall - 2);
  }

  #axes(ctx, labels) {
    const { left, tall } = this.box;
    ctx.fillStyle = colour("quiet");
    drawLane(ctx, this.canvas.clientWidth, labels, this.box, Math.max(tall, 6) / 2);
    const [from, to] = this.#shown;
    const wide = this.canvas.clientWidth - left;
    ctx.textAlign = "center";
    for (const time of ticks(from, to, Math.max(2, Math.floor(wide / 120)))) {
      const x = Math.max(left + 14, Math.min(left + wide - 22, this.#x(time)));
      ctx.fillText(time ? seconds(time) : "0", x, labels.length * tall + BELOW / 2 + 2);
    }
    ctx.textAlign = "left";
  }

  // When a step of a rank begins and ends.
  #span({ row, at }) {
    const [, begun, ...took] = this.spans.rows[row].steps[at];
    return [begun, begun + took.reduce((sum, spent) => sum + spent, 0)];
  }

  // The step under a point, and which of its phases.
  #under(event) {
    if (!this.box) return null;
    const row = Math.floor(event.offsetY / this.box.tall);
    const time = this.#shown[0] + (event.offsetX - this.box.left) / this.box.wide;
    const at = (this.spans.rows[row]?.steps ?? []).findIndex((_, place) => {
      const [from, to] = this.#span({ row, at: place });
      return time >= from && time < to;
    });
    if (at < 0) return null;
    let [, from, ...took] = this.spans.rows[row].steps[at];
    const phase = took.findIndex((spent) => { from += spent; return time < from; });
    return { row, at, phase };
  }

  #words({ row, at, phase }) {
    const { rows, phases } = this.spans;
    const [step, , ...took] = rows[row].steps[at];
    const { rank } = rows[row];
    const host = this.#hosts[rank] ? ` on ${this.#hosts[rank]}` : "";
    const told = phase === undefined
      ? took.map((spent, place) => `${phases[place]} ${seconds(spent)}`).join(", ")
      : `${phases[phase]} ${seconds(took[phase])} of ${seconds(took.reduce((sum, spent) => sum + spent, 0))}`;
    return `rank ${rank}${host}, step ${number(step + 1)}: ${told}`;
  }

  #point(event) {
    if (!this.spans?.rows.length) return;
    const found = this.#under(event);
    const pulled = this.#pressed !== null && Math.abs(event.offsetX - this.#pressed) > 4;
    this.tip.textContent = pulled ? `zoom to ${seconds(Math.abs(event.offsetX - this.#pressed) / this.box.wide)}` : found ? this.#words(found) : "";
    this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 14, this.canvas.clientWidth - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${event.offsetY + 16}px`;
  }

  #drop(event) {
    if (this.#pressed === null || !this.box) return;
    const [a, b] = [this.#pressed, event.offsetX].sort((x, y) => x - y);
    this.#pressed = null;
    const time = (x) => this.#shown[0] + (x - this.box.left) / this.box.wide;
    const found = this.#under(event);
    if (b - a > 4) this.#close([time(Math.max(a, this.box.left)), time(b)]);
    else if (found) this.#closeTo(found);
  }

  // A step, with a little of what is around it.
  #closeTo(found) {
    const [from, to] = this.#span(found);
    this.#close([from - (to - from) * 0.08, to + (to - from) * 0.08]);
  }

  #close(part) {
    this.#part = part;
    this.redraw();
  }

  #key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!this.spans?.rows.length) return;
    const { rows } = this.spans;
    if (event.key === "Escape") this.#close(null);
    else if (event.key === "Enter" && this.#chosen) this.#closeTo(this.#chosen);
    else if (moves[event.key]) {
      const now = this.#chosen ?? { row: 0, at: rows[0].steps.length };
      const row = Math.max(0, Math.min(rows.length - 1, now.row + moves[event.key][1]));
      const at = Math.max(0, Math.min(rows[row].steps.length - 1, now.at + moves[event.key][0]));
      this.#chosen = rows[row].steps.length ? { row, at } : null;
      if (this.#chosen && this.#part) this.#closeTo(this.#chosen);
      this.tip.textContent = this.#chosen ? this.#words(this.#chosen) : "";
      Object.assign(this.tip.style, { left: `${this.box.left + 6}px`, top: `${rows.length * this.box.tall + BELOW + 10}px` });
      this.redraw();
    } else return;
    event.preventDefault();
  }

  #leave() {
    this.#pressed = null;
    this.tip.textContent = "";
    if (this.#chosen) { this.#chosen = null; this.redraw(); }
  }

  #table() {
    const { rows, phases } = this.spans;
    const sums = rows.map((row) => [row.rank, ...phases.map((_, at) => seconds(row.steps.reduce((sum, each) => sum + each[at + 2], 0)))]);
    return table("Seconds by rank and phase in the steps of the time line", ["Rank", ...phases], sums, [0, ...phases.map((_, at) => at + 1)]);
  }
}
