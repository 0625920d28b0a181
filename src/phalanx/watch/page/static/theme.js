// Light, dark, or as the system is: a switch that is remembered where the browser allows it.

const THEMES = ["system", "light", "dark"];

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
