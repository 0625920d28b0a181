// What is told in words: the verdict, what happened, and what is true of the run.
import { clock, make, number, replace, table } from "./words.js";

// unheard: that a newer start has done nothing yet, if so; then the verdict is of what came before it.
export function showVerdict(place, verdict, unheard = "") {
  const told = JSON.stringify([verdict, unheard]);
  if (place.dataset.told === told) return; // or a screen reader would say it again
  place.dataset.told = told;
  place.classList.toggle("fails", !verdict.holds && !unheard);
  place.classList.toggle("waits", Boolean(verdict.pending || unheard));
  const evidence = verdict.evidence?.length ? [make("ul", {}, ...verdict.evidence.map((text) => make("li", { text })))] : [];
  const next = verdict.next ? [make("p", { class: "next", text: verdict.next })] : [];
  const looking = verdict.pending ? [make("p", { class: "next", text: "Looking for what is wrong, if anything is." })] : [];
  const now = unheard ? [make("strong", { text: unheard }), make("p", { class: "next", text: "Before that:" })] : [];
  replace(place, ...now, make(unheard ? "span" : "strong", { text: verdict.summary }), ...evidence, ...next, ...looking);
}

export function showEvents(place, facts) {
  const marks = [...facts.marks].sort((a, b) => (b.time ?? 0) - (a.time ?? 0));
  const told = JSON.stringify(marks);
  if (place.dataset.told === told) return;
  place.dataset.told = told;
  if (!marks.length) { replace(place, make("p", { class: "quiet", text: "None so far." })); return; }
  const rows = marks.map((mark) => [clock(mark.time), number(mark.step), mark.kind, `rank ${mark.rank}`, mark.words]);
  replace(place, table(`${number(marks.length)} of them, the newest first`, ["When", "After step", "What", "Who", "In words"], rows, [1]));
}

export function showFacts(place, facts) {
  const told = JSON.stringify([facts.settings, facts.certificate, facts.proof, facts.counts]);
  if (place.dataset.told === told) return;
  place.dataset.told = told;
  const parts = [part("Again", make("p", {}, "The same run in another folder: ", make("code", { text: facts.again })))];
  if (facts.certificate) parts.push(part("Certificate", pairs("Certificate", plain(facts.certificate))));
  if (facts.proof) {
    const rows = facts.proof.results.map((each) => [each.layout, each.verdict]);
    parts.push(part("Proof", table(`From ${facts.proof.from}, code ${facts.proof.code ?? "unknown"}`, ["Layout", "Verdict"], rows)));
  }
  parts.push(part("Settings", pairs("Settings", facts.settings)));
  parts.push(part("Noted", pairs("Events beside steps", facts.counts)));
  replace(place, ...parts);
}

function part(title, content) {
  return make("div", {}, make("h3", { text: title }), content);
}

function pairs(caption, values) {
  const found = table(caption, ["Name", "Value"], Object.entries(values).map(([name, value]) => [name, String(value)]));
  found.querySelector("caption").className = "heard"; // the heading above says it
  return found;
}

function plain(values) {
  return Object.fromEntries(Object.entries(values).map(([name, value]) => [
    name, Array.isArray(value) && !value.length ? "none" : value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : value,
  ]));
}
