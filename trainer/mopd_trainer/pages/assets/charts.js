"use strict";
/* One chart: uPlot with a legend of buttons, a shared cursor and a shared zoom. */

/** State that all charts share. */
const chartState = {
  charts: new Set(),
  smoothing: preferences.read("smoothing", 0),
  logarithmic: preferences.read("logarithmic", false),
  zoom: null, // [first step, last step]
  /** Move the cursor of every chart to a step. */
  setStep(step) {
    for (const { plot } of this.charts) plot?.setCursor({ left: plot.valToPos(step, "x"), top: 20 });
  },
  setZoom(range) {
    this.zoom = range;
    for (const chart of this.charts) chart.applyZoom();
    document.getElementById("reset-zoom")?.toggleAttribute("disabled", range === null);
  },
};

const seriesColour = (number) => cssVariable(`series-${number % 8}`);
const DASHES = [[], [6, 4]];

/** Exponential moving average that skips NaN; the first values are not pulled to zero. */
function smoothed(values, weight) {
  let total = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = weight * total + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return total / mass;
  });
}

/** Repeat the last value up to the end. */
function extendLast(values) {
  let row = values.length - 1;
  while (row >= 0 && values[row] === null) row--;
  if (row >= 0) values.fill(values[row], row + 1);
}

/** Steps between ticks of bytes: powers of two have short labels. */
const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);

const measuring = document.createElement("canvas").getContext("2d");

/** Width of an axis in pixels that its longest label fits into; equal for most charts. */
function labelWidth(labels, font) {
  measuring.font = font;
  const widths = labels.map((label) => measuring.measureText(label).width);
  return Math.max(54, Math.ceil(Math.max(0, ...widths)) + 14);
}

/** `lines`: {label, key, run, colour, low, high}; `low` and `high` are keys of a band's ends. */
class Chart {
  constructor({ title, note = "", unit = "", lines, share = false }) {
    Object.assign(this, { title, unit, lines, share });
    this.hidden = new Set(); // numbers of lines
    this.plot = null;
    this.legend = h("div.legend");
    this.canvas = h("div.canvas", { tabindex: 0, role: "img" });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.element = h("figure.chart", {},
      h("figcaption", {}, h("h3", { title: note || title }, title), h("span.unit", {}, share ? "" : unit)),
      this.canvas, this.legend);
    this.element.chart = this;
    chartState.charts.add(this);
    this.drawLegend();
  }

  /** Values of a key as uPlot's, null where nothing was measured. */
  values(run, key) {
    const column = run.column(key) ?? [];
    return run.steps.map((_, row) => (Number.isFinite(column[row]) ? column[row] : null));
  }

  /** [steps, ...values] of all series, and the series' options. */
  content() {
    const raw = chartState.smoothing > 0;
    const series = [], tables = new Map();
    const add = (run, values, options) => {
      if (!tables.has(run)) tables.set(run, [run.steps]);
      tables.get(run).push(values);
      series.push({ run, options });
    };
    this.lines.forEach((line, number) => {
      const { run } = line, colour = seriesColour(line.colour), show = !this.hidden.has(number);
      const values = this.values(run, line.key);
      if (line.isReference) extendLast(values); // a teacher is evaluated once
      const measured = values.reduce((count, value) => count + (value !== null), 0);
      const sparse = measured < values.length / 2;
      const common = { show, spanGaps: sparse, stroke: colour,
        dash: line.isReference ? [2, 3] : DASHES[run.index] ?? [] };
      if (line.low && !line.isReference) {
        for (const key of [line.high, line.low]) {
          const isTop = key === line.high;
          add(run, this.values(run, key), { ...common, width: 0.5, points: { show: false }, isTop });
        }
      }
      if (raw) add(run, values, { ...common, width: 1, alpha: 0.25, points: { show: false } });
      add(run, raw ? smoothed(values, chartState.smoothing) : values, {
        ...common, width: 1.75, line: number,
        points: { show: sparse && measured < 200, size: 5, fill: colour },
      });
    });
    // uPlot's join orders the columns by table; the series have to follow.
    const runs = [...tables.keys()];
    const ordered = runs.flatMap((run) => series.filter((each) => each.run === run));
    const joined = runs.length > 1
      ? uPlot.join([...tables.values()], [...tables.values()].map((table) => table.map(() => 1)))
      : [...tables.values()][0] ?? [[]];
    return { data: joined, series: ordered.map((each) => each.options) };
  }

