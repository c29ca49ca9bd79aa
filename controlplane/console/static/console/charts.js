// Plots to read values off, in place of the pictures over time that the server drew.
//
// A figure with `data-plot` (charts.py: Plotted) has an empty `.drawn`, which is filled here; the sheet then hides the
// picture from the eye, not from screen readers. Words are those of the figure's table of numbers, colours and dashes
// those of its legend. htmx keeps `.drawn` when it puts newer figures in place: a plot stays and gets the newer numbers.
(() => {
  "use strict";
  const plots = new Map(); // by id of their figure
  const DAYS = [1, 2, 3, 4, 5, 6, 7, 10, 15, 30, 60, 90, 120, 180, 360].map((each) => each * 86_400); // between marks
  const isDark = matchMedia("(prefers-color-scheme: dark)");

  const made = (name, properties, ...children) => {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  };

  class Plot {
    constructor(figure, data, format) {
      this.format = format;
      this.holder = figure.querySelector(".drawn");
      this.hidden = new Set(); // names: they outlive a change of the series
      this.at = made("span", { className: "at" });
      this.said = made("span", { className: "visually-hidden", role: "status" });
      this.all = made("button", { type: "button", className: "quiet", hidden: true, textContent: "Show all" });
      this.all.addEventListener("click", () => this.showAll());
      this.frame = made("div", { className: "frame", tabIndex: 0, role: "group" });
      this.frame.setAttribute("aria-roledescription", "plot");
      this.frame.addEventListener("keydown", (event) => this.pressed(event));
      this.frame.addEventListener("blur", () => this.left());
      this.legend = made("div", { className: "legend" });
      const hint = made("span", { className: "hint", textContent: "Point at it for values, drag to zoom, double-click for all." });
      this.holder.append(this.frame, made("p", { className: "reading" }, this.at, this.all, hint, this.said), this.legend);
      this.build(figure, data);
      this.observer = new ResizeObserver(() => this.fit());
      this.observer.observe(this.frame);
    }

    // --- what is shown

    read(figure, data) {
      this.raw = figure.dataset.plot;
      this.data = data;
      this.texts = [...figure.querySelectorAll(".numbers tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
      const picture = figure.querySelector("svg.chart").getAttribute("aria-label");
      this.frame.setAttribute("aria-label", `${picture}. Left and right arrow keys read its values.`);
    }

    build(figure, data) {
      this.read(figure, data);
      const keys = [...figure.querySelectorAll(":scope > .legend > span")].map((each) => each.firstElementChild);
      this.items = data.series.map(({ name }, index) => {
        const value = made("b", {});
        const button = made("button", { type: "button", className: "series", id: `${this.holder.id}-${index}` },
          keys[index].cloneNode(true), made("span", { textContent: name }), value);
        button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
        button.addEventListener("click", () => this.toggle(index));
        return { name, button, value };
      });
      this.legend.replaceChildren(...this.items.map((item) => item.button));
      this.recolour();
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), this.columns(), this.frame);
      this.plot.root.setAttribute("aria-hidden", "true");
      this.tell();
    }

    update(figure, data) {
      if (figure.dataset.plot === this.raw) return;
      const names = (of) => JSON.stringify([of.kind, of.zone, ...of.series.map((each) => each.name)]);
      if (names(data) !== names(this.data)) return this.build(figure, data);
      const isKept = (this.isZoomed() && this.plot.scales.x.max > data.times[0]) || this.plot.select.width > 0;
      this.read(figure, data);
      this.plot.setData(this.columns(), !isKept);
      if (isKept) this.plot.redraw();
      this.tell();
    }

    // Lines as they are. Bars are stacked: each ends where those before it, of what is shown, add up to, and the last
    // is drawn first.
    columns() {
      const { kind, times, series } = this.data;
      if (kind === "lines") return [times, ...series.map((each) => each.values)];
      const sums = times.map(() => 0);
      const ends = series.map(({ name, values }) => values.map((value, i) => {
        if (value === null) return null;
        if (!this.hidden.has(name)) sums[i] += value;
        return sums[i];
      }));
      return [times, ...ends.reverse()];
    }

    // Where a series stands among uPlot's, the first of which is the times.
    place(index) {
      return this.data.kind === "bars" ? this.items.length - index : index + 1;
    }

    options() {
      const axis = { stroke: () => this.colours.muted, grid: { stroke: () => this.colours.line, width: 1 },
        ticks: { stroke: () => this.colours.line, width: 1 }, font: "11px system-ui, sans-serif" };
      const series = this.items.map(({ name }, index) => {
        const common = { label: name, show: !this.hidden.has(name), scale: "y" };
        const colour = () => this.colours.series[index];
        if (this.data.kind === "bars") {
          return { ...common, fill: colour, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.7, 48] }) };
        }
        return { ...common, stroke: colour, width: 1.8, dash: this.dashes[index], points: { size: 6, fill: colour, width: 0 } };
      });
      return {
        ...this.size(),
        series: [{}, ...(this.data.kind === "bars" ? series.reverse() : series)],
        legend: { show: false },
        cursor: { y: false, points: { show: this.data.kind === "lines", size: 9 } },
        tzDate: (at) => uPlot.tzDate(new Date(at * 1e3), this.data.zone),
        scales: { x: { range: (_, from, to) => this.span(from, to) }, y: { range: (_, from, to) => [0, this.top(to)] } },
        axes: [
          { ...axis, space: 70, size: 34, ...(this.data.kind === "bars" && this.step() >= 80_000 ? { incrs: DAYS } : {}), values: (_, instants, __, ___, step) => this.stamps(instants, step) },
          { ...axis, size: 58, values: (_, values) => values.map((value) => this.worded(value)) },
        ],
        hooks: { setCursor: [() => this.tell()], setScale: [(_, name) => name === "x" && this.zoomed()], draw: [() => this.drawRules()] },
      };
    }

    // Of everything: bars stand around the moment at which they begin.
    span(from, to) {
      const { times, kind } = this.data;
      const last = times[times.length - 1];
      if (from !== times[0] || (times.length > 1 && to !== last)) return [from, to];
      const beside = kind === "bars" || times.length === 1 ? this.step() / 2 : 0;
      this.whole = [from - beside, last + beside];
      return this.whole;
    }

    step() {
      const { times } = this.data;
      return times.length > 1 ? times[1] - times[0] : 86_400;
    }

    top(highest) {
      return uPlot.rangeNum(0, Math.max(highest ?? 0, ...this.data.rules.map(([value]) => value)) || 1, 0.1, true)[1];
    }

    stamps(instants, step) {
      const day = this.format({ day: "2-digit", month: "short" });
      if (step >= 86_400) return instants.map((each) => day.format(each * 1e3));
      const time = this.format({ hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(step < 60 ? { second: "2-digit" } : {}) });
      return instants.map((each) => {
        const text = time.format(each * 1e3);
        return /^00:00(:00)?$/.test(text) ? day.format(each * 1e3) : text;
      });
    }

    worded(value) {
      if (this.data.unit !== "s" || !value) return new Intl.NumberFormat("en", { notation: "compact" }).format(value);
      return value >= 1 ? `${Number(value.toPrecision(3))} s` : `${Number((value * 1e3).toPrecision(3))} ms`;
    }

    drawRules() {
      const { ctx, bbox } = this.plot ?? {};
      if (!ctx) return;
      ctx.save();
      ctx.strokeStyle = this.colours.text;
      ctx.lineWidth = devicePixelRatio;
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.textAlign = "right";
      for (const [value, text] of this.data.rules) {
        const y = Math.round(this.plot.valToPos(value, "y", true));
        ctx.setLineDash([5, 4].map((each) => each * devicePixelRatio));
        ctx.beginPath();
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
        ctx.stroke();
        ctx.setLineDash([]);
        ctx.lineWidth = 4 * devicePixelRatio;
        ctx.strokeStyle = this.colours.panel;
        ctx.strokeText(text, bbox.left + bbox.width, y - 6 * devicePixelRatio);
        ctx.lineWidth = devicePixelRatio;
        ctx.strokeStyle = ctx.fillStyle = this.colours.text;
        ctx.fillText(text, bbox.left + bbox.width, y - 6 * devicePixelRatio);
      }
      ctx.restore();
    }

    // The sheet's colours, as they are now.
    recolour() {
      const root = getComputedStyle(document.documentElement);
      const named = Object.fromEntries(["text", "muted", "line", "panel"].map((name) => [name, root.getPropertyValue(`--${name}`).trim()]));
      const keys = this.items.map(({ button }) => getComputedStyle(button.querySelector(".line") ?? button.firstElementChild));
      const isLines = this.data.kind === "lines";
      this.colours = { ...named, series: keys.map((key) => (isLines ? key.stroke : key.backgroundColor)) };
      this.dashes = keys.map((key) => (key.strokeDasharray.match(/[\d.]+/g) ?? []).map((each) => each * devicePixelRatio));
    }

    size() {
      const width = Math.max(200, Math.floor(this.frame.clientWidth));
      return { width, height: Math.round(Math.min(260, Math.max(190, width * 0.42))) };
    }

    fit() {
      const size = this.size();
      if (this.frame.clientWidth && size.width !== this.plot.width) this.plot.setSize(size);
    }

    // --- what a person does

    // The moment under the cursor, else the last of which anything is known.
    moment() {
      const { times, series } = this.data;
      const { idx } = this.plot?.cursor ?? {};
      if (idx !== null && idx !== undefined && idx < times.length) return idx;
      const isKnown = (_, i) => series.some((each) => each.values[i] !== null);
      return times.findLastIndex(isKnown);
    }

    tell() {
      const [stamp, ...words] = this.texts[this.moment()] ?? [""];
      this.at.textContent = stamp && `${stamp} ${this.data.zone}`;
      const under = this.under();
      this.items.forEach(({ button, value }, index) => {
        value.textContent = words[index] ?? "–";
        button.classList.toggle("under", index === under);
      });
    }

    // The bar that the cursor is on: colours alone would not tell which it is.
    under() {
      const { idx, left, top } = this.plot?.cursor ?? {};
      if (this.data.kind !== "bars" || !(left >= 0) || !(top > 0)) return -1;
      const value = this.plot.posToVal(top, "y");
      return this.items.findIndex(({ name }, index) => !this.hidden.has(name) && this.plot.data[this.place(index)][idx] >= value);
    }

    toggle(index) {
      const { name, button } = this.items[index];
      if (!this.hidden.delete(name)) this.hidden.add(name);
      button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
      this.plot.setSeries(this.place(index), { show: !this.hidden.has(name) });
      this.plot.setData(this.columns(), false);
      this.plot.redraw();
    }

    isZoomed() {
      const { min, max } = this.plot.scales.x;
      return min !== this.whole[0] || max !== this.whole[1];
    }

    zoomed() {
      if (this.plot) this.all.hidden = !this.isZoomed();
    }

    showAll() {
      this.plot.setData(this.columns());
      if (document.activeElement === this.all) this.frame.focus();
    }

    pressed(event) {
      const [first, last] = this.plot.series[0].idxs;
      const now = this.moment();
      const isOn = this.plot.cursor.left >= 0;
      const to = { ArrowLeft: isOn ? now - 1 : now, ArrowRight: isOn ? now + 1 : first, Home: first, End: last }[event.key];
      if (event.key === "Escape") this.showAll();
      if (to === undefined) return;
      event.preventDefault();
      const index = Math.min(last, Math.max(first, to));
      this.plot.setCursor({ left: this.plot.valToPos(this.data.times[index], "x"), top: 0 });
      const said = this.items.filter(({ name }) => !this.hidden.has(name)).map(({ name, value }) => `${name} ${value.textContent}`);
      this.said.textContent = `${this.at.textContent}: ${said.join(", ")}`;
    }

    left() {
      this.plot.setCursor({ left: -10, top: -10 });
    }

    destroy() {
      this.observer.disconnect();
      this.plot.destroy();
    }
  }

  function look() {
    for (const [id, plot] of plots) {
      if (plot.holder.isConnected) continue;
      plot.destroy();
      plots.delete(id);
    }
    for (const figure of document.querySelectorAll("figure[data-plot]")) {
      const data = JSON.parse(figure.dataset.plot);
      if (plots.has(figure.id)) plots.get(figure.id).update(figure, data);
      else {
        const format = (parts) => new Intl.DateTimeFormat("en-GB", { timeZone: data.zone, ...parts });
        try {
          format({});
        } catch {
          continue; // a zone that this browser does not know: the picture stays
        }
        plots.set(figure.id, new Plot(figure, data, format));
      }
    }
  }

  // Opened numbers stay open when their figure is replaced.
  const opened = new Set();
  document.addEventListener("htmx:beforeSwap", () => {
    opened.clear();
    document.querySelectorAll("figure[data-plot] > details[open]").forEach((each) => opened.add(each.parentElement.id));
  });
  document.addEventListener("htmx:afterSwap", () => {
    document.querySelectorAll("figure[data-plot] > details").forEach((each) => { each.open ||= opened.has(each.parentElement.id); });
    look();
  });
  isDark.addEventListener("change", () => plots.forEach((each) => { each.recolour(); each.plot.redraw(); }));
  look();
})();
