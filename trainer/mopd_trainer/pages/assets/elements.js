"use strict";
/* Elements, numbers, settings of the reader, and the colour theme. */

/** Create an element: `h("p.note", {title: "…"}, "text", child)`. Text is never parsed as HTML. */
function h(selector, attributes = {}, ...children) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Create an SVG element. */
function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The data that the page was written with. */
const embeddedData = () => JSON.parse(document.getElementById("data").textContent);

const wholeNumber = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A number in few characters: 1,234 · 0.0123 · 1.2e-5. */
function shortNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1000) return wholeNumber.format(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

const percentText = (value) =>
  value === null || value === undefined || Number.isNaN(value)
    ? "–"
    : value !== 0 && Math.abs(value) < 5e-5 ? `${(100 * value).toExponential(0)}%`
    : `${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 2 : 1)}%`;

/** Seconds as 4.2 s · 3 min 20 s · 2 h 5 min · 3 d 4 h. */
function durationText(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toPrecision(2) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Bytes as 512 B · 176 KiB · 1.25 MiB · 3.4 GiB. */
function bytesText(bytes) {
  if (!Number.isFinite(bytes)) return "–";
  const power = [3, 2, 1].find((each) => Math.abs(bytes) >= 1024 ** each) ?? 0;
  return `${Number((bytes / 1024 ** power).toPrecision(3))} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

/** True if values differ by no more than rounding. */
const isConstant = (low, high) => high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));

/** A value in the unit of its metric. */
function valueText(value, unit) {
  if (unit === "share") return percentText(value);
  if (unit === "s") return durationText(value);
  if (unit === "bytes") return bytesText(value);
  return shortNumber(value);
}

/** Settings of the reader, kept in this browser where it permits that. */
const preferences = {
  read(name, fallback) {
    try {
      const text = localStorage.getItem(`mopd.${name}`);
      return text === null ? fallback : JSON.parse(text);
    } catch {
      return fallback;
    }
  },
  save(name, value) {
    try {
      localStorage.setItem(`mopd.${name}`, JSON.stringify(value));
    } catch {
      // A browser may keep nothing for files; the setting lasts as long as the page.
    }
  },
};

/** Light or dark: the system's, until the reader chooses. */
const theme = {
  listeners: [],
  system: matchMedia("(prefers-color-scheme: dark)"),
  chosen: preferences.read("theme", null),
  name() {
    return this.chosen ?? (this.system.matches ? "dark" : "light");
  },
  apply() {
    document.documentElement.dataset.theme = this.name();
    for (const listener of this.listeners) listener();
  },
  toggle() {
    this.chosen = this.name() === "dark" ? "light" : "dark";
    preferences.save("theme", this.chosen);
    this.apply();
  },
};
theme.system.addEventListener("change", () => theme.apply());
addEventListener("storage", () => { // chosen on another page
  theme.chosen = preferences.read("theme", theme.chosen);
  theme.apply();
});
theme.apply();

/** The value of a CSS variable. */
const cssVariable = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const themeButton = () =>
  h("button.icon", { type: "button", title: "Light or dark (d)", "aria-label": "Light or dark",
    onclick: () => theme.toggle() }, "◐");

/** A line without axes, for a tile or a table. Values: numbers or NaN. */
function sparkline(values, { width = 96, height = 24, floor = null } = {}) {
  const image = drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", "aria-hidden": "true" });
  const step = Math.max(1, Math.floor(values.length / width));
  const points = [];
  for (let index = 0; index < values.length; index += step) {
    if (Number.isFinite(values[index])) points.push([index, values[index]]);
  }
  if (points.length < 2) return image;
  const low = floor ?? Math.min(...points.map((point) => point[1]));
  const high = Math.max(...points.map((point) => point[1]));
  const x = (index) => (index / (values.length - 1)) * (width - 2) + 1;
  const share = (value) => (isConstant(low, high) ? 0.5 : (value - low) / (high - low));
  const y = (value) => height - 2 - share(value) * (height - 4);
  const path = points.map(([index, value]) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`);
  image.append(drawn("polyline", { points: path.join(" ") }));
  return image;
}

/** A dialog with the keys of the page. Rows: [keys, meaning]. */
function keyHelp(rows) {
  const dialog = h("dialog.help", { "aria-label": "Keys" },
    h("h2", {}, "Keys"),
    h("table", {}, rows.map(([keys, meaning]) =>
      h("tr", {}, h("td", {}, keys.split(" ").map((key) => h("kbd", {}, key))), h("td", {}, meaning)))),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);
  return dialog;
}

/** True if a key event belongs to a field in which the reader types or chooses. */
const isTyping = (event) =>
  event.ctrlKey || event.metaKey || event.altKey ||
  /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName ?? "");
