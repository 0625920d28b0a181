// Light, dark, or as the system is: a switch that is remembered where the browser allows it. And colours that follow it.

const THEMES = ["system", "light", "dark"];
const LIGHT = [[240, 238, 233], [168, 199, 219], [58, 121, 178], [22, 44, 92]];
const DARK = [[33, 38, 44], [40, 83, 122], [104, 166, 214], [249, 232, 182]];

function remembered() {
  try { return localStorage.getItem("phalanx-theme") || "system"; } catch { return "system"; }
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// From little to much, as 256 colours of a map's cells.
export function shades() {
  const stops = isDark() ? DARK : LIGHT;
  return Array.from({ length: 256 }, (_, value) => {
    const at = (value / 255) * (stops.length - 1);
    const from = Math.min(stops.length - 2, Math.floor(at));
    return stops[from].map((low, part) => Math.round(low + (stops[from + 1][part] - low) * (at - from)));
  });
}

// The same, as a bar between two words.
export function shadeBar(bar) {
  const stops = (isDark() ? DARK : LIGHT).map((parts) => `rgb(${parts.join(" ")})`);
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
}

export function themeSwitch(button, changed) {
  let now = remembered();
  const apply = () => {
    if (now === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = now;
    button.textContent = `Theme: ${now}`;
  };
  button.addEventListener("click", () => {
    now = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    try { localStorage.setItem("phalanx-theme", now); } catch { /* a report opened from a file may have no storage */ }
    apply();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply();
}
