"use strict";
/* The curves of a run: groups of charts, chosen by the names of the metrics. */

const teacherMetric = (last) => new RegExp(`^teacher/(.+)/${last}$`);

/* A chart takes the metrics that `keys` names or `match` matches; the first group of a match is the
   label. `band`: from a key to the keys of its lower and upper end. */
const GROUPS = [
  ["Evaluation", [
    { title: "Accuracy", share: true, match: /^evaluation\/(.+)\/accuracy$/, except: /\/source\//,
      band: (key) => [`${key}_low`, `${key}_high`], note: "greedy, with the 95 % interval" },
    { title: "Accuracy of samples", share: true, match: /^evaluation\/(.+)\/sampled_accuracy$/, except: /\/source\//,
      band: (key) => [`${key}_low`, `${key}_high`], note: "with the 95 % interval" },
    { title: "Pass@k", share: true, match: /^evaluation\/(.+\/pass_at_\d+)$/ },
    { title: "Gap closed", share: true, match: /^evaluation\/(.+gap_closed\/.+)$/,
      note: "(student - before) / (teacher - before)" },
    { title: "Bits per byte of the reference answers", match: /^evaluation\/(.+\/bits_per_byte)$/, except: /\/source\// },
    { title: "Accuracy by source", share: true, match: /^evaluation\/(.+\/source\/.+accuracy)$/ },
  ]],
  ["Loss", [
    { title: "Loss per compared token", keys: ["loss", "sft/loss_per_token"] },
    { title: "Loss by teacher", match: teacherMetric("loss") },
    { title: "Reverse KL to each teacher, estimated", match: teacherMetric("reverse_kl_estimate") },
    { title: "Tokens that are compared", share: true, keys: ["compared_share"], match: teacherMetric("compared_share") },
  ]],
  ["Distributions", [
    { title: "Student's entropy", keys: ["rollout/entropy"] },
    { title: "Teachers' entropy, bounds", match: teacherMetric("entropy_low"),
      band: (key) => [key, key.replace(/low$/, "high")] },
    { title: "Entropy per byte, student and teachers", keys: ["rollout/entropy_per_byte", "rollout/teacher_entropy_per_byte"] },
    { title: "Teacher top-k coverage", share: true, match: teacherMetric("teacher_mass_mean") },
    { title: "Student's probability of the compared ids", share: true, match: teacherMetric("student_mass_mean") },
  ]],
  ["Samples", [
    { title: "Completion length", match: /^rollout\/completion_tokens_(min|p50|p95|max)$/ },
    { title: "Finished with an ending token", share: true, keys: ["rollout/finished_share"] },
    { title: "Bytes that are not UTF-8", keys: ["rollout/invalid_byte_share"], unit: "share" },
    { title: "Staleness", match: /^staleness\/(.+)$/ },
    { title: "Dropped samples", match: /^dropped\/(.+)$/ },
  ]],
  ["Teachers", [
    { title: "Seconds per request, median", match: teacherMetric("score_seconds_p50") },
    { title: "Seconds per request, 95th percentile", match: teacherMetric("score_seconds_p95") },
    { title: "Retries, failures and waits", match: /^teacher\/(.+\/(?:retries|failures|waits|fallbacks|breaker_openings))$/ },
    { title: "Fraction of the step's tokens", share: true, match: teacherMetric("token_fraction") },
    { title: "Bytes in aligned spans", share: true, match: teacherMetric("alignment_ratio") },
    { title: "Received bytes", match: teacherMetric("received_bytes") },
  ]],
  ["Speed", [
    { title: "Seconds by phase", keys: ["time/step", "time/sample", "time/score", "time/wait", "time/train", "time/evaluate", "time/push"],
      note: "Phases may overlap" },
    { title: "Tokens per second", match: /^throughput\/(.+)$/ },
    { title: "Peak memory", match: /^memory\/(.+)$/ },
    { title: "Tokens per step", keys: ["tokens/trained", "rollout/tokens"] },
  ]],
  ["Optimizer", [
    { title: "Gradient norm", keys: ["grad_norm"] },
    { title: "Learning rate", keys: ["learning_rate"] },
    { title: "Objective, nats per token", keys: ["objective"] },
    { title: "Skipped steps", match: /^update\/(.+)$/ },
  ]],
];

/** A set, or a set and a model, of an evaluation's key. */
const shortLabel = (name) => name.replace(/^(.+?)\/teacher\/(.+)$/, "$1, teacher $2")
  .replace(/^(.+?)\/(sampled_)?gap_closed\/(.+)$/, (_, set, sampled, teacher) =>
    `${set}${set === teacher ? "" : ` to ${teacher}`}${sampled ? ", sampled" : ""}`);

class Curves {
  constructor(runs, metrics) {
    this.runs = runs;
    this.metrics = metrics;
    this.filter = "";
    this.panels = h("div.panels");
    this.nothing = h("p.empty", { hidden: true }, "No metric has this name.");
    this.element = h("section", { "aria-label": "Curves" }, this.toolbar(), this.nothing, this.panels);
    this.build();
  }

  toolbar() {
    const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: chartState.smoothing,
      "aria-label": "Smoothing", oninput: () => {
        chartState.smoothing = Number(smoothing.value);
        preferences.save("smoothing", chartState.smoothing);
        redrawCharts();
      } });
    const logarithmic = h("input", { type: "checkbox", checked: chartState.logarithmic, onchange: () => {
      chartState.logarithmic = logarithmic.checked;
      preferences.save("logarithmic", chartState.logarithmic);
      redrawCharts();
    } });
    this.search = h("input", { type: "search", placeholder: "Filter metrics  /", "aria-label": "Filter metrics",
      oninput: () => { this.filter = this.search.value.trim().toLowerCase(); this.build(); } });
    const reset = h("button", { type: "button", id: "reset-zoom", disabled: true, title: "0 or double click",
      onclick: () => chartState.setZoom(null) }, "Reset zoom");
    return h("div.toolbar", {}, this.search, h("label", {}, "Smoothing ", smoothing),
      h("label", {}, logarithmic, " Logarithmic"), reset,
      h("span.hint", {}, "Drag to zoom. Click a name to hide its line, with Shift to isolate it."));
  }

  /** Create all charts of the metrics that the runs have. */
  build() {
    const keys = [...new Set(this.runs.flatMap((run) => run.keys))];
    this.known = keys.length;
    const used = new Set();
    chartState.charts.clear();
    this.panels.replaceChildren();
    let count = 0;
    for (const [name, specs] of GROUPS) {
      const charts = specs.map((spec) => this.chart(spec, keys, used)).filter(Boolean);
      count += charts.length;
      if (charts.length) this.panels.append(this.panel(name, charts));
    }
    const others = this.others(keys.filter((key) => !used.has(key)));
    count += others.length;
    if (others.length) this.panels.append(this.panel("All other metrics", others, !this.filter));
    this.nothing.hidden = count > 0;
  }

  panel(name, charts, closed = false) {
    const grid = h("div.charts", {}, charts.map((chart) => chart.element));
    for (const chart of charts) {
      nearWindow.observe(chart.element);
      sizes.observe(chart.canvas);
    }
    return h("details.panel", { open: !closed },
      h("summary", {}, h("h2", {}, name), h("span.count", {}, String(charts.length))), grid);
  }

  /** A chart of a spec; null if the runs have none of its metrics. */
  chart(spec, keys, used) {
    const labels = new Map();
    for (const key of spec.keys ?? []) if (keys.includes(key)) labels.set(key, key.replace(/^(time|rollout|tokens)\//, ""));
    for (const key of keys) {
      const match = spec.match?.exec(key);
      if (!match || spec.except?.test(key)) continue;
      labels.set(key, match[1] ?? key);
    }
    if (!labels.size) return null;
    for (const key of labels.keys()) {
      used.add(key);
      for (const end of spec.band?.(key) ?? []) used.add(end);
    }
    const shown = [...labels.keys()].filter((key) => this.isShown(key, spec.title));
    if (!shown.length) return null;
    const lines = shown.flatMap((key, number) => this.runs.filter((run) => run.has(key)).map((run) => {
      const [low, high] = spec.band?.(key) ?? [];
      const band = run.has(low) && run.has(high) ? { low, high } : {};
      const colour = shown.length > 1 ? number : run.index;
      return { key, run, colour, meaning: this.meaning(key), ...band,
        isReference: evaluationParts(key)?.teacher > "",
        label: this.runs.length > 1 && shown.length === 1 ? run.name : shortLabel(labels.get(key)) };
    }));
    const unit = spec.unit ?? this.metrics[shown[0]]?.[0] ?? "";
    return new Chart({ title: spec.title, note: spec.note ?? this.meaning(shown[0]), unit, lines, share: spec.share ?? unit === "share" });
  }

  /** One chart for each last part of the remaining names. */
  others(keys) {
    const groups = new Map();
    for (const key of keys) {
      const family = key.startsWith("teacher/") ? `teacher/…/${key.slice(key.lastIndexOf("/") + 1)}`
        : key.startsWith("evaluation/") ? `evaluation/…/${key.slice(key.lastIndexOf("/") + 1)}` : key;
      groups.set(family, [...(groups.get(family) ?? []), key]);
    }
    return [...groups].map(([family, members]) => this.chart(
      { title: family, keys: members, unit: this.metrics[members[0]]?.[0] ?? "", share: false }, keys, new Set())).filter(Boolean);
  }

  isShown(key, title) {
    return !this.filter || `${key} ${title} ${this.meaning(key)}`.toLowerCase().includes(this.filter);
  }

  meaning(key) {
    const row = this.metrics[key];
    return row ? `${key}: ${row[1]}` : key;
  }

  /** Show new steps; new metrics need new charts. */
  update() {
    const keys = new Set(this.runs.flatMap((run) => run.keys));
    if (keys.size !== this.known) this.build();
    else for (const chart of chartState.charts) chart.update();
  }
}
