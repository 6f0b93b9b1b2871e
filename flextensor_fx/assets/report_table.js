"use strict";
// The table of units: sort, filter, and follow one unit together with the timelines.
(() => {
  const table = document.getElementById("units"), body = table.tBodies[0], box = table.closest(".scroll");
  let chosen = -1, clicked = false;

  document.addEventListener("unit", (e) => {
    chosen = e.detail;
    for (const row of body.querySelectorAll("tr.chosen")) row.classList.remove("chosen");
    const row = chosen < 0 ? null : body.querySelector(`tr[data-unit="${chosen}"]`);
    row?.classList.add("chosen");
    if (row && !clicked) box.scrollTop = row.offsetTop - box.clientHeight / 2;
    clicked = false;
  });
  body.addEventListener("click", (e) => {
    const unit = Number(e.target.closest("tr").dataset.unit ?? -1);
    if (unit < 0) return;
    clicked = true;
    document.dispatchEvent(new CustomEvent("unit", { detail: unit === chosen ? -1 : unit }));
  });

  document.getElementById("filter").addEventListener("input", (e) => {
    const wanted = e.target.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });

  const headers = table.querySelectorAll("th[data-column]");
  for (const header of headers) header.querySelector("button").addEventListener("click", () => {
    const column = Number(header.dataset.column), now = header.getAttribute("aria-sort");
    // The first column begins in the model's order, every other with its largest value.
    const up = now ? now === "descending" : column === 0;
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => Number(row.cells[column].dataset.v ?? -1);
    body.append(...[...body.rows].sort((a, b) => (up ? value(a) - value(b) : value(b) - value(a))));
  });
})();
