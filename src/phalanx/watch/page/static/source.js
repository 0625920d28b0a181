// Where the page has its data from: the server it came from, or what a report carries in itself.

async function asked(what, query) {
  const answer = await fetch(`api/${what}?${new URLSearchParams(query)}`, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  return answer.json();
}

class Live {
  live = true;
  #known = new Map();

  runs() { return asked("runs", {}); }
  facts(run) { return asked("run", { run }); }
  verdict(run) { return asked("verdict", { run }); }
  links(run) { return asked("links", { run }); }
  memory(run, range, rank) { return asked("memory", { run, rank, ...range }); }
  heat(run, range, phase) { return asked("heat", { run, phase, ...range }); }
  spans(run, range) { return asked("spans", { run, ...range }); }

  // What is new since the last time, put behind what is known; all of it when the steps shown are others.
  async charts(run, range) {
    const key = JSON.stringify([run, range.first, range.columns]);
    const known = this.#known.get(key);
    const since = known && !("last" in range) ? { since: known.version, width: known.width } : {};
    const fresh = await asked("charts", { run, ...range, ...since });
    const whole = known && since.width === fresh.width && fresh.begin > fresh.first ? joined(known, fresh) : fresh;
    if (this.#known.size > 20) this.#known.clear();
    this.#known.set(key, whole);
    return whole;
  }
}

function joined(known, fresh) {
  const kept = known.steps.findIndex((step) => step >= fresh.begin);
  const count = kept < 0 ? known.steps.length : kept;
  const gap = (size) => new Array(size).fill(null);
  const series = Object.create(null); // no name of a metric is one of the language's
  for (const name of new Set([...Object.keys(known.series), ...Object.keys(fresh.series)])) {
    const before = known.series[name] || { low: gap(known.steps.length) };
    const after = fresh.series[name] || { low: gap(fresh.steps.length) };
    const put = (side) => [...(before[side] || before.low).slice(0, count), ...(after[side] || after.low)];
    series[name] = before.high || after.high ? { low: put("low"), high: put("high") } : { low: put("low") };
  }
  return { ...fresh, steps: [...known.steps.slice(0, count), ...fresh.steps], series };
}

class Carried {
  live = false;

  constructor(told) { this.told = told; }
  async runs() { return [this.told.run]; }
  async facts() { return this.told.run; }
  async verdict() { return this.told.verdict; }
  async spans() { return this.told.spans; }
  async links() { return this.told.links; }
  async heat(run, range, phase) { return cropped(this.told.heat[phase] || this.told.heat.total, range); }

  async memory(run, range, rank) {
    const known = Object.keys(this.told.memory);
    const own = this.told.memory[rank] ?? this.told.memory[known[0]] ?? { parts: {}, wholes: {}, steps: [], ranks: [] };
    const kept = own.steps.map((step) => step + own.width > range.first && step < (range.last ?? Infinity));
    const pick = (lists) => Object.fromEntries(Object.entries(lists).map(([name, list]) => [name, list.filter((_, at) => kept[at])]));
    return {
      ...own, ranks: known.map(Number), parts: pick(own.parts), wholes: pick(own.wholes), steps: own.steps.filter((_, at) => kept[at]),
      first: range.first, last: range.last ?? own.last,
    };
  }

  async charts(run, range) {
    const { charts } = this.told;
    const kept = charts.steps.map((step) => step + charts.width > range.first && step < (range.last ?? Infinity));
    const pick = (list) => list && list.filter((_, at) => kept[at]);
    const series = Object.create(null);
    for (const [name, both] of Object.entries(charts.series)) {
      series[name] = both.high ? { low: pick(both.low), high: pick(both.high) } : { low: pick(both.low) };
    }
    return { ...charts, steps: pick(charts.steps), series, first: range.first, last: range.last ?? charts.last };
  }
}

// Some columns of a map that was made of all steps.
function cropped(heat, range) {
  const from = Math.max(0, Math.floor((range.first - heat.first) / heat.width));
  const to = Math.min(heat.columns, Math.ceil(((range.last ?? heat.last) - heat.first) / heat.width));
  if (from === 0 && to === heat.columns) return heat;
  const text = atob(heat.cells);
  let cells = "";
  for (let row = 0; row < heat.rows; row += 1) cells += text.slice(2 * (row * heat.columns + from), 2 * (row * heat.columns + to));
  const first = heat.first + from * heat.width;
  return { ...heat, first, last: Math.min(heat.last, heat.first + to * heat.width), columns: to - from, cells: btoa(cells) };
}

export function source() {
  const told = document.getElementById("told");
  return told ? new Carried(JSON.parse(told.textContent)) : new Live();
}
