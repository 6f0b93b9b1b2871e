"use strict";
// Draws the timelines of the report. All text goes to the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const GUTTER = 82, RIGHT = 10, LANE = 26, MEMORY = 72, AXIS = 20, GAP = 8, SMALL = 3;
  const full = Math.max(1e-6, ...data.timelines.map((t) => t.total));
  let view = [0, full], chosen = -1, hover = null, drag = null, frame = 0, color = {};
  const tip = document.getElementById("tip");
  const css = getComputedStyle(document.documentElement);
  const NAMES = ["card", "line", "text", "soft", "faint", "transfer", "transfer-2", "compute", "compute-2",
    "stall", "stall-soft", "resident", "streamed", "budget", "in-span"];

  const ms = (v) => v >= 1000 ? (v / 1000).toFixed(3) + " s" : v.toFixed(v >= 100 ? 1 : v >= 1 ? 2 : 4) + " ms";
  const bytes = (n) => {
    let unit = 0;
    for (; n >= 1000 && unit < 5; unit++) n /= 1024;
    return (unit ? n.toPrecision(3) : n) + " " + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit];
  };
  // Index of the first span that ends after `at`; ends do not decrease within a lane.
  const firstAfter = (spans, at) => {
    let low = 0, high = spans.length;
    while (low < high) { const mid = (low + high) >> 1; if (spans[mid][1] > at) high = mid; else low = mid + 1; }
    return low;
  };
  const levelAt = (memory, at) => {
    let low = 0, high = memory.length;
    while (low < high) { const mid = (low + high) >> 1; if (memory[mid][0] > at) high = mid; else low = mid + 1; }
    return memory[Math.max(0, low - 1)][1];
  };

  for (const t of data.timelines) t.peak = t.memory.reduce((most, m) => Math.max(most, m[1]), 0);
  const most = Math.max(1, ...data.timelines.map((t) => t.peak));
  const panels = data.timelines.map((t, index) => {
    const canvas = document.getElementById("timeline-" + index);
    const lanes = [];
    for (const span of t.transfers) (lanes[span[5]] ||= []).push(span);
    const depth = Math.max(1, lanes.length), top = 2;
    const computeAt = top + LANE + (depth - 1) * 14 + GAP, memoryAt = computeAt + LANE + 22;
    // Beside large residents the streamed weights are a thin line: a chart of their own shows what the budget leaves them.
    const charts = [{ y: memoryAt, from: 0, name: "memory", what: "budget" }];
    if (t.resident > most / 4 && t.transfers.length)
      charts.push({ y: memoryAt + MEMORY + 20, from: t.resident, name: "streamed", what: "the budget leaves" });
    for (const chart of charts) {
      const top = data.timelines.map((o) => Math.max(o.budget ?? 0, o.peak) - (chart.from && o.resident));
      chart.most = Math.max(1, ...top) * 1.03;
    }
    const base = charts.at(-1).y + MEMORY;
    return { t, canvas, lanes, depth, top, computeAt, memoryAt, charts, base, height: base + AXIS };
  });

  const redraw = () => { frame ||= requestAnimationFrame(() => { frame = 0; panels.forEach(draw); }); };
  const scale = (p) => {
    const width = p.canvas.clientWidth - GUTTER - RIGHT;
    return { width, x: (v) => GUTTER + (v - view[0]) / (view[1] - view[0]) * width,
      at: (px) => view[0] + (px - GUTTER) / width * (view[1] - view[0]) };
  };

  function draw(p) {
    const ratio = window.devicePixelRatio || 1, wide = p.canvas.clientWidth, g = p.canvas.getContext("2d");
    if (wide < GUTTER + 20) return;
    p.canvas.style.height = p.height + "px";
    if (p.canvas.width !== Math.round(wide * ratio)) p.canvas.width = Math.round(wide * ratio);
    if (p.canvas.height !== Math.round(p.height * ratio)) p.canvas.height = Math.round(p.height * ratio);
    for (const name of NAMES) color[name] = css.getPropertyValue("--" + name).trim();
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, wide, p.height);
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    const s = scale(p), laneHeight = (p.computeAt - GAP - p.top) / p.depth;
    const text = (words, x, y, tint, align = "left") => { g.fillStyle = tint; g.textAlign = align; g.fillText(words, x, y); };
    text("transfers", GUTTER - 8, p.top + (p.computeAt - GAP - p.top) / 2, color.soft, "right");
    text("compute", GUTTER - 8, p.computeAt + LANE / 2, color.soft, "right");
    for (const chart of p.charts) text(chart.name, GUTTER - 8, chart.y + MEMORY / 2, color.soft, "right");
    axis(g, p, s, text);
    g.save();
    g.beginPath(); g.rect(GUTTER, 0, s.width, p.height); g.clip();
    for (const chart of p.charts) memory(g, p, s, chart);
    p.lanes.forEach((lane, n) => row(g, lane, s, p.top + n * laneHeight, laneHeight - (p.depth > 1 ? 1 : 0), "transfer", 2));
    row(g, p.t.compute, s, p.computeAt, LANE, "compute", 2);
    stalls(g, p, s);
    if (hover) { g.fillStyle = color.faint; g.fillRect(Math.round(s.x(hover.at)), 0, 1, p.base); }
    if (drag) {
      g.globalAlpha = 0.18; g.fillStyle = color.transfer;
      g.fillRect(s.x(Math.min(...drag)), 0, Math.abs(s.x(drag[1]) - s.x(drag[0])), p.base);
      g.globalAlpha = 1;
    }
    g.restore();
    if (p.t.budget !== null)
      for (const chart of p.charts) {
        const words = `${chart.what} ${bytes(p.t.budget - chart.from)}`, y = level(chart, p.t.budget) - 8;
        const room = g.measureText(words).width + 6;
        g.fillStyle = color.card; g.fillRect(wide - RIGHT - room, y - 7, room, 13); // the grid would run through the words
        text(words, wide - RIGHT, y, color.budget, "right");
      }
  }

  function cover(pixels, a, b, weight) {
    for (let px = Math.max(0, Math.floor(a)); px <= b && px < pixels.length; px++)
      pixels[px] += weight * Math.max(0, Math.min(b, px + 1) - Math.max(a, px));
  }

  // Spans wide enough to be told apart are drawn one by one; the others as a density, so that a thousand units stay readable.
  function row(g, spans, s, y, height, name, unitAt) {
    const density = new Float32Array(Math.ceil(s.width) + 2), strong = new Float32Array(density.length);
    let dense = false;
    for (let i = firstAfter(spans, view[0]); i < spans.length && spans[i][0] < view[1]; i++) {
      const span = spans[i], a = s.x(span[0]), b = s.x(span[1]), unit = span[unitAt], on = chosen < 0 || unit === chosen;
      if (b - a < SMALL) {
        dense = true;
        cover(on ? strong : density, a - GUTTER, b - GUTTER, 1);
        continue;
      }
      const left = Math.max(a, GUTTER - 2), right = Math.min(b, GUTTER + s.width + 2);
      g.globalAlpha = on ? 1 : 0.22;
      g.fillStyle = color[unit % 2 ? name + "-2" : name];
      g.fillRect(left, y, right - left - (b - a > 6 ? 1 : 0), height);
      label(g, data.units[unit], left, right, y + height / 2, height, unit % 2);
    }
    for (const [values, base, most] of [[density, 0, chosen < 0 ? 1 : 0.25], [strong, 0.3, 1]]) {
      if (!dense) break;
      g.fillStyle = color[name];
      for (let px = 0; px < values.length; px++) {
        if (!values[px]) continue;
        g.globalAlpha = most * (base + (1 - base) * Math.min(1, values[px]));
        g.fillRect(GUTTER + px, y, 1, height);
      }
    }
    g.globalAlpha = 1;
  }

  function label(g, words, left, right, y, height, second) {
    if (height < 14 || right - left < 18) return;
    const room = right - left - 8;
    // Of a path the end tells units apart: "model.layers.12" becomes "layers.12", then "12".
    for (let rest = words; ; rest = rest.slice(rest.indexOf(".") + 1)) {
      if (g.measureText(rest).width <= room) {
        g.fillStyle = second ? color.text : color["in-span"];
        g.textAlign = "center";
        g.fillText(rest, (left + right - 1) / 2, y + 0.5);
        return;
      }
      if (!rest.includes(".")) return;
    }
  }

  function stalls(g, p, s) {
    const spans = p.t.stalls, density = new Float32Array(Math.ceil(s.width) + 2);
    for (let i = firstAfter(spans, view[0]); i < spans.length && spans[i][0] < view[1]; i++) {
      const a = s.x(spans[i][0]), b = s.x(spans[i][1]), on = chosen < 0 || spans[i][2] === chosen;
      if (b - a < SMALL) { cover(density, a - GUTTER, b - GUTTER, on ? 1 : 0.3); continue; }
      g.globalAlpha = on ? 1 : 0.3;
      g.fillStyle = b - a >= 8 ? color["stall-soft"] : color.stall;
      g.fillRect(a, p.computeAt, b - a, LANE);
      g.fillStyle = color.stall;
      g.fillRect(a, p.computeAt + LANE + 1, b - a, 4);
      if (b - a >= 8) {
        const left = Math.max(a, GUTTER), right = Math.min(b, GUTTER + s.width);
        g.save();
        g.beginPath(); g.rect(left, p.computeAt, right - left, LANE); g.clip();
        g.strokeStyle = color.stall; g.lineWidth = 1; g.beginPath();
        for (let x = left - LANE - (left % 7); x < right; x += 7) { g.moveTo(x, p.computeAt + LANE); g.lineTo(x + LANE, p.computeAt); }
        g.stroke();
        g.restore();
      }
    }
    // Short stalls keep their true share of the lane; the strip below it shows that they are there at all.
    g.fillStyle = color.stall;
    for (let px = 0; px < density.length; px++) {
      if (!density[px]) continue;
      g.globalAlpha = Math.min(1, density[px]);
      g.fillRect(GUTTER + px, p.computeAt, 1, LANE);
      g.globalAlpha = Math.min(1, 0.3 + density[px]);
      g.fillRect(GUTTER + px, p.computeAt + LANE + 1, 1, 4);
    }
    g.globalAlpha = 1;
  }

  const level = (chart, n) => chart.y + MEMORY - Math.max(0, n - chart.from) / chart.most * MEMORY;

  function memory(g, p, s, chart) {
    const base = chart.y + MEMORY, end = Math.min(s.x(p.t.total), GUTTER + s.width + 2), resident = level(chart, p.t.resident);
    g.fillStyle = color.resident;
    g.fillRect(s.x(0), resident, end - s.x(0), base - resident);
    g.fillStyle = color.line;
    g.fillRect(GUTTER, base, s.width, 1);
    g.fillStyle = color.streamed;
    // One rectangle per pixel column or per level, whichever is fewer: the highest level within a column counts.
    let column = -1, highest = 0;
    const flush = () => { if (column >= 0) bar(column, column + 1, highest); column = -1; highest = 0; };
    const bar = (a, b, n) => { const y = level(chart, Math.max(n, p.t.resident)); g.fillRect(a, y, b - a, resident - y); };
    for (let i = 0; i < p.t.memory.length; i++) {
      const a = s.x(p.t.memory[i][0]), b = i + 1 < p.t.memory.length ? s.x(p.t.memory[i + 1][0]) : end;
      if (b < GUTTER || a > GUTTER + s.width) continue;
      if (b - a >= 1) { flush(); bar(Math.floor(a), b, p.t.memory[i][1]); continue; }
      if (Math.floor(a) !== column) { flush(); column = Math.floor(a); }
      highest = Math.max(highest, p.t.memory[i][1]);
    }
    flush();
    if (p.t.budget !== null) {
      g.strokeStyle = color.budget; g.lineWidth = 1.5; g.setLineDash([6, 4]); g.beginPath();
      g.moveTo(GUTTER, level(chart, p.t.budget)); g.lineTo(GUTTER + s.width, level(chart, p.t.budget)); g.stroke();
      g.setLineDash([]);
    }
  }

  function axis(g, p, s, text) {
    const wanted = (view[1] - view[0]) / Math.max(2, s.width / 90), power = 10 ** Math.floor(Math.log10(wanted));
    const step = power * [1, 2, 5, 10].find((f) => f * power >= wanted), base = p.base;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let n = Math.ceil(view[0] / step - 1e-9); n * step <= view[1] * (1 + 1e-9); n++) {
      const x = Math.round(s.x(n * step));
      g.fillStyle = color.line; g.fillRect(x, 0, 1, base + 3);
      text((n * step).toFixed(Math.min(9, digits)) + (n === Math.ceil(view[0] / step - 1e-9) ? " ms" : ""), x, base + 12, color.faint, "center");
    }
    if (s.x(p.t.total) < GUTTER + s.width - 2) { g.fillStyle = color.text; g.fillRect(s.x(p.t.total), 0, 1.5, base); }
  }

  function find(p, x, y) {
    const s = scale(p), at = s.at(x), slack = (view[1] - view[0]) / s.width * 1.5;
    const near = (spans) => { const i = firstAfter(spans, at - slack); return spans[i] && spans[i][0] <= at + slack ? spans[i] : null; };
    if (y >= p.computeAt && y < p.memoryAt) {
      const stall = near(p.t.stalls), span = near(p.t.compute);
      if (stall) return { at, unit: stall[2], words: `stall ${ms(stall[1] - stall[0])}\nwaits for ${data.keys[stall[3]]}` };
      if (span) return { at, unit: span[2], words: `compute ${ms(span[1] - span[0])}\n${data.units[span[2]]}` };
    } else if (y < p.computeAt) {
      const lane = Math.min(p.depth - 1, Math.floor(Math.max(0, y - p.top) / (p.computeAt - GAP - p.top) * p.depth));
      const span = p.lanes[lane] && near(p.lanes[lane]);
      if (span) return { at, unit: span[2], words: `transfer ${ms(span[1] - span[0])}, ${bytes(span[4])}` +
        (span[1] > span[0] ? ` at ${(span[4] / (span[1] - span[0]) / 1e6).toFixed(2)} GB/s` : "") + `\n${data.keys[span[3]]}` };
    }
    return { at, unit: -1, words: "" };
  }

  const clampView = (a, b) => {
    const size = Math.min(full, Math.max(full * 1e-6, b - a));
    a = Math.min(Math.max(0, a), full - size);
    view = [a, a + size];
    redraw();
  };
  const zoom = (factor, about = (view[0] + view[1]) / 2) =>
    clampView(about - (about - view[0]) * factor, about + (view[1] - about) * factor);
  const pan = (share) => clampView(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));

  // The table of units is a script of its own: both sides tell each other what was chosen by an event.
  const choose = (unit) => document.dispatchEvent(new CustomEvent("unit", { detail: unit === chosen ? -1 : unit }));
  document.addEventListener("unit", (e) => {
    chosen = e.detail;
    const clear = document.getElementById("clear");
    clear.hidden = chosen < 0;
    clear.textContent = chosen < 0 ? "" : `${data.units[chosen]} \u2715`;
    redraw();
  });

  for (const p of panels) {
    const c = p.canvas, where = (e) => { const box = c.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top]; };
    c.addEventListener("pointerdown", (e) => { const at = scale(p).at(where(e)[0]); drag = [at, at]; c.setPointerCapture(e.pointerId); });
    c.addEventListener("pointermove", (e) => {
      const [x, y] = where(e);
      if (drag) drag[1] = scale(p).at(x);
      hover = find(p, x, y);
      const held = hover.at <= p.t.total && hover.at >= 0 ? `\nmemory ${bytes(levelAt(p.t.memory, hover.at))}` : "";
      tip.textContent = `${hover.words ? hover.words + "\n" : ""}at ${ms(Math.max(0, hover.at))}${held}`;
      tip.hidden = false;
      const box = tip.getBoundingClientRect();
      tip.style.left = Math.min(e.clientX + 14, innerWidth - box.width - 8) + "px";
      tip.style.top = Math.min(e.clientY + 16, innerHeight - box.height - 8) + "px";
      redraw();
    });
    c.addEventListener("pointerup", (e) => {
      const range = drag, [x, y] = where(e), s = scale(p);
      drag = null;
      if (range && Math.abs(s.x(range[1]) - s.x(range[0])) > 4) clampView(Math.min(...range), Math.max(...range));
      else { const unit = find(p, x, y).unit; if (unit >= 0) choose(unit); }
      redraw();
    });
    c.addEventListener("pointercancel", () => { drag = null; redraw(); });
    c.addEventListener("pointerleave", () => { hover = null; tip.hidden = true; redraw(); });
    c.addEventListener("dblclick", () => clampView(0, full));
    c.addEventListener("wheel", (e) => {
      if (e.ctrlKey || e.metaKey) { e.preventDefault(); zoom(Math.exp(e.deltaY * 0.003), scale(p).at(where(e)[0])); }
      else if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) { e.preventDefault(); pan((e.deltaX || e.deltaY) / 800); }
    }, { passive: false });
    c.addEventListener("keydown", (e) => {
      const act = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6),
        "-": () => zoom(1 / 0.6), "0": () => clampView(0, full), Escape: () => choose(-1) }[e.key];
      if (act) { e.preventDefault(); act(); }
    });
  }
  const on = (id, act) => document.getElementById(id)?.addEventListener("click", act);
  on("in", () => zoom(0.6)); on("out", () => zoom(1 / 0.6)); on("all", () => clampView(0, full)); on("clear", () => choose(-1));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(document.body);

  redraw();
})();
