// What axe does not ask of a page. Each function returns a list of faults, as texts; run in the page after axe.
window.fairlane = (() => {
  const named = (element) => {
    const words = (element.innerText || element.value || "").trim().slice(0, 40);
    return `<${element.localName}${element.id ? "#" + element.id : ""} ${element.className}> ${words}`;
  };
  const isShown = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0;
  const reached = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex]:not([tabindex='-1'])";

  function structure() {
    const faults = [];
    const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
    for (const id of new Set(ids.filter((id, index) => ids.indexOf(id) !== index))) faults.push(`id ${id} stands there twice`);
    if (document.querySelectorAll("h1").length !== 1) faults.push(`${document.querySelectorAll("h1").length} h1`);
    if (!/^\S.* · Fairlane$/.test(document.title)) faults.push(`title ${JSON.stringify(document.title)}`);
    for (const table of document.querySelectorAll("table")) {
      const widths = [...table.rows].map((row) => [...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0));
      if (new Set(widths).size > 1) faults.push(`rows of ${[...new Set(widths)]} cells in table ${named(table)}`);
    }
    return faults;
  }

  // Nothing sticks out of the window, and no text out of the picture or the button it stands in.
  function fits() {
    const faults = [];
    const width = document.documentElement.clientWidth;
    const found = document.scrollingElement.scrollWidth;
    if (found > width) {
      const wide = [...document.body.querySelectorAll("*")].filter((element) => isShown(element)
        && element.getBoundingClientRect().right > width + 1);
      const free = wide.filter((element) => !scrolls(element.parentElement));
      faults.push(`${found} px wide in ${width}: ${(free.length ? free : wide).slice(0, 3).map(named).join("; ")}`);
    }
    for (const svg of document.querySelectorAll("svg.chart")) {
      const paper = svg.getBoundingClientRect();
      for (const text of svg.querySelectorAll("text")) {
        const box = text.getBoundingClientRect();
        if (box.width && (box.left < paper.left - 2 || box.right > paper.right + 2 || box.bottom > paper.bottom + 3))
          faults.push(`cut in ${svg.getAttribute("aria-label")}: ${text.textContent}`);
      }
    }
    return faults;
  }

  function scrolls(element) {
    for (let each = element; each && each !== document.body; each = each.parentElement)
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(each).overflowX)) return true;
    return false;
  }

  // Whatever can be clicked can be reached by Tab in the order of the page, and is seen when it is. Run after a key
  // was pressed: the browser shows a focus that a script sets as it showed the last one.
  function focus() {
    const faults = [];
    for (const element of document.querySelectorAll("[tabindex]"))
      if (element.tabIndex > 0) faults.push(`out of order: ${named(element)}`);
    for (const element of document.querySelectorAll("[onclick], [hx-trigger*=click]"))
      if (!element.matches(reached)) faults.push(`for the mouse only: ${named(element)}`);
    for (const element of [...document.querySelectorAll(reached)].filter((each) => isShown(each) && !each.matches(":disabled"))) {
      element.focus();
      if (document.activeElement !== element) { faults.push(`cannot have the focus: ${named(element)}`); continue; }
      const style = getComputedStyle(element);
      const seen = element.matches(":focus-visible") && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
      if (!seen) faults.push(`its focus is not seen: ${named(element)}`);
    }
    return faults;
  }

  // Everything that can be opened is, and everything that refreshes itself has done so once.
  async function unfold() {
    document.querySelectorAll("details").forEach((each) => { each.open = true; });
    for (const each of document.querySelectorAll("[hx-get]"))
      await htmx.ajax("GET", each.getAttribute("hx-get"), { source: each });
    document.querySelectorAll("details").forEach((each) => { each.open = true; });
  }

  async function accessible(rules) {
    const { violations } = await axe.run(document, { resultTypes: ["violations"], elementRef: false, ...rules });
    return violations.flatMap((each) => each.nodes.slice(0, 4).map((node) => `${each.id}: ${node.target} ${node.html.slice(0, 120)}`
      + (each.id === "color-contrast" ? " " + node.any.map((any) => any.message).join(" ").slice(0, 160) : "")));
  }

  return { structure, fits, focus, unfold, accessible };
})();
