"use strict";
// Reading off the charts by pointer, touch or arrow keys. The page is complete without it.
(() => {
  const trim = (value, digits = 4) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1))))));
  };
  const scaled = (value, steps) => {
    const [size, name] = steps.find(([step]) => Math.abs(value) >= step) || steps[steps.length - 1];
    return `${trim(value / size)} ${name}`;
  };
  const show = {
    number: (value) => trim(value),
    epsilon: (value) => trim(value), // comes rounded up to the digits that trim keeps
    count: (value) => String(Math.round(value)),
    percent: (value) => `${trim(100 * value)} %`,
    bytes: (value) => scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]),
    seconds: (value) => (value === 0 ? "0 s" : scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])),
  };
  const nearest = (data, x) => {
    let low = 0, high = data.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (data[middle][0] <= x) low = middle; else high = middle;
    }
    return Math.abs(data[low][0] - x) <= Math.abs(data[high][0] - x) ? low : high;
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const plot = figure.querySelector(".plot"), source = figure.querySelector("script");
    if (!plot || !source) continue;
    const { x: [low, high, log], units: [xUnit, yUnit], xLabel, curves } = JSON.parse(source.textContent);
    const place = (x) => (log ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low));
    const value = (share) => (log ? low * Math.pow(high / low, share) : low + share * (high - low));
    const longest = curves.map((curve) => curve.data).reduce((a, b) => (b.length > a.length ? b : a));
    const cross = document.createElement("div"), tip = document.createElement("div");
    cross.className = "cross"; tip.className = "tip"; tip.setAttribute("role", "status");
    let at = longest.length - 1;

    const hide = () => { cross.remove(); tip.remove(); };
    const mark = (x) => {
      const share = place(x), rows = [];
      const title = document.createElement("b");
      title.textContent = `${xLabel} ${show[xUnit](x)}`;
      for (const curve of curves) {
        if (!curve.data.length) continue;
        const row = document.createElement("span"), key = document.createElement("i");
        key.style.background = `var(--c${curve.colour})`;
        row.append(key, `${curve.label}: ${show[yUnit](curve.data[nearest(curve.data, x)][1])}`);
        rows.push(row);
      }
      tip.replaceChildren(title, ...rows);
      cross.style.left = `${100 * share}%`;
      tip.style.left = share < 0.5 ? `calc(${100 * share}% + 10px)` : "auto";
      tip.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + 10px)`;
      plot.append(cross, tip);
    };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      at = nearest(longest, value(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width))));
      mark(longest[at][0]);
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (!step) return;
      event.preventDefault();
      at = Math.min(longest.length - 1, Math.max(0, at + step));
      mark(longest[at][0]);
    });
  }
})();