  draw() {
    const { data, series } = this.content();
    this.plot?.destroy();
    this.canvas.replaceChildren();
    this.measured = true;
    const muted = cssVariable("muted"), grid = { stroke: cssVariable("grid"), width: 1 };
    const bands = series.flatMap((options, index) =>
      options.isTop ? [{ series: [index + 1, index + 2], fill: `${options.stroke}22` }] : []);
    const logarithmic = chartState.logarithmic && !this.share && this.isPositive(data);
    const font = `11px ${cssVariable("font")}`;
    const axis = { stroke: muted, grid, ticks: { ...grid, size: 4 }, font };
    const range = (plot, low, high) => {
      if (low === null) return [0, 1];
      if (this.share) return [Math.min(0, low), Math.max(1, high)];
      // Rounding of a constant is no range: uPlot would not finish to search its ticks.
      const margin = isConstant(low, high) ? Math.abs(high) * 0.1 || 0.1 : (high - low) * 0.06;
      return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
    };
    this.plot = new uPlot({
      width: this.canvas.clientWidth || 400,
      height: 190,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: "steps", setSeries: false, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        bind: { dblclick: () => () => chartState.setZoom(null) },
      },
      scales: { x: { time: false }, y: logarithmic ? { distr: 3 } : { range } },
      axes: [
        { ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => wholeNumber.format(tick)),
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        { ...axis, size: (_, labels) => labelWidth(labels ?? [], font),
          ...(this.unit === "bytes" && !logarithmic ? { incrs: BYTE_STEPS } : {}),
          values: (_, ticks) => ticks.map((tick) => this.tickText(tick)) },
      ],
      series: [{}, ...series],
      bands,
      hooks: {
        setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        setSelect: [(plot) => this.zoomToSelection(plot)],
      },
    }, data, this.canvas);
    this.plot.over.setAttribute("aria-hidden", "true");
    this.applyZoom();
    this.showValues(null);
  }

  isPositive(data) {
    return data.slice(1).every((column) => column.every((value) => value === null || value === undefined || value > 0));
  }

  tickText(tick) {
    if (tick === null) return "";
    if (this.share) return `${Math.round(tick * 100)}%`;
    return this.unit === "bytes" ? bytesText(tick) : shortNumber(tick);
  }

  /** Show new steps; the zoom stays. */
  update() {
    if (this.plot === null) return;
    this.plot.setData(this.content().data, false);
    this.applyZoom();
    this.showValues(this.plot.cursor.idx);
  }

  applyZoom() {
    if (this.plot === null) return;
    const steps = this.plot.data[0];
    const [low, high] = chartState.zoom ?? [steps[0] ?? 0, steps.at(-1) ?? 1];
    this.plot.setScale("x", { min: low, max: Math.max(high, low + 1) });
  }

  zoomToSelection(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    chartState.setZoom(range);
  }

  drawLegend() {
    this.entries = this.lines.map((line, number) => {
      const value = h("span.value");
      const swatch = drawn("svg", { viewBox: "0 0 18 8", class: "swatch", "aria-hidden": "true" },
        drawn("line", { x1: 0, x2: 18, y1: 4, y2: 4, class: `colour-${line.colour % 8}`,
          "stroke-dasharray": line.isReference ? "2 2" : line.run.index ? "5 3" : "none" }));
      const button = h("button", { type: "button", title: `${line.run.name}: ${line.meaning ?? line.key}`, "aria-pressed": "true",
        onclick: (event) => this.toggle(number, event.shiftKey) }, swatch, h("span", {}, line.label), value);
      return { button, value };
    });
    this.legend.replaceChildren(...this.entries.map((entry) => entry.button));
  }

  /** Hide or show a line; `only`: hide all others, or show all. */
  toggle(number, only) {
    if (only) {
      const alone = this.hidden.size === this.lines.length - 1 && !this.hidden.has(number);
      this.hidden = new Set(alone ? [] : this.lines.keys());
      this.hidden.delete(number);
    } else if (!this.hidden.delete(number)) this.hidden.add(number);
    this.entries.forEach(({ button }, index) => button.setAttribute("aria-pressed", !this.hidden.has(index)));
    this.draw();
  }

  /** Show the values at a row of the plot, or the last ones. */
  showValues(row) {
    const described = [];
    this.lines.forEach((line, number) => {
      let value = NaN;
      if (row !== null && row !== undefined && this.plot) {
        const step = this.plot.data[0][row];
        const at = line.run.steps.indexOf(step);
        value = at < 0 ? NaN : line.isReference ? line.run.last(line.key) : (line.run.column(line.key) ?? [])[at];
      } else value = line.run.last(line.key);
      this.entries[number].value.textContent = this.share ? percentText(value) : valueText(value, this.unit);
      described.push(`${line.label} ${this.entries[number].value.textContent}`);
    });
    const step = row === null || row === undefined ? "last values" : `step ${wholeNumber.format(this.plot.data[0][row])}`;
    this.canvas.setAttribute("aria-label", `${this.title}, ${step}: ${described.join("; ")}`);
    this.element.dataset.step = row === null || row === undefined ? "" : this.plot.data[0][row];
  }

  key(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = this.plot.data[0], row = this.plot.cursor.idx ?? steps.length - 1;
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 }[event.key];
    if (move !== undefined) {
      const next = Math.min(steps.length - 1, Math.max(0, row + move));
      chartState.setStep(steps[next]);
    } else if (event.key === "+" || event.key === "-") {
      const [low, high] = chartState.zoom ?? [steps[0], steps.at(-1)];
      const half = ((high - low) / 2) * (event.key === "+" ? 0.5 : 2), centre = steps[row];
      const range = [Math.max(steps[0], centre - half), Math.min(steps.at(-1), centre + half)];
      chartState.setZoom(range[1] - range[0] > 0.95 * (steps.at(-1) - steps[0]) ? null : range);
    } else if (event.key === "0" || event.key === "Escape") chartState.setZoom(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Draws charts when they come near the window, and again when their width changes. */
const nearWindow = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting && !target.chart.plot) target.chart.draw();
  }
}, { rootMargin: "300px" });

const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const { plot } = target.parentElement.chart;
    if (plot && contentRect.width > 0 && Math.abs(plot.width - contentRect.width) > 1) {
      plot.setSize({ width: contentRect.width, height: plot.height });
    }
  }
});

function redrawCharts() {
  for (const chart of chartState.charts) if (chart.plot) chart.draw();
}
theme.listeners.push(redrawCharts);
