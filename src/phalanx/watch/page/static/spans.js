// The time line: what each rank did when, phase by phase, in a few steps.
import { make, number, phaseColour, picture, replace, seconds, table } from "./words.js";
import { colour } from "./theme.js";

const LEFT = 44;

export class TimeLine {
  constructor(place, note, legend, tables) {
    Object.assign(this, { note, legend }, picture(place, tables, () => this.#table()));
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.textContent = ""; });
  }

  show(spans) {
    this.spans = spans;
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
    this.canvas.setAttribute("aria-label", `Time line of ${number(spans.rows.length)} ranks: ${this.note.textContent}. The table below has its sums.`);
    this.redraw();
    this.twin.refill();
  }

  redraw() {
    const { rows, phases, seconds: whole, checkpoints } = this.spans;
    const tall = Math.max(5, Math.min(24, Math.floor(360 / Math.max(1, rows.length))));
    const height = rows.length * tall + 4;
    this.canvas.style.height = `${height}px`;
    const ratio = devicePixelRatio;
    this.canvas.width = Math.max(1, this.canvas.clientWidth * ratio);
    this.canvas.height = height * ratio;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const wide = (this.canvas.clientWidth - LEFT) / (whole || 1);
    this.scale = { tall, wide };
    ctx.font = "11px system-ui";
    ctx.textBaseline = "middle";
    const every = Math.ceil(12 / tall);
    rows.forEach((row, place) => {
      const top = place * tall;
      ctx.fillStyle = colour("quiet");
      if (place % every === 0) ctx.fillText(String(row.rank), 4, top + tall / 2);
      for (const [, begun, ...took] of row.steps) {
        let x = LEFT + begun * wide;
        took.forEach((spent, at) => {
          ctx.fillStyle = phaseColour(phases[at], at);
          ctx.fillRect(x, top + 1, Math.max(spent * wide - (spent * wide > 3 ? 0.5 : 0), 0.25), tall - 2);
          x += spent * wide;
        });
      }
    });
    for (const saved of checkpoints) {
      const place = rows.findIndex((row) => row.rank === saved.rank);
      if (place < 0) continue;
      ctx.fillStyle = phaseColour("checkpoint", 0);
      ctx.fillRect(Math.max(LEFT, LEFT + saved.begun * wide), place * tall + tall - 4, Math.max(2, saved.seconds * wide), 3);
    }
  }

  #point(event) {
    const { rows, phases } = this.spans ?? { rows: [] };
    const row = rows[Math.floor(event.offsetY / this.scale?.tall)];
    const at = (event.offsetX - LEFT) / this.scale?.wide;
    this.tip.textContent = "";
    for (const [step, begun, ...took] of row?.steps ?? []) {
      let from = begun;
      for (const [place, spent] of took.entries()) {
        if (at >= from && at < from + spent) this.tip.textContent = `rank ${row.rank}, step ${number(step + 1)}: ${phases[place]} ${seconds(spent)}`;
        from += spent;
      }
    }
    this.tip.style.left = `${Math.min(event.offsetX + 14, this.canvas.clientWidth - 190)}px`;
    this.tip.style.top = `${event.offsetY + 16}px`;
  }

  #table() {
    const { rows, phases } = this.spans;
    const sums = rows.map((row) => [row.rank, ...phases.map((_, at) => seconds(row.steps.reduce((sum, each) => sum + each[at + 2], 0)))]);
    return table("Seconds by rank and phase in the steps of the time line", ["Rank", ...phases], sums, [0, ...phases.map((_, at) => at + 1)]);
  }
}
