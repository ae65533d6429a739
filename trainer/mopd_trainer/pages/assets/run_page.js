"use strict";
/* The page of one or two runs: header, tabs, keys, and the updates of a running run. */

const POLL_SECONDS = 2;
const TABS = [["curves", "Curves"], ["completions", "Completions"], ["teachers", "Teachers"], ["settings", "Settings"]];
const KEYS = [
  ["1 2 3 4", "curves, completions, teachers, settings"], ["/", "filter metrics, or search completions"],
  ["j k", "next and previous completion"], ["← →", "next and previous token, or step of the chart in focus"],
  ["t", "next teacher of the completion"], ["a", "both tokenizations span by span, or running text"],
  ["+ - 0", "zoom of the chart in focus"], ["d", "light or dark"], ["?", "this list"],
];

class RunPage {
  constructor(data) {
    this.runs = data.runs.map((run, index) => new RunMetrics(run, index));
    this.live = data.live;
    this.makers = {
      curves: () => new Curves(this.runs, data.metrics), completions: () => new Completions(this.runs),
      teachers: () => new Teachers(this.runs), settings: () => new RunSettings(this.runs),
    };
    this.views = {}; // created when they are first opened
    this.main = h("main");
    this.help = keyHelp(KEYS);
    this.header = h("div.runs");
    this.tiles = h("div.tiles");
    this.tabs = h("nav.tabs", { role: "tablist" }, TABS.map(([name, title], index) =>
      h("button", { type: "button", role: "tab", id: `tab-${name}`, title: `${title} (${index + 1})`,
        onclick: () => this.open(name) }, title)));
    document.getElementById("page").replaceChildren(
      h("header.top", {}, h("div.bar", {}, h("span.brand", {}, "mopd"), this.header, h("span.space"), themeButton(),
        h("button.icon", { type: "button", title: "Keys (?)", "aria-label": "Keys", onclick: () => this.help.showModal() }, "?")),
      this.damage(), this.tiles, this.tabs),
      this.main);
    this.drawHeader();
    this.open(TABS.some(([name]) => `#${name}` === location.hash) ? location.hash.slice(1) : "curves");
    document.addEventListener("keydown", (event) => this.key(event));
    if (this.live) setTimeout(() => this.poll(), POLL_SECONDS * 1000);
  }

  open(name) {
    this.tab = name;
    if (!this.views[name]) {
      this.views[name] = this.makers[name]();
      this.main.append(this.views[name].element);
    }
    for (const [other] of TABS) {
      if (this.views[other]) this.views[other].element.hidden = other !== name;
      document.getElementById(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    }
    history.replaceState(null, "", `#${name}`);
  }

  damage() {
    const damaged = this.runs.filter((run) => run.damagedLines);
    return damaged.length ? h("p.warning", {}, damaged.map((run) =>
      `${run.name}: skipped ${run.damagedLines} damaged lines (${run.damaged.join(", ")}${run.damagedLines > run.damaged.length ? ", …" : ""}). `)) : null;
  }

  drawHeader() {
    this.header.replaceChildren(...this.runs.map((run) => {
      const total = run.maxSteps ?? run.lastStep, bar = h("span.progress-bar");
      bar.style.width = `${total ? (100 * run.lastStep) / total : 0}%`;
      return h("div.run-title", {},
        h("div", {}, this.runs.length > 1 ? h("span", { class: `run run-${run.index}` }) : null,
          h("strong", {}, run.name), h("span", { class: `state ${this.status(run)[0]}` }, this.status(run)[1]),
          h("span.steps", {}, `step ${wholeNumber.format(run.lastStep)}${run.maxSteps ? ` of ${wholeNumber.format(run.maxSteps)}` : ""}`)),
        h("span.progress", {}, bar));
    }));
    this.tiles.replaceChildren(...this.runs.flatMap((run) => this.tilesOf(run)));
  }

  /** Class and text of a run's state. */
  status(run) {
    if (run.isFinished) return ["finished", "finished"];
    if (!this.live) return ["written", "as of the last update"];
    if (!run.steps.length) return ["waiting", "no step yet"];
    const typical = run.last("time/step") || 1;
    if (run.age !== null && run.age > Math.max(30, 10 * typical)) return ["waiting", `no step for ${durationText(run.age)}`];
    return ["live", "live"];
  }

  tilesOf(run) {
    const gap = run.keys.filter((key) => /^evaluation\/.*\bgap_closed\//.test(key) && !key.includes("/sampled_"));
    const accuracy = run.keys.filter((key) => /^evaluation\/[^/]+\/accuracy$/.test(key));
    const tile = (title, key, text, options = {}) => {
      const values = (run.column(key) ?? []).filter((value) => !Number.isNaN(value));
      return values.length ? h("div.tile", { title: key }, h("span.label", {}, this.runs.length > 1 ? [h("span", { class: `run run-${run.index}` }), title] : title),
        h("span.figure", {}, text(run.last(key))), sparkline(values, options)) : null;
    };
    return [
      tile("loss, nats", "loss", shortNumber), ...gap.slice(0, 3).map((key) => tile(`gap closed, ${evaluationParts(key).set}`, key, percentText)),
      ...(gap.length ? [] : accuracy.slice(0, 3).map((key) => tile(`accuracy, ${evaluationParts(key).set}`, key, percentText))),
      tile("compared tokens", "compared_share", percentText), tile("entropy, nats", "rollout/entropy", shortNumber, { floor: 0 }),
      tile("per step", "time/step", durationText, { floor: 0 }),
      run.isFinished ? null : tile("remaining", "time/remaining", durationText, { floor: 0 }),
    ].filter(Boolean);
  }

  key(event) {
    if (event.key === "Escape" && isTyping(event)) return event.target.blur();
    if (isTyping(event) || this.help.open) return;
    const { completions, curves } = this.views;
    const number = Number(event.key);
    if (number >= 1 && number <= TABS.length) this.open(TABS[number - 1][0]);
    else if (event.key === "d") theme.toggle();
    else if (event.key === "?") this.help.showModal();
    else if (event.key === "0") chartState.setZoom(null);
    else if (event.key === "/") (this.tab === "completions" ? completions : curves)?.search.focus();
    else if (this.tab === "completions" && event.key === "j") completions.move(1);
    else if (this.tab === "completions" && event.key === "k") completions.move(-1);
    else if (this.tab === "completions" && event.key === "t") completions.nextTeacher();
    else if (this.tab === "completions" && event.key === "a") completions.toggleAligned();
    else return;
    event.preventDefault();
  }

  /** Request the lines after the known ones, of each run. */
  async poll() {
    try {
      const changes = await Promise.all(this.runs.map((run) => this.update(run)));
      if (changes.some((change) => change.steps)) {
        this.views.curves?.update();
        this.views.teachers?.update();
      }
      if (changes.some((change) => change.completions)) this.views.completions?.update();
      document.documentElement.dataset.connection = "open";
    } catch {
      document.documentElement.dataset.connection = "lost";
    }
    this.drawHeader();
    setTimeout(() => this.poll(), POLL_SECONDS * 1000);
  }

  async update(run) {
    const { journal, completions } = run.positions;
    const response = await fetch(`updates?run=${run.index}&journal=${journal.join(":")}&completions=${completions.join(":")}`);
    if (!response.ok) throw new Error(response.statusText);
    const update = await response.json();
    if (update.changed) location.reload(); // the run was resumed from an earlier step
    run.age = update.age;
    run.positions = { journal: update.journal.position, completions: update.completions.position };
    return { steps: run.append(update.journal.text), completions: run.appendCompletions(update.completions.lines) };
  }
}

new RunPage(embeddedData());
