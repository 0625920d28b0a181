// Several runs: a list to choose from and to compare, and the settings in which those chosen differ.
import { make, number, replace, table } from "./words.js";

export class RunList {
  constructor(place, differences, choose, compare) {
    Object.assign(this, { place, differences, choose, compare });
    this.shape = "";
  }

  show(runs, current, compared) {
    const shape = JSON.stringify([runs.map(({ name, state, steps, loss }) => [name, state, steps, loss]), current, [...compared]]);
    if (shape === this.shape) return;
    this.shape = shape;
    const focused = this.place.contains(document.activeElement) ? document.activeElement.id : "";
    const rows = runs.map((run, at) => [
      make("input", {
        type: "checkbox", id: `compare-${at}`, "aria-label": `compare ${run.name}`, checked: compared.has(run.name) || run.name === current,
        disabled: run.name === current, onchange: (event) => this.compare(run.name, event.target.checked),
      }),
      run.name === current
        ? make("strong", { text: run.name, "aria-current": "true" })
        : make("button", { type: "button", id: `open-${at}`, text: run.name, onclick: () => this.choose(run.name) }),
      run.state, `${number(run.steps)} of ${number(run.planned)}`, number(run.loss), run.layout, run.task,
    ]);
    replace(this.place, table("Runs of this folder", ["", "Run", "State", "Step", "Loss", "Layout", "Task"], rows, [3, 4]));
    document.getElementById(focused)?.focus();
    const chosen = runs.filter((run) => run.name === current || compared.has(run.name));
    this.#differ(chosen.sort((a, b) => (b.name === current) - (a.name === current)));
  }

  #differ(chosen) {
    const names = [...new Set(chosen.flatMap((run) => Object.keys(run.settings)))];
    const other = names.filter((name) => new Set(chosen.map((run) => run.settings[name])).size > 1);
    if (chosen.length < 2) replace(this.differences, make("p", { class: "quiet", text: "Tick a second run." }));
    else if (!other.length) replace(this.differences, make("p", { class: "quiet", text: "None: all settings are the same." }));
    else {
      const rows = other.map((name) => [name, ...chosen.map((run) => run.settings[name] ?? "not set")]);
      const found = table("Settings that differ", ["Setting", ...chosen.map((run) => run.name)], rows);
      found.querySelector("caption").className = "heard"; // the heading above says it
      replace(this.differences, found);
    }
  }
}
