// The page: which run and which steps are shown, and when to ask for more.
import { make, number, replace } from "./words.js";
import { themeSwitch } from "./theme.js";
import { source } from "./source.js";
import { Charts } from "./charts.js";
import { HeatMap, phaseName } from "./heat.js";
import { TimeLine } from "./spans.js";
import { MemoryChart } from "./memory.js";
import { LinkMap } from "./links.js";
import { RunList } from "./runs.js";
import { showEvents, showFacts, showVerdict } from "./facts.js";

const LOOK_MILLISECONDS = 1000;
const LIST_MILLISECONDS = 5000;
const READING_MILLISECONDS = 200;
const by = (id) => document.getElementById(id);
const data = source();
const state = { run: "", first: 0, last: null, phase: "own", rank: 0, compared: new Set(), version: -1, asked: 0, stale: true, runs: [], listed: 0, drawn: 0, linked: 0, reading: false };

const charts = new Charts(by("charts"), by("constants"), zoom);
const heat = new HeatMap(by("heat"), by("heat-scale"), by("heat-table"), zoom, whole);
const line = new TimeLine(by("spans"), by("spans-note"), by("legend"), by("spans-table"), by("spans-back"));
const memory = new MemoryChart(by("memory-section"), by("memory"), by("memory-legend"), by("memory-table"), by("memory-rank"), (rank) => { state.rank = rank; renew(); });
const links = new LinkMap(by("links-section"), by("links"), by("links-axes"), by("axis"), by("links-scale"), by("links-table"));
const list = new RunList(by("runs"), by("differences"), choose, (name, on) => {
  if (on) state.compared.add(name); else state.compared.delete(name);
  renew();
});

function zoom(first, last) {
  Object.assign(state, { first: Math.max(0, first), last: Math.max(first + 1, last) });
  renew();
}

function whole() {
  Object.assign(state, { first: 0, last: null });
  renew();
}

function choose(name) {
  state.compared.delete(name);
  Object.assign(state, { run: name, first: 0, last: null, linked: 0, rank: 0 });
  renew();
}

function renew() {
  state.stale = true;
  look();
}

function range() {
  const columns = Math.max(100, Math.min(1000, by("charts").clientWidth || 800));
  return { first: state.first, columns, ...(state.last === null ? {} : { last: state.last }) };
}

function showRange(facts) {
  for (const [id, value] of [["first", state.first + 1], ["last", state.last ?? facts.steps]]) {
    if (document.activeElement !== by(id)) by(id).value = value;
    by(id).max = facts.steps;
  }
  by("zoom-out").setAttribute("aria-pressed", String(state.first === 0 && state.last === null));
}

function showNames(runs, facts) {
  document.title = `${facts.name}: ${facts.state}`;
  by("title").textContent = facts.name;
  by("subtitle").textContent = `${facts.task} on ${facts.layout}, ${number(facts.ranks)} rank${facts.ranks === 1 ? "" : "s"}`;
  const names = runs.map((run) => run.name);
  if (names.join("/") !== by("run").dataset.names) {
    by("run").dataset.names = names.join("/");
    replace(by("run"), ...names.map((name) => make("option", { value: name, text: name })));
  }
  by("run").value = facts.name;
  for (const id of ["run", "run-label"]) by(id).hidden = names.length < 2;
  by("runs-section").hidden = names.length < 2;
}

function showPhases(phases) {
  if (phases.join() === by("phase").dataset.names) return;
  by("phase").dataset.names = phases.join();
  replace(by("phase"), ...phases.map((name) => make("option", { value: name, text: phaseName(name) })));
  by("phase").value = state.phase;
}

// Asks for what may be new. Whatever is asked for again meanwhile makes the answers of this time void.
async function look() {
  const ticket = (state.asked += 1);
  try {
    if (Date.now() - state.listed > LIST_MILLISECONDS) Object.assign(state, { runs: await data.runs(), listed: Date.now() });
    const { runs } = state;
    if (!runs.length) { by("live").textContent = "no run is here yet"; return; }
    if (!runs.some((run) => run.name === state.run)) state.run = runs.at(-1).name;
    const facts = await data.facts(state.run);
    if (ticket !== state.asked) return;
    showNames(runs, facts);
    showRange(facts);
    const read = facts.reading ? `reading: ${number(facts.ranks)} of ${number(facts.of_ranks)} ranks` : "";
    state.reading = Boolean(read);
    const fresh = facts.version !== state.version || state.compared.size;
    const waits = read && Date.now() - state.drawn < LIST_MILLISECONDS; // or drawing would slow the reading down
    if (state.stale || (fresh && !waits)) await draw(ticket, facts);
    if (ticket !== state.asked) return;
    showEvents(by("events"), facts);
    showFacts(by("facts"), facts);
    list.show(runs, state.run, state.compared);
    by("live").textContent = !data.live ? "" : read || (facts.state === "running" ? "live" : facts.state);
    document.body.dataset.ready = `${state.run} ${state.first} ${state.last ?? ""} ${facts.steps}`;
    conclude(ticket, facts);
    if (!read) connect();
  } catch (error) {
    by("live").textContent = `no answer: ${error.message}`;
  }
}

async function draw(ticket, facts) {
  const names = [state.run, ...state.compared];
  const sets = await Promise.all(names.map(async (run) => ({ run, charts: await data.charts(run, range()) })));
  if (ticket !== state.asked) return;
  charts.show(sets, facts.marks);
  const [cells, spans, held] = await Promise.all([
    data.heat(state.run, range(), state.phase), data.spans(state.run, range()), data.memory(state.run, range(), state.rank),
  ]);
  if (ticket !== state.asked) return;
  Object.assign(state, { version: facts.version, stale: false, drawn: Date.now() });
  showPhases(cells.phases);
  heat.show(cells, facts.hosts);
  line.show(spans, facts.hosts);
  memory.show(held, facts.hosts);
}

// The verdict and the links take a while to find: nothing else waits for them.
async function conclude(ticket, facts) {
  const verdict = await data.verdict(state.run).catch((error) => ({ holds: false, summary: `no answer: ${error.message}` }));
  if (ticket !== state.asked) return;
  showVerdict(by("verdict"), verdict, facts.unheard);
  document.body.dataset.concluded = verdict.pending ? "" : state.run;
}

async function connect() {
  if (Date.now() - state.linked < LIST_MILLISECONDS || (!data.live && state.linked)) return;
  const run = state.run;
  const found = await data.links(run).catch(() => null);
  if (!found || run !== state.run) return;
  state.linked = Date.now();
  links.show(found);
}

function typed() {
  const [first, last] = ["first", "last"].map((id) => Math.round(Number(by(id).value)));
  if (first >= 1 && last >= first) zoom(first - 1, last);
}

by("run").addEventListener("change", () => choose(by("run").value));
by("phase").addEventListener("change", () => { state.phase = by("phase").value; renew(); });
for (const id of ["first", "last"]) by(id).addEventListener("change", typed);
by("zoom-out").addEventListener("click", whole);
themeSwitch(by("theme"), () => { charts.redraw(); for (const each of [heat, line, memory, links]) each.redraw(); });
addEventListener("resize", () => { for (const each of [heat, line, links]) each.redraw(); });

async function watch() {
  if (!document.hidden) await look();
  if (data.live) setTimeout(watch, state.reading ? READING_MILLISECONDS : LOOK_MILLISECONDS);
}
watch();
