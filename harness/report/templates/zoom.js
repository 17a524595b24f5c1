"use strict";
// Zoom of charts over time: the time axis grows, heights and texts stay. Without scripts a chart is shown whole.
for (const figure of document.querySelectorAll("figure.zoomable")) {
  const boxes = [...figure.querySelectorAll(":scope > div")];
  let zoom = 1;
  const show = (wanted, at = 0.5) => {
    const next = Math.min(32, Math.max(1, wanted));
    for (const box of boxes) {
      const chart = box.querySelector("svg");
      if (!box.clientWidth || !chart) continue;
      if (zoom === 1) chart.style.height = chart.getBoundingClientRect().height + "px";
      const held = (box.scrollLeft + at * box.clientWidth) / (box.clientWidth * zoom);
      chart.setAttribute("preserveAspectRatio", "none");
      chart.style.width = 100 * next + "%";
      chart.style.setProperty("--narrow", 1 / next);
      box.scrollLeft = held * box.clientWidth * next - at * box.clientWidth;
      chart.classList.toggle("zoomed", next > 1);
      if (next === 1) { chart.style.height = ""; chart.removeAttribute("preserveAspectRatio"); }
    }
    zoom = next;
    closer.disabled = zoom === 32;
    wider.disabled = whole.disabled = zoom === 1;
  };
  const buttons = document.createElement("p");
  buttons.className = "zoom";
  const button = (text, label, wanted) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.setAttribute("aria-label", label);
    made.addEventListener("click", () => show(wanted()));
    buttons.append(made);
    return made;
  };
  const closer = button("+", "show less time, larger", () => zoom * 2);
  const wider = button("−", "show more time, smaller", () => zoom / 2);
  const whole = button("whole run", "show the whole run", () => 1);
  figure.prepend(buttons);
  for (const box of boxes) {
    box.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      show(zoom * 2 ** (-event.deltaY / 200), (event.clientX - box.getBoundingClientRect().left) / box.clientWidth);
    }, { passive: false });
  }
  addEventListener("resize", () => show(1));
  show(1);
}
