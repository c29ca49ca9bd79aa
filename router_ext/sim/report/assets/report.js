// Choose policies, and follow one tenant through all pictures. Without script everything is shown.
const all = (selector) => [...document.querySelectorAll(selector)];
for (const box of all("input[data-policy]")) {
  box.addEventListener("change", () => {
    for (const part of all("[data-of]")) if (part.dataset.of === box.dataset.policy) part.classList.toggle("hidden", !box.checked);
  });
}
for (const button of all("button[data-tenant]")) {
  button.addEventListener("click", () => {
    const chosen = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.tenant;
    for (const other of all("button[data-tenant]")) other.setAttribute("aria-pressed", String(other.dataset.tenant === chosen));
    for (const part of all("svg [data-tenant]")) part.classList.toggle("dim", chosen !== null && part.dataset.tenant !== chosen);
  });
}
for (const group of all(".choices fieldset")) group.hidden = false;
