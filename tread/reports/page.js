// Curves: one switch of the x-axis and one chip a name for all plots of a section. Samples: one slider for all runs.
"use strict";
(() => {
  const COLOURS = ["#3b82d0", "#dd7a2d", "#2d9d66", "#c5488f", "#8764d6", "#a98a28", "#26a0b5", "#d25149", "#71829a", "#7f9d2c"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // Plotly reads tags in names

  function element(kind, properties, ...children) {
    const made = Object.assign(document.createElement(kind), properties);
    made.append(...children);
    return made;
  }

  function choice(words, chosen, act) {
    const box = element("span", { className: "choice" });
    for (const word of words) {
      const button = element("button", { type: "button", textContent: word });
      button.setAttribute("aria-pressed", word === chosen);
      button.onclick = () => {
        for (const other of box.children) other.setAttribute("aria-pressed", other === button);
        act(word);
      };
      box.append(button);
    }
    return box;
  }

  // lines of one panel as Plotly's traces; bands y ± spread and levels without a hover of their own
  function traces(panel, names, hidden) {
    const made = [];
    panel.lines.forEach((line) => {
      if (hidden.has(line.name) || !line.x.length) return;
      const colour = COLOURS[names.indexOf(line.name) % COLOURS.length];
      if (line.spread) {
        const x = [...line.x, ...[...line.x].reverse()];
        const upper = line.y.map((y, i) => y + line.spread[i]);
        const lower = line.y.map((y, i) => y - line.spread[i]).reverse();
        made.push({ x, y: [...upper, ...lower], fill: "toself", fillcolor: colour + "33", mode: "none", hoverinfo: "skip" });
      }
      const mode = line.x.length <= 40 ? "lines+markers" : "lines";
      const style = { color: colour, width: 1.8, dash: line.dashed ? "dash" : "solid" };
      made.push({ x: line.x, y: line.y, name: plain(line.name), mode, line: style, marker: { size: 5 } });
    });
    return made;
  }

  function layout(panel, logarithmic) {
    const axis = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true };
    const shapes = [], annotations = [];
    for (const [name, height] of Object.entries(panel.levels)) {
      const y = logarithmic ? Math.log10(height) : height;
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: height, y1: height, line: { color: css("--faint"), dash: "dot", width: 1.5 } });
      annotations.push({ xref: "paper", x: 1, y, xanchor: "right", yanchor: "bottom", text: plain(name), showarrow: false, font: { size: 12 } });
    }
    return {
      margin: { l: 52, r: 12, t: 8, b: 44 }, showlegend: false, shapes, annotations,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--ink") },
      xaxis: { ...axis, title: { text: plain(panel.x_label), standoff: 8 }, exponentformat: "power", separatethousands: true },
      yaxis: { ...axis, type: logarithmic ? "log" : "linear", exponentformat: "power", nticks: 6, tickformat: logarithmic ? "~g" : "" },
      hovermode: "x unified", hoverlabel: { bgcolor: css("--paper"), font: { color: css("--ink"), size: 12 } },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--faint"), activecolor: css("--ink") },
    };
  }

  const CONFIG = {
    responsive: true, displaylogo: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  function charts(box, charts) {
    const axes = [...new Set(charts.flatMap((chart) => Object.keys(chart)))];
    const names = [...new Set(charts.flatMap((chart) => Object.values(chart).flatMap((p) => p.lines.map((l) => l.name))))];
    const hidden = new Set();
    const logarithmic = charts.some((chart) => Object.values(chart).some((panel) => panel.log.includes("y")));
    let axis = axes[0], scale = "log";
    const plots = element("div", { className: "plots" });
    const drawings = charts.map((chart) => {
      const drawing = element("div", { className: "drawing" });
      plots.append(element("div", { className: "plot" }, element("h3", { textContent: Object.values(chart)[0].title }), drawing));
      return drawing;
    });
    function draw() {
      charts.forEach((chart, number) => {
        const panel = chart[axis] ?? chart[axes[0]];
        const log = panel.log.includes("y") && scale === "log";
        Plotly.react(drawings[number], traces(panel, names, hidden), layout(panel, log), {
          ...CONFIG, toImageButtonOptions: { filename: panel.title, scale: 2 },
        });
      });
    }
    const controls = element("div", { className: "controls" });
    if (axes.length > 1) controls.append("against", choice(axes, axis, (word) => { axis = word; draw(); }));
    if (logarithmic) controls.append(choice(["log", "linear"], scale, (word) => { scale = word; draw(); }));
    if (names.length > 1) {
      names.forEach((name, number) => {
        const dot = element("i", {});
        dot.style.background = COLOURS[number % COLOURS.length];
        const chip = element("button", { type: "button", className: "chip", title: "show or hide" }, dot, name);
        chip.setAttribute("aria-pressed", true);
        chip.onclick = () => {
          hidden.has(name) ? hidden.delete(name) : hidden.add(name);
          chip.setAttribute("aria-pressed", !hidden.has(name));
          draw();
        };
        controls.append(chip);
      });
    }
    box.append(controls, plots);
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }

  // the newest picture of each run up to the step of the slider
  function samples(box) {
    const input = box.querySelector("input"), output = box.querySelector("output");
    const steps = JSON.parse(input.dataset.steps);
    const runs = [...box.querySelectorAll("figure")].map((figure) => [...figure.querySelectorAll("img")]);
    function show() {
      const step = steps[input.value];
      output.textContent = `step ${step.toLocaleString("en")}`;
      input.setAttribute("aria-valuetext", output.textContent);
      for (const pictures of runs) {
        const shown = pictures.filter((picture) => Number(picture.dataset.step) <= step).pop() ?? pictures[0];
        for (const picture of pictures) picture.hidden = picture !== shown;
        shown.parentElement.querySelector("b").textContent = `step ${Number(shown.dataset.step).toLocaleString("en")}`;
      }
    }
    input.addEventListener("input", show);
    show();
  }

  const sets = JSON.parse(document.getElementById("charts").textContent);
  document.querySelectorAll(".charts").forEach((box, number) => charts(box, sets[number]));
  document.querySelectorAll(".samples").forEach(samples);
})();
