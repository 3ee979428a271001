"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const places = Array.from(document.querySelectorAll("[data-chart]"));
  const COLOURS = {
    weights: "#3b76c4", weights_and_non_torch: "#3b76c4", kv_cache: "#b55d1a", recurrent_state: "#ad4596",
    cuda_graphs: "#2b8454", activations: "#7d63c9", non_torch: "#857532", workspace: "#946f1c", communication: "#19818a",
    request_tables: "#b35a6b", in_use_at_start: "#74747c", cuda_context: "#66788a", other_processes: "#a14d3a",
    driver_reserved: "#777069", server_processes: "#3b76c4", page_cache: "#827357", allocator_slack: "#8e6e56",
    released: "#4a7d7d", reserve: "#697781", unexplained: "#d3322f", holder: "#3b76c4", kv_window: "#19818a", running: "#3b76c4", queued: "#d3322f",
  };
  const MORE = ["#3b76c4", "#b55d1a", "#ad4596", "#2b8454", "#7d63c9", "#857532", "#19818a", "#b35a6b", "#a14d3a", "#66788a"];

  // Plotly reads a few tags in texts: log text has none.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const fold = (text, width) => {
    const lines = [];
    for (const line of String(text).split("\n")) {
      let rest = line;
      while (rest.length > width) {
        const at = rest.lastIndexOf(" ", width);
        const end = at > width / 2 ? at : width;
        lines.push(rest.slice(0, end));
        rest = rest.slice(end).trimStart();
      }
      lines.push(rest);
    }
    return lines.slice(0, 14).map(plain).join("<br>");
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const theme = () => ({
    ink: css("--ink"), soft: css("--soft"), line: css("--line"), page: css("--page"), panel: css("--panel"), free: css("--free"),
    rise: css("--rise"), fall: css("--fall"), level: css("--level"), on: css("--on"),
  });
  const colour = (name, look) => {
    if (name === "free") return look.free;
    const numbered = /^more-(\d+)$/.exec(name);
    if (numbered) return MORE[Number(numbered[1]) % MORE.length];
    return COLOURS[name] || "#6f7a86";
  };

  const axis = (look, more) => ({
    gridcolor: look.line, zerolinecolor: look.soft, linecolor: look.line, tickfont: { color: look.ink }, automargin: true,
    title: { font: { color: look.soft, size: 12 } }, fixedrange: true, ...more,
  });
  const layout = (look, width, more) => ({
    width, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false,
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, sans-serif", size: 13, color: look.ink },
    margin: { l: 8, r: 12, t: 8, b: 8 },
    hoverlabel: { bgcolor: look.panel, bordercolor: look.soft, align: "left", font: { color: look.ink, size: 13 } },
    ...more,
  });

  const stack = (chart, look, width) => {
    const wide = width > 560;
    const rows = chart.bars.length;
    const labels = chart.bars.map((name) => fold(name, wide ? 34 : 18));
    const ends = chart.bars.map((_, i) => chart.parts.reduce((sum, p) => sum + Math.abs(p.values[i] || 0), 0));
    const margin = 24 + 7.5 * Math.max(...labels.map((text) => Math.max(...text.split("<br>").map((line) => line.length))));
    const pixel = Math.max(60, width - margin) / (Math.max(...ends) * 1.05 || 1);
    // A part that the axis names already leaves each bar its figure, beside it where the bar is short.
    const lone = chart.parts.length === 1 && chart.parts[0].name === chart.unit;
    const fits = (part, size) => Math.abs(size) * pixel > 8 + 7 * Math.max(part.name.length, 5);
    const data = chart.parts.map((part) => ({
      type: "bar", orientation: "h", name: plain(part.name), y: chart.bars.map((_, i) => i), x: part.values,
      hovertext: part.hover.map((text) => fold(text, wide ? 70 : 38)), hoverinfo: "text",
      text: part.values.map((v, i) => (v && lone ? plain(part.texts[i]) : v && fits(part, v) ? `${plain(part.name)}<br>${plain(part.texts[i])}` : "")),
      textposition: lone ? "auto" : "inside", outsidetextfont: { color: look.ink, size: 12 }, cliponaxis: false, insidetextanchor: "middle", textangle: 0, constraintext: "none",
      insidetextfont: { color: part.colour === "free" ? look.ink : "#ffffff", size: 12 },
      marker: {
        color: colour(part.colour, look), line: { color: look.page, width: 1 },
        pattern: part.colour === "unexplained" ? { shape: "/", fillmode: "overlay", fgcolor: look.page, fgopacity: 0.6, size: 6, solidity: 0.25 } : { shape: "" },
      },
    }));
    const legendRows = chart.parts.length < 2 ? 0 : Math.ceil(chart.parts.length / Math.max(1, Math.floor(width / (wide ? 150 : 130))));
    const body = rows * (rows > 4 ? 40 : 64);
    return {
      data,
      layout: layout(look, width, {
        barmode: "relative", bargap: 0.25, height: body + (legendRows ? 70 : 52) + legendRows * 24, showlegend: legendRows > 0,
        legend: { orientation: "h", x: 0, xanchor: "left", y: -62 / body, yanchor: "top", traceorder: "normal", font: { size: 12 }, itemclick: false, itemdoubleclick: false },
        margin: { l: 8, r: 12, t: 8, b: (legendRows ? 62 : 44) + legendRows * 24 },
        xaxis: axis(look, { title: { text: plain(chart.unit), font: { color: look.soft, size: 12 }, standoff: 4 } }),
        yaxis: axis(look, { autorange: "reversed", tickmode: "array", tickvals: chart.bars.map((_, i) => i), ticktext: labels, showgrid: false, zeroline: false }),
      }),
    };
  };

  const tree = (chart, look, width) => {
    const wide = width > 560;
    return {
      data: [{
        type: "treemap", ids: chart.nodes.map((n) => n.id), labels: chart.nodes.map((n) => plain(n.label)),
        parents: chart.nodes.map((n) => n.parent), values: chart.nodes.map((n) => n.value), branchvalues: "remainder", sort: false,
        hovertext: chart.nodes.map((n) => fold(n.hover, wide ? 70 : 38)), hoverinfo: "text", textinfo: "label",
        tiling: { packing: "squarify", pad: 2 }, pathbar: { visible: false },
        marker: { depthfade: false, pad: { t: 20, l: 2, r: 2, b: 2 }, colors: chart.nodes.map((n) => (n.colour === "root" ? look.panel : colour(n.colour, look))), line: { color: look.page, width: 1 } },
        textfont: { color: chart.nodes.map((n) => (n.colour === "root" || n.colour === "free" ? look.ink : "#ffffff")), size: 12 },
      }],
      layout: layout(look, width, { height: wide ? 320 : 380, uniformtext: { minsize: 10, mode: "hide" } }),
    };
  };

  const waterfall = (chart, look, width) => {
    const wide = width > 560;
    const columns = chart.columns;
    const flat = wide && (width - 70) / columns.length >= 88;
    // Lying columns are named with their figure: beside a short one there is no room for it.
    const names = columns.map((c) => (flat ? fold(c.label, 14) : `${fold(c.label, 22)}<br>${plain(c.text)}`));
    const at = columns.map((_, i) => i);
    const trace = {
      type: "waterfall", orientation: flat ? "v" : "h", measure: columns.map((c) => (c.level ? "absolute" : "relative")),
      hovertext: columns.map((c) => fold(c.hover, wide ? 70 : 38)), hoverinfo: "text", text: flat ? columns.map((c) => plain(c.text)) : undefined,
      textposition: "auto", outsidetextfont: { color: look.ink }, insidetextfont: { color: look.on }, textangle: 0, cliponaxis: false,
      // Lines lead from one column to the change that follows: between levels nothing is told of what lies between.
      connector: { visible: columns.some((c) => !c.level), line: { color: look.soft, width: 1 } },
      increasing: { marker: { color: look.rise } }, decreasing: { marker: { color: look.fall } }, totals: { marker: { color: look.level } },
    };
    const values = columns.map((c) => c.value);
    // A falling column's figure may stand below it: there it needs room, or it would stand on the names.
    const levels = columns.reduce((all, c) => [...all, c.level ? c.value : (all[all.length - 1] || 0) + c.value], []);
    const span = Math.max(...levels, 0) - Math.min(...levels, 0) || 1;
    const room = [Math.min(...levels, 0) - 0.1 * span, Math.max(...levels, 0) + 0.07 * span];
    const low = columns.some((c, i) => !c.level && c.value < 0 && levels[i] < Math.min(...levels, 0) + 0.1 * span);
    const labelled = { tickmode: "array", tickvals: at, ticktext: names, showgrid: false, zeroline: false };
    const unit = { title: { text: plain(chart.unit), font: { color: look.soft, size: 12 }, standoff: 4 } };
    return {
      data: [flat ? { ...trace, x: at, y: values } : { ...trace, y: at, x: values }],
      layout: layout(look, width, {
        height: flat ? 340 : 60 + columns.length * Math.max(wide ? 40 : 44, (wide ? 6 : 16) + (wide ? 17 : 18) * Math.max(...names.map((name) => name.split("<br>").length))), margin: { l: 8, r: 24, t: 24, b: 40 },
        xaxis: flat ? axis(look, { ...labelled, tickangle: 0 }) : axis(look, unit),
        yaxis: flat ? axis(look, low ? { ...unit, range: room } : unit) : axis(look, { ...labelled, autorange: "reversed" }),
      }),
    };
  };

  const uses = (chart, look, width) => {
    const wide = width > 560;
    const at = chart.pools.map((_, i) => i);
    const hover = chart.pools.map((p) => fold(p.hover, wide ? 70 : 38));
    const used = chart.pools.map((p) => p.share * 100);
    return {
      data: [
        { type: "bar", orientation: "h", y: at, x: at.map(() => 100), name: "reserved", hovertext: hover, hoverinfo: "text",
          marker: { color: look.free, line: { color: look.soft, width: 1 } } },
        { type: "bar", orientation: "h", y: at, x: used, name: "used at the peak", hovertext: hover, hoverinfo: "text", width: 0.4,
          text: used.map((v) => `${v < 0.95 && v > 0 ? v.toFixed(1) : v.toFixed(0)} %`), textposition: "outside", textfont: { color: look.ink }, cliponaxis: false,
          marker: { color: look.level, line: { color: look.page, width: 1 } } },
      ],
      layout: layout(look, width, {
        barmode: "overlay", bargap: 0.25, height: 110 + at.length * 46, showlegend: true, margin: { l: 8, r: 40, t: 8, b: 80 },
        legend: { orientation: "h", x: 0, y: -58 / (at.length * 46), yanchor: "top", font: { size: 12 }, itemclick: false, itemdoubleclick: false },
        xaxis: axis(look, { range: [0, Math.max(100, ...used) * 1.02], ticksuffix: " %", title: { text: "of what was reserved", font: { color: look.soft, size: 12 }, standoff: 4 } }),
        yaxis: axis(look, { autorange: "reversed", tickmode: "array", tickvals: at, ticktext: chart.pools.map((p) => fold(p.label, wide ? 34 : 18)), showgrid: false, zeroline: false }),
      }),
    };
  };

  const DASHES = { kv_cache: "solid", kv_window: "dot", recurrent_state: "dash", running: "solid", queued: "dot" };
  const timeline = (chart, look, width) => {
    const wide = width > 560;
    const hover = chart.hover.map((text) => fold(text, wide ? 70 : 38));
    const silences = new Set(chart.breaks);
    const size = chart.places.length <= 60 ? 5 : 3;
    const curve = (one, pane) => {
      const x = [], y = [], text = [];
      let silent = false;
      one.values.forEach((value, i) => {
        silent = silent || silences.has(i);
        if (value === null) return;
        if (silent && x.length) {
          x.push(chart.places[i]);
          y.push(null);
          text.push("");
        }
        silent = false;
        x.push(chart.places[i]);
        y.push(pane ? value : value * 100);
        text.push(hover[i]);
      });
      return {
        type: "scatter", mode: "lines+markers", name: plain(one.name), x, y, connectgaps: false, xaxis: "x", yaxis: pane ? "y2" : "y",
        hovertext: text, hoverinfo: "text", marker: { size },
        line: { color: colour(one.colour, look), width: 2, dash: DASHES[one.colour] || "solid" },
      };
    };
    const most = (curves) => Math.max(0, ...curves.flatMap((one) => one.values.map((v) => v || 0)));
    const both = chart.shares.length > 0 && chart.counts.length > 0;
    const body = both ? 360 : 220;
    const names = [...chart.shares, ...chart.counts].map((one) => one.name.length);
    const legendRows = Math.ceil(names.length / Math.max(1, Math.floor((width - 60) / (60 + 7 * Math.max(...names)))));
    const more = {};
    if (chart.shares.length) {
      more.yaxis = axis(look, { domain: both ? [0.46, 1] : [0, 1], range: [0, Math.max(1, most(chart.shares)) * 104], ticksuffix: " %", nticks: 6,
        title: { text: "of what was reserved", font: { color: look.soft, size: 12 }, standoff: 6 } });
    }
    if (chart.counts.length) {
      more.yaxis2 = axis(look, { domain: both ? [0, 0.38] : [0, 1], range: chart.whole ? [0, Math.max(1, most(chart.counts)) * 1.08] : undefined, nticks: 5, tickformat: chart.whole ? ",d" : "+,.4~g", anchor: "x",
        title: { text: plain(chart.counted), font: { color: look.soft, size: 12 }, standoff: 6 } });
    }
    return {
      data: [...chart.shares.map((one) => curve(one, 0)), ...chart.counts.map((one) => curve(one, 1))],
      layout: layout(look, width, {
        height: body + 72 + legendRows * 24, showlegend: true, margin: { l: 8, r: 16, t: 8, b: 72 + legendRows * 24 }, hovermode: "closest",
        legend: { orientation: "h", x: 0, xanchor: "left", y: -60 / body, yanchor: "top", font: { size: 12 }, itemclick: false, itemdoubleclick: false },
        xaxis: axis(look, { anchor: chart.counts.length ? "y2" : "y", title: { text: plain(chart.unit), font: { color: look.soft, size: 12 }, standoff: 4 }, zeroline: false }),
        shapes: chart.shares.length ? [{ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y", y0: 100, y1: 100, line: { color: look.soft, width: 1, dash: "dash" } }] : [],
        ...more,
      }),
    };
  };

  const KINDS = { stack, tree, waterfall, uses, timeline };
  const draw = (fixed) => {
    const look = theme();
    return Promise.all(places.map((place) => {
      const chart = charts[Number(place.dataset.chart)];
      const width = fixed || Math.max(240, Math.floor(place.getBoundingClientRect().width));
      const made = KINDS[chart.kind](chart, look, width);
      return Plotly.react(place, made.data, made.layout, { displayModeBar: false, responsive: false, displaylogo: false, scrollZoom: false, doubleClick: false, showTips: false })
        .then(() => { place.dataset.drawn = "yes"; });
    })).then(() => { document.documentElement.dataset.charts = "drawn"; });
  };

  let waiting = 0;
  const again = () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => draw());
  };
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) {
      width = window.innerWidth;
      again();
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);

  // On paper the tables stand open, and the charts are as wide as a page.
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = Array.from(document.querySelectorAll("details:not([open])"));
    opened.forEach((one) => { one.open = true; });
    draw(680);
  });
  window.addEventListener("afterprint", () => {
    opened.forEach((one) => { one.open = false; });
    again();
  });
  draw();
})();
