"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = Object.fromEntries(data.columns.map((column, i) => [column.id, i]));
  const byId = (id) => document.getElementById(id);

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };

  // ---- numbers
  const scaled = (value, units) => {
    const [unit, scale] = units.find(([, s]) => value >= s) || units[units.length - 1];
    const digits = value / scale >= 100 ? 0 : value / scale >= 10 ? 1 : 2;
    return `${(value / scale).toFixed(digits)} ${unit}`;
  };
  const written = {
    count: (v) => String(v),
    speed: (v) => Math.round(v).toLocaleString("en-US"),
    seconds: (v) => (v >= 1 ? `${v.toFixed(v >= 10 ? 2 : 3)} s` : v >= 0.01 ? `${(1e3 * v).toFixed(1)} ms` : `${Number((1e3 * v).toPrecision(3))} ms`),
    bytes: (v) => (v >= 2 ** 30 / 10 ? `${(v / 2 ** 30).toFixed(1)} GiB` : `${(v / 2 ** 20).toFixed(1)} MiB`),
    sent: (v) => scaled(v, [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]),
    share: (v) => `${(100 * v).toFixed(v < 0.0995 ? 1 : 0)}%`,
    dollars: (v) => String(Number(v.toPrecision(3))),
  };
  const missing = (value) => value === null || value === "";
  const SPEED = "tokens_per_second_per_chip";
  const ABOUT = ["rank", "label", SPEED, "step_s", "seen", "alike"];
  // Columns that are used by filters but not shown, because the layout's name or the status includes them.
  const HIDDEN = ["outcome", "partition", "mesh", "reason"];

  // ---- the ranked table
  let order = { column: null, down: false };
  const cell = (row, column, index) => {
    const value = row[at[column.id]];
    const kind = column.kind === "text" || column.kind === "layout" ? column.id : "number";
    const td = column.kind === "layout"
      ? make("th", { scope: "row", class: kind, "data-id": column.id })
      : make("td", { class: kind, "data-id": column.id });
    if (column.id === SPEED && missing(value) && row[at.outcome] !== "ok") {
      td.append(make("span", { class: "badge", title: row[at.reason] || "" }, row[at.outcome]));
    }
    if (missing(value)) return td;
    if (column.kind === "layout") {
      const button = make("button", { type: "button" }, value);
      button.addEventListener("click", () => choose(index, true));
      td.append(button);
    } else {
      td.append((written[column.kind] || String)(value));
    }
    return td;
  };
  const matches = (row) => {
    const find = byId("find").value.trim().toLowerCase();
    if (find && !row.some((value) => typeof value === "string" && value.toLowerCase().includes(find))) return false;
    return [...document.querySelectorAll("#filters select")].every(
      (select) => !select.value || row[at[select.dataset.column]] === select.value,
    );
  };
  const compared = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  // Returns the longest range of neighbouring columns that are empty in a row. The reason is shown there.
  const gap = (row) => {
    let best = [0, 0], start = 0;
    columns.forEach((column, i) => {
      if (ABOUT.includes(column.id) || !missing(row[at[column.id]])) start = i + 1;
      else if (i + 1 - start > best[1] - best[0]) best = [start, i + 1];
    });
    return best;
  };
  const cells = (row, index) => {
    const text = row[at.reason], [start, end] = gap(row);
    const made = columns.map((column) => cell(row, column, index));
    if (!text || row[at[SPEED]] !== null || start === end) return made;
    made.splice(start, end - start, make("td", { class: "reason", colspan: end - start, title: text }, make("div", {}, text)));
    return made;
  };
  const fillTable = () => {
    const shown = data.rows.map((row, i) => [row, i]).filter(([row]) => matches(row));
    if (order.column) {
      const i = at[order.column];
      shown.sort(([a], [b]) => {
        if (missing(a[i]) || missing(b[i])) return missing(a[i]) - missing(b[i]);
        return (order.down ? -1 : 1) * compared(a[i], b[i]);
      });
    }
    const body = shown.map(([row, i]) => make("tr", {}, ...cells(row, i)));
    byId("table").tBodies[0].replaceChildren(...body);
    byId("count").textContent = `${shown.length} of ${data.rows.length} trials`;
  };
  const sortBy = (column) => {
    const text = ["text", "layout"].includes(column.kind);
    const first = text || ["count", "seconds", "bytes", "sent", "dollars"].includes(column.kind) ? false : true;
    order = { column: column.id, down: order.column === column.id ? !order.down : first };
    for (const th of byId("table").tHead.rows[0].cells) {
      th.setAttribute("aria-sort", th.dataset.id !== order.column ? "none" : order.down ? "descending" : "ascending");
    }
    fillTable();
  };
  const hidden = (column) => HIDDEN.includes(column.id) || (column.id === "seen" && data.groups.length < 2);
  const columns = data.columns.filter((column) => !hidden(column) && data.rows.some((row) => !missing(row[at[column.id]])));
  const head = make("tr");
  for (const column of columns) {
    const button = make("button", { type: "button", title: column.help }, column.label);
    button.addEventListener("click", () => sortBy(column));
    const number = column.kind === "text" || column.kind === "layout" ? "" : "number";
    head.append(make("th", { scope: "col", "aria-sort": "none", "data-id": column.id, class: number }, button));
  }
  byId("table").tHead.append(head);
  for (const select of document.querySelectorAll("#filters select")) {
    const values = [...new Set(data.rows.map((row) => row[at[select.dataset.column]]))];
    if (select.dataset.column !== "seen") values.sort((a, b) => compared(a, b));
    select.parentElement.hidden = values.length < 2;
    select.append(make("option", { value: "" }, "all"), ...values.map((value) => make("option", { value }, value)));
    select.addEventListener("change", fillTable);
  }
  byId("filters").hidden = data.rows.length < 2;
  byId("find").addEventListener("input", fillTable);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(fillTable));

  // ---- figures
  const OPTIONS = {
    renderer: "svg",
    actions: { export: true, source: false, compiled: false, editor: false },
    downloadFileName: "valkyrie-report",
  };
  const lines = (text, length) => text.split(" ").reduce((all, word) => {
    const last = all.at(-1);
    return last && last.length + word.length < length ? [...all.slice(0, -1), `${last} ${word}`] : [...all, word];
  }, []);
  const views = new Map();
  const draw = async (node, spec) => {
    views.get(node)?.finalize();
    views.delete(node);
    node.hidden = !spec;
    const empty = node.parentElement.querySelector(".empty");
    if (empty) empty.hidden = Boolean(spec);
    else node.parentElement.hidden = !spec;
    if (!spec) return node.replaceChildren();
    const shown = structuredClone(spec);
    shown.config.axis.labelLimit = Math.min(720, Math.max(160, 0.62 * node.clientWidth));
    // A legend starts where the plot does, to the right of the labels of its rows.
    const longest = Math.max(0, ...(shown.data?.values ?? []).map((value) => (value.label ?? "").length));
    const room = node.clientWidth - Math.min(shown.config.axis.labelLimit, 6.6 * longest);
    shown.config.legend.columns = Math.max(1, Math.floor(room / 160));
    if (typeof shown.title?.text === "string") shown.title.text = lines(shown.title.text, node.clientWidth / 7);
    views.set(node, await window.vegaEmbed(node, shown, OPTIONS));
  };
  const figure = (id) => document.querySelector(`[data-figure="${id}"]`);
  const drawGroup = (index) =>
    Object.entries(data.figures).filter(([id]) => figure(id)).map(([id, specs]) => draw(figure(id), specs[index]));
  data.groups.forEach((group, i) => {
    const radio = make("input", { type: "radio", name: "kind", value: i });
    radio.checked = i === 0;
    radio.addEventListener("change", () => drawGroup(i));
    byId("kinds")?.append(make("label", {}, radio, ` ${group}`));
  });
  if (byId("kinds")) byId("kinds").hidden = data.groups.length < 2;

  // ---- one layout
  const NAMES = {
    seen: "source", outcome: "status", reason: "reason", [SPEED]: "tokens/s/chip", step_s: "step", peak_bytes: "peak memory",
    roles: "role of each mesh axis", on: "hardware", work: "workload", parameters: "parameters", command: "command", folder: "run folder",
    memory: "memory by use", reported: "peak reported by the devices", compiled: "compile time", placement: "placement on the torus", hints: "hints",
    parts: "where the step time goes", sent: "sent per device and step", goodput: "wall time", steps: "steps",
  };
  const textAt = (place) => (Array.isArray(place) ? place.map(textAt) : data.texts[place]);
  const fact = (name, value) => {
    const dd = make("dd");
    if (name === "command") dd.append(make("code", {}, value.join(" ")));
    else if (Array.isArray(value)) dd.append(make("ul", {}, ...value.map((line) => make("li", {}, line))));
    else dd.append(name === "folder" ? make("code", {}, value) : value);
    return [make("dt", {}, NAMES[name]), dd];
  };
  const choose = (index, jump) => {
    const row = data.rows[index];
    byId("chosen").value = String(index);
    const facts = [];
    for (const id of ["seen", "outcome", "reason", SPEED, "step_s", "peak_bytes"]) {
      const column = data.columns[at[id]], value = row[at[id]];
      if (missing(value)) continue;
      facts.push(...fact(id, (written[column.kind] || String)(value)));
    }
    for (const [name, places] of Object.entries(data.details[index])) facts.push(...fact(name, textAt(places)));
    byId("facts").replaceChildren(...facts);
    drawTorus(data.toruses[index]);
    drawTimeline(data.timelines[index]);
    if (jump) {
      byId("layout").scrollIntoView({ block: "start" });
      byId("layout").focus({ preventScroll: true });
    }
  };
  const drawTimeline = (timeline) => {
    const node = byId("timeline");
    node.parentElement.querySelector(".empty").textContent = Object.keys(data.timelines).length
      ? "Only the best layouts have a timeline on this page. If the run folder of this layout contains timeline.json, open that file at ui.perfetto.dev."
      : "";
    byId("over-time").hidden = !Object.keys(data.timelines).length;
    if (!timeline) return draw(node, null);
    const values = timeline.spans.map(([track, start, length, kind, name, count]) => ({
      track: timeline.tracks[track], start: start / 1e3, end: (start + length) / 1e3, ms: length / 1e3,
      kind: timeline.tracks[track] === "compute" ? timeline.names[kind] : timeline.tracks[track], name: timeline.names[name], count,
    }));
    const spec = structuredClone(data.timeline);
    spec.data.values = values;
    spec.height = 34 * timeline.tracks.length;
    spec.encoding.x.scale.domain = [0, timeline.step_us / 1e3];
    spec.encoding.y.scale = { domain: timeline.tracks };
    const kinds = [...new Set(values.map((value) => value.kind))];
    spec.encoding.color.scale = { domain: kinds, range: kinds.map((kind) => data.colours[kind] || "#a3afbb") };
    return draw(node, spec);
  };
  data.rows.forEach((row, i) => {
    byId("chosen").append(make("option", { value: i }, `${row[at.label]} — ${row[at.seen]}${row[at.rank] ? "" : `, ${row[at.outcome]}`}`));
  });
  byId("chosen").addEventListener("change", (event) => choose(Number(event.target.value), false));

  // ---- two layouts
  const SIDES = [
    ["seconds", "where the step time goes", "seconds"],
    ["sent", "sent per device and step, over", "sent"],
    ["memory", "memory per device at the peak", "bytes"],
  ];
  const LEAST = 0.001;
  const pairRows = (a, b) => SIDES.flatMap(([key, title, kind]) => {
    const scale = key === "memory" || !a.tokens || !b.tokens ? 1 : a.tokens / b.tokens;
    const names = [...new Set([...Object.keys(a[key]), ...Object.keys(b[key])])];
    const values = names.map((name) => [name, a[key][name] || 0, scale * (b[key][name] || 0)]);
    const least = LEAST * Math.max(...[1, 2].map((i) => values.reduce((sum, row) => sum + row[i], 0)));
    values.sort((x, y) => Math.abs(y[2] - y[1]) - Math.abs(x[2] - x[1]));
    const sum = ["total", ...[1, 2].map((i) => values.reduce((total, row) => total + row[i], 0))];
    const number = (value, sign) => make("td", { class: "number" }, value ? `${sign}${written[kind](Math.abs(value))}` : "");
    const lines = [...values.filter((row) => Math.max(row[1], row[2]) >= least), sum].map(([name, x, y]) =>
      make("tr", {}, make("td", {}, name), number(x, ""), number(y, ""), number(y - x, y < x ? "−" : "+")));
    return [make("tr", {}, make("th", { scope: "rowgroup", colspan: 4 }, title)), ...lines];
  });
  const comparePair = () => {
    const [i, j] = [byId("one"), byId("other")].map((select) => Number(select.value));
    const [a, b] = [data.pairs.quantities[i], data.pairs.quantities[j]];
    const alike = a.work === b.work;
    const none = i === j ? "These are the same layout."
      : alike ? "Only pairs of the best layouts have an explanation. The numbers of these two layouts are below."
      : `A is ${a.work}, but B is ${b.work}. Only layouts with the same model, settings and precision can be compared.`;
    byId("why").replaceChildren(...(data.pairs.explanations[`${i},${j}`] || [none]).map((line) => make("li", {}, line)));
    byId("sides").hidden = !alike;
    byId("sides").tBodies[0].replaceChildren(...(alike ? pairRows(a, b) : []));
  };
  const paired = Object.keys(data.pairs.quantities).map(Number);
  for (const [place, select] of [byId("one"), byId("other")].entries()) {
    select.append(...paired.map((i) => make("option", { value: i }, `${data.rows[i][at.label]} — ${data.rows[i][at.seen]}`)));
    select.addEventListener("change", comparePair);
    const alike = paired.filter((i) => i !== paired[0] && data.pairs.quantities[i].work === data.pairs.quantities[paired[0]].work);
    const other = alike.find((i) => data.rows[i][at.partition] !== data.rows[paired[0]][at.partition]) ?? alike[0];
    if (paired.length) select.selectedIndex = place === 0 ? 0 : Math.max(paired.indexOf(other), 1);
  }
  byId("pair").hidden = paired.length < 2;
  if (paired.length > 1) comparePair();

  // ---- the torus
  const svg = (tag, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const drawTorus = (torus) => {
    const box = byId("torus");
    box.parentElement.hidden = !Object.keys(data.toruses).length;
    if (!torus) {
      box.replaceChildren(make("p", { class: "empty" }, "The placement of this layout is unknown. It is recorded by predictions for TPU slices of up to 256 chips."));
      return;
    }
    const [rows, across, deep] = [...torus.shape, 1, 1].slice(0, 3);
    const step = Math.max(34, Math.min(64, 520 / Math.max(rows, across)));
    const shift = deep > 1 ? step * 0.42 : 0;
    const place = (a, b, c) => [30 + b * step * (deep > 1 ? 1 + 0.25 * deep : 1) + c * shift, 30 + (deep - 1) * shift * 0.7 + a * step * (deep > 1 ? 1 + 0.2 * deep : 1) - c * shift * 0.7];
    const index = (a, b, c) => (a * across + b) * deep + c;
    const meshOf = (device) => {
      const where = [];
      for (const [, size] of [...torus.axes].reverse()) { where.unshift(device % size); device = Math.floor(device / size); }
      return where;
    };
    const between = (one, other) => {
      const changed = torus.axes.filter((_, i) => meshOf(torus.devices_by_chip[one])[i] !== meshOf(torus.devices_by_chip[other])[i]);
      return changed.length === 1 ? changed[0][0] : null;
    };
    const used = torus.axes.filter(([, size]) => size > 1).map(([name]) => name);
    const colour = (axis) => (axis === null ? "currentColor" : data.colours[axis]);
    const [right, low] = place(rows - 1, across - 1, 0), [far] = place(0, across - 1, deep - 1);
    const width = Math.max(right, far) + 60, height = low + 30;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    const links = svg("g", { "stroke-width": 3.5, "stroke-linecap": "round" }), chips = svg("g", {});
    const title = `${torus.shifts ? "twisted torus" : "torus"} of ${torus.shape.join("x")} chips${torus.slices > 1 ? `, one of ${torus.slices} slices` : ""}`;
    picture.append(svg("title", {}, title), links, chips);
    const drawn = new Set();
    for (let a = 0; a < rows; a++) for (let b = 0; b < across; b++) for (let c = 0; c < deep; c++) {
      const here = [a, b, c], sizes = [rows, across, deep], [x, y] = place(a, b, c);
      sizes.forEach((size, axis) => {
        const next = [...here];
        next[axis] += 1;
        const wraps = next[axis] === size;
        if (wraps && (!torus.wrap[axis] || size < 3)) return;
        if (wraps) {
          next[axis] = 0;
          (torus.shifts?.[axis] ?? []).forEach((by, other) => { next[other] = (next[other] + by) % sizes[other]; });
        }
        const over = between(index(...here), index(...next));
        if (over) drawn.add(over);
        const line = { stroke: colour(over), "stroke-opacity": over ? 0.95 : 0.25 };
        if (!wraps) {
          const [x2, y2] = place(...next);
          links.append(svg("line", { x1: x, y1: y, x2, y2, ...line }));
          return;
        }
        const [dx, dy] = [[0, 18], [18, 0], [11, -9]][axis], [x2, y2] = place(...next);
        links.append(svg("line", { x1: x, y1: y, x2: x + dx, y2: y + dy, ...line }), svg("line", { x1: x2, y1: y2, x2: x2 - dx, y2: y2 - dy, ...line }));
      });
      const where = meshOf(torus.devices_by_chip[index(a, b, c)]);
      const labels = torus.axes.map(([name], i) => [name, where[i]]).filter(([name]) => used.includes(name));
      const chip = svg("circle", { cx: x, cy: y, r: deep > 1 ? 6 : 8, fill: "var(--paper)", stroke: "currentColor", "stroke-width": 1.5 });
      chip.append(svg("title", {}, `chip ${here.slice(0, torus.shape.length).join(",")}: ${labels.map(([name, i]) => `${name}=${i}`).join(" ")}`));
      chips.append(chip);
      if (rows * across * deep <= 32 && deep === 1) chips.append(svg("text", { x: x + 10, y: y - 8 }, labels.map(([, i]) => i).join(",")));
    }
    const keys = used.map((name) => {
      const swatch = make("i");
      swatch.style.background = colour(name);
      return make("li", {}, swatch, `${name}${drawn.has(name) ? "" : ": neighbours along it are not linked"}`);
    });
    const note = [...(deep === 1 && rows * across <= 32 ? [make("p", { class: "words" }, `The numbers next to a chip are its positions along ${used.join(", ")}. Grey links join chips that differ along several mesh axes.`)] : [])];
    box.replaceChildren(picture, make("ul", { class: "keys" }, ...keys), ...note, make("p", { class: "words" }, title));
  };

  // ---- light and dark
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("valkyrie-theme"); } catch { chosen = null; }
  const paint = () => {
    const now = chosen ? chosen === "dark" : dark.matches;
    document.documentElement.dataset.theme = now ? "dark" : "light";
    byId("theme").textContent = now ? "Light page" : "Dark page";
  };
  dark.addEventListener("change", paint);
  byId("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("valkyrie-theme", chosen); } catch { /* pages opened from disk may have no storage */ }
    paint();
  });
  window.addEventListener("beforeprint", () => document.querySelectorAll("details.reason").forEach((one) => { one.open = true; }));

  // ---- commands
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      } catch { // pages opened from disk may have no clipboard
        window.getSelection().selectAllChildren(code);
      }
    });
  }

  paint();
  if (data.rows.length) {
    fillTable();
    const first = Math.min(...Object.keys(data.timelines).map(Number));
    choose(Number.isFinite(first) ? first : 0, false);
  }
  Promise.all([...drawGroup(0), ...Object.entries(data.overall_figures).filter(([id]) => figure(id)).map(([id, spec]) => draw(figure(id), spec))])
    .then(() => { document.body.dataset.ready = "true"; });
})();
